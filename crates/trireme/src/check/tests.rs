//! Reports on repositories of built-in engines, good and broken.

use clap::Parser;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    check: CheckArgs,
}

/// `name` is `model` or `model/config.pbtxt` and so on.
fn repository(files: &[(&str, &str)]) -> TempDir {
    let root = tempfile::tempdir().expect("a directory");
    for (name, text) in files {
        let path = root.path().join(name);
        fs_err::create_dir_all(path.parent().expect("has a parent")).expect("can create");
        fs_err::write(path, text).expect("can write");
    }
    root
}

const IDENTITY: &str = r#"backend: "identity"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]
"#;

fn check(root: &TempDir, flags: &[&str]) -> Report {
    let path = root.path().to_str().expect("UTF-8");
    let line = Line::try_parse_from(["check", path].iter().chain(flags)).expect("valid flags");
    Report::of(&line.check).expect("readable")
}

fn json(report: &Report) -> Value {
    serde_json::to_value(report.json()).expect("plain data")
}

#[test]
fn a_good_repository_is_ok() {
    let root =
        repository(&[("good/config.pbtxt", IDENTITY), ("good/1/model.bin", ""), ("good/3/model.bin", "")]);
    let report = check(&root, &[]);
    assert!(report.is_ok());
    assert_eq!(
        report.text(Colours::NONE),
        "good: ok (version 3)\n1 model checked: 1 ok, 0 failed, 0 warnings\n"
    );
    let json = json(&report);
    assert_eq!(json["ok"], true);
    assert_eq!(json["models"][0]["model"], "good");
    assert_eq!(json["models"][0]["versions"], json!([{ "version": 3, "ok": true, "error": null }]));
}

#[test]
fn a_broken_configuration_is_shown_with_its_place() {
    let broken = IDENTITY.replace("max_batch_size", "max_batchsize");
    let root = repository(&[
        ("bad/config.pbtxt", &broken),
        ("bad/1/model.bin", ""),
        ("good/config.pbtxt", IDENTITY),
        ("good/1/model.bin", ""),
    ]);
    let report = check(&root, &[]);
    assert!(!report.is_ok());
    let text = report.text(Colours::NONE);
    for part in [
        "bad: failed\n  error: ",
        "bad/config.pbtxt:2:1: ",
        "2 | max_batchsize: 8",
        "| ^^^^^^^^^^^^^",
        "max_batch_size",
        "good: ok (version 1)",
        "2 models checked: 1 ok, 1 failed, 0 warnings",
    ] {
        assert!(text.contains(part), "no '{part}' in\n{text}");
    }
    let json = json(&report);
    let error = &json["models"][0]["errors"][0];
    assert_eq!((&error["line"], &error["column"]), (&json!(2), &json!(1)));
    assert!(error["file"].as_str().is_some_and(|file| file.ends_with("bad/config.pbtxt")), "{error}");
    assert_eq!(json["ok"], false);
}

#[test]
fn one_model_can_be_chosen_and_a_wrong_name_is_told() {
    let root = repository(&[("a/config.pbtxt", IDENTITY), ("a/1/m", ""), ("b/config.pbtxt", "oops")]);
    assert!(check(&root, &["--load-model", "a"]).is_ok());
    let report = check(&root, &["--load-model", "c"]);
    assert!(!report.is_ok());
    let text = report.text(Colours::NONE);
    assert!(text.contains("there is no model 'c'") && text.contains("found a, b"), "{text}");
}

#[test]
fn an_empty_repository_explains_the_layout() {
    let report = check(&repository(&[("README.md", "")]), &[]);
    assert!(!report.is_ok());
    let text = report.text(Colours::NONE);
    assert!(
        text.contains("no model was found") && text.contains("REPOSITORY/my_model/1/model.onnx"),
        "{text}"
    );
}

#[test]
fn flags_of_serve_count() {
    let partial = "backend: \"identity\"\n";
    let root = repository(&[
        ("m/config.pbtxt", partial),
        ("m/configs/small.pbtxt", IDENTITY),
        ("m/1/model.bin", ""),
    ]);
    assert!(check(&root, &["--model-config-name", "small"]).is_ok());
    let bare = repository(&[("m/1/model.onnx", "")]);
    let text = check(&bare, &["--disable-auto-complete-config"]).text(Colours::NONE);
    assert!(text.contains("has no config.pbtxt, which --disable-auto-complete-config demands"), "{text}");
    let line = Line::try_parse_from(["check", ".", "--backend-config", "nonsense"]).expect("valid flags");
    let error = Report::of(&line.check).err().expect("no KEY=VALUE").to_string();
    assert!(error.contains("--backend-config expects [BACKEND,]KEY=VALUE"), "{error}");
}
