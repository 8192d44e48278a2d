//! Data goes in and comes out: types, strings, memory, batches.

use bytes::Bytes;
use trireme_backend::{InstanceContext, InstanceKind};
use trireme_types::{Code, DataType, TensorBuffer};

use crate::harness::{ModelDir, fp32, input, int32, request, run, run_batch, spec, tensors, text, x_to_y};
use crate::onnx_models::{FLOAT, Fixed, Graph, INT32, INT64, Named, STRING, identity, simple};

/// ONNX's number of each type and the bytes of two elements.
fn samples() -> Vec<(DataType, u64, Vec<u8>)> {
    use DataType as T;
    vec![
        (T::Bool, 9, vec![1, 0]),
        (T::Uint8, 2, vec![255, 7]),
        (T::Uint16, 4, vec![1, 255, 2, 0]),
        (T::Uint32, 12, vec![255; 8]),
        (T::Uint64, 13, vec![254; 16]),
        (T::Int8, 3, vec![128, 127]),
        (T::Int16, 5, vec![0, 128, 1, 0]),
        (T::Int32, INT32, int32(&[i32::MIN, -1])),
        (T::Int64, INT64, vec![129; 16]),
        (T::Fp16, 10, vec![0, 0x3c, 0, 0x7e]),
        (T::Fp32, FLOAT, fp32(&[f32::NAN, -0.5])),
        (T::Fp64, 11, vec![1; 16]),
        (T::Bytes, STRING, text(&[b"a\0b", b""])),
        (T::Bf16, 16, vec![0x80, 0x3f, 0, 0xc0]),
    ]
}

#[test]
fn every_data_type_goes_through() {
    let samples = samples();
    assert_eq!(samples.len(), DataType::ALL.len());
    for (data_type, element, data) in samples {
        let dir = ModelDir::new(&identity(element, &[Named("n")]));
        let report = dir.report();
        assert_eq!((report.inputs[0].data_type, &*report.inputs[0].shape), (data_type, &[-1][..]));
        let mut instance = dir.instance(x_to_y(0, data_type, &[-1]));
        let given = input("X", data_type, &[2], data.clone());
        let response = run(instance.as_mut(), request(1, vec![given], &[])).expect("an answer");
        let output = response.output("Y").expect("Y");
        assert_eq!(output.data_type, data_type);
        assert_eq!(&*output.shape, &[2]);
        assert_eq!(output.data.as_slice(), data, "{data_type}");
    }
}

#[test]
fn strings_of_every_length_keep_every_byte() {
    let long = vec![b'x'; 1 << 20];
    let strings: [&[u8]; 5] = [b"", b"a\0b", "\u{e9}\u{6a21}\u{1f600}".as_bytes(), b"\xff\xfe", &long];
    let mut instance =
        ModelDir::new(&identity(STRING, &[Named("n")])).instance(x_to_y(0, DataType::Bytes, &[-1]));
    let mut through = |shape: i64, data: Vec<u8>| {
        run(instance.as_mut(), request(1, vec![input("X", DataType::Bytes, &[shape], data)], &[]))
    };
    let response = through(5, text(&strings)).expect("an answer");
    assert_eq!(response.outputs[0].data.as_slice(), text(&strings));
    assert!(through(0, Vec::new()).expect("an answer").outputs[0].data.is_empty());
    for (shape, data, message) in [
        (1, vec![5, 0, 0, 0, b'a'], "ends within a string"),
        (1, [text(&[b""]), vec![5, 0, 0]].concat(), "ends within a length"),
        (1, vec![5, 0, 0], "has at most 0 strings, expected 1"),
        (1 << 40, text(&[b"a"]), "has at most 1 strings, expected 1099511627776"),
        (2, text(&[b"abcd"]), "has 1 strings, expected 2"),
        (1, text(&[b"a", b"b"]), "has more than 1 strings"),
        (1, vec![255; 4], "ends within a string"),
    ] {
        let error = through(shape, data).expect_err(message);
        assert_eq!(error.code(), Code::InvalidArg);
        assert!(error.message().contains(message), "{error}");
    }
}

#[test]
fn misaligned_bytes_are_read_right() {
    let mut instance = ModelDir::new(&simple()).instance(simple_tensors(0));
    let values: Vec<i32> = (0..16).collect();
    for offset in 0..4 {
        let slice = |values: &[i32]| {
            let padded = Bytes::from([vec![0; offset], int32(values)].concat());
            TensorBuffer::from(padded).slice(offset..offset + 64)
        };
        let inputs = vec![
            input("INPUT0", DataType::Int32, &[1, 16], slice(&values)),
            input("INPUT1", DataType::Int32, &[1, 16], slice(&[1; 16])),
        ];
        let response = run(instance.as_mut(), request(1, inputs, &[])).expect("an answer");
        let expected: Vec<i32> = values.iter().map(|v| v + 1).collect();
        assert_eq!(response.output("OUTPUT0").expect("OUTPUT0").data.as_slice(), int32(&expected));
    }
}

#[test]
fn any_byte_but_zero_is_true() {
    let model = Graph::default()
        .input("X", 9, &[Named("n")])
        .output("Y", 9, Some(&[Named("n")]))
        .node("Not", &["X"], &["Y"])
        .model();
    let mut instance = ModelDir::new(&model).instance(x_to_y(0, DataType::Bool, &[-1]));
    let given = input("X", DataType::Bool, &[4], vec![0, 1, 2, 255]);
    let response = run(instance.as_mut(), request(1, vec![given], &[])).expect("an answer");
    assert_eq!(response.outputs[0].data.as_slice(), [1, 0, 0, 0]);
}

fn simple_tensors(max_batch_size: usize) -> trireme_backend::ModelTensors {
    let dims: &[i64] = if max_batch_size > 0 { &[16] } else { &[-1, 16] };
    let int32 = |name: &str| spec(name, DataType::Int32, dims);
    tensors(max_batch_size, vec![int32("INPUT0"), int32("INPUT1")], vec![int32("OUTPUT0"), int32("OUTPUT1")])
}

fn simple_request(rows: usize, first: i32, outputs: &[&str]) -> trireme_types::InferRequest {
    let shape = [rows as i64, 16];
    let values: Vec<i32> = (0..).map(|i| first + i).take(rows * 16).collect();
    let inputs = vec![
        // The order is the client's.
        input("INPUT1", DataType::Int32, &shape, int32(&vec![3; rows * 16])),
        input("INPUT0", DataType::Int32, &shape, int32(&values)),
    ];
    request(rows, inputs, outputs)
}

#[test]
fn a_batch_is_gathered_and_scattered() {
    let mut instance = ModelDir::new(&simple()).instance(simple_tensors(8));
    let requests = vec![
        (simple_request(1, 0, &[]), false),
        (simple_request(2, 1000, &["OUTPUT1"]), false),
        (simple_request(1, 5000, &["OUTPUT0"]), false),
    ];
    let answers = run_batch(instance.as_mut(), requests);
    let answers: Vec<_> = answers.into_iter().map(|answer| answer.expect("an answer")).collect();
    let names = |index: usize| answers[index].outputs.iter().map(|o| &*o.name).collect::<Vec<_>>();
    assert_eq!(names(0), ["OUTPUT0", "OUTPUT1"]);
    assert_eq!(names(1), ["OUTPUT1"]);
    assert_eq!(names(2), ["OUTPUT0"]);
    let second = &answers[1].outputs[0];
    let expected: Vec<i32> = (1000..1032).map(|v| v - 3).collect();
    assert_eq!(&*second.shape, &[2, 16]);
    assert_eq!(second.data.as_slice(), int32(&expected));
    let third: Vec<i32> = (5000..5016).map(|v| v + 3).collect();
    assert_eq!(answers[2].outputs[0].data.as_slice(), int32(&third));
}

#[test]
fn strings_are_batched_too() {
    let model = identity(STRING, &[Named("b"), Named("n")]);
    let mut instance = ModelDir::new(&model).instance(x_to_y(8, DataType::Bytes, &[-1]));
    let make = |rows: usize, strings: &[&[u8]]| {
        let shape = [rows as i64, (strings.len() / rows) as i64];
        (request(rows, vec![input("X", DataType::Bytes, &shape, text(strings))], &[]), false)
    };
    let requests = vec![make(1, &[b"a", b""]), make(2, &[b"b", b"cc", b"d\0", b"e"])];
    let answers = run_batch(instance.as_mut(), requests);
    let data = |index: usize| answers[index].as_ref().expect("an answer").outputs[0].data.as_slice().to_vec();
    assert_eq!(data(0), text(&[b"a", b""]));
    assert_eq!(data(1), text(&[b"b", b"cc", b"d\0", b"e"]));
}

#[test]
fn requests_that_do_not_fit_together_run_apart() {
    let model = identity(FLOAT, &[Named("b"), Named("n")]);
    let mut instance = ModelDir::new(&model).instance(x_to_y(8, DataType::Fp32, &[-1]));
    let make = |values: &[f32]| {
        let shape = [1, values.len() as i64];
        (request(1, vec![input("X", DataType::Fp32, &shape, fp32(values))], &[]), false)
    };
    let requests = vec![make(&[1.0]), make(&[2.0, 3.0]), make(&[4.0, 5.0]), make(&[6.0])];
    let answers = run_batch(instance.as_mut(), requests);
    let data: Vec<_> = answers
        .iter()
        .map(|answer| answer.as_ref().expect("an answer").outputs[0].data.as_slice().to_vec())
        .collect();
    assert_eq!(data, [fp32(&[1.0]), fp32(&[2.0, 3.0]), fp32(&[4.0, 5.0]), fp32(&[6.0])]);
}

#[test]
fn cancelled_requests_are_not_run() {
    let mut instance = ModelDir::new(&simple()).instance(simple_tensors(8));
    let requests = vec![
        (simple_request(1, 0, &[]), true),
        (simple_request(1, 7, &[]), false),
        (simple_request(1, 0, &[]), true),
    ];
    let answers = run_batch(instance.as_mut(), requests);
    assert_eq!(answers[0].as_ref().expect_err("cancelled").code(), Code::Cancelled);
    assert_eq!(answers[2].as_ref().expect_err("cancelled").code(), Code::Cancelled);
    assert_eq!(answers[1].as_ref().expect("an answer").outputs[0].data.as_slice()[0], 10);
}

#[test]
fn an_initializer_stands_in_for_an_input_that_is_left_out() {
    let model = Graph::default()
        .input("X", FLOAT, &[Named("b"), Fixed(2)])
        .input("W", FLOAT, &[Fixed(2)])
        .initializer("W", FLOAT, &[2], &fp32(&[10.0, 20.0]))
        .output("Y", FLOAT, Some(&[Named("b"), Fixed(2)]))
        .node("Add", &["X", "W"], &["Y"])
        .model();
    let dir = ModelDir::new(&model);
    let report = dir.report();
    let seen: Vec<_> = report.inputs.iter().map(|i| (i.name.as_str(), i.optional)).collect();
    assert_eq!(seen, [("X", false), ("W", true)]);
    assert!(report.batch_dimension, "an input with a default need not be batched");
    let mut weight = spec("W", DataType::Fp32, &[2]);
    weight.optional = true;
    let promised = tensors(
        0,
        vec![spec("X", DataType::Fp32, &[-1, 2]), weight],
        vec![spec("Y", DataType::Fp32, &[-1, 2])],
    );
    let mut instance = dir.instance(promised);
    let x = || input("X", DataType::Fp32, &[1, 2], fp32(&[1.0, 2.0]));
    let without = run(instance.as_mut(), request(1, vec![x()], &[])).expect("an answer");
    assert_eq!(without.outputs[0].data.as_slice(), fp32(&[11.0, 22.0]));
    let given = input("W", DataType::Fp32, &[2], fp32(&[0.5, 0.5]));
    let with = run(instance.as_mut(), request(1, vec![x(), given], &[])).expect("an answer");
    assert_eq!(with.outputs[0].data.as_slice(), fp32(&[1.5, 2.5]));
    let half = vec![input("INPUT0", DataType::Int32, &[1, 16], int32(&[0; 16]))];
    let mut instance = ModelDir::new(&simple()).instance(simple_tensors(0));
    let error = run(instance.as_mut(), request(1, half, &[])).expect_err("no INPUT1");
    assert!(error.message().contains("input 'INPUT1' is missing"), "{error}");
}

/// Large outputs are handed on in the engine's memory: it must outlive model, instance and request, and must not be
/// the memory of an input.
#[test]
fn outputs_outlive_everything_else() {
    const SIZE: usize = 100_000;
    let weights: Vec<f32> = (0..1000_u16).cycle().take(SIZE).map(f32::from).collect();
    // Reshape by a request's own numbers: no length is known before the run, and Reshape may hand its input on.
    let reshaped = |graph: Graph, source: &str, name: &str| {
        graph.output(name, FLOAT, Some(&[Named("any")])).node("Reshape", &[source, "S"], &[name])
    };
    let graph = Graph::default()
        .input("X", FLOAT, &[Named("n")])
        .input("S", INT64, &[Fixed(1)])
        .initializer("W", FLOAT, &[SIZE as u64], &fp32(&weights))
        .node("Add", &["X", "W"], &["sum"]);
    let graph = [("X", "PASSED"), ("W", "CONSTANT"), ("sum", "SUM")]
        .into_iter()
        .fold(graph, |graph, (source, name)| reshaped(graph, source, name));
    let outputs = ["PASSED", "CONSTANT", "SUM"].map(|name| spec(name, DataType::Fp32, &[-1])).to_vec();
    let inputs = vec![spec("X", DataType::Fp32, &[-1]), spec("S", DataType::Int64, &[1])];
    let mut instance = ModelDir::new(&graph.model()).instance(tensors(0, inputs, outputs));
    let given = vec![
        input("X", DataType::Fp32, &[SIZE as i64], fp32(&[1.0; SIZE])),
        input("S", DataType::Int64, &[1], SIZE.to_le_bytes().to_vec()),
    ];
    let response = run(instance.as_mut(), request(1, given, &[])).expect("an answer");
    drop(instance);
    // New memory in the place of what was freed would show here.
    let noise = vec![fp32(&[9.0; SIZE]); 4];
    let data = |name: &str| response.output(name).expect(name).data.as_slice();
    assert_eq!(data("PASSED"), fp32(&[1.0; SIZE]));
    assert_eq!(data("CONSTANT"), fp32(&weights));
    let sum: Vec<f32> = weights.iter().map(|w| w + 1.0).collect();
    assert_eq!(data("SUM"), fp32(&sum));
    drop(noise);
}

#[test]
fn instances_share_one_session_on_many_threads() {
    let dir = ModelDir::new(&simple()).parameters(&[("intra_op_thread_count", "2")]);
    let model = dir.load(simple_tensors(8)).expect("a model");
    let threads: Vec<_> = (0..4)
        .map(|thread: i32| {
            let mut instance = model.instance(&InstanceContext::default()).expect("an instance");
            std::thread::spawn(move || {
                for round in 0..50 {
                    let first = thread * 10_000 + round;
                    let response =
                        run(instance.as_mut(), simple_request(1, first, &["OUTPUT0"])).expect("an answer");
                    let expected: Vec<i32> = (first..first + 16).map(|v| v + 3).collect();
                    assert_eq!(response.outputs[0].data.as_slice(), int32(&expected));
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("no panic");
    }
    let gpu = InstanceContext { kind: InstanceKind::Gpu, ..InstanceContext::default() };
    let error = model.instance(&gpu).err().expect("no GPU");
    assert!(error.message().contains("KIND_CPU"), "{error}");
    let usage = model.memory_usage();
    assert!(matches!(&usage[..], [memory] if memory.kind == "CPU" && memory.byte_size > 0), "{usage:?}");
}
