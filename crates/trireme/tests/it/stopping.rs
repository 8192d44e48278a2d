//! Signals: nothing in flight is lost within the exit timeout, and nothing is waited for in vain.

use std::io::Write as _;
use std::net::TcpStream;
use std::time::Duration;

use crate::program::{LOCAL, Serving, receive, trireme};
use crate::repository::{REQUEST, Repository};

/// Far above what a stop takes, far below a timeout.
const AT_ONCE: Duration = Duration::from_secs(2);

#[test]
fn an_idle_server_stops_at_once_with_clients_connected() {
    let place = Repository::new().with_identity("m", 0);
    for signal in ["INT", "TERM"] {
        let mut serving = Serving::repository(place.path(), &[]);
        let silent = TcpStream::connect(serving.http).expect("accepts");
        let mut kept = TcpStream::connect(serving.http).expect("accepts");
        kept.write_all(b"GET /v2/health/live HTTP/1.1\r\nHost: t\r\n\r\n").expect("reads");
        let mut first = [0; 12];
        std::io::Read::read_exact(&mut kept, &mut first).expect("an answer");
        assert_eq!(&first, b"HTTP/1.1 200");
        serving.signal(signal);
        let (status, took, log) = serving.ended();
        assert_eq!(status.code(), Some(0), "{log}");
        assert!(took < AT_ONCE, "took {took:?}\n{log}");
        assert!(log.contains(&format!("received: SIG{signal}")), "{log}");
        drop((silent, kept));
    }
}

#[test]
fn what_is_in_flight_is_answered_and_further_signals_change_nothing() {
    let place = Repository::new().with_identity("slow", 800);
    let mut serving = Serving::repository(place.path(), &[]);
    let asked = serving.send("POST", "/v2/models/slow/infer", REQUEST);
    std::thread::sleep(Duration::from_millis(200));
    serving.signal("TERM");
    serving.wait_for("received: SIGTERM");
    serving.signal("TERM");
    serving.signal("INT");
    let (status, answer) = receive(asked);
    assert_eq!(status, 200, "{answer}");
    assert!(answer.contains(r#""data":[1,2,3,4]"#), "{answer}");
    let (status, _, log) = serving.ended();
    assert_eq!(status.code(), Some(0), "{log}");
}

#[test]
fn a_stop_that_takes_too_long_says_what_was_dropped() {
    let place = Repository::new().with_identity("slow", 20_000);
    for timeout in ["0", "1"] {
        let mut serving = Serving::repository(place.path(), &["--exit-timeout-secs", timeout]);
        let _asked = serving.send("POST", "/v2/models/slow/infer", REQUEST);
        std::thread::sleep(Duration::from_millis(200));
        serving.signal("TERM");
        let (status, took, log) = serving.ended();
        assert_eq!(status.code(), Some(1), "{log}");
        assert!(took < Duration::from_secs(1) + AT_ONCE, "took {took:?}\n{log}");
        assert!(
            log.contains("Exit timeout expired. Exiting immediately. Dropped: 1 requests in models"),
            "{log}"
        );
    }
}

#[test]
fn a_signal_ends_a_start_that_is_still_loading() {
    let config = r#"backend: "identity"
        input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 4 ] } ]
        output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 4 ] } ]
        parameters { key: "creation_delay_sec" value { string_value: "60" } }"#;
    let place = Repository::new().with_identity("quick", 0).with_config("slow", config);
    let mut command = trireme();
    command.arg("serve").arg(place.path()).args(LOCAL);
    let mut serving = Serving::spawn(command);
    serving.wait_for("successfully loaded 'quick'");
    serving.signal("INT");
    let (status, took, log) = serving.ended();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(took < AT_ONCE, "took {took:?}\n{log}");
    assert!(log.contains("stopped while models were loading"), "{log}");
}
