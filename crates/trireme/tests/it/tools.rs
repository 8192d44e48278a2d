//! `check`, `config` and `infer` as programs in a pipe.

use serde_json::Value;

use crate::program::{Serving, run, run_with_input};
use crate::repository::Repository;

#[test]
fn check_speaks_to_people_and_to_programs() {
    let good = Repository::new().with_identity("m", 0);
    let ended = run(["check", good.text()]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("1 model checked: 1 ok, 0 failed, 0 warnings"), "{ended:?}");
    let bad = good.with_config("n", "backend: \"identity\"\nmax_batchsize: 8\n");
    let ended = run(["check", bad.text(), "--format=json"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let report: Value = serde_json::from_str(&ended.stdout).expect("JSON");
    assert_eq!(report["ok"], false);
    assert_eq!(report["models"][0]["ok"], true);
    let error = &report["models"][1]["errors"][0];
    assert_eq!((&error["line"], &error["column"]), (&2.into(), &1.into()), "{report:#}");
    let missing = run(["check", "/no/such/place"]);
    assert_eq!(missing.code, Some(1));
    assert!(missing.stdout.is_empty() && missing.stderr.contains("/no/such/place"), "{missing:?}");
}

#[test]
fn a_configuration_survives_the_way_through_json() {
    let place = Repository::new().with_identity("m", 5);
    let shown = run(["config", "show", place.text()]);
    assert_eq!(shown.code, Some(0), "{shown:?}");
    let json = run_with_input(&["config", "convert", "-"], &shown.stdout);
    assert_eq!(json.code, Some(0), "{json:?}");
    let parsed: Value = serde_json::from_str(&json.stdout).expect("JSON");
    assert_eq!(parsed["parameters"]["execute_delay_ms"]["string_value"], "5");
    let back = run_with_input(&["config", "convert", "-"], &json.stdout);
    assert_eq!(back.stdout, shown.stdout);
    let serving = Serving::repository(place.path(), &[]);
    let (_, served) = serving.get("/v2/models/m/config");
    let served = run_with_input(&["config", "convert", "-"], &served);
    assert_eq!(served.stdout, shown.stdout, "what is shown is what is served");
}

#[test]
fn infer_asks_a_running_server() {
    let place = Repository::new().with_identity("m", 0);
    let serving = Serving::repository(place.path(), &[]);
    let url = format!("http://{}", serving.http);
    let ended = run(["infer", "m", "--url", &url, "--input", "INPUT0=[5,6,7,8]", "--format=json"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let answer: Value = serde_json::from_str(&ended.stdout).expect("JSON");
    assert_eq!(answer["outputs"][0]["data"], serde_json::json!([5, 6, 7, 8]), "{answer:#}");
    let ended = run(["infer", "n", "--url", &url, "--input", "x=1"]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("unknown model"), "{ended:?}");
}

#[test]
fn nobody_to_ask_is_told_in_one_line() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
    let ended = run(["infer", "m", "--url", &format!("http://{free}"), "--input", "x=1"]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.starts_with("error: ") && ended.stderr.contains(&free.to_string()), "{ended:?}");
}
