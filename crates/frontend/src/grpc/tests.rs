//! The frontend as clients see it: a server in the process, a client of tonic or of bare HTTP/2.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tonic::transport::Channel;
use tonic::{Code, Request};
use trireme_core::{ModelControlMode, Server, ServerOptions};
use trireme_proto::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use trireme_proto::inference::infer_parameter::ParameterChoice;
use trireme_proto::inference::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use trireme_proto::inference::{self as pb, InferParameter, ModelInferRequest};

use super::*;

mod http2;
mod leaving;
mod rpc;
mod streams;

type Client = GrpcInferenceServiceClient<Channel>;

/// A server on a free port with the models of `backends/testing`.
struct Harness {
    server: Arc<Server>,
    shutdown: Shutdown,
    address: SocketAddr,
    _repository: TempDir,
}

/// Names, dimensions and settings of the models, all of FP32 but `repeat`.
const MODELS: [(&str, &str); 4] = [
    ("identity", "backend: 'identity' max_batch_size: 0 DIMS"),
    ("batching", "backend: 'identity' max_batch_size: 8 DIMS"),
    (
        "slow",
        "backend: 'identity' max_batch_size: 0 DIMS parameters { key: 'execute_delay_ms' value: { string_value: '300' } }",
    ),
    (
        "repeat",
        "backend: 'repeat' max_batch_size: 0 model_transaction_policy { decoupled: true } \
         input [ { name: 'IN' data_type: TYPE_INT32 dims: [ -1 ] }, \
         { name: 'DELAY' data_type: TYPE_UINT32 dims: [ -1 ] optional: true }, \
         { name: 'WAIT' data_type: TYPE_UINT32 dims: [ 1 ] optional: true } ] \
         output [ { name: 'OUT' data_type: TYPE_INT32 dims: [ 1 ] }, { name: 'IDX' data_type: TYPE_UINT32 dims: [ 1 ] } ]",
    ),
];

const DIMS: &str = "input [ { name: 'INPUT0' data_type: TYPE_FP32 dims: [ -1 ] } ] \
                    output [ { name: 'OUTPUT0' data_type: TYPE_FP32 dims: [ -1 ] label_filename: 'labels.txt' } ]";

fn lay_model(repository: &Path, name: &str, config: &str) {
    let directory = repository.join(name);
    fs_err::create_dir_all(directory.join("1")).expect("a directory");
    fs_err::write(directory.join("config.pbtxt"), config.replace("DIMS", DIMS)).expect("a file");
    fs_err::write(directory.join("labels.txt"), "cat\ndog\n").expect("a file");
}

impl Harness {
    fn start() -> Self {
        Self::with(GrpcOptions::default())
    }

    fn with(options: GrpcOptions) -> Self {
        let repository = tempfile::tempdir().expect("a directory");
        for (name, config) in MODELS {
            lay_model(repository.path(), name, config);
        }
        let server_options = ServerOptions {
            repositories: vec![repository.path().to_owned()],
            control_mode: ModelControlMode::Explicit,
            load_models: vec!["*".to_owned()],
            ..ServerOptions::default()
        };
        let server = Server::start(server_options, trireme_backend_testing::backends()).expect("a server");
        assert!(server.is_ready(), "{:?}", server.load_report());
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("an address");
        let shutdown = Shutdown::new();
        let serving = serve_grpc(listener, Arc::clone(&server), options, shutdown.clone());
        shutdown.spawn(async move { serving.await.expect("serves") });
        Self { server, shutdown, address, _repository: repository }
    }

    async fn client(&self) -> Client {
        let channel = Channel::from_shared(format!("http://{}", self.address)).expect("an address");
        GrpcInferenceServiceClient::new(channel.connect().await.expect("connects"))
            .max_decoding_message_size(usize::MAX)
            .max_encoding_message_size(usize::MAX)
    }

    /// As the launcher stops a server.
    async fn stop(&self) -> Duration {
        let started = Instant::now();
        self.server.begin_stop();
        self.shutdown.begin();
        assert_eq!(self.shutdown.wait(Duration::from_secs(20)).await, 0, "a task did not end");
        started.elapsed()
    }

    /// Waits until no model has a request.
    async fn idle(&self) {
        let server = Arc::clone(&self.server);
        let wait = tokio::task::spawn_blocking(move || server.wait_idle(Duration::from_secs(10)));
        assert_eq!(wait.await.expect("no panic"), 0);
    }
}

fn parameter(choice: ParameterChoice) -> InferParameter {
    InferParameter { parameter_choice: Some(choice) }
}

/// A request for a model with one FP32 input.
fn request(model: &str, id: &str, values: &[f32]) -> ModelInferRequest {
    let len = i64::try_from(values.len()).expect("small");
    let shape = if model == "batching" { vec![1, len] } else { vec![len] };
    ModelInferRequest {
        model_name: model.into(),
        id: id.into(),
        inputs: vec![InferInputTensor {
            name: "INPUT0".into(),
            datatype: "FP32".into(),
            shape,
            ..Default::default()
        }],
        raw_input_contents: vec![
            values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>().into(),
        ],
        ..Default::default()
    }
}

/// A request for the decoupled model: one response for each value, after its delay.
fn repeat(id: &str, values: &[i32], delay_ms: u32) -> ModelInferRequest {
    let len = i64::try_from(values.len()).expect("small");
    let input = |name: &str, datatype: &str| InferInputTensor {
        name: name.into(),
        datatype: datatype.into(),
        shape: vec![len],
        ..Default::default()
    };
    ModelInferRequest {
        model_name: "repeat".into(),
        id: id.into(),
        inputs: vec![input("IN", "INT32"), input("DELAY", "UINT32")],
        raw_input_contents: vec![
            values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>().into(),
            values.iter().flat_map(|_| delay_ms.to_le_bytes()).collect::<Vec<_>>().into(),
        ],
        ..Default::default()
    }
}

#[test]
fn a_busy_server_says_when_to_come_again() {
    let busy = Error::unavailable("Exceeds maximum queue size");
    assert!(status(busy.clone()).metadata().is_empty());
    let head = status(busy.retry_after(Duration::from_millis(1200))).into_http::<()>().into_parts().0;
    assert_eq!(head.headers["grpc-status"], "14");
    assert_eq!(head.headers["grpc-retry-pushback-ms"], "1200");
}
