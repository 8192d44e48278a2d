//! What a started server tells and answers.

use crate::program::Serving;
use crate::repository::{REQUEST, Repository};

#[test]
fn the_tables_are_drawn_as_triton_draws_them() {
    let place = Repository::new().with_identity("b", 0).with_identity("a_longer_name", 0);
    let mut serving = Serving::repository(place.path(), &["--exit-timeout-secs=7", "--id=me"]);
    serving.signal("TERM");
    let (_, _, log) = serving.ended();
    let table = "\
+---------------+---------+--------+
| Model         | Version | Status |
+---------------+---------+--------+
| a_longer_name | 1       | READY  |
| b             | 1       | READY  |
+---------------+---------+--------+
";
    assert!(log.contains(table), "{log}");
    for (option, value) in
        [("server_id", "me"), ("exit_timeout", "7"), ("model_repository_path[0]", place.text())]
    {
        let row = log.lines().find(|line| line.starts_with(&format!("| {option} ")));
        let row = row.unwrap_or_else(|| panic!("no row '{option}':\n{log}"));
        assert_eq!(row.split('|').nth(2).map(str::trim), Some(value), "{row}");
    }
    assert_eq!(log.matches("thread budget: ").count(), 1, "{log}");
    let at = |text: &str| log.find(text).unwrap_or_else(|| panic!("no '{text}':\n{log}"));
    let order = [
        "| Backend ",
        "| Model ",
        "| Option ",
        "thread budget: ",
        "Started GRPCInferenceService at 127.0.0.1:",
        "Started HTTPService at 127.0.0.1:",
        "Started Metrics Service at 127.0.0.1:",
    ]
    .map(at);
    assert!(order.is_sorted(), "{log}");
}

#[test]
fn the_line_to_try_works_as_it_stands() {
    let place = Repository::new().with_identity("echo", 0);
    let mut serving = Serving::repository(place.path(), &[]);
    let line = serving.wait_for("  curl http://");
    let (url, body) = line.trim().trim_start_matches("curl http://").split_once(" -d '").expect("a request");
    let (host, path) = url.split_once('/').expect("a path");
    assert_eq!(host, serving.http.to_string());
    let (status, answer) = serving.post(&format!("/{path}"), body.strip_suffix('\'').expect("a quote"));
    assert_eq!(status, 200, "{answer}");
    assert!(answer.contains(r#""data":[0,0,0,0]"#), "{answer}");
}

#[test]
fn the_other_models_are_served_when_one_failed() {
    let place = Repository::new().with_identity("good", 0).with_config("bad", "backend: \"nothing\"");
    let serving = Serving::repository(place.path(), &["--exit-on-error=false"]);
    assert_eq!(serving.post("/v2/models/good/infer", REQUEST).0, 200);
    assert_eq!(serving.get("/v2/models/bad/ready").0, 400);
    assert_eq!(serving.get("/v2/health/live").0, 200);
    assert_eq!(serving.get("/v2/health/ready").0, 400, "strict readiness waits for every model");
    let lax = Serving::repository(place.path(), &["--exit-on-error=0", "--strict-readiness=off"]);
    assert_eq!(lax.get("/v2/health/ready").0, 200);
}

#[test]
fn services_that_are_switched_off_open_no_port() {
    let place = Repository::new().with_identity("m", 0);
    let mut serving = Serving::repository(place.path(), &["--allow-grpc=false"]);
    serving.signal("TERM");
    let (status, _, log) = serving.ended();
    assert!(status.success() && !log.contains("GRPCInferenceService"), "{log}");
}

#[test]
fn explicit_mode_loads_what_is_named_and_what_is_asked_for() {
    let place = Repository::new().with_identity("a", 0).with_identity("b", 0);
    let serving = Serving::repository(place.path(), &["--model-control-mode=explicit", "--load-model=a"]);
    assert_eq!(serving.get("/v2/models/a/ready").0, 200);
    assert_eq!(serving.post("/v2/models/b/infer", REQUEST).0, 404);
    assert_eq!(serving.post("/v2/repository/models/b/load", "").0, 200);
    assert_eq!(serving.post("/v2/models/b/infer", REQUEST).0, 200);
}
