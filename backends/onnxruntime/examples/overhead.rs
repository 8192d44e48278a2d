//! What one execution costs over the bare engine: 16 INT32 added and subtracted, on one thread.
//!
//! `cargo run --release -p trireme-backend-onnxruntime --example overhead [MODEL.onnx]`, with TRIREME_ONNXRUNTIME set
//! or the library in `.trireme/onnxruntime`. The model must be Triton's `simple` (INPUT0, INPUT1 -> OUTPUT0, OUTPUT1,
//! INT32 `[-1,16]`). Blocks of the raw loop and of the backend alternate; the best block of each counts, because the
//! machine may be shared. The raw loop makes four values over memory of its own, runs and releases them, which is
//! the least that answering a request can do.

#![allow(unsafe_code, reason = "the raw loop calls the C API")]
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::undocumented_unsafe_blocks,
    reason = "a program for developers that ends at the first surprise"
)]

use std::ffi::{CString, c_void};
use std::path::{Path, PathBuf};
use std::time::Instant;

use libloading::Library;
use ort_sys::{
    GraphOptimizationLevel, ONNXTensorElementDataType, OrtAllocatorType, OrtApi, OrtApiBase, OrtLoggingLevel,
    OrtMemType, OrtMemoryInfo, OrtSession, OrtStatusPtr, OrtValue,
};
use trireme_backend::{
    Backend, Batch, BatchRequest, InstanceContext, ModelContext, ModelFiles, ModelInstance, ModelTensors,
};
use trireme_backend_onnxruntime::OnnxRuntimeBackend;
use trireme_types::{
    DataType, InferInput, InferRequest, InferResponse, Responder, ResponseSink, Result, Shape, TensorBuffer,
    TensorSpec,
};

const BLOCKS: usize = 20;
const CALLS: u32 = 20_000;

fn main() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let library = std::env::var_os("TRIREME_ONNXRUNTIME")
        .map_or_else(|| PathBuf::from(root).join(".trireme/onnxruntime/libonnxruntime.so"), PathBuf::from);
    let model =
        std::env::args_os().nth(1).map(PathBuf::from).expect("the path of Triton's `simple` model.onnx");
    let mut raw = Raw::open(&library, &model);
    let mut ours = Ours::open(&library, &model);
    let (mut best_raw, mut best_ours) = (f64::MAX, f64::MAX);
    for _ in 0..BLOCKS {
        best_raw = best_raw.min(time(|| raw.call()));
        best_ours = best_ours.min(time(|| ours.call()));
    }
    println!("raw engine     {best_raw:7.0} ns a call");
    println!("the backend    {best_ours:7.0} ns a call");
    println!("overhead       {:7.0} ns a call", best_ours - best_raw);
}

/// Nanoseconds of this thread's CPU a call would be better, but a quiet block is as good and needs no system call.
fn time(mut call: impl FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..CALLS {
        call();
    }
    start.elapsed().as_nanos() as f64 / f64::from(CALLS)
}

/// The engine alone.
struct Raw {
    api: &'static OrtApi,
    session: *mut OrtSession,
    memory: *mut OrtMemoryInfo,
    names: [CString; 4],
    buffers: [Box<[i32; 16]>; 4],
    _library: Library,
}

impl Raw {
    fn open(library: &Path, model: &Path) -> Self {
        unsafe {
            let library = Library::new(library).unwrap();
            let base = library
                .get::<unsafe extern "system" fn() -> *const OrtApiBase>(b"OrtGetApiBase\0")
                .unwrap()();
            let api = &*((*base).GetApi)(ort_sys::ORT_API_VERSION);
            let check = |status: OrtStatusPtr| assert!(status.0.is_null());
            let mut env = std::ptr::null_mut();
            check((api.CreateEnv)(OrtLoggingLevel::ORT_LOGGING_LEVEL_WARNING, c"raw".as_ptr(), &mut env));
            let mut options = std::ptr::null_mut();
            check((api.CreateSessionOptions)(&mut options));
            check((api.SetIntraOpNumThreads)(options, 1));
            check((api.SetSessionGraphOptimizationLevel)(options, GraphOptimizationLevel::ORT_ENABLE_ALL));
            let path = CString::new(model.to_str().unwrap()).unwrap();
            let mut session = std::ptr::null_mut();
            check((api.CreateSession)(env, path.as_ptr(), options, &mut session));
            let mut memory = std::ptr::null_mut();
            let (arena, default) = (OrtAllocatorType::OrtArenaAllocator, OrtMemType::OrtMemTypeDefault);
            check((api.CreateCpuMemoryInfo)(arena, default, &mut memory));
            let names = ["INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1"].map(|name| CString::new(name).unwrap());
            let buffers = std::array::from_fn(|_| Box::new([1; 16]));
            Self { api, session, memory, names, buffers, _library: library }
        }
    }

    fn call(&mut self) {
        unsafe {
            let mut values: [*mut OrtValue; 4] = [std::ptr::null_mut(); 4];
            for (value, buffer) in values.iter_mut().zip(&mut self.buffers) {
                let status = (self.api.CreateTensorWithDataAsOrtValue)(
                    self.memory,
                    buffer.as_mut_ptr().cast::<c_void>(),
                    64,
                    [1, 16].as_ptr(),
                    2,
                    ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32,
                    value,
                );
                assert!(status.0.is_null());
            }
            let names = self.names.each_ref().map(|name| name.as_ptr());
            let (inputs, outputs) = values.split_at_mut(2);
            let status = (self.api.Run)(
                self.session,
                std::ptr::null(),
                names.as_ptr(),
                inputs.as_ptr().cast(),
                2,
                names[2..].as_ptr(),
                2,
                outputs.as_mut_ptr(),
            );
            assert!(status.0.is_null());
            for value in values {
                (self.api.ReleaseValue)(value);
            }
        }
    }
}

/// The same through the contract that the server calls.
struct Ours {
    instance: Box<dyn ModelInstance>,
    inputs: [InferInput; 2],
}

struct Nobody;

impl ResponseSink for Nobody {
    fn send(&mut self, reply: Option<Result<InferResponse>>, _: bool) {
        assert_eq!(reply.unwrap().unwrap().outputs.len(), 2);
    }

    fn is_closed(&self) -> bool {
        false
    }
}

impl Ours {
    fn open(library: &Path, model: &Path) -> Self {
        let files = ModelFiles { model_path: model.to_owned(), ..ModelFiles::default() };
        let context = ModelContext { name: "simple".into(), files, threads: 1, ..ModelContext::default() };
        let spec = |name: &str| TensorSpec::new(name, DataType::Int32, Shape::new(&[16]));
        let tensors = ModelTensors {
            max_batch_size: 8,
            inputs: vec![spec("INPUT0"), spec("INPUT1")],
            outputs: vec![spec("OUTPUT0"), spec("OUTPUT1")],
            ..ModelTensors::default()
        };
        let backend = OnnxRuntimeBackend::new(Some(library.to_owned()));
        let model = backend.open(&context).unwrap().load(tensors).unwrap();
        let input = |name: &str| InferInput {
            name: name.into(),
            data_type: DataType::Int32,
            shape: Shape::new(&[1, 16]),
            data: TensorBuffer::from(vec![0; 64]),
        };
        let inputs = [input("INPUT0"), input("INPUT1")];
        Self { instance: model.instance(&InstanceContext::default()).unwrap(), inputs }
    }

    fn call(&mut self) {
        let mut request = InferRequest::new();
        request.inputs.extend(self.inputs.iter().cloned());
        let request = BatchRequest::new(request, Responder::new(Box::new(Nobody)));
        let mut batch = Batch::new(vec![request], Instant::now());
        self.instance.execute(&mut batch).unwrap();
        for request in batch.requests {
            let (_, responder, answer) = request.into_parts();
            responder.unwrap().finish(answer);
        }
    }
}
