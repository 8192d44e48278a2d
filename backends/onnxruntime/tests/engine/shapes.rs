//! Shapes: scalars, nothing at all, reshape, and models that declare other shapes than they make.

use trireme_types::{Code, DataType, Shape};

use crate::harness::{ModelDir, fp32, input, request, run, run_batch, spec, tensors, x_to_y};
use crate::onnx_models::{FLOAT, Fixed, Graph, INT64, NO_SHAPE, Named, identity};

fn int64(values: &[i64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn a_scalar_is_one_element_to_clients() {
    let dir = ModelDir::new(&identity(INT64, &[]));
    let report = dir.report();
    assert!(report.inputs[0].shape.is_empty() && !report.batch_dimension);
    let mut instance = dir.instance(x_to_y(0, DataType::Int64, &[1]));
    let given = input("X", DataType::Int64, &[1], int64(&[7]));
    let response = run(instance.as_mut(), request(1, vec![given], &[])).expect("an answer");
    assert_eq!(&*response.outputs[0].shape, &[1]);
    assert_eq!(response.outputs[0].data.as_slice(), int64(&[7]));
}

#[test]
fn a_row_of_one_element_is_reshaped_away_and_back() {
    let mut instance = {
        let mut promised = x_to_y(8, DataType::Fp32, &[1]);
        promised.inputs[0].reshape = Some(Shape::new(&[]));
        promised.outputs[0].reshape = Some(Shape::new(&[]));
        ModelDir::new(&identity(FLOAT, &[Named("b")])).instance(promised)
    };
    let make = |values: &[f32]| {
        let rows = values.len();
        (request(rows, vec![input("X", DataType::Fp32, &[rows as i64, 1], fp32(values))], &[]), false)
    };
    let answers = run_batch(instance.as_mut(), vec![make(&[1.0, 2.0]), make(&[3.0])]);
    let first = &answers[0].as_ref().expect("an answer").outputs[0];
    assert_eq!((&*first.shape, first.data.as_slice()), (&[2, 1][..], &fp32(&[1.0, 2.0])[..]));
    let second = &answers[1].as_ref().expect("an answer").outputs[0];
    assert_eq!((&*second.shape, second.data.as_slice()), (&[1, 1][..], &fp32(&[3.0])[..]));
}

#[test]
fn tensors_without_elements_go_through() {
    let mut instance = ModelDir::new(&identity(FLOAT, &[Named("a"), Named("b")])).instance(x_to_y(
        0,
        DataType::Fp32,
        &[-1, -1],
    ));
    for shape in [[0, 3], [3, 0], [0, 0]] {
        let given = input("X", DataType::Fp32, &shape, Vec::new());
        let response = run(instance.as_mut(), request(1, vec![given], &[])).expect("an answer");
        assert_eq!(&*response.outputs[0].shape, &shape);
        assert!(response.outputs[0].data.is_empty());
    }
    // A shape that a client made up takes no memory: the engine refuses or answers, and the process lives.
    let given = input("X", DataType::Fp32, &[0, i64::MAX], Vec::new());
    let _ = run(instance.as_mut(), request(1, vec![given], &[]));
}

/// `Y` has as many elements as `X` has that are not 0.
fn non_zero() -> Vec<u8> {
    Graph::default()
        .input("X", FLOAT, &[Named("n")])
        .output("Y", INT64, Some(&[Fixed(1), Named("found")]))
        .node("NonZero", &["X"], &["Y"])
        .model()
}

#[test]
fn shapes_that_only_the_run_can_tell() {
    let promised =
        tensors(0, vec![spec("X", DataType::Fp32, &[-1])], vec![spec("Y", DataType::Int64, &[1, -1])]);
    let mut instance = ModelDir::new(&non_zero()).instance(promised);
    for (values, found) in [(&[0.0, 2.0, 0.0, 4.0][..], &[1, 3][..]), (&[0.0], &[]), (&[1.0], &[0])] {
        let given = input("X", DataType::Fp32, &[values.len() as i64], fp32(values));
        let response = run(instance.as_mut(), request(1, vec![given], &[])).expect("an answer");
        assert_eq!(&*response.outputs[0].shape, &[1, found.len() as i64]);
        assert_eq!(response.outputs[0].data.as_slice(), int64(found));
    }
}

/// `Y = Reshape(X, S)`, declared as if it always were 2 by 2.
fn liar() -> Vec<u8> {
    Graph::default()
        .input("X", FLOAT, &[Named("n")])
        .input("S", INT64, &[Named("rank")])
        .output("Y", FLOAT, Some(&[Fixed(2), Fixed(2)]))
        .node("Reshape", &["X", "S"], &["Y"])
        .model()
}

#[test]
fn a_model_that_declares_another_shape_is_answered_with_what_it_made() {
    let inputs = vec![spec("X", DataType::Fp32, &[-1]), spec("S", DataType::Int64, &[-1])];
    let promised = tensors(0, inputs, vec![spec("Y", DataType::Fp32, &[2, 2])]);
    let mut instance = ModelDir::new(&liar()).instance(promised);
    for shape in [&[2, 2][..], &[4], &[4, 1], &[2, 2], &[1, 2, 2]] {
        let inputs = vec![
            input("X", DataType::Fp32, &[4], fp32(&[1.0, 2.0, 3.0, 4.0])),
            input("S", DataType::Int64, &[shape.len() as i64], int64(shape)),
        ];
        let response = run(instance.as_mut(), request(1, inputs, &[])).expect("an answer");
        assert_eq!(&*response.outputs[0].shape, shape);
        assert_eq!(response.outputs[0].data.as_slice(), fp32(&[1.0, 2.0, 3.0, 4.0]));
    }
}

#[test]
fn a_batch_without_one_row_for_each_request_is_refused() {
    // All rows are summed up into one, though the model says that it keeps them. The engine cannot see it at load,
    // because the axes may be given with a request.
    let model = Graph::default()
        .input("X", FLOAT, &[Named("b"), Fixed(2)])
        .input("axes", INT64, &[Fixed(1)])
        .initializer("axes", INT64, &[1], &int64(&[0]))
        .output("Y", FLOAT, Some(&[Named("b"), Fixed(2)]))
        .node("ReduceSum", &["X", "axes"], &["Y"])
        .model();
    let mut instance = ModelDir::new(&model).instance(x_to_y(4, DataType::Fp32, &[2]));
    let make = || (request(1, vec![input("X", DataType::Fp32, &[1, 2], fp32(&[1.0, 2.0]))], &[]), false);
    for answer in run_batch(instance.as_mut(), vec![make(), make()]) {
        let error = answer.expect_err("one row for two");
        assert!(error.message().contains("not one row for each of the 2 in the batch"), "{error}");
    }
}

#[test]
fn an_output_of_unknown_rank_is_served() {
    // The rank of what Reshape makes is open when the target is an input of open length.
    let model = Graph::default()
        .input("X", FLOAT, &[Named("n")])
        .input("S", INT64, &[Named("rank")])
        .output("Y", FLOAT, NO_SHAPE)
        .node("Reshape", &["X", "S"], &["Y"])
        .model();
    let dir = ModelDir::new(&model);
    assert_eq!(&*dir.report().outputs[0].shape, &[-1]);
    let inputs = vec![spec("X", DataType::Fp32, &[-1]), spec("S", DataType::Int64, &[-1])];
    let mut instance = dir.instance(tensors(0, inputs, vec![spec("Y", DataType::Fp32, &[-1, 2])]));
    let inputs = vec![
        input("X", DataType::Fp32, &[4], fp32(&[1.0, 2.0, 3.0, 4.0])),
        input("S", DataType::Int64, &[2], int64(&[2, 2])),
    ];
    let response = run(instance.as_mut(), request(1, inputs, &[])).expect("an answer");
    assert_eq!(&*response.outputs[0].shape, &[2, 2]);
}

#[test]
fn wrong_dimensions_are_the_client_s_fault_and_named() {
    let mut instance = ModelDir::new(&identity(FLOAT, &[Named("b"), Fixed(16)])).instance(x_to_y(
        0,
        DataType::Fp32,
        &[-1, 16],
    ));
    let given = input("X", DataType::Fp32, &[1, 4], fp32(&[0.0; 4]));
    let error = run(instance.as_mut(), request(1, vec![given], &[])).expect_err("4 for 16");
    assert_eq!(error.code(), Code::InvalidArg);
    for part in
        ["onnx runtime error 2: ", "Got invalid dimensions for input: X", "Got: 4 Expected: 16", "'m'"]
    {
        assert!(error.message().contains(part), "{error}");
    }
    let short = input("X", DataType::Fp32, &[1, 16], vec![0; 60]);
    let error = run(instance.as_mut(), request(1, vec![short], &[])).expect_err("60 bytes for 64");
    assert!(error.message().contains("has 60 bytes"), "{error}");
}
