//! Requests of every kind turned into calls, and bytes that are no requests turned into errors.

use std::collections::BTreeMap;

use proptest::prelude::*;
use prost::Message as _;
use trireme_proto::inference::{
    InferParameter, InferTensorContents, ModelInferRequest,
    infer_parameter::ParameterChoice::{self, BoolParam, DoubleParam, Int64Param, StringParam, Uint64Param},
    model_infer_request::{InferInputTensor, InferRequestedOutputTensor},
};
use trireme_types::{Code, Sequence, Shape};

use super::*;

fn spec(name: &str, data_type: DataType) -> TensorSpec {
    TensorSpec::new(name, data_type, Shape::new(&[-1]))
}

fn convert(sent: &ModelInferRequest) -> Result<InferCall> {
    convert_bytes(&sent.encode_to_vec().into())
}

fn convert_bytes(message: &Bytes) -> Result<InferCall> {
    let inputs = [spec("A", DataType::Fp32), spec("B", DataType::Int8)];
    let outputs = [spec("OUT", DataType::Fp32)];
    let target = Target { model: "m", inputs: &inputs, outputs: &outputs };
    let wire = WireRequest::parse(message).map_err(malformed)?;
    request(message, &wire, target, &[], Instant::now())
}

fn parameter(choice: ParameterChoice) -> InferParameter {
    InferParameter { parameter_choice: Some(choice) }
}

fn with_parameter(name: &str, choice: ParameterChoice) -> ModelInferRequest {
    ModelInferRequest { parameters: [(name.to_owned(), parameter(choice))].into(), ..Default::default() }
}

fn input(name: &str, datatype: &str, shape: &[i64]) -> InferInputTensor {
    InferInputTensor {
        name: name.into(),
        datatype: datatype.into(),
        shape: shape.to_vec(),
        ..Default::default()
    }
}

fn fp32_contents(values: &[f32]) -> Option<InferTensorContents> {
    Some(InferTensorContents { fp32_contents: values.to_vec(), ..Default::default() })
}

#[test]
fn raw_inputs_are_slices_of_the_message() {
    let sent = ModelInferRequest {
        id: "r1".into(),
        inputs: vec![input("A", "FP32", &[1, 2]), input("X", "INT8", &[3])],
        outputs: vec![InferRequestedOutputTensor { name: "OUT".into(), ..Default::default() }],
        raw_input_contents: vec![vec![7; 8].into(), vec![1, 2, 3].into()],
        ..Default::default()
    };
    let message = Bytes::from(sent.encode_to_vec());
    let call = convert_bytes(&message).expect("converts");
    let request = &call.request;
    assert_eq!(request.id, "r1");
    assert_eq!(request.inputs.len(), 2);
    for (got, (name, data_type, shape, data)) in request
        .inputs
        .iter()
        .zip([("A", DataType::Fp32, &[1, 2][..], &[7; 8][..]), ("X", DataType::Int8, &[3], &[1, 2, 3])])
    {
        assert_eq!((&*got.name, got.data_type, &*got.shape), (name, data_type, shape));
        assert_eq!(got.data.as_slice(), data);
        assert!(message.as_ptr_range().contains(&got.data.as_slice().as_ptr()));
    }
    assert!(request.wants("OUT") && !request.wants("OTHER"));
    assert!(call.classifications.is_empty());
}

#[test]
fn data_comes_from_one_place() {
    let both = |raw: usize, contents: [bool; 2]| ModelInferRequest {
        inputs: ["A", "C"]
            .into_iter()
            .zip(contents)
            .map(|(name, typed)| InferInputTensor {
                contents: if typed { fp32_contents(&[1.0]) } else { None },
                ..input(name, "FP32", &[1])
            })
            .collect(),
        raw_input_contents: vec![vec![0; 4].into(); raw],
        ..Default::default()
    };
    for (raw, contents) in [(2, [false, false]), (0, [true, true])] {
        assert!(convert(&both(raw, contents)).is_ok(), "{raw} {contents:?}");
    }
    let table = [
        (0, [false, false], "unable to find data for input tensor 'A' for model 'm' in request."),
        (0, [true, false], "unable to find data for input tensor 'C' for model 'm' in request."),
        (1, [false, false], "unable to find data for input tensor 'C' for model 'm' in request."),
        (
            1,
            [false, true],
            "contents field must not be specified when using raw_input_contents for 'C' for model 'm'",
        ),
        (
            2,
            [true, true],
            "contents field must not be specified when using raw_input_contents for 'A' for model 'm'",
        ),
        (
            3,
            [false, false],
            "expected one entry in raw_input_contents for each of the 2 input(s) of the request for model 'm', got 3",
        ),
    ];
    for (raw, contents, expected) in table {
        let error = convert(&both(raw, contents)).expect_err("refused");
        assert_eq!((error.code(), error.message()), (Code::InvalidArg, expected));
    }
}

#[test]
fn tensors_without_elements_need_no_data() {
    let empty = Some(InferTensorContents::default());
    for contents in [None, empty, fp32_contents(&[])] {
        let sent = ModelInferRequest {
            inputs: vec![InferInputTensor { contents, ..input("A", "FP32", &[1, 0]) }],
            ..Default::default()
        };
        assert!(convert(&sent).expect("converts").request.inputs[0].data.is_empty());
    }
}

#[test]
fn parameters_become_what_they_mean() {
    let sequence =
        |choice| convert(&with_parameter("sequence_id", choice)).expect("converts").request.sequence.id;
    assert_eq!(sequence(Int64Param(0)), CorrelationId::None);
    assert_eq!(sequence(Int64Param(42)), CorrelationId::Number(42));
    assert_eq!(sequence(Int64Param(-1)), CorrelationId::Number(u64::MAX));
    assert_eq!(sequence(Uint64Param(u64::MAX)), CorrelationId::Number(u64::MAX));
    assert_eq!(sequence(StringParam(String::new())), CorrelationId::None);
    assert_eq!(sequence(StringParam("s".into())), CorrelationId::Text("s".into()));

    let sent = ModelInferRequest {
        parameters: [
            ("sequence_start", BoolParam(true)),
            ("sequence_end", BoolParam(true)),
            ("priority", Uint64Param(u64::MAX)),
            ("timeout", Int64Param(1000)),
            ("triton_enable_empty_final_response", BoolParam(true)),
            ("a", StringParam("x".into())),
            ("b", Int64Param(-5)),
            ("c", BoolParam(false)),
            ("d", DoubleParam(1.5)),
            ("e", Uint64Param(7)),
            ("f", Uint64Param(u64::MAX)),
        ]
        .map(|(name, choice)| (name.to_owned(), parameter(choice)))
        .into(),
        ..Default::default()
    };
    let call = convert(&sent).expect("converts");
    let request = &call.request;
    assert!(call.empty_final_response);
    assert_eq!(request.sequence, Sequence { id: CorrelationId::None, start: true, end: true });
    assert_eq!((request.priority, request.timeout_us), (u64::MAX, 1000));
    let custom: Vec<_> = request.parameters.iter().collect();
    assert_eq!(
        custom,
        [
            ("a", &ParameterValue::String("x".into())),
            ("b", &ParameterValue::Int(-5)),
            ("c", &ParameterValue::Bool(false)),
            ("d", &ParameterValue::Double(1.5)),
            ("e", &ParameterValue::Int(7)),
            ("f", &ParameterValue::Uint(u64::MAX)),
        ]
    );
}

#[test]
fn wrong_parameters_are_refused_in_tritons_words() {
    let kind =
        |name: &str, kinds: &str| format!("invalid value type for '{name}' parameter, expected {kinds}.");
    let reserved = "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys \
                    starting with 'triton_' are allowed: triton_enable_empty_final_response";
    let table = [
        ("sequence_id", BoolParam(true), kind("sequence_id", "int64_param or string_param")),
        ("sequence_start", Int64Param(1), kind("sequence_start", "bool_param")),
        ("sequence_end", StringParam("true".into()), kind("sequence_end", "bool_param")),
        ("priority", StringParam("x".into()), kind("priority", "int64_param or uint64_param")),
        ("priority", Int64Param(-1), "invalid value for 'priority', expected value >= 0.".into()),
        ("timeout", BoolParam(true), kind("timeout", "int64_param")),
        ("timeout", Int64Param(-1), "invalid value for 'timeout', expected value >= 0.".into()),
        (
            "triton_enable_empty_final_response",
            Int64Param(1),
            kind("triton_enable_empty_final_response", "bool_param"),
        ),
        ("triton_foo", StringParam("x".into()), reserved.into()),
    ];
    for (name, choice, expected) in table {
        let error = convert(&with_parameter(name, choice)).expect_err(name);
        assert_eq!((error.code(), error.message()), (Code::InvalidArg, expected.as_str()));
    }
    let unset = ModelInferRequest {
        parameters: [("a".to_owned(), InferParameter::default())].into(),
        ..Default::default()
    };
    let error = convert(&unset).expect_err("refused");
    assert_eq!(error.message(), kind("a", "int64_param, bool_param, or string_param"));
}

#[test]
fn requested_outputs_may_be_classified() {
    let output = |name: &str, choice| {
        let parameters = [(name.to_owned(), parameter(choice))].into();
        ModelInferRequest {
            outputs: vec![InferRequestedOutputTensor { name: "OUT".into(), parameters }],
            ..Default::default()
        }
    };
    let call = convert(&output("classification", Int64Param(3))).expect("converts");
    assert_eq!(call.classifications.as_slice(), [("OUT".into(), 3)]);
    let other =
        convert(&output("binary_data", BoolParam(true))).expect("unknown parameters of outputs are ignored");
    assert!(other.classifications.is_empty());

    let positive = "invalid value for 'classification' parameter, expected >= 0";
    let table = [
        ("classification", Int64Param(0), Code::InvalidArg, positive),
        ("classification", Int64Param(-1), Code::InvalidArg, positive),
        (
            "classification",
            StringParam("2".into()),
            Code::InvalidArg,
            "invalid value type for 'classification' parameter, expected int64_param.",
        ),
    ];
    for (name, choice, code, expected) in table {
        let error = convert(&output(name, choice)).expect_err("refused");
        assert_eq!((error.code(), error.message()), (code, expected));
    }
}

fn in_region(more: &[(&str, i64)]) -> BTreeMap<String, InferParameter> {
    let numbers = more.iter().map(|(name, value)| ((*name).to_owned(), parameter(Int64Param(*value))));
    numbers.chain([("shared_memory_region".to_owned(), parameter(StringParam("r0".into())))]).collect()
}

#[test]
fn tensors_may_be_in_shared_memory() {
    let place = in_region(&[("shared_memory_byte_size", 4), ("shared_memory_offset", 8)]);
    let slice = MemorySlice { region: "r0".into(), offset: 8, byte_size: 4 };
    let output = |more: &[(&str, i64)]| {
        let parameters = place.clone().into_iter().chain(in_region(more)).collect();
        InferRequestedOutputTensor { name: "OUT".into(), parameters }
    };
    let mut sent = ModelInferRequest {
        inputs: vec![
            InferInputTensor { parameters: place.clone(), ..input("A", "FP32", &[1]) },
            input("B", "FP32", &[1]),
        ],
        outputs: vec![output(&[])],
        // Of the inputs that are not in shared memory.
        raw_input_contents: vec![vec![1, 2, 3, 4].into()],
        ..Default::default()
    };
    let call = convert(&sent).expect("fits");
    assert_eq!(call.memory_inputs.as_slice(), [(0, slice.clone())]);
    assert_eq!(call.memory_outputs.as_slice(), [("OUT".into(), slice)]);
    assert!(call.request.inputs[0].data.is_empty());
    assert_eq!(call.request.inputs[1].data.as_slice(), [1, 2, 3, 4]);

    sent.outputs = vec![output(&[("classification", 1)])];
    let error = convert(&sent).expect_err("both");
    assert_eq!(error.message(), "Output can't set both 'shared_memory_region' and 'classification'");
    sent.raw_input_contents.push(vec![0; 4].into());
    let error = convert(&sent).expect_err("one too much");
    assert!(
        error.message().starts_with("expected one entry in raw_input_contents for each of the 1 input(s)")
    );
    sent.inputs[0].contents = fp32_contents(&[1.0]);
    let error = convert(&sent).expect_err("contents and region");
    assert_eq!(
        error.message(),
        "unexpected 'content' provided when using shared memory for input tensor 'A' for model 'm'"
    );
}

#[test]
fn unknown_data_types_are_named() {
    let sent = |id: &str, name: &str| ModelInferRequest {
        id: id.into(),
        inputs: vec![input(name, "FLOAT", &[1])],
        ..Default::default()
    };
    let error = convert(&sent("", "A")).expect_err("refused");
    assert_eq!(
        error.message(),
        "[request id: <id_unknown>] inference input 'A' data-type is '<invalid>', but model 'm' expects 'FP32'"
    );
    let error = convert(&sent("7", "Z")).expect_err("refused");
    assert!(
        error
            .message()
            .starts_with("[request id: 7] inference input 'Z' for model 'm' has the data-type 'FLOAT'")
    );
}

#[test]
fn forwarded_headers_become_parameters() {
    let message = Bytes::from(with_parameter("x-a", Int64Param(1)).encode_to_vec());
    let wire = WireRequest::parse(&message).expect("well formed");
    let target = Target { model: "m", inputs: &[], outputs: &[] };
    let forwarded = [("x-a".to_owned(), "1".to_owned())];
    let call = request(&message, &wire, target, &forwarded, Instant::now()).expect("converts");
    assert_eq!(call.request.parameters.get("x-a"), Some(&ParameterValue::String("1".into())));
}

proptest! {
    #[test]
    fn any_bytes_end_in_a_request_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = convert_bytes(&bytes.into());
    }

    /// Damaged requests: a valid message with some bytes changed and its end cut off.
    #[test]
    fn damaged_requests_end_in_a_request_or_an_error(
        values in prop::collection::vec(any::<i32>(), 0..20),
        shape in prop::collection::vec(any::<i64>(), 0..5),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        end in any::<prop::sample::Index>(),
    ) {
        let contents = InferTensorContents {
            int_contents: values,
            bytes_contents: vec![b"ab".as_slice().into()],
            ..Default::default()
        };
        let sent = ModelInferRequest {
            inputs: vec![InferInputTensor { contents: Some(contents), ..input("B", "INT8", &shape) }],
            raw_input_contents: vec![b"raw".as_slice().into()],
            ..with_parameter("sequence_id", Int64Param(1))
        };
        let mut bytes = sent.encode_to_vec();
        for (index, byte) in damage {
            let index = index.index(bytes.len());
            bytes[index] = byte;
        }
        bytes.truncate(end.index(bytes.len() + 1));
        let _ = convert_bytes(&bytes.into());
    }

    #[test]
    fn what_was_sent_arrives(
        ids in ("[a-z]{0,4}", "[a-z]{0,4}"),
        shape in prop::collection::vec(any::<i64>(), 0..8),
        data in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let (id, name) = ids;
        let sent = ModelInferRequest {
            id: id.clone(),
            inputs: vec![input(&name, "UINT8", &shape)],
            raw_input_contents: vec![data.clone().into()],
            ..Default::default()
        };
        let call = convert(&sent).expect("converts");
        let got = &call.request.inputs[0];
        prop_assert_eq!(&call.request.id, &id);
        prop_assert_eq!(&*got.name, name.as_str());
        prop_assert_eq!(&*got.shape, shape.as_slice());
        prop_assert_eq!(got.data.as_slice(), data.as_slice());
    }
}
