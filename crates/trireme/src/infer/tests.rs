//! The client against a real server in the same process.

use std::net::TcpListener;
use std::sync::Arc;

use clap::Parser;
use serde_json::Value;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use trireme_core::{Server, ServerOptions};
use trireme_frontend::http::{HttpOptions, serve_http};
use trireme_frontend::shutdown::Shutdown;

use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    infer: InferArgs,
}

/// A server with an identity model for numbers and one for strings.
struct Harness {
    url: String,
    shutdown: Shutdown,
    runtime: Runtime,
    root: TempDir,
}

impl Harness {
    fn start() -> Self {
        let root = tempfile::tempdir().expect("a directory");
        let repository = root.path().join("models");
        let lay = |name: &str, config: &str| {
            let directory = repository.join(name);
            fs_err::create_dir_all(directory.join("1")).expect("can create");
            fs_err::write(directory.join("config.pbtxt"), config).expect("can write");
            fs_err::write(directory.join("labels.txt"), "cat\ndog\n").expect("can write");
        };
        lay(
            "numbers",
            "backend: 'identity' max_batch_size: 8 input [ { name: 'INPUT0' data_type: TYPE_FP32 dims: [ 3 ] } ] \
             output [ { name: 'OUTPUT0' data_type: TYPE_FP32 dims: [ 3 ] label_filename: 'labels.txt' } ]",
        );
        lay(
            "my words",
            "backend: 'identity' input [ { name: 'INPUT0' data_type: TYPE_STRING dims: [ -1 ] } ] \
             output [ { name: 'OUTPUT0' data_type: TYPE_STRING dims: [ -1 ] } ]",
        );
        let options = ServerOptions { repositories: vec![repository], ..ServerOptions::default() };
        let server = Server::start(options, trireme_backend_testing::backends()).expect("a server");
        assert!(server.is_ready(), "{:?}", server.load_report());
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("a socket");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let shutdown = Shutdown::new();
        let serving = serve_http(listener, Arc::clone(&server), HttpOptions::default(), shutdown.clone());
        {
            let _inside = runtime.enter();
            shutdown.spawn(async move { serving.await.expect("serves") });
        }
        Self { url, shutdown, runtime, root }
    }

    fn infer(&self, arguments: &[&str]) -> Result<Inference> {
        let url = format!("--url={}", self.url);
        let line = std::iter::once("infer").chain(arguments.iter().copied()).chain([url.as_str()]);
        infer(&Line::try_parse_from(line).expect("valid flags").infer)
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let inference = self.infer(arguments).expect("answers");
        serde_json::from_str(&inference.json().expect("whole")).expect("JSON")
    }

    fn refusal(&self, arguments: &[&str]) -> String {
        format!("{:#}", self.infer(arguments).expect_err("must be refused"))
    }
}

impl Drop for Harness {
    fn drop(&mut self) {
        self.shutdown.begin();
        self.runtime.block_on(self.shutdown.wait(Duration::from_secs(5)));
    }
}

#[test]
fn asks_a_server() {
    let server = Harness::start();
    let answer = server.json(&["numbers", "--input", "INPUT0=[0.1,\"NaN\",3]"]);
    assert_eq!(
        answer,
        json!({
            "model_name": "numbers",
            "model_version": "1",
            "outputs": [{ "name": "OUTPUT0", "datatype": "FP32", "shape": [1, 3], "data": [0.1, "NaN", 3.0] }],
        })
    );
    let answer =
        server.json(&["numbers", "--model-version", "1", "--input", "INPUT0=zeros", "--shape", "INPUT0=4,3"]);
    assert_eq!(answer["outputs"][0]["shape"], json!([4, 3]));
    let answer = server.json(&["my words", "--input", "INPUT0=[\"\", \"模型\"]", "--output", "OUTPUT0"]);
    assert_eq!(answer["outputs"][0]["data"], json!(["", "模型"]));
    let answer = server.json(&["numbers", "--input", "INPUT0=[1,5,2]", "--class", "2"]);
    assert_eq!(answer["outputs"][0]["data"], json!(["5.000000:1:dog", "2.000000:2"]));

    let saved = server.root.path().join("out");
    let random = server.infer(&["numbers", "--input", "INPUT0=random"]).expect("answers");
    random.save(&saved).expect("can write");
    let file = format!("INPUT0=@{}", saved.join("OUTPUT0.npy").display());
    let again = server.infer(&["numbers", "--input", &file]).expect("answers");
    assert_eq!(again.outputs, random.outputs);
}

#[test]
fn refusals_say_what_to_do() {
    let server = Harness::start();
    for (arguments, parts) in [
        (
            &["nothing", "--input", "x=1"][..],
            &["models that are ready are my words, numbers", "'nothing' is not found"][..],
        ),
        (&["numbers", "--model-version", "7", "--input", "INPUT0=1"], &["version 7 is not found"]),
        (&["numbers"], &["--input INPUT0=zeros   FP32 [-1,3]"]),
        (&["numbers", "--input", "OUTPUT0=1"], &["has no input 'OUTPUT0'", "--input INPUT0=zeros"]),
        (
            &["numbers", "--input", "INPUT0=zeros", "--output", "X"],
            &["has no output 'X'; its outputs are OUTPUT0"],
        ),
        (
            &["numbers", "--input", "INPUT0=zeros", "--shape", "INPUT0=9,3"],
            &["answered 400", "batch-size must be <= 8", "FP32 [-1,3]"],
        ),
        (
            &["my words", "--input", "INPUT0=x", "--class", "1"],
            &["answered 400", "class result not available"],
        ),
    ] {
        let error = server.refusal(arguments);
        for part in parts {
            assert!(error.contains(part), "no '{part}' in '{error}'");
        }
    }
}
