//! Lays a model file out, loads it through the backend's own contract and runs requests.

use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use tempfile::TempDir;
use trireme_backend::{
    Backend, Batch, BatchRequest, InstanceContext, Model, ModelContext, ModelFiles, ModelInstance,
    ModelTensors, OpenModel,
};
use trireme_backend_onnxruntime::OnnxRuntimeBackend;
use trireme_types::{
    DataType, InferInput, InferRequest, InferResponse, ModelReport, RequestedOutput, Responder, ResponseSink,
    Result, Shape, TensorBuffer, TensorSpec,
};

/// The library that `make test` installs.
pub(crate) fn library() -> PathBuf {
    let installed = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../.trireme/onnxruntime"));
    let path = std::env::var_os("TRIREME_ONNXRUNTIME").map_or(installed, PathBuf::from);
    assert!(
        path.exists(),
        "these tests need the ONNX Runtime library, and there is none at '{}': run them with `make test`, or set \
         TRIREME_ONNXRUNTIME",
        path.display()
    );
    path
}

pub(crate) fn backend() -> OnnxRuntimeBackend {
    OnnxRuntimeBackend::new(Some(library()))
}

/// A model directory with one version.
pub(crate) struct ModelDir {
    pub(crate) context: ModelContext,
    _root: TempDir,
}

impl ModelDir {
    pub(crate) fn new(model: &[u8]) -> Self {
        let root = tempfile::tempdir().expect("a directory");
        let version_dir = root.path().join("m/1");
        fs_err::create_dir_all(&version_dir).expect("a directory");
        let model_path = version_dir.join("model.onnx");
        fs_err::write(&model_path, model).expect("a model file");
        let files = ModelFiles { model_dir: root.path().join("m"), version_dir, model_path };
        let context =
            ModelContext { name: "m".into(), version: 1, files, threads: 1, ..ModelContext::default() };
        Self { context, _root: root }
    }

    pub(crate) fn parameters(mut self, parameters: &[(&str, &str)]) -> Self {
        self.context.parameters =
            parameters.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        self
    }

    pub(crate) fn open(&self) -> Result<Box<dyn OpenModel>> {
        backend().open(&self.context)
    }

    pub(crate) fn report(&self) -> ModelReport {
        self.open().expect("a model").report().expect("a report").expect("ONNX says what it has")
    }

    pub(crate) fn load(&self, tensors: ModelTensors) -> Result<Arc<dyn Model>> {
        self.open()?.load(tensors)
    }

    pub(crate) fn instance(&self, tensors: ModelTensors) -> Box<dyn ModelInstance> {
        let model = self.load(tensors).expect("a model");
        model.instance(&InstanceContext::default()).expect("an instance")
    }
}

pub(crate) fn spec(name: &str, data_type: DataType, dims: &[i64]) -> TensorSpec {
    TensorSpec::new(name, data_type, Shape::new(dims))
}

pub(crate) fn tensors(
    max_batch_size: usize,
    inputs: Vec<TensorSpec>,
    outputs: Vec<TensorSpec>,
) -> ModelTensors {
    ModelTensors { max_batch_size, inputs, outputs, ..ModelTensors::default() }
}

/// `X` -> `Y` of one type and shape.
pub(crate) fn x_to_y(max_batch_size: usize, data_type: DataType, dims: &[i64]) -> ModelTensors {
    tensors(max_batch_size, vec![spec("X", data_type, dims)], vec![spec("Y", data_type, dims)])
}

pub(crate) fn input(
    name: &str,
    data_type: DataType,
    shape: &[i64],
    data: impl Into<TensorBuffer>,
) -> InferInput {
    InferInput { name: name.into(), data_type, shape: Shape::new(shape), data: data.into() }
}

pub(crate) fn bytes_of<T: Copy, const N: usize>(values: &[T], to_bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|value| to_bytes(*value)).collect()
}

pub(crate) fn int32(values: &[i32]) -> Vec<u8> {
    bytes_of(values, i32::to_le_bytes)
}

pub(crate) fn fp32(values: &[f32]) -> Vec<u8> {
    bytes_of(values, f32::to_le_bytes)
}

/// Wire bytes of strings.
pub(crate) fn text(values: &[&[u8]]) -> Vec<u8> {
    let mut wire = Vec::new();
    for value in values {
        wire.extend(u32::try_from(value.len()).expect("short").to_le_bytes());
        wire.extend(*value);
    }
    wire
}

pub(crate) fn request(batch_size: usize, inputs: Vec<InferInput>, outputs: &[&str]) -> InferRequest {
    let mut request = InferRequest::new();
    request.inputs = inputs.into();
    request.outputs = outputs.iter().map(|name| RequestedOutput { name: (*name).into() }).collect();
    request.batch_size = batch_size;
    request
}

struct Sink {
    sender: mpsc::Sender<Result<InferResponse>>,
    closed: bool,
}

impl ResponseSink for Sink {
    fn send(&mut self, reply: Option<Result<InferResponse>>, _: bool) {
        self.sender.send(reply.expect("an answer")).expect("the test holds the receiver");
    }

    fn is_closed(&self) -> bool {
        self.closed
    }
}

/// Runs requests as one batch and gives the answers in order. `closed` tells whose clients are gone.
pub(crate) fn run_batch(
    instance: &mut dyn ModelInstance,
    requests: Vec<(InferRequest, bool)>,
) -> Vec<Result<InferResponse>> {
    let (sender, receiver) = mpsc::channel();
    let requests = requests.into_iter().map(|(request, closed)| {
        BatchRequest::new(request, Responder::new(Box::new(Sink { sender: sender.clone(), closed })))
    });
    let mut batch = Batch::new(requests.collect(), Instant::now());
    instance.execute(&mut batch).expect("the execution");
    let times = batch.times();
    if let (Some(inputs), Some(outputs)) = (times.inputs_ready, times.outputs_start) {
        assert!(times.start <= inputs && inputs <= outputs);
    }
    for request in batch.requests {
        let (_, responder, answer) = request.into_parts();
        responder.expect("the responder was left").finish(answer);
    }
    drop(sender);
    receiver.iter().collect()
}

pub(crate) fn run(instance: &mut dyn ModelInstance, request: InferRequest) -> Result<InferResponse> {
    run_batch(instance, vec![(request, false)]).pop().expect("one answer")
}
