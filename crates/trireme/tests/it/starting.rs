//! The command line: help, refusals, and starts that fail.

use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::process::Command;

use crate::program::{Ended, LOCAL, Serving, run, trireme};
use crate::repository::Repository;

/// The program under the name of `tritonserver`.
fn tritonserver(place: &Repository) -> Command {
    let link = place.path().join("tritonserver");
    if !link.exists() {
        symlink(env!("CARGO_BIN_EXE_trireme"), &link).expect("can link");
    }
    let mut command = Command::new(link);
    command.env("NO_COLOR", "1");
    command
}

#[track_caller]
fn fails_with(ended: &Ended, text: &str) {
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains(text), "expected '{text}' in:\n{}", ended.stderr);
    assert!(ended.stdout.is_empty(), "{ended:?}");
}

#[test]
fn help_is_an_answer_and_no_error() {
    let place = Repository::new();
    for ended in [
        run(["--help"]),
        run(["serve", "--help"]),
        tritonserver(&place).arg("--help").output().expect("starts").into(),
    ] {
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.stderr.is_empty() && ended.stdout.contains("Usage: "), "{ended:?}");
    }
    fails_with(&run::<&str>([]), "Usage: trireme <COMMAND>");
}

#[test]
fn a_wrong_flag_is_told_with_the_nearest() {
    fails_with(&run(["serve", "--model-repostory=/m"]), "'--model-repository'");
    fails_with(&run(["serve", "--http=1"]), "--http");
    let place = Repository::new();
    let stray = tritonserver(&place).args(["--model-repository=/m", "stray"]).output().expect("starts");
    fails_with(&stray.into(), "unexpected argument 'stray'");
}

#[test]
fn what_is_not_built_yet_is_refused_by_name() {
    for flag in ["--trace-level=TENSORS", "--model-namespacing=true"] {
        let ended = run(["serve", "--model-repository=/m", flag]);
        fails_with(&ended, &format!("error: {flag} cannot be followed"));
        assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
    }
}

#[test]
fn a_repository_is_needed_and_must_be_there() {
    fails_with(&run(["serve"]), "error: --model-repository must be specified");
    let missing = run(["serve", "/no/such/place"]);
    fails_with(&missing, "there is no file or directory '/no/such/place'");
    let missing = run(["serve", "--model-repository=/no/such/place"].into_iter().chain(LOCAL));
    fails_with(&missing, "failed to stat the model repository '/no/such/place'");
}

#[test]
fn a_port_in_use_names_the_flag_and_the_holder_before_any_model_is_loaded() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("an address").port();
    let place = Repository::new().with_identity("m", 0);
    for flag in ["--http-port", "--grpc-port", "--metrics-port"] {
        let ended: Ended = trireme()
            .args(["serve", place.text()])
            .args(LOCAL)
            .arg(format!("{flag}={port}"))
            .output()
            .expect("starts")
            .into();
        fails_with(&ended, &format!("127.0.0.1:{port}' already in use by process {}", std::process::id()));
        assert!(ended.stderr.contains(flag), "{ended:?}");
        assert!(!ended.stderr.contains("successfully loaded"), "{ended:?}");
    }
}

#[test]
fn a_model_that_fails_ends_the_start_with_a_table_and_what_to_do() {
    let place = Repository::new()
        .with_identity("good", 0)
        .with_config("bad", "backend: \"identity\"\nmax_batch: 8\n");
    let ended = run(["serve", place.text()].into_iter().chain(LOCAL));
    fails_with(&ended, "error: creating server: Internal - failed to load all models");
    let log = &ended.stderr;
    assert!(log.contains("| Model | Version | Status"), "{log}");
    assert!(log.contains("| good  | 1       | READY"), "{log}");
    assert!(log.contains("| bad   | "), "{log}");
    let paragraph = log.split("\nModel 'bad'").nth(1).expect("a paragraph for the model");
    let paragraph = paragraph.split("\n\n").next().expect("text");
    assert!(paragraph.contains("config.pbtxt:2:1"), "{paragraph}");
    assert!(paragraph.contains("did you mean `max_batch_size`?"), "{paragraph}");
    assert!(!log.contains("\nModel 'good'"), "{log}");
}

#[test]
fn a_table_without_models_explains_itself() {
    let place = Repository::new();
    fs_err::write(place.path().join("model.onnx"), b"x").expect("can write");
    let mut serving = Serving::repository(place.path(), &[]);
    serving.signal("TERM");
    let (status, _, log) = serving.ended();
    assert!(status.success());
    assert!(log.contains(&format!("No model was found in '{}'", place.text())), "{log}");
    assert!(log.contains("REPOSITORY/my_model/1/model.onnx"), "{log}");
    let mut explicit = Serving::repository(place.path(), &["--model-control-mode=EXPLICIT"]);
    explicit.signal("TERM");
    let (_, _, log) = explicit.ended();
    assert!(log.contains("POST /v2/repository/models/NAME/load"), "{log}");
}

#[test]
fn tritonserver_takes_old_and_new_flags() {
    let place = Repository::new().with_identity("m", 0);
    let mut command = tritonserver(&place);
    command.arg(format!("--model-store={}", place.text())).args(LOCAL).args([
        "--strict-model-config",
        "false",
        "--log-verb=1",
        "--id",
        "me",
        "--pinned-memory-pool-byte-size=0",
    ]);
    let mut serving = Serving::start(command);
    let (status, metadata) = serving.get("/v2");
    assert_eq!(status, 200);
    assert!(metadata.starts_with(r#"{"name":"me","#), "{metadata}");
    serving.signal("INT");
    let (status, _, log) = serving.ended();
    assert!(status.success(), "{log}");
    assert!(log.contains("--strict-model-config is deprecated"), "{log}");
    assert!(log.contains("--pinned-memory-pool-byte-size is accepted and has no effect"), "{log}");
}
