//! Requests that differ in anything a model can see have different keys; those that do not have the same.

use std::collections::HashSet;
use std::sync::Arc;

use proptest::prelude::*;
use trireme_types::{DataType, InferInput, RequestedOutput, Shape};

use super::*;

fn spec(name: &str) -> TensorSpec {
    TensorSpec { optional: true, ..TensorSpec::new(name, DataType::Int32, Shape::new(&[-1])) }
}

fn input(name: &str, data_type: DataType, shape: &[i64], data: &[u8]) -> InferInput {
    InferInput { name: Arc::from(name), data_type, shape: Shape::new(shape), data: data.to_vec().into() }
}

fn request(inputs: &[InferInput], outputs: &[&str]) -> InferRequest {
    let mut request = InferRequest::new();
    request.inputs.extend(inputs.iter().cloned());
    request.outputs.extend(outputs.iter().map(|name| RequestedOutput { name: Arc::from(*name) }));
    request
}

fn key_of(request: &InferRequest) -> Key {
    let identity = Identity::new("m", 1, b"content");
    key(&identity, &[spec("A"), spec("B")], &[spec("X"), spec("Y")], request, false)
}

#[test]
fn whatever_the_model_sees_counts() {
    let a = |shape: &[i64], data: &[u8]| input("A", DataType::Uint8, shape, data);
    let base = request(&[a(&[4], b"abcd")], &[]);
    let mut different = vec![
        base.clone(),
        request(&[a(&[4], b"abce")], &[]),
        request(&[a(&[1, 4], b"abcd")], &[]),
        request(&[a(&[2, 2], b"abcd")], &[]),
        request(&[input("A", DataType::Int8, &[4], b"abcd")], &[]),
        request(&[input("B", DataType::Uint8, &[4], b"abcd")], &[]),
        request(&[a(&[4], b"abcd"), input("B", DataType::Uint8, &[0], b"")], &[]),
        request(&[a(&[2], b"ab"), input("B", DataType::Uint8, &[2], b"cd")], &[]),
        request(&[], &[]),
        request(&[a(&[4], b"abcd")], &["X"]),
        request(&[a(&[4], b"abcd")], &["Y"]),
    ];
    let values = [
        ParameterValue::Bool(true),
        ParameterValue::Int(1),
        ParameterValue::Uint(1),
        ParameterValue::Double(1.0),
        ParameterValue::String("1".into()),
    ];
    for (name, value) in ["p", "q"].into_iter().flat_map(|name| values.clone().map(|value| (name, value))) {
        let mut with = base.clone();
        with.parameters.insert(name, value);
        different.push(with);
    }
    for id in [CorrelationId::Number(7), CorrelationId::Text("7".into())] {
        for (start, end) in [(false, false), (true, false), (false, true)] {
            let mut with = base.clone();
            with.sequence = trireme_types::Sequence { id: id.clone(), start, end };
            different.push(with);
        }
    }
    let keys: HashSet<Key> = different.iter().map(key_of).collect();
    assert_eq!(keys.len(), different.len());
}

#[test]
fn whatever_it_does_not_see_does_not_count() {
    let (a, b) = (input("A", DataType::Int8, &[1], b"a"), input("B", DataType::Int8, &[1], b"b"));
    let base = request(&[a.clone(), b.clone()], &[]);
    let mut same = request(&[b, a], &["Y", "X"]);
    same.id = "another".into();
    same.priority = 2;
    same.timeout_us = 9;
    assert_eq!(key_of(&base), key_of(&same));
}

#[test]
fn the_order_of_outputs_counts_where_the_model_follows_it() {
    let of = |outputs: &[&str], ordered| {
        let identity = Identity::new("m", 1, b"content");
        let request = request(&[input("A", DataType::Int8, &[1], b"a")], outputs);
        key(&identity, &[spec("A")], &[spec("X"), spec("Y")], &request, ordered)
    };
    assert_eq!(of(&["X", "Y"], false), of(&["Y", "X"], false));
    assert_eq!(of(&["X", "Y"], true), of(&[], true), "the order without names");
    let keys = [of(&["X", "Y"], true), of(&["Y", "X"], true), of(&["X"], true)];
    assert_eq!(HashSet::from(keys).len(), keys.len());
}

#[test]
fn models_versions_and_contents_are_kept_apart() {
    let request = request(&[input("A", DataType::Int8, &[1], b"a")], &[]);
    let of = |name: &str, version, content: &[u8]| {
        key(&Identity::new(name, version, content), &[spec("A")], &[spec("X")], &request, false)
    };
    let keys = [of("m", 1, b"c"), of("m", 2, b"c"), of("m", 1, b"d"), of("n", 1, b"c"), of("m", 1, b"")];
    assert_eq!(HashSet::from(keys).len(), keys.len());
    assert_eq!(of("m", 1, b"c"), keys[0]);
}

proptest! {
    /// However bytes are spread over two inputs, each way has a key of its own.
    #[test]
    fn bytes_do_not_flow_from_one_input_to_the_next(
        bytes in proptest::collection::vec(0_u8..3, 0..12), one in 0_usize..12, other in 0_usize..12,
    ) {
        let split = |at: usize| {
            let (a, b) = bytes.split_at(at.min(bytes.len()));
            let shape = |part: &[u8]| [i64::try_from(part.len()).expect("small")];
            request(
                &[input("A", DataType::Uint8, &shape(a), a), input("B", DataType::Uint8, &shape(b), b)],
                &[],
            )
        };
        let same = one.min(bytes.len()) == other.min(bytes.len());
        prop_assert_eq!(key_of(&split(one)) == key_of(&split(other)), same);
    }
}
