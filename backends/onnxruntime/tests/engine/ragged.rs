//! Batches of requests whose shapes differ: what the model sees of them, and what each gets back.

use trireme_backend::ragged::{BatchInput, BatchInputKind, BatchOutput};
use trireme_backend::{ModelInstance, ModelTensors};
use trireme_types::{DataType, Error, InferRequest, InferResponse, Shape, TensorSpec};

use crate::harness::{ModelDir, bytes_of, fp32, input, int32, request, run, run_batch, spec, tensors, text};
use crate::onnx_models::{Dim, FLOAT, Fixed, Graph, INT32, INT64, Named, STRING};

fn ragged(name: &str, data_type: DataType) -> TensorSpec {
    TensorSpec { ragged: true, ..spec(name, data_type, &[-1]) }
}

/// An output of one number a row.
fn number(name: &str) -> TensorSpec {
    TensorSpec { reshape: Some(Shape::new(&[])), ..spec(name, DataType::Fp32, &[1]) }
}

fn batch_input(kind: BatchInputKind, target: &str, data_type: DataType) -> BatchInput {
    BatchInput { kind, targets: vec![target.into()], data_type, source: "X".into() }
}

fn scattered(target: &str) -> Vec<BatchOutput> {
    vec![BatchOutput { targets: vec![target.into()], source: "X".into() }]
}

fn long(values: &[i64]) -> Vec<u8> {
    bytes_of(values, i64::to_le_bytes)
}

/// `Y` is the flat `X`, `END` the batch input.
fn echo_with_ends() -> (Vec<u8>, ModelTensors) {
    let model = Graph::default()
        .input("X", FLOAT, &[Named("total")])
        .input("ENDS", FLOAT, &[Named("requests")])
        .output("Y", FLOAT, Some(&[Named("total")]))
        .output("END", FLOAT, Some(&[Named("requests")]))
        .node("Identity", &["X"], &["Y"])
        .node("Identity", &["ENDS"], &["END"])
        .model();
    let mut tensors =
        tensors(8, vec![ragged("X", DataType::Fp32)], vec![spec("Y", DataType::Fp32, &[-1]), number("END")]);
    tensors.batch_inputs = vec![batch_input(BatchInputKind::AccumulatedElementCount, "ENDS", DataType::Fp32)];
    tensors.batch_outputs = scattered("Y");
    (model, tensors)
}

fn x(values: &[f32]) -> InferRequest {
    let shape = [1, i64::try_from(values.len()).expect("few")];
    request(1, vec![input("X", DataType::Fp32, &shape, fp32(values))], &[])
}

fn answers(instance: &mut dyn ModelInstance, requests: Vec<InferRequest>) -> Vec<InferResponse> {
    let replies = run_batch(instance, requests.into_iter().map(|request| (request, false)).collect());
    replies.into_iter().map(|reply| reply.expect("an answer")).collect()
}

fn floats(response: &InferResponse, name: &str) -> (Vec<i64>, Vec<f32>) {
    let output = response.output(name).expect(name);
    let words = output.data.as_slice().chunks_exact(4);
    (output.shape.to_vec(), words.map(|word| f32::from_le_bytes(word.try_into().expect("four"))).collect())
}

#[test]
fn lengths_two_five_three_run_as_ten_values() {
    let (model, tensors) = echo_with_ends();
    let mut instance = ModelDir::new(&model).instance(tensors);
    let values: [&[f32]; 3] = [&[1., 2.], &[3., 4., 5., 6., 7.], &[8., 9., 10.]];
    let responses = answers(instance.as_mut(), values.iter().map(|values| x(values)).collect());
    for ((response, values), end) in responses.iter().zip(values).zip([2., 7., 10.]) {
        assert_eq!(
            floats(response, "Y"),
            (vec![1, i64::try_from(values.len()).expect("few")], values.to_vec())
        );
        assert_eq!(floats(response, "END"), (vec![1, 1], vec![end]));
    }
    // The pieces are parts of one buffer.
    let place = |index: usize| responses[index].output("Y").expect("Y").data.as_slice().as_ptr().addr();
    assert_eq!((place(1) - place(0), place(2) - place(1)), (8, 20));
}

#[test]
fn one_request_is_a_batch_of_its_own() {
    let (model, tensors) = echo_with_ends();
    let mut instance = ModelDir::new(&model).instance(tensors);
    for values in [&[1., 2., 3.][..], &[4.], &[]] {
        let response = run(instance.as_mut(), x(values)).expect("an answer");
        let count = u16::try_from(values.len()).expect("few");
        assert_eq!(floats(&response, "Y"), (vec![1, i64::from(count)], values.to_vec()));
        assert_eq!(floats(&response, "END"), (vec![1, 1], vec![f32::from(count)]));
    }
}

#[test]
fn only_what_a_client_asks_for_goes_back() {
    let (model, tensors) = echo_with_ends();
    let mut instance = ModelDir::new(&model).instance(tensors);
    let mut first = x(&[1.]);
    first.outputs.push(trireme_types::RequestedOutput { name: "END".into() });
    let responses = answers(instance.as_mut(), vec![first, x(&[2., 3.])]);
    assert!(responses[0].output("Y").is_none());
    assert_eq!(floats(&responses[0], "END").1, [1.]);
    assert_eq!(floats(&responses[1], "Y").1, [2., 3.]);
}

/// Every request sees the whole of `X` and of the batch input `T` in its row of `ALL` and `TOLD`.
fn broadcast(kind: BatchInputKind, data_type: DataType) -> (Vec<u8>, ModelTensors) {
    let element = if data_type == DataType::Fp32 { FLOAT } else { INT32 };
    let told: &[Dim] = match kind {
        BatchInputKind::ItemShape => &[Named("rows"), Named("rank")],
        _ => &[Named("told")],
    };
    let model = Graph::default()
        .input("X", FLOAT, &[Named("total")])
        .input("COUNT", FLOAT, &[Named("requests")])
        .input("T", element, told)
        .output("ALL", FLOAT, Some(&[Named("rows"), Named("total")]))
        .output("TOLD", element, Some(&[Named("rows"), Named("flat")]))
        .initializer("ax1", INT64, &[1], &long(&[1]))
        .initializer("flat", INT64, &[2], &long(&[1, -1]))
        .node("Unsqueeze", &["COUNT", "ax1"], &["COLUMN"])
        .node("Shape", &["COLUMN"], &["ROWS"])
        .node("Reshape", &["X", "flat"], &["X0"])
        .node("Expand", &["X0", "ROWS"], &["ALL"])
        .node("Reshape", &["T", "flat"], &["T0"])
        .node("Expand", &["T0", "ROWS"], &["TOLD"])
        .model();
    let mut tensors = tensors(
        8,
        vec![ragged("X", DataType::Fp32)],
        vec![spec("ALL", DataType::Fp32, &[-1]), spec("TOLD", data_type, &[-1])],
    );
    tensors.batch_inputs = vec![
        batch_input(BatchInputKind::ElementCount, "COUNT", DataType::Fp32),
        batch_input(kind, "T", data_type),
    ];
    (model, tensors)
}

#[test]
fn the_model_sees_every_kind_of_batch_input() {
    for (kind, told) in [
        (BatchInputKind::ElementCount, &[2_u8, 3, 1][..]),
        (BatchInputKind::AccumulatedElementCount, &[2, 5, 6]),
        (BatchInputKind::AccumulatedElementCountWithZero, &[0, 2, 5, 6]),
        (BatchInputKind::MaxElementCountAsShape, &[0, 0, 0]),
        (BatchInputKind::ItemShape, &[2, 3, 1]),
        (BatchInputKind::ItemShapeFlatten, &[2, 3, 1]),
    ] {
        for data_type in [DataType::Fp32, DataType::Int32] {
            let (model, tensors) = broadcast(kind, data_type);
            let mut instance = ModelDir::new(&model).instance(tensors);
            let responses = answers(instance.as_mut(), vec![x(&[1., 2.]), x(&[3., 4., 5.]), x(&[6.])]);
            for response in &responses {
                assert_eq!(floats(response, "ALL"), (vec![1, 6], vec![1., 2., 3., 4., 5., 6.]));
                let expected: Vec<u8> = match data_type {
                    DataType::Fp32 => fp32(&told.iter().map(|&n| f32::from(n)).collect::<Vec<_>>()),
                    _ => int32(&told.iter().map(|&n| i32::from(n)).collect::<Vec<_>>()),
                };
                let output = response.output("TOLD").expect("TOLD");
                assert_eq!(output.data.as_slice(), expected, "{kind:?} {data_type}");
                assert_eq!(&*output.shape, &[1, i64::try_from(told.len()).expect("few")]);
            }
        }
    }
}

#[test]
fn one_tensor_goes_to_every_target() {
    let model = Graph::default()
        .input("X", FLOAT, &[Named("total")])
        .input("A", INT32, &[Named("n")])
        .input("B", INT32, &[Named("n")])
        .output("SUM", INT32, Some(&[Named("n")]))
        .output("Y", FLOAT, Some(&[Named("total")]))
        .node("Add", &["A", "B"], &["SUM"])
        .node("Identity", &["X"], &["Y"])
        .model();
    let sum = TensorSpec { data_type: DataType::Int32, ..number("SUM") };
    let mut tensors =
        tensors(8, vec![ragged("X", DataType::Fp32)], vec![sum, spec("Y", DataType::Fp32, &[-1])]);
    tensors.batch_inputs = vec![BatchInput {
        targets: vec!["A".into(), "B".into()],
        ..batch_input(BatchInputKind::ElementCount, "A", DataType::Int32)
    }];
    tensors.batch_outputs = scattered("Y");
    let mut instance = ModelDir::new(&model).instance(tensors);
    let responses = answers(instance.as_mut(), vec![x(&[1., 2.]), x(&[3.])]);
    assert_eq!(responses[0].output("SUM").expect("SUM").data.as_slice(), int32(&[4]));
    assert_eq!(responses[1].output("SUM").expect("SUM").data.as_slice(), int32(&[2]));
    assert_eq!(floats(&responses[1], "Y").1, [3.]);
}

#[test]
fn strings_can_be_ragged() {
    let model = Graph::default()
        .input("X", STRING, &[Named("total")])
        .output("Y", STRING, Some(&[Named("total")]))
        .node("Identity", &["X"], &["Y"])
        .model();
    let mut tensors = tensors(8, vec![ragged("X", DataType::Bytes)], vec![spec("Y", DataType::Bytes, &[-1])]);
    tensors.batch_outputs = scattered("Y");
    let mut instance = ModelDir::new(&model).instance(tensors);
    let words = [text(&[b"one", b""]), text(&[b"two"])];
    let send =
        |shape: &[i64], data: &[u8]| request(1, vec![input("X", DataType::Bytes, shape, data.to_vec())], &[]);
    let responses = answers(instance.as_mut(), vec![send(&[1, 2], &words[0]), send(&[1, 1], &words[1])]);
    for (response, words) in responses.iter().zip(&words) {
        assert_eq!(response.outputs[0].data.as_slice(), words);
    }
    assert_eq!(&*responses[0].outputs[0].shape, &[1, 2]);
}

#[test]
fn an_output_that_has_neither_rows_nor_pieces_is_told() {
    let (model, mut tensors) = echo_with_ends();
    tensors.batch_outputs.clear();
    tensors.outputs = vec![TensorSpec { reshape: Some(Shape::new(&[])), ..spec("Y", DataType::Fp32, &[1]) }];
    let mut instance = ModelDir::new(&model).instance(tensors);
    let replies = run_batch(instance.as_mut(), vec![(x(&[1., 2.]), false), (x(&[3.]), false)]);
    for reply in replies {
        let error = reply.expect_err("no row for each request");
        assert!(error.message().contains("not one row for each of the 2 in the batch"), "{error}");
    }
}

#[test]
fn inputs_that_are_not_ragged_still_keep_requests_apart() {
    let model = Graph::default()
        .input("X", FLOAT, &[Named("total")])
        .input("P", FLOAT, &[Named("rows"), Named("p")])
        .output("Y", FLOAT, Some(&[Named("total")]))
        .output("Q", FLOAT, Some(&[Named("rows"), Named("p")]))
        .node("Identity", &["X"], &["Y"])
        .node("Identity", &["P"], &["Q"])
        .model();
    let mut tensors = tensors(
        8,
        vec![ragged("X", DataType::Fp32), spec("P", DataType::Fp32, &[-1])],
        vec![spec("Y", DataType::Fp32, &[-1]), spec("Q", DataType::Fp32, &[-1])],
    );
    tensors.batch_outputs = scattered("Y");
    let mut instance = ModelDir::new(&model).instance(tensors);
    let with = |values: &[f32], p: &[f32]| {
        let mut request = x(values);
        let shape = [1, i64::try_from(p.len()).expect("few")];
        request.inputs.push(input("P", DataType::Fp32, &shape, fp32(p)));
        request
    };
    let requests = vec![with(&[1.], &[1., 2.]), with(&[2., 3.], &[3., 4.]), with(&[4., 5., 6.], &[5.])];
    let responses = answers(instance.as_mut(), requests);
    assert_eq!(floats(&responses[0], "Q"), (vec![1, 2], vec![1., 2.]));
    assert_eq!(floats(&responses[1], "Y"), (vec![1, 2], vec![2., 3.]));
    assert_eq!(floats(&responses[2], "Q"), (vec![1, 1], vec![5.]));
    assert_eq!(floats(&responses[2], "Y"), (vec![1, 3], vec![4., 5., 6.]));
}

#[test]
fn states_are_in_every_response() {
    let model = Graph::default()
        .input("X", FLOAT, &[Named("rows"), Fixed(1)])
        .input("S", FLOAT, &[Named("rows"), Fixed(1)])
        .output("Y", FLOAT, Some(&[Named("rows"), Fixed(1)]))
        .output("NEXT", FLOAT, Some(&[Named("rows"), Fixed(1)]))
        .node("Add", &["X", "S"], &["NEXT"])
        .node("Identity", &["X"], &["Y"])
        .model();
    let plain = |name: &str| spec(name, DataType::Fp32, &[1]);
    let sent = |x: f32, s: f32, outputs: &[&str]| {
        let inputs = [("X", x), ("S", s)].map(|(name, v)| input(name, DataType::Fp32, &[1, 1], fp32(&[v])));
        request(1, inputs.into(), outputs)
    };
    // As a state alone, and as a state that clients may ask for as well.
    for outputs in [vec![plain("Y")], vec![plain("Y"), plain("NEXT")]] {
        let mut tensors = tensors(8, vec![plain("X")], outputs);
        tensors.injected = vec![("S".into(), DataType::Fp32)];
        tensors.states = vec![plain("NEXT")];
        let mut instance = ModelDir::new(&model).instance(tensors);
        let responses = answers(instance.as_mut(), vec![sent(1., 10., &["Y"]), sent(2., 20., &["NEXT"])]);
        assert_eq!(floats(&responses[0], "NEXT"), (vec![1, 1], vec![11.]));
        assert_eq!(floats(&responses[0], "Y").1, [1.]);
        assert_eq!(floats(&responses[1], "NEXT").1, [22.]);
        assert_eq!(responses[1].outputs.len(), 1);
    }
}

#[test]
fn promises_that_cannot_be_kept_fail_the_load() {
    type Spoil = fn(&mut ModelTensors);
    let cases: [(Spoil, &str); 7] = [
        (|t| t.inputs[0].optional = true, "ragged input 'X', which is not supported for optional input"),
        (
            |t| t.batch_inputs[0].data_type = DataType::Int32,
            "unexpected datatype TYPE_INT32 for tensor 'ENDS'",
        ),
        (|t| t.batch_inputs[0].targets = vec!["NONE".into()], "unexpected inference input 'NONE'"),
        (
            |t| t.batch_inputs[0].kind = BatchInputKind::ItemShape,
            "has the shape [-1,-1], a row for each item",
        ),
        (|t| t.batch_inputs.clear(), "the configuration lacks 'ENDS'"),
        (
            |t| t.batch_inputs.push(t.batch_inputs[0].clone()),
            "batch input 'ENDS' of model 'm' is given twice",
        ),
        (|t| t.batch_outputs[0].source = "ENDS".into(), "from the input 'ENDS', which clients do not send"),
    ];
    for (spoil, message) in cases {
        let (model, mut tensors) = echo_with_ends();
        spoil(&mut tensors);
        let error: Error = ModelDir::new(&model).load(tensors).err().expect(message);
        assert!(error.message().contains(message), "expected '{message}', got '{error}'");
    }
}
