//! Each rule with a sample that breaks it.

use super::super::validate;
use crate::normalize::MachineFacts;
use crate::{normalize, parse_pbtxt};

/// Path and reason of what is wrong with a sample of a model that takes X FP32[-1, 4] and, if wanted, Z INT32[1].
fn wrong(sample: &str, more: &str) -> Vec<(String, String)> {
    let text = format!(
        "name: 'm' backend: 'b' {more} input {{ name: 'X' data_type: TYPE_FP32 dims: [ -1, 4 ] }}
         input {{ name: 'Z' data_type: TYPE_INT32 dims: 1 optional: true }} model_warmup {{ name: 'w' {sample} }}"
    );
    let mut config = parse_pbtxt(text.as_bytes(), "c").unwrap_or_else(|e| panic!("{text}\n{e}")).config;
    normalize(&mut config, &MachineFacts::default());
    let errors = validate(&config, &MachineFacts::default()).err();
    let told = errors
        .iter()
        .flatten()
        .map(|error| (error.path().unwrap_or_default().to_owned(), error.reason().to_owned()));
    told.collect()
}

fn input(name: &str, value: &str) -> String {
    format!("inputs {{ key: '{name}' value {{ {value} }} }}")
}

fn good() -> String {
    input("X", "data_type: TYPE_FP32 dims: [ 2, 4 ] zero_data: true")
}

#[track_caller]
fn one(sample: &str, more: &str, path: &str, reason: &str) {
    let wrong = wrong(sample, more);
    assert!(wrong.len() == 1 && wrong[0].0 == path && wrong[0].1.contains(reason), "{wrong:?}");
}

const AT_X: &str = "model_warmup[0].inputs[\"X\"]";

#[test]
fn batch_sizes() {
    for (size, max) in [(1, 0), (0, 0), (1, 8), (8, 8)] {
        let found = wrong(&format!("batch_size: {size} {}", good()), &format!("max_batch_size: {max}"));
        assert!(found.is_empty(), "{size} {max}: {found:?}");
    }
    let at = "model_warmup[0].batch_size";
    one(
        &format!("batch_size: 9 {}", good()),
        "max_batch_size: 8",
        at,
        "is above max_batch_size 8 of model m",
    );
    one(&format!("batch_size: 2 {}", good()), "", at, "has batch_size 2, but model m has no batch dimension");
    one(&format!("batch_size: 4294967295 {}", good()), "", at, "has batch_size 4294967295");
}

#[test]
fn names() {
    let stray = input("Y", "data_type: TYPE_FP32 dims: 4 zero_data: true");
    one(
        &format!("batch_size: 1 {} {stray}", good()),
        "",
        "model_warmup[0].inputs[\"Y\"]",
        "names the input 'Y', which model m does not have; its inputs are 'X', 'Z'",
    );
    one("batch_size: 1", "", "model_warmup[0]", "lacks the required input(s) 'X'");
    assert!(wrong("batch_size: 0", "").is_empty(), "a sample that is skipped needs nothing");
    let sequence = "max_batch_size: 2 sequence_batching {
        control_input { name: 'START' control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
        state { input_name: 'S_IN' output_name: 'S_OUT' data_type: TYPE_FP32 dims: 3 } }";
    let added = ["START", "S_IN"].map(|name| input(name, "data_type: TYPE_INT32 dims: 1 zero_data: true"));
    let sample = format!("batch_size: 1 {} {}", good(), added.join(" "));
    assert!(wrong(&sample, sequence).is_empty());
    let found = wrong(&sample, "max_batch_size: 2");
    assert_eq!(found.len(), 2, "without sequence_batching nobody knows them: {found:?}");
}

#[test]
fn types_shapes_and_data() {
    let sample = |value: &str| format!("batch_size: 1 {}", input("X", value));
    for (value, member, reason) in [
        (
            "data_type: TYPE_INT32 dims: [ 2, 4 ] zero_data: true",
            ".data_type",
            "but model m expects TYPE_FP32",
        ),
        ("dims: [ 2, 4 ] zero_data: true", ".data_type", "to have data_type set"),
        (
            "data_type: TYPE_FP32 dims: [ 2, 5 ] zero_data: true",
            ".dims",
            "its dims are [-1,4], the sample has [2,5]",
        ),
        ("data_type: TYPE_FP32 zero_data: true", ".dims", "the sample has []"),
        (
            "data_type: TYPE_FP32 dims: [ -1, 4 ] zero_data: true",
            ".dims",
            "all variable-size dimensions are specified",
        ),
        ("data_type: TYPE_FP32 dims: [ 2, 4 ]", "", "to have input_data_type set"),
        ("data_type: TYPE_FP32 dims: [ 2, 4 ] input_data_file: ''", ".input_data_file", "is no file in"),
        (
            "data_type: TYPE_FP32 dims: [ 2, 4 ] input_data_file: '/etc/passwd'",
            ".input_data_file",
            "is no file in",
        ),
        (
            "data_type: TYPE_FP32 dims: [ 2, 4 ] input_data_file: 'a/../../b'",
            ".input_data_file",
            "is no file in",
        ),
    ] {
        one(&sample(value), "", &format!("{AT_X}{member}"), reason);
    }
    for value in ["random_data: true", "input_data_file: 'a/b'"] {
        let found = wrong(&sample(&format!("data_type: TYPE_FP32 dims: [ 0, 4 ] {value}")), "");
        assert!(found.is_empty(), "{found:?}");
    }
}
