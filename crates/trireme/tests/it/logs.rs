//! The log: its two forms, its switches and its file.

use regex::Regex;

use crate::program::{LOCAL, Serving, run, trireme};
use crate::repository::Repository;

/// The log of a server with these flags, from start to stop.
fn log_with(flags: &[&str]) -> String {
    let place = Repository::new().with_identity("m", 0);
    let mut serving = Serving::repository(place.path(), flags);
    serving.signal("TERM");
    serving.ended().2
}

#[track_caller]
fn has_line(log: &str, pattern: &str) {
    let pattern = Regex::new(&format!("(?m)^{pattern}$")).expect("a pattern");
    assert!(pattern.is_match(log), "no line {pattern}:\n{log}");
}

#[test]
fn lines_have_tritons_two_forms() {
    let message = r#"serve\.rs:\d+\] "Started HTTPService at 127\.0\.0\.1:\d+""#;
    has_line(&log_with(&[]), &format!(r"I\d{{4}} \d\d:\d\d:\d\d\.\d{{6}} \d+ {message}"));
    let iso = log_with(&["--log-format=ISO8601"]);
    has_line(&iso, &format!(r"\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ I \d+ {message}"));
}

#[test]
fn messages_are_written_as_they_are_when_asked() {
    let place = Repository::new().with_identity("m", 0);
    let mut command = trireme();
    command.arg("serve").arg(place.path()).args(LOCAL).env("TRITON_SERVER_ESCAPE_LOG_MESSAGES", "0");
    let mut serving = Serving::start(command);
    serving.signal("TERM");
    has_line(&serving.ended().2, r".*\] Started HTTPService at 127\.0\.0\.1:\d+");
}

#[test]
fn channels_are_switched_off_one_by_one() {
    let place = Repository::new().with_config("bad", "backend: \"nothing\"");
    let failing = |flags: &[&str]| {
        let all = ["serve", place.text()].into_iter().chain(LOCAL).chain(flags.iter().copied());
        run(all).stderr
    };
    let quiet = failing(&["--log-info=false", "--log-error=false"]);
    assert!(quiet.starts_with("error: creating server: "), "{quiet}");
    let errors = failing(&["--log-info=0"]);
    assert!(errors.contains("Model 'bad'") && !errors.contains("| Option"), "{errors}");
    let silent = failing(&["--log-info=false", "--log-error=false", "--strict-model-config=false"]);
    assert!(silent.contains("is deprecated"), "warnings are still on: {silent}");
    let silent = failing(&[
        "--log-info=false",
        "--log-error=false",
        "--log-warning=off",
        "--strict-model-config=false",
    ]);
    assert!(!silent.contains("is deprecated"), "{silent}");
}

#[test]
fn a_file_takes_the_log_and_is_added_to() {
    let place = Repository::new().with_config("bad", "backend: \"nothing\"");
    let file = place.path().join("server.log");
    fs_err::write(&file, "before\n").expect("can write");
    let flag = format!("--log-file={}", file.display());
    let ended = run(["serve", place.text(), &flag].into_iter().chain(LOCAL));
    assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
    let log = fs_err::read_to_string(&file).expect("a log");
    assert!(log.starts_with("before\n") && log.contains("Model 'bad'"), "{log}");
    let ended = run(["serve", place.text(), "--log-file=/no/such/place/log"].into_iter().chain(LOCAL));
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("--log-file") && ended.stderr.contains("/no/such/place/log"), "{ended:?}");
}
