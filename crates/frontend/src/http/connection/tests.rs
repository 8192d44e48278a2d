//! The connections of a real client side: what comes back on the socket, and when it ends.

use std::io::{Read, Write};
use std::net::{Shutdown as Direction, SocketAddr, TcpStream as StdStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use bytes::Bytes;
use http::StatusCode;
use tokio::sync::Notify;

use super::*;
use crate::http::body;
use crate::http::reply::{Refusal, Reply};

/// What the service did and waits for.
#[derive(Default)]
struct Probe {
    /// Lets `/slow` answer.
    go: Notify,
    entered: AtomicUsize,
    dropped: AtomicUsize,
}

/// Notices that the future of a request was dropped before it was done.
struct Unfinished<'a>(Option<&'a Probe>);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if let Some(probe) = self.0 {
            probe.dropped.fetch_add(1, Ordering::SeqCst);
        }
    }
}

async fn service(request: Request<Incoming>, probe: Arc<Probe>) -> Reply {
    let (parts, mut body) = request.into_parts();
    match parts.uri.path() {
        "/echo" => match body::receive(&mut body, 0, None).await {
            Ok(bytes) => Response::new(Pieces::from(bytes)),
            Err(refusal) => refusal.into_reply(),
        },
        "/slow" => {
            probe.entered.fetch_add(1, Ordering::SeqCst);
            let mut unfinished = Unfinished(Some(&probe));
            probe.go.notified().await;
            unfinished.0 = None;
            Response::new(Pieces::from(Bytes::from_static(b"slow")))
        }
        "/large" => Response::new(Pieces::from(Bytes::from(vec![b'x'; LARGE]))),
        _ => Refusal::new(StatusCode::NOT_FOUND, "Not Found").into_reply(),
    }
}

const LARGE: usize = 32 << 20;

/// A server on a runtime of its own threads.
struct Running {
    address: SocketAddr,
    shutdown: Shutdown,
    probe: Arc<Probe>,
    runtime: tokio::runtime::Runtime,
}

impl Running {
    fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let listener = StdListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("a socket");
        let address = listener.local_addr().expect("an address");
        let (shutdown, probe) = (Shutdown::new(), Arc::new(Probe::default()));
        let (watched, shared) = (shutdown.clone(), Arc::clone(&probe));
        let _entered = runtime.enter();
        shutdown.spawn(async move {
            let serving = serve(listener, move |request| service(request, Arc::clone(&shared)), watched);
            serving.await.expect("a listener");
        });
        Self { address, shutdown, probe, runtime }
    }

    fn connect(&self) -> StdStream {
        let stream = StdStream::connect(self.address).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
        stream
    }

    fn wait(&self, timeout: Duration) -> usize {
        self.runtime.block_on(self.shutdown.wait(timeout))
    }

    fn until(&self, what: impl Fn(&Probe) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !what(&self.probe) {
            assert!(Instant::now() < deadline, "it never happened");
            std::thread::yield_now();
        }
    }
}

fn post(path: &str, body: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// Reads one answer: its head and as many bytes as the head says.
fn answer(stream: &mut StdStream) -> (String, Vec<u8>) {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).expect("a head");
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).expect("text");
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("Content-Length: "))
        .map_or(0, |n| n.parse().expect(n));
    let mut body = vec![0; length];
    stream.read_exact(&mut body).expect("a body");
    (head, body)
}

#[test]
fn idle_connections_end_at_once() {
    let running = Running::start();
    let mut used = running.connect();
    used.write_all(post("/echo", "hi").as_bytes()).expect("a request");
    assert_eq!(answer(&mut used).1, b"hi");
    let fresh = running.connect();
    let mut half = running.connect();
    half.write_all(b"GET /ec").expect("half a head");
    // The half head and the fresh connection have arrived when a later connection is answered.
    let mut later = running.connect();
    later.write_all(post("/echo", "x").as_bytes()).expect("a request");
    answer(&mut later);

    running.shutdown.begin();
    assert_eq!(running.wait(Duration::from_secs(10)), 0);
    for mut stream in [used, fresh, half, later] {
        let mut rest = Vec::new();
        // A half head may end as a reset.
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.is_empty());
    }
}

#[test]
fn an_answer_that_is_on_its_way_is_finished() {
    let running = Running::start();
    let mut slow = running.connect();
    slow.write_all(post("/slow", "").as_bytes()).expect("a request");
    running.until(|probe| probe.entered.load(Ordering::SeqCst) == 1);
    let mut large = running.connect();
    large.write_all(post("/large", "").as_bytes()).expect("a request");
    let mut first = [0; 17];
    large.read_exact(&mut first).expect("the start of the answer");

    running.shutdown.begin();
    running.probe.go.notify_one();
    assert_eq!(answer(&mut slow).1, b"slow");
    let mut rest = Vec::new();
    large.read_to_end(&mut rest).expect("the rest of the answer");
    assert!(rest.len() > LARGE && rest.ends_with(&[b'x'; 100]));
    assert_eq!(running.wait(Duration::from_secs(10)), 0);
}

#[test]
fn what_does_not_end_is_dropped() {
    let running = Running::start();
    let mut slow = running.connect();
    slow.write_all(post("/slow", "").as_bytes()).expect("a request");
    running.until(|probe| probe.entered.load(Ordering::SeqCst) == 1);
    running.shutdown.begin();
    assert_eq!(running.wait(Duration::from_millis(50)), 1);
    assert_eq!(running.probe.dropped.load(Ordering::SeqCst), 1);
}

#[test]
fn a_client_that_leaves_ends_its_request() {
    let running = Running::start();
    let mut slow = running.connect();
    slow.write_all(post("/slow", "").as_bytes()).expect("a request");
    running.until(|probe| probe.entered.load(Ordering::SeqCst) == 1);
    drop(slow);
    running.until(|probe| probe.dropped.load(Ordering::SeqCst) == 1);
}

#[test]
fn requests_are_answered_in_order_on_one_connection() {
    let running = Running::start();
    let mut stream = running.connect();
    let pipelined: String = (0..10).map(|i| post("/echo", &i.to_string())).collect();
    stream.write_all(pipelined.as_bytes()).expect("requests");
    for i in 0..10 {
        assert_eq!(answer(&mut stream).1, i.to_string().as_bytes());
    }
}

#[test]
fn chunked_bodies_arrive_whole() {
    let running = Running::start();
    let mut stream = running.connect();
    let mut send = |chunks: &str| {
        let head = "POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
        stream.write_all(format!("{head}{chunks}").as_bytes()).expect("a request");
        answer(&mut stream)
    };
    assert_eq!(send("1;ext=1\r\na\r\n2\r\nbc\r\n0\r\nX-Trailer: 1\r\n\r\n").1, b"abc");
    assert_eq!(send("0\r\n\r\n").1, b"");
    let flood = format!("{}0\r\n\r\n", "1\r\n \r\n".repeat(70_000));
    let (head, body) = send(&flood);
    assert!(head.starts_with("HTTP/1.1 400") && head.contains("Connection: close"), "{head}");
    assert!(String::from_utf8_lossy(&body).contains("exceeds maximum of 65536 non-empty chunks"));
}

#[test]
fn broken_framing_is_refused() {
    let running = Running::start();
    for (request, status) in [
        ("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n{}", "HTTP/1.1 400"),
        ("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", "HTTP/1.1 400"),
        ("\0\u{1}garbage\r\n\r\n", "HTTP/1.1 400"),
        ("GET /nope HTTP/1.0\r\n\r\n", "HTTP/1.0 404"),
    ] {
        let mut stream = running.connect();
        stream.write_all(request.as_bytes()).expect("a request");
        let mut reply = String::new();
        stream.read_to_string(&mut reply).expect("an answer and the end");
        assert!(reply.starts_with(status), "{request:?}: {reply}");
    }
    let mut cut = running.connect();
    cut.write_all(b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n10\r\nabc")
        .expect("a request");
    cut.shutdown(Direction::Write).expect("half a close");
    let mut reply = String::new();
    cut.read_to_string(&mut reply).expect("an answer and the end");
    assert!(reply.starts_with("HTTP/1.1 400"), "{reply}");
}

#[test]
fn large_bodies_come_back_unchanged() {
    let running = Running::start();
    let mut stream = running.connect();
    let body: String =
        (0..2_000_000).map(|i| char::from(b'a' + u8::try_from(i % 26).expect("a letter"))).collect();
    let request = post("/echo", &body);
    let mut sender = stream.try_clone().expect("a socket");
    let sending = std::thread::spawn(move || sender.write_all(request.as_bytes()).expect("a request"));
    assert!(answer(&mut stream).1 == body.as_bytes());
    sending.join().expect("it was sent");
}
