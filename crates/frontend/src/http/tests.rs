//! The frontend as clients see it: a server in the process with identity models, spoken to over a socket.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use flate2::Compression;
use flate2::read::{GzDecoder, ZlibDecoder};
use flate2::write::{GzEncoder, ZlibEncoder};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use trireme_core::{ModelControlMode, Server, ServerOptions};
use trireme_types::DataType;

use super::*;
use crate::metrics::serve_metrics;

mod control;
mod infer;

/// A server on free ports with one identity model for every datatype and a few others.
struct Harness {
    address: SocketAddr,
    metrics: SocketAddr,
    server: Arc<Server>,
    shutdown: Shutdown,
    runtime: Runtime,
    _repository: TempDir,
}

/// An answer as it stood on the wire.
struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The text of `data` of the first output.
    fn data(&self) -> String {
        let text = self.text();
        assert_eq!(self.status, 200, "{text}");
        let start = text.find("\"data\":").expect("data") + 7;
        text[start..text.len() - 3].to_owned()
    }

    /// JSON and binary data of an answer that has both.
    fn split(&self) -> (String, &[u8]) {
        let length =
            self.header("Inference-Header-Content-Length").expect("binary data").parse().expect("a length");
        let (json, binary) = self.body.split_at(length);
        (String::from_utf8_lossy(json).into_owned(), binary)
    }
}

fn open_port() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("a socket");
    let address = listener.local_addr().expect("an address");
    (listener, address)
}

impl Harness {
    fn start() -> Self {
        Self::with(HttpOptions::default())
    }

    fn with(options: HttpOptions) -> Self {
        let repository = tempfile::tempdir().expect("a directory");
        let lay = |name: &str, config: String| {
            let directory = repository.path().join(name);
            fs_err::create_dir_all(directory.join("1")).expect("a directory");
            fs_err::write(directory.join("config.pbtxt"), config).expect("a file");
            fs_err::write(directory.join("labels.txt"), "cat\r\ndog").expect("a file");
        };
        let tensor = |name: &str, data_type: &str, dims: &str| {
            format!(
                "{{ name: '{name}' data_type: {data_type} dims: [ {dims} ] label_filename: 'labels.txt' }}"
            )
        };
        let input =
            |data_type: &str| tensor("INPUT0", data_type, "-1").replace("label_filename: 'labels.txt'", "");
        let identity = |data_type: &str, more: &str| {
            let output = tensor("OUTPUT0", data_type, "-1");
            format!("backend: 'identity' {more} input [ {} ] output [ {output} ]", input(data_type))
        };
        for data_type in DataType::ALL {
            let name = format!("id_{}", data_type.wire_name().to_lowercase());
            lay(&name, identity(data_type.config_name(), "max_batch_size: 0"));
        }
        lay("batched", identity("TYPE_FP32", "max_batch_size: 8"));
        for name in ["my model", "模型", "a+b", "a.b-c_d"] {
            lay(name, identity("TYPE_FP32", "max_batch_size: 0"));
        }
        let delay = "parameters { key: 'execute_delay_ms' value: { string_value: '60000' } }";
        lay("slow", identity("TYPE_FP32", &format!("max_batch_size: 0 {delay}")));
        let two = |side: &str, more: &str| {
            format!(
                "{{ name: '{side}0' data_type: TYPE_FP32 dims: [ 1 ] {more} }}, \
                 {{ name: '{side}1' data_type: TYPE_FP32 dims: [ 1 ] {more} }}"
            )
        };
        lay(
            "two",
            format!("backend: 'identity' input [ {} ] output [ {} ]", two("INPUT", ""), two("OUTPUT", "")),
        );
        lay(
            "repeat",
            "backend: 'repeat' max_batch_size: 0 model_transaction_policy { decoupled: true } \
             input [ { name: 'IN' data_type: TYPE_INT32 dims: [ -1 ] }, \
             { name: 'DELAY' data_type: TYPE_UINT32 dims: [ -1 ] optional: true }, \
             { name: 'WAIT' data_type: TYPE_UINT32 dims: [ 1 ] optional: true } ] \
             output [ { name: 'OUT' data_type: TYPE_INT32 dims: [ 1 ] }, { name: 'IDX' data_type: TYPE_UINT32 dims: [ 1 ] } ]"
                .to_owned(),
        );
        let server_options = ServerOptions {
            repositories: vec![repository.path().to_owned()],
            control_mode: ModelControlMode::Explicit,
            load_models: vec!["*".to_owned()],
            ..ServerOptions::default()
        };
        let server = Server::start(server_options, trireme_backend_testing::backends()).expect("a server");
        assert!(server.is_ready(), "{:?}", server.load_report());
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let (shutdown, (listener, address), (metrics_listener, metrics)) =
            (Shutdown::new(), open_port(), open_port());
        let serving = serve_http(listener, Arc::clone(&server), options, shutdown.clone());
        let measuring = serve_metrics(metrics_listener, Arc::clone(&server), shutdown.clone());
        {
            let _entered = runtime.enter();
            shutdown.spawn(async move { serving.await.expect("serves") });
            shutdown.spawn(async move { measuring.await.expect("serves") });
        }
        Self { address, metrics, server, shutdown, runtime, _repository: repository }
    }

    /// Sends bytes on a connection of their own and reads what comes until the server closes it.
    fn exchange(&self, address: SocketAddr, request: &[u8]) -> Vec<u8> {
        let mut stream = TcpStream::connect(address).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a socket");
        // The server may refuse a request before it has read all of it.
        let _ = stream.write_all(request);
        let mut reply = Vec::new();
        let _ = stream.read_to_end(&mut reply);
        reply
    }

    fn send(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> Answer {
        self.send_to(self.address, method, path, headers, body)
    }

    fn send_to(&self, address: SocketAddr, method: &str, path: &str, headers: &str, body: &[u8]) -> Answer {
        let length =
            if method == "GET" { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
        let head =
            format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{length}{headers}\r\n");
        let reply = self.exchange(address, &[head.as_bytes(), body].concat());
        let end = reply.windows(4).position(|window| window == b"\r\n\r\n").expect("a head") + 4;
        let head = String::from_utf8(reply[..end].to_vec()).expect("text");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        Answer { status, head, body: reply[end..].to_vec() }
    }

    fn get(&self, path: &str) -> Answer {
        self.send("GET", path, "", b"")
    }

    fn post(&self, path: &str, body: impl AsRef<[u8]>) -> Answer {
        self.send("POST", path, "", body.as_ref())
    }

    fn infer(&self, model: &str, body: impl AsRef<[u8]>) -> Answer {
        self.post(&format!("/v2/models/{model}/infer"), body)
    }

    /// JSON followed by binary data, with the header that tells where it begins.
    fn infer_binary(&self, model: &str, json: &str, data: &[u8]) -> Answer {
        let header = format!("Inference-Header-Content-Length: {}\r\n", json.len());
        self.send("POST", &format!("/v2/models/{model}/infer"), &header, &[json.as_bytes(), data].concat())
    }

    fn metric(&self, name: &str) -> u64 {
        let page = self.send_to(self.metrics, "GET", "/metrics", "", b"").text();
        let line =
            page.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {page}"));
        line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
    }
}

/// A request with one input of JSON data.
fn request(data_type: &str, dims: &str, data: &str) -> String {
    format!(r#"{{"inputs":[{{"name":"INPUT0","datatype":"{data_type}","shape":[{dims}],"data":{data}}}]}}"#)
}
