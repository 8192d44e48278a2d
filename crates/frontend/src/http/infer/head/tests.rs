//! Requests as clients write them, and as they should not.

use proptest::prelude::*;

use super::*;

const LIMIT: usize = 1 << 20;

fn parse(text: &str) -> Result<InferHead<'_>> {
    parse_infer_head(text.as_bytes(), LIMIT)
}

fn message(text: &str) -> String {
    parse(text).expect_err(text).message().to_owned()
}

#[test]
fn reads_a_whole_request() {
    let head = parse(
        r#"{"id": "abc", "unknown": {"a": [1, {}]},
            "parameters": {"sequence_id": 7, "sequence_start": true, "priority": 2, "timeout": 100, "x": "y", "n": -5,
                "big": 18446744073709551615, "d": 1.5, "b": false, "binary_data_output": true},
            "inputs": [
                {"name": "A", "datatype": "INT32", "shape": [1, 2], "data": [[1, -2]]},
                {"name": "B", "datatype": "FP32", "shape": [4], "parameters": {"binary_data_size": 16, "z": [1]}},
                {"name": "C", "shape": [1], "datatype": "BOOL", "parameters": {"shared_memory_region": "r",
                    "shared_memory_offset": 4, "shared_memory_byte_size": 1}}],
            "outputs": [{"name": "Y", "parameters": {"binary_data": true, "classification": 3}}, {"name": "Z"}]}"#,
    )
    .expect("a request");
    assert_eq!(head.id, "abc");
    assert_eq!(head.sequence, Sequence { id: CorrelationId::Number(7), start: true, end: false });
    assert_eq!((head.priority, head.timeout_us, head.binary_data_output), (2, 100, true));
    let parameters: Vec<_> = head.parameters.iter().map(|(name, value)| (name, value.clone())).collect();
    assert_eq!(
        parameters,
        [
            ("x", ParameterValue::String("y".into())),
            ("n", ParameterValue::Int(-5)),
            ("big", ParameterValue::Uint(u64::MAX)),
            ("d", ParameterValue::Double(1.5)),
            ("b", ParameterValue::Bool(false)),
        ]
    );
    let [a, b, c] = &head.inputs[..] else { panic!("three inputs") };
    assert!(matches!(&a.source, Source::Json(data) if data.as_slice() == [1, 0, 0, 0, 254, 255, 255, 255]));
    assert_eq!((&*a.name, a.data_type, &a.shape[..]), ("A", DataType::Int32, &[1, 2][..]));
    assert!(matches!(b.source, Source::Binary(16)));
    let region = SharedMemory { region: "r".into(), offset: 4, byte_size: 1 };
    assert!(matches!(&c.source, Source::SharedMemory(found) if *found == region));
    let [y, z] = &head.outputs[..] else { panic!("two outputs") };
    assert_eq!((&*y.name, y.binary_data, y.classification), ("Y", true, 3));
    assert_eq!((&*z.name, z.binary_data, z.classification), ("Z", false, 0));
}

#[test]
fn the_order_of_members_does_not_matter() {
    let members = [
        r#""name":"A""#,
        r#""datatype":"UINT8""#,
        r#""shape":[2]"#,
        r#""data":[1,2]"#,
        r#""parameters":{"q":1}"#,
    ];
    for rotation in 0..members.len() {
        let mut order = members;
        order.rotate_left(rotation);
        let text = format!(r#"{{"inputs":[{{{}}}]}}"#, order.join(","));
        let head = parse(&text).expect(&text);
        assert!(matches!(&head.inputs[0].source, Source::Json(data) if data.as_slice() == [1, 2]), "{text}");
    }
}

#[test]
fn the_first_of_a_repeated_member_counts() {
    let head = parse(
        r#"{"id":"1","id":5,"inputs":[{"name":"A","name":4,"datatype":"UINT8","shape":[1],"shape":0,"data":[1],"data":2}],
            "inputs":7,"outputs":[],"outputs":3,"parameters":{"a":1,"a":2},"parameters":null}"#,
    )
    .expect("a request");
    assert_eq!((&*head.id, head.inputs.len()), ("1", 1));
    assert_eq!(head.parameters.get("a"), Some(&ParameterValue::Int(1)));
}

#[test]
fn sequence_flags_need_an_id() {
    let with = |id: &str| {
        let text = format!(r#"{{"inputs":[],"parameters":{{"sequence_start":true,"sequence_id":{id}}}}}"#);
        parse(&text).map(|head| head.sequence)
    };
    assert_eq!(with("0"), Ok(Sequence::default()));
    assert_eq!(with(r#""""#), Ok(Sequence::default()));
    let text = Sequence { id: CorrelationId::Text("s".into()), start: true, end: false };
    assert_eq!(with(r#""s""#), Ok(text));
    assert!(with("-1").is_err());
}

#[test]
fn refuses_with_tritons_words_and_the_place() {
    let data = r#""data":[1]"#;
    let input = |members: &str| format!(r#"{{"inputs":[{{{members}}}]}}"#);
    let parameters = |members: &str| format!(r#"{{"inputs":[],"parameters":{members}}}"#);
    let output = |members: &str| format!(r#"{{"inputs":[],"outputs":[{members}]}}"#);
    let no_inputs = "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'";
    let one_source = "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', \
        'shared_memory_region' in 'parameters'. But ";
    for (text, says) in [
        (String::new(), "failed to parse the request JSON buffer: The document is empty. at 0".into()),
        ("abc".into(), "failed to parse the request JSON buffer: Invalid value. at 0".into()),
        (r#"{"inputs":["#.into(), "failed to parse the request JSON buffer: Invalid value. at 11".into()),
        ("[]".into(), no_inputs.to_owned()),
        ("{}".into(), no_inputs.to_owned()),
        ("5".into(), no_inputs.to_owned()),
        (
            r#"{"inputs":{}}"#.into(),
            "Unable to parse 'inputs': attempt to access JSON non-array as array".into(),
        ),
        (r#"{"inputs":[5]}"#.into(), format!("{one_source}no field is set")),
        (input(r#""name":"A","datatype":"FP32","shape":[1]"#), format!("{one_source}no field is set")),
        (
            input(&format!(r#""name":"A",{data},"parameters":{{"binary_data_size":4}}"#)),
            format!("{one_source}set 'data' 'binary_data_size'"),
        ),
        (
            input(r#""parameters":{"binary_data_size":4,"shared_memory_region":"r"}"#),
            format!("{one_source}set 'binary_data_size' 'shared_memory_region'"),
        ),
        (
            input(&format!(r#""datatype":"FP32","shape":[1],{data}"#)),
            "Unable to parse 'name': attempt to access non-existing object member 'name' at inputs[0].name"
                .into(),
        ),
        (
            input(&format!(r#""name":"A","shape":[1],{data}"#)),
            "Unable to parse 'datatype': attempt to access non-existing object member 'datatype'".into(),
        ),
        (
            input(&format!(r#""name":"A","datatype":"FP32",{data}"#)),
            "Unable to parse 'shape': attempt to access non-existing object member 'shape'".into(),
        ),
        (
            input(&format!(r#""name":"A","datatype":"fp32","shape":[1],{data}"#)),
            "invalid datatype for input A".into(),
        ),
        (input(r#""name":5"#), "Unable to parse 'name': attempt to access JSON non-string as string".into()),
        (
            input(r#""shape":[-1]"#),
            "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer at \
             inputs[0].shape[0], byte 21"
                .into(),
        ),
        (input(r#""shape":[1.0]"#), "Unable to parse 'shape': attempt to access JSON non-unsigned".into()),
        (input(r#""shape":["1"]"#), "Unable to parse 'shape': attempt to access JSON non-unsigned".into()),
        (
            input(r#""shape":"-1""#),
            "Unable to parse 'shape': attempt to access JSON non-array as array".into(),
        ),
        (input(r#""shape":[18446744073709551615]"#), "Unable to parse 'shape': 18446744073709551615".into()),
        (
            input(r#""name":"A","datatype":"FP32","shape":[1],"data":null"#),
            "Unable to parse 'data': attempt to access JSON non-array as array".into(),
        ),
        (
            input(r#""parameters":{"binary_data_size":"64"}"#),
            "Unable to parse 'binary_data_size': attempt to access JSON non-unsigned-integer".into(),
        ),
        (
            r#"{"id":5,"inputs":[]}"#.into(),
            "Unable to parse 'id': attempt to access JSON non-string as string".into(),
        ),
        (parameters("5"), "failed to get request params.: attempt to get members for non-object".into()),
        (
            parameters(r#"{"a":null}"#),
            "parameter 'a' has invalid type. It should be either 'int', 'bool', or 'string'.".into(),
        ),
        (parameters(r#"{"headers":{"b":1}}"#), "parameter 'headers' has invalid type.".into()),
        (parameters(r#"{"triton_x":1}"#), "parameter keys starting with 'triton_' are reserved".into()),
        (
            parameters(r#"{"priority":"high"}"#),
            "Unable to parse 'priority': attempt to access JSON non-unsigned-integer as unsigned-integer"
                .into(),
        ),
        (
            parameters(r#"{"timeout":-5}"#),
            "Unable to parse 'timeout': attempt to access JSON non-unsigned".into(),
        ),
        (
            parameters(r#"{"binary_data_output":"yes"}"#),
            "Unable to parse 'binary_data_output': attempt to access JSON non-boolean as boolean".into(),
        ),
        (
            output(r#"{"name":"Y","parameters":{"classification":-1}}"#),
            "Unable to set 'classification': attempt to access JSON non-unsigned-integer as unsigned-integer"
                .into(),
        ),
        (output("{}"), "Unable to parse 'name': attempt to access non-existing object member 'name'".into()),
        (output("7"), "Unable to parse 'outputs': attempt to access JSON non-object as object".into()),
        (
            output(r#"{"name":"Y","parameters":{"classification":1,"shared_memory_region":"r"}}"#),
            "Output can't set both 'shared_memory_region' and 'classification'".into(),
        ),
        (
            output(r#"{"name":"Y","parameters":{"binary_data":true,"shared_memory_region":"r"}}"#),
            "Output can't set both 'shared_memory_region' and 'binary_data'".into(),
        ),
        (
            r#"{"inputs":[]} x"#.into(),
            "failed to parse the request JSON buffer: The document root must not".into(),
        ),
    ] {
        let said = message(&text);
        assert!(said.starts_with(&says), "{text}\n  said {said}\n  want {says}");
    }
}

#[test]
fn lists_and_nesting_are_bounded() {
    let deep = format!(
        r#"{{"inputs":[{{"name":"X","datatype":"FP32","shape":[1],"data":{}1{}}}]}}"#,
        "[".repeat(250_000),
        "]".repeat(250_000)
    );
    assert!(message(&deep).starts_with("JSON nesting depth exceeds maximum allowed limit (100)"));
    let entry = r#"{"name":"A","datatype":"UINT8","shape":[0],"data":[]}"#;
    let many = format!(r#"{{"inputs":[{}]}}"#, vec![entry; 5000].join(","));
    assert!(message(&many).contains("at most 4096 inputs"));
    let rank = format!(r#"{{"inputs":[{{"shape":[{}1]}}]}}"#, "1,".repeat(100));
    assert!(message(&rank).contains("more than 64 dimensions"));
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
        let _ = parse_infer_head(&bytes, LIMIT);
    }

    #[test]
    fn mutilated_requests_never_panic(cut in 0_usize..200, at in 0_usize..200, byte: u8) {
        let mut text = br#"{"id":"a","parameters":{"sequence_id":"x","t":1.5},"inputs":[{"name":"A","datatype":"BYTES","shape":[1,2],"data":[["a\u00e9","\ud83d\ude00"]]}],"outputs":[{"name":"B","parameters":{"binary_data":true}}]}"#.to_vec();
        if let Some(slot) = text.get_mut(at) {
            *slot = byte;
        }
        text.truncate(text.len() - cut.min(text.len()));
        let _ = parse_infer_head(&text, LIMIT);
    }
}
