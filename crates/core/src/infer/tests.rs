//! Each refusal by its wording, and the requests that must pass.

use std::sync::Arc;

use trireme_types::RequestedOutput;

use super::*;

fn spec(name: &str, data_type: DataType, dims: &[i64]) -> TensorSpec {
    TensorSpec::new(name, data_type, Shape::new(dims))
}

fn input(name: &str, data_type: DataType, shape: &[i64], bytes: usize) -> InferInput {
    InferInput { name: Arc::from(name), data_type, shape: Shape::new(shape), data: vec![0; bytes].into() }
}

fn strings(elements: &[&[u8]]) -> TensorBuffer {
    let mut data = Vec::new();
    for element in elements {
        data.extend_from_slice(&u32::try_from(element.len()).expect("short").to_le_bytes());
        data.extend_from_slice(element);
    }
    data.into()
}

fn run(inputs: Vec<InferInput>, specs: &[TensorSpec], max_batch_size: usize) -> Result<InferRequest> {
    let mut request = InferRequest::new();
    request.inputs = inputs.into();
    let outputs = [spec("Y", DataType::Fp32, &[1])];
    normalize(
        &mut request,
        &Expectation {
            model: "m",
            max_batch_size,
            inputs: specs,
            outputs: &outputs,
            padding: None,
            text_ids: false,
        },
    )?;
    Ok(request)
}

fn refusal(inputs: Vec<InferInput>, specs: &[TensorSpec], max_batch_size: usize) -> String {
    run(inputs, specs, max_batch_size).expect_err("must be refused").message().to_owned()
}

#[test]
fn sets_the_batch_size() {
    let specs = [spec("X", DataType::Fp32, &[16])];
    let request = run(vec![input("X", DataType::Fp32, &[3, 16], 192)], &specs, 8).expect("fits");
    assert_eq!(request.batch_size, 3);
    let request = run(vec![input("X", DataType::Fp32, &[16], 64)], &specs, 0).expect("fits");
    assert_eq!(request.batch_size, 1);
}

#[test]
fn refuses_with_tritons_words() {
    let fp32 = DataType::Fp32;
    let specs = [spec("X", fp32, &[16])];
    let two = [spec("X", fp32, &[16]), spec("Z", fp32, &[-1])];
    let cases = [
        (
            refusal(vec![], &specs, 8),
            "[request id: <id_unknown>] expected 1 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing \
             required input(s) ['X']. Please provide all required input(s).",
        ),
        (
            refusal(vec![input("Q", fp32, &[1, 16], 64)], &specs, 8),
            "unexpected inference input 'Q' for model 'm'",
        ),
        (
            refusal(vec![input("X", DataType::Int32, &[1, 16], 64)], &specs, 8),
            "[request id: <id_unknown>] inference input 'X' data-type is 'INT32', but model 'm' expects 'FP32'",
        ),
        (
            refusal(vec![input("X", fp32, &[1, 8], 32)], &specs, 8),
            "[request id: <id_unknown>] unexpected shape for input 'X' for model 'm'. Expected [-1,16], got [1,8]. NOTE",
        ),
        (
            refusal(vec![input("X", fp32, &[9, 16], 576)], &specs, 8),
            "[request id: <id_unknown>] inference request batch-size must be <= 8 for 'm'",
        ),
        (
            refusal(vec![input("X", fp32, &[1, 16], 60)], &specs, 8),
            "[request id: <id_unknown>] input byte size mismatch for input 'X' for model 'm'. Expected 64, got 60",
        ),
        (
            refusal(vec![input("X", fp32, &[1, 16], 64), input("X", fp32, &[1, 16], 64)], &specs, 8),
            "[request id: <id_unknown>] input 'X' already exists in request",
        ),
        (
            refusal(vec![input("X", fp32, &[1, 16], 64), input("Z", fp32, &[2, 1], 8)], &two, 8),
            "[request id: <id_unknown>] input 'Z' batch size does not match other inputs for 'm'",
        ),
        (
            refusal(vec![input("X", fp32, &[1, 16], 64), input("Z", fp32, &[1, i64::MAX], 8)], &two, 8),
            "[request id: <id_unknown>] shape [1,9223372036854775807] of input 'Z' for model 'm' takes more bytes",
        ),
    ];
    for (got, want) in cases {
        assert!(got.starts_with(want), "got  {got}\nwant {want}");
    }
}

#[test]
fn optional_inputs_may_be_absent() {
    let mut optional = spec("O", DataType::Fp32, &[1]);
    optional.optional = true;
    let specs = [spec("X", DataType::Fp32, &[1]), optional];
    run(vec![input("X", DataType::Fp32, &[1, 1], 4)], &specs, 8).expect("the optional input may be absent");
    let text = refusal(vec![input("O", DataType::Fp32, &[1, 1], 4)], &specs, 8);
    assert!(text.contains("expected number of inputs between 1 and 2 but got 1 inputs"), "{text}");
}

#[test]
fn checks_string_elements() {
    let specs = [spec("X", DataType::Bytes, &[-1])];
    let send = |shape: &[i64], data: TensorBuffer| {
        let input =
            InferInput { name: Arc::from("X"), data_type: DataType::Bytes, shape: Shape::new(shape), data };
        run(vec![input], &specs, 0).map(|_| ()).map_err(|e| e.message().to_owned())
    };
    assert_eq!(send(&[3], strings(&[b"", b"a\0b", b"xyz"])), Ok(()));
    assert_eq!(send(&[0], strings(&[])), Ok(()));
    let refused = |shape: &[i64], data| send(shape, data).expect_err("must be refused");
    assert!(refused(&[2], strings(&[b"hello"])).contains("expected 2 string elements"));
    assert!(refused(&[1], strings(&[b"a", b"b", b"c"])).contains("unexpected number of string elements 3"));
    assert!(refused(&[1], vec![1, 0].into()).contains("only 2 bytes available"));
    let cut = vec![0xff, 0xff, 0xff, 0x7f, 1, 2, 3, 4].into();
    assert!(refused(&[1], cut).contains("element 0 declares 2147483647 bytes but 4 remain"));
}

#[test]
fn raw_bodies_become_the_only_input() {
    let outputs: [TensorSpec; 0] = [];
    let deduce = |specs: &[TensorSpec], max_batch_size, body: Vec<u8>| {
        raw_input(
            body.into(),
            &Expectation {
                model: "m",
                max_batch_size,
                inputs: specs,
                outputs: &outputs,
                padding: None,
                text_ids: false,
            },
        )
    };
    let open = [spec("X", DataType::Fp32, &[2, -1])];
    let input = deduce(&open, 8, vec![0; 24]).expect("24 bytes are [2,3]");
    assert_eq!(&*input.shape, &[1, 2, 3]);
    assert!(deduce(&open, 8, vec![0; 25]).is_err());
    let text = [spec("X", DataType::Bytes, &[1])];
    let input = deduce(&text, 0, b"hi".to_vec()).expect("one element");
    assert_eq!(input.data.as_slice(), b"\x02\0\0\0hi");
    assert!(deduce(&[], 0, vec![]).is_err());
    assert!(deduce(&[spec("X", DataType::Fp32, &[-1, -1])], 0, vec![0; 4]).is_err());
}

#[test]
fn unknown_outputs_are_refused() {
    let specs = [spec("X", DataType::Fp32, &[1])];
    let mut request = InferRequest::new();
    request.inputs.push(input("X", DataType::Fp32, &[1], 4));
    request.outputs.push(RequestedOutput { name: Arc::from("NOPE") });
    let expect = Expectation {
        model: "m",
        max_batch_size: 0,
        inputs: &specs,
        outputs: &specs,
        padding: None,
        text_ids: false,
    };
    let error = normalize(&mut request, &expect).expect_err("no such output");
    assert!(error.message().starts_with("unexpected inference output 'NOPE' for model 'm'"));
}
