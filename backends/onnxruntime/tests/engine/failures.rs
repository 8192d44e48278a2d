//! What goes wrong when a model is opened or loaded, and what the person is told.

use std::path::PathBuf;

use trireme_backend::{Backend, ModelTensors};
use trireme_backend_onnxruntime::OnnxRuntimeBackend;
use trireme_types::{Code, DataType, Error, Result};

use crate::harness::{ModelDir, spec, tensors, x_to_y};
use crate::onnx_models::{FLOAT, Fixed, Graph, INT32, Named, identity, simple};

fn refused<T>(result: Result<T>) -> Error {
    result.err().expect("an error")
}

fn contains(error: &Error, parts: &[&str]) {
    for part in parts {
        assert!(error.message().contains(part), "{part:?} is not in: {error}");
    }
}

#[test]
fn an_absent_library_is_told_with_the_path() {
    let dir = ModelDir::new(&simple());
    let backend = OnnxRuntimeBackend::new(Some(PathBuf::from("/nonexistent/libonnxruntime.so")));
    let error = refused(backend.open(&dir.context));
    assert_eq!(error.code(), Code::Unavailable);
    contains(&error, &["'/nonexistent/libonnxruntime.so'", "there is no such file"]);
    // The answer is kept: the next model hears the same at once.
    assert_eq!(refused(backend.open(&dir.context)), error);
    assert_eq!(backend.describe(), None);
}

#[test]
fn the_library_tells_its_version() {
    let backend = crate::harness::backend();
    backend.open(&ModelDir::new(&simple()).context).expect("a model");
    let told = backend.describe().expect("a version");
    assert!(told.starts_with("ONNX Runtime 1."), "{told}");
}

#[test]
fn a_missing_file_is_told_in_triton_s_words() {
    let mut dir = ModelDir::new(&simple());
    dir.context.files.model_path.set_file_name("other.onnx");
    let error = refused(dir.open());
    assert_eq!(error.code(), Code::Unavailable);
    contains(&error, &["unable to find '", "other.onnx' for model instance 'm'", "holds 'model.onnx'"]);
}

#[test]
fn a_corrupt_file_is_told_for_what_it_is() {
    let whole = simple();
    for (content, parts) in [
        (
            &b"not a model"[..],
            &["onnx runtime error 7: Load model from ", "Protobuf parsing failed.", "11 bytes"][..],
        ),
        (b"", &["'model.onnx' (0 bytes) is empty"]),
        (b"version https://git-lfs.github.com/spec/v1\n", &["git lfs pull"]),
        (b"<!DOCTYPE html>", &["HTML page"]),
        (&whole[..whole.len() - 9], &["may have been cut short", "'model.onnx' has"]),
    ] {
        let error = refused(ModelDir::new(content).open());
        assert_eq!(error.code(), Code::Internal);
        contains(&error, parts);
    }
    // Others are served.
    ModelDir::new(&whole).open().expect("a model");
}

#[test]
fn a_model_directory_holds_the_file() {
    let mut dir = ModelDir::new(&simple());
    let inner = dir.context.files.version_dir.join("net");
    fs_err::create_dir(&inner).expect("a directory");
    fs_err::rename(&dir.context.files.model_path, inner.join("model.onnx")).expect("a move");
    dir.context.files.model_path = inner;
    dir.open().expect("a model");
}

fn simple_with(max_batch_size: usize, change: impl FnOnce(&mut ModelTensors)) -> Result<()> {
    let int32 = |name: &str| spec(name, DataType::Int32, &[16]);
    let mut promised = tensors(
        max_batch_size,
        vec![int32("INPUT0"), int32("INPUT1")],
        vec![int32("OUTPUT0"), int32("OUTPUT1")],
    );
    change(&mut promised);
    ModelDir::new(&simple()).load(promised).map(drop)
}

#[test]
fn promises_that_the_model_does_not_keep() {
    simple_with(8, |_| {}).expect("a kept promise");
    let error = refused(simple_with(8, |t| t.outputs[1].name = "OUTPUTX".into()));
    assert_eq!(error.code(), Code::InvalidArg);
    // As recorded from Triton.
    assert_eq!(
        error.message(),
        "unexpected inference output 'OUTPUTX', allowed outputs are: OUTPUT0, OUTPUT1"
    );
    let error = refused(simple_with(8, |t| t.inputs[0].name = "X".into()));
    assert_eq!(error.message(), "unexpected inference input 'X', allowed inputs are: INPUT0, INPUT1");
    let error = refused(simple_with(8, |t| drop(t.inputs.pop())));
    contains(&error, &["configuration expects 1 inputs, model provides 2", "lacks 'INPUT1'"]);
    let error = refused(simple_with(8, |t| t.inputs[1].data_type = DataType::Fp32));
    contains(&error, &["'INPUT1'", "TYPE_FP32", "TYPE_INT32"]);
    let error = refused(simple_with(8, |t| t.inputs[1] = spec("INPUT1", DataType::Int32, &[8])));
    contains(
        &error,
        &["tensor 'INPUT1'", "(shape [-1,16])", "making complete shape [-1,8]", "dimension 1 is 16"],
    );
    let error = refused(simple_with(0, |_| {}));
    contains(&error, &["expects 2 dimensions (shape [-1,16])", "specifies 1 dimensions (shape [16])"]);
    let error = refused(simple_with(8, |t| t.inputs[0].ragged = true));
    contains(
        &error,
        &["model provides input with shape [-1] for ragged input 'INPUT0', model provides [-1,16]"],
    );
    let error = refused(simple_with(8, |t| t.injected = vec![("START".into(), DataType::Int32)]));
    contains(&error, &["unexpected inference input 'START'"]);
    // An open dimension of an output promises less than a fixed one; of an input, more.
    simple_with(8, |t| t.outputs[0] = spec("OUTPUT0", DataType::Int32, &[-1])).expect("16 is any");
    let error = refused(simple_with(8, |t| t.inputs[0] = spec("INPUT0", DataType::Int32, &[-1])));
    contains(&error, &["dimension 1 is 16 in the model and -1 in the configuration"]);
    // An output may be left out.
    simple_with(8, |t| drop(t.outputs.pop())).expect("one output is enough");
}

#[test]
fn batching_needs_an_open_first_dimension() {
    let dir = ModelDir::new(&identity(FLOAT, &[Fixed(1), Fixed(4)]));
    assert!(!dir.report().batch_dimension);
    let error = refused(dir.load(x_to_y(8, DataType::Fp32, &[4])));
    contains(&error, &["for the model to support batching", "[1,4]", "max_batch_size: 0"]);
}

#[test]
fn the_report_says_what_the_file_has() {
    let report = ModelDir::new(&simple()).report();
    assert!(report.batch_dimension);
    let names: Vec<_> = report.inputs.iter().chain(&report.outputs).map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1"]);
    assert!(
        report.inputs.iter().all(|t| t.data_type == DataType::Int32 && *t.shape == [-1, 16] && !t.optional)
    );
}

#[test]
fn values_that_are_no_tensors_are_named() {
    let input = Graph::default()
        .sequence_input("S", FLOAT)
        .output("N", 7, Some(&[]))
        .node("SequenceLength", &["S"], &["N"])
        .model();
    let error = refused(ModelDir::new(&input).open());
    assert_eq!(error.code(), Code::Unsupported);
    contains(&error, &["input 'S' of model 'm' is a sequence"]);
    // As a scikit-learn classifier: the tensor is served, the sequence is not.
    let output = || {
        let base = Graph::default().input("X", FLOAT, &[Named("n")]).sequence_output("S", FLOAT);
        base.node("SequenceConstruct", &["X"], &["S"])
    };
    let mixed = output().output("Y", FLOAT, Some(&[Named("n")])).node("Identity", &["X"], &["Y"]).model();
    let dir = ModelDir::new(&mixed);
    assert_eq!(dir.report().outputs.len(), 1);
    dir.load(x_to_y(0, DataType::Fp32, &[-1])).expect("the tensor is served");
    let mut asked = x_to_y(0, DataType::Fp32, &[-1]);
    asked.outputs.push(spec("S", DataType::Fp32, &[-1]));
    contains(&refused(dir.load(asked)), &["output 'S' of model 'm' is a sequence"]);
    contains(&refused(ModelDir::new(&output().model()).open()), &["no output that can be served", "'S'"]);
}

#[test]
fn element_types_that_the_protocol_lacks_are_named() {
    let unused = |element| {
        let graph = Graph::default().input("X", FLOAT, &[Named("n")]).input("P", element, &[Named("n")]);
        graph.output("Y", FLOAT, Some(&[Named("n")])).node("Identity", &["X"], &["Y"]).model()
    };
    for (element, name) in [(17, "float8e4m3fn"), (22, "int4")] {
        let error = refused(ModelDir::new(&unused(element)).open());
        assert_eq!(error.code(), Code::Unsupported);
        contains(&error, &["input 'P' of model 'm'", name, "FP32"]);
    }
}

#[test]
fn settings_reach_the_engine_or_are_refused() {
    let settings = [
        ("execution_mode", "1"),
        ("inter_op_thread_count", "2"),
        ("enable_mem_arena", "0"),
        ("enable_mem_pattern", "0"),
        ("memory.enable_memory_arena_shrinkage", "cpu:0"),
        ("session.disable_prepacking", "1"),
        ("unknown", "x"),
    ];
    let mut dir = ModelDir::new(&simple()).parameters(&settings);
    for level in [-1, 0, 1, 2] {
        dir.context.graph_level = Some(level);
        dir.open().expect("a model");
    }
    let error = refused(ModelDir::new(&simple()).parameters(&[("execution_mode", "fast")]).open());
    contains(&error, &["'execution_mode' of model 'm'", "'fast'", "0 or 1"]);
}

#[test]
fn accelerators_and_operators_that_are_not_there_are_named() {
    let mut dir = ModelDir::new(&simple());
    dir.context.accelerators = vec![("tensorrt".to_owned(), Vec::new())];
    let error = refused(dir.open());
    assert_eq!(error.code(), Code::Unavailable);
    contains(&error, &["'tensorrt'", "no TensorrtExecutionProvider", "CPUExecutionProvider"]);
    dir.context.accelerators.clear();
    dir.context.op_libraries = vec!["libcustom.so".to_owned()];
    contains(&refused(dir.open()), &["op_library_filename 'libcustom.so' of model 'm'"]);
}

#[test]
fn memory_that_cannot_be_had_is_an_error_and_not_the_end() {
    use crate::harness::{input, request, run};
    let model = Graph::default()
        .input("X", INT32, &[Named("n")])
        .input("S", 7, &[Named("rank")])
        .output("Y", INT32, Some(&[Named("m")]))
        .node("Expand", &["X", "S"], &["Y"])
        .model();
    let inputs = vec![spec("X", DataType::Int32, &[-1]), spec("S", DataType::Int64, &[-1])];
    let mut instance =
        ModelDir::new(&model).instance(tensors(0, inputs, vec![spec("Y", DataType::Int32, &[-1])]));
    for size in [1_i64 << 50, i64::MAX, -5] {
        let inputs = vec![
            input("X", DataType::Int32, &[1], vec![1, 0, 0, 0]),
            input("S", DataType::Int64, &[1], size.to_le_bytes().to_vec()),
        ];
        let error = run(instance.as_mut(), request(1, inputs, &[])).expect_err("no such memory");
        contains(&error, &["onnx runtime error ", "in model 'm'"]);
    }
}
