//! The JSON form: what is written, what is read back, what is refused.

use proptest::prelude::*;
use trireme_proto::inference::ModelConfig;

use super::*;
use crate::error::ConfigError;
use crate::parse_pbtxt;
use crate::testing::random_config;

fn refuse(text: &str) -> Vec<ConfigError> {
    match from_json(text) {
        Ok(config) => panic!("accepted: {text}\n{config:?}"),
        Err(errors) => errors.into_iter().collect(),
    }
}

#[track_caller]
fn refused(text: &str, path: &str, words: &[&str]) {
    let errors = refuse(text);
    let shown = errors[0].to_string();
    assert_eq!(errors[0].path.as_deref().unwrap_or(""), path, "{shown}");
    for word in words {
        assert!(shown.contains(word), "`{word}` is not in:\n{shown}");
    }
}

#[test]
fn prints_as_triton_serves_it() {
    let text = "name: 'simple' platform: 'onnxruntime_onnx' backend: 'onnxruntime' version_policy { latest { num_versions: 1 } }
        max_batch_size: 8 input [ { name: 'INPUT0' data_type: TYPE_INT32 dims: [ 16 ] reshape { } } ]
        output [ { name: 'OUTPUT0' data_type: TYPE_INT32 dims: [ 16 ] } ]
        optimization { input_pinned_memory { enable: true } }
        dynamic_batching { priority_queue_policy { key: 2 value { default_timeout_microseconds: 18446744073709551615 } } }
        instance_group { name: 'simple' kind: KIND_CPU count: 2 secondary_devices { device_id: 9007199254740993 } }
        default_model_filename: 'model.onnx' parameters { key: 'k' value { string_value: 'a\"/\\n\u{1}é' } }
        model_metrics { metric_control { histogram_options { buckets: [ 0.1, 1, nan, 1e300 ] } } }";
    let config = parse_pbtxt(text.replace('\u{1}', "\\001").as_bytes(), "c").unwrap().config;
    let expected = r#"{"name":"simple","platform":"onnxruntime_onnx","backend":"onnxruntime","runtime":"","version_policy":{"latest":{"num_versions":1}},"max_batch_size":8,"input":[{"name":"INPUT0","data_type":"TYPE_INT32","format":"FORMAT_NONE","dims":[16],"reshape":{"shape":[]},"is_shape_tensor":false,"allow_ragged_batch":false,"optional":false,"is_non_linear_format_io":false}],"output":[{"name":"OUTPUT0","data_type":"TYPE_INT32","dims":[16],"label_filename":"","is_shape_tensor":false,"is_non_linear_format_io":false}],"batch_input":[],"batch_output":[],"optimization":{"priority":"PRIORITY_DEFAULT","input_pinned_memory":{"enable":true},"gather_kernel_buffer_threshold":0,"eager_batching":false},"dynamic_batching":{"preferred_batch_size":[],"max_queue_delay_microseconds":0,"preserve_ordering":false,"priority_levels":0,"default_priority_level":0,"priority_queue_policy":{"2":{"timeout_action":"REJECT","default_timeout_microseconds":18446744073709551615,"allow_timeout_override":false,"max_queue_size":0}}},"instance_group":[{"name":"simple","kind":"KIND_CPU","count":2,"gpus":[],"secondary_devices":[{"kind":"KIND_NVDLA","device_id":9007199254740993}],"profile":[],"passive":false,"host_policy":""}],"default_model_filename":"model.onnx","cc_model_filenames":{},"metric_tags":{},"parameters":{"k":{"string_value":"a\"/\n\u0001é"}},"model_warmup":[],"model_metrics":{"metric_control":[{"histogram_options":{"buckets":[0.1,1,"NaN",1e300]}}]}}"#;
    assert_eq!(to_json(&config), expected.replace("/\n", "/\\n"));
}

#[test]
fn cfg_20_every_64_bit_integer_is_a_number() {
    let text = "version_policy { specific { versions: 9007199254740993 } }
        input { dims: -1 reshape { shape: 2 } } instance_group { secondary_devices { device_id: 3 } }
        optimization { cuda { graph_spec { input { key: 'a' value { dim: 4 } } graph_lower_bound { input { key: 'a' value { dim: 5 } } } } } }
        sequence_batching { max_sequence_idle_microseconds: 6 state { dims: 7 initial_state { dims: 8 } } }
        model_warmup { inputs { key: 'a' value { dims: 9 } } }";
    let json = to_json(&parse_pbtxt(text.as_bytes(), "c").unwrap().config);
    for part in [
        r#""versions":[9007199254740993]"#,
        r#""dims":[-1]"#,
        r#""shape":[2]"#,
        r#""device_id":3"#,
        r#""dim":[4]"#,
        r#""dim":[5]"#,
        r#""max_sequence_idle_microseconds":6"#,
        r#""dims":[7]"#,
        r#""dims":[8]"#,
        r#""dims":[9]"#,
    ] {
        assert!(json.contains(part), "{part} is not in {json}");
    }
}

#[test]
fn reads_the_spellings_of_protobuf_json() {
    let plain = from_json(r#"{"max_batch_size": 8, "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [-1, 3]}], "version_policy": {"latest": {"num_versions": 2}}}"#).unwrap();
    for other in [
        r#"{"maxBatchSize": 8.0, "input": [{"name": "X", "dataType": "type_fp32", "dims": ["-1", 3e0]}], "versionPolicy": {"latest": {"numVersions": "2"}}}"#,
        r#"{"max_batch_size": "8", "input": [{"name": "X", "data_type": 11, "dims": [-1, "3"], "reshape": null}], "version_policy": {"latest": {"num_versions": 2}}, "output": []}"#,
    ] {
        assert_eq!(from_json(other).unwrap(), plain);
    }
    let quoted = serde_json::Value::String(r#"{"max_batch_size": 8}"#.to_owned()).to_string();
    assert_eq!(from_json(&quoted).unwrap().max_batch_size, 8);
    assert_eq!(from_json("{}").unwrap(), ModelConfig::default());
}

#[test]
fn cfg_09_json_names_the_type_that_was_meant() {
    refused(
        r#"{"input": [{"name": "X", "data_type": "FP32", "dims": [1]}]}"#,
        "input[0].data_type",
        &["did you mean TYPE_FP32?", "(input 'X')"],
    );
    refused(r#"{"input": [{"data_type": "float32"}]}"#, "input[0].data_type", &["did you mean TYPE_FP32?"]);
}

#[test]
fn refuses_with_the_path_of_the_member() {
    refused(
        r#"{"max_batchsize": 8}"#,
        "",
        &["no field named \"max_batchsize\"", "did you mean \"max_batch_size\"?"],
    );
    refused(
        r#"{"max_batch_size": 3000000000}"#,
        "max_batch_size",
        &["expected an integer of type int32", "3000000000"],
    );
    refused(r#"{"max_batch_size": 1.5}"#, "max_batch_size", &["found 1.5"]);
    refused(r#"{"input": {"name": "X"}}"#, "input", &["expected an array"]);
    refused(r#"{"parameters": {"a": "b"}}"#, "parameters[\"a\"]", &["write {\"string_value\": \"b\"}"]);
    refused(
        r#"{"response_cache": {"enable": "true"}}"#,
        "response_cache.enable",
        &["write true without quotes"],
    );
    refused(r#"{"dynamic_batching": {}, "ensemble_scheduling": {}}"#, "ensemble_scheduling", &["along with"]);
    refused(r#"{"max_batch_size": 1, "maxBatchSize": 1}"#, "", &["given twice"]);
    refused(
        r#"{"dynamic_batching": {"priority_queue_policy": {"x": {}}}}"#,
        "dynamic_batching.priority_queue_policy[\"x\"]",
        &["as the key"],
    );
    refused("{bad", "", &["not valid JSON", "1:2"]);
    refused("name: \"m\"", "", &["this looks like config.pbtxt"]);
    refused("[1]", "", &["must be a JSON object"]);
    refused(&"[".repeat(100_000), "", &["not valid JSON"]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn write_then_read_is_the_identity(seed: u64) {
        let config = random_config(seed);
        let json = to_json(&config);
        serde_json::from_str::<serde_json::Value>(&json).map_err(|e| TestCaseError::fail(format!("{e}: {json}")))?;
        let back = from_json(&json).map_err(|e| TestCaseError::fail(format!("{e}: {json}")))?;
        prop_assert_eq!(back, config);
    }

    #[test]
    fn no_text_makes_it_panic(text: String, seed: u64, cut: u16) {
        let _ = from_json(&text);
        let json = to_json(&random_config(seed));
        let _ = from_json(&json.chars().take(usize::from(cut)).collect::<String>());
    }
}
