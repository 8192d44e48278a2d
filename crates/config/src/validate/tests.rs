//! Each rule with a configuration that breaks it.

use super::*;
use crate::{normalize, parse_pbtxt};

/// A configuration that passes, with more text behind it.
fn with(text: &str) -> String {
    format!("name: 'm' backend: 'identity' {text}")
}

fn check(text: &str, facts: &MachineFacts) -> Result<Vec<Note>, ConfigErrors> {
    let parsed = parse_pbtxt(text.as_bytes(), "config.pbtxt").unwrap_or_else(|e| panic!("{text}\n{e}"));
    let mut config = parsed.config;
    normalize(&mut config, facts);
    validate(&config, facts).map_err(|errors| errors.located(&parsed.spans))
}

/// The first error must be exactly this, at this member.
#[track_caller]
fn fails(text: &str, path: &str, reason: &str) {
    let errors = check(text, &MachineFacts::default()).expect_err(text);
    assert_eq!((errors.first().path(), errors.first().reason()), (Some(path), reason), "{text}\n{errors}");
}

#[track_caller]
fn passes(text: &str) {
    if let Err(errors) = check(text, &MachineFacts::default()) {
        panic!("{text}\n{errors}");
    }
}

const X: &str = "input { name: 'X' data_type: TYPE_FP32 dims: [ 4 ] }";
const Y: &str = "output { name: 'Y' data_type: TYPE_FP32 dims: [ 4 ] }";

#[test]
fn identity_of_the_model() {
    passes(&with(""));
    fails("backend: 'b'", "name", "model configuration must specify 'name'");
    fails("name: 'm'", "backend", "unexpected platform type '' for m");
    fails("name: 'm' platform: 'p'", "backend", "unexpected platform type 'p' for m");
    fails(
        "name: 'm' platform: 'onnxruntime_onnx' backend: 'tensorrt'",
        "platform",
        "unexpected 'platform' and 'backend' pair, got:onnxruntime_onnx, tensorrt",
    );
    passes("name: 'm' platform: 'anything' backend: 'own'");
    fails(&with("max_batch_size: -1"), "max_batch_size", "'max_batch_size' must be non-negative value for m");
    fails(&with("version_policy { }"), "version_policy", "must specify 'version policy' for m");
}

#[test]
fn dynamic_batching() {
    let at = |text: &str| with(&format!("max_batch_size: 4 dynamic_batching {{ {text} }}"));
    passes(&at("preferred_batch_size: [ 2, 4 ]"));
    fails(
        &at("preferred_batch_size: [ 0 ]"),
        "dynamic_batching.preferred_batch_size[0]",
        "dynamic batching preferred size must be positive for m",
    );
    fails(
        &at("preferred_batch_size: [ 4, 5 ]"),
        "dynamic_batching.preferred_batch_size[1]",
        "dynamic batching preferred size must be <= max batch size for m",
    );
    fails(
        &at("priority_levels: 2"),
        "dynamic_batching.default_priority_level",
        "default priority level must be in range [1, 2] for m",
    );
    fails(
        &at("priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 }"),
        "dynamic_batching.priority_queue_policy[3]",
        "priority queue policy must have priority level in range [1, 2] for m",
    );
    fails(
        &at("priority_levels: 20000 default_priority_level: 1"),
        "dynamic_batching.priority_levels",
        "priority_levels must be at most 10000 for m, got 20000",
    );
    fails(
        &at("preserve_ordering: true priority_levels: 2 default_priority_level: 1"),
        "dynamic_batching.preserve_ordering",
        "Only one priority level is allowed when 'preserve_ordering' is true for m",
    );
    for policy in [
        "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 }",
        "priority_queue_policy { key: 1 value { timeout_action: DELAY default_timeout_microseconds: 1 } }",
    ] {
        fails(
            &at(&format!("preserve_ordering: true {policy}")),
            "dynamic_batching.preserve_ordering",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
        );
    }
    passes(&at("preserve_ordering: true default_queue_policy { timeout_action: DELAY }"));
}

#[test]
fn sequence_batching() {
    let at = |text: &str| with(&format!("max_batch_size: 4 sequence_batching {{ {text} }}"));
    let control = |text: &str| at(&format!("control_input {{ name: 'C' control {{ {text} }} }}"));
    let path = "sequence_batching.control_input[0].control[0]";
    passes(&control("kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ]"));
    passes(&control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING"));
    fails(
        &at("control_input { control { int32_false_true: [ 0, 1 ] } }"),
        "sequence_batching.control_input[0]",
        "sequence batching control tensor must have a name for m",
    );
    fails(
        &at("control_input { name: 'C' } control_input { name: 'C' }"),
        "sequence_batching.control_input[1].name",
        "sequence batching control tensor 'C' is specified for multiple control kinds for m",
    );
    fails(
        &at(
            "control_input { name: 'C' control [ { int32_false_true: [ 0, 1 ] }, { int32_false_true: [ 0, 1 ] } ] }",
        ),
        "sequence_batching.control_input[0].control[1].kind",
        "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m",
    );
    fails(
        &control("kind: CONTROL_SEQUENCE_END"),
        path,
        "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for CONTROL_SEQUENCE_END for m",
    );
    fails(
        &control("int32_false_true: [ 0, 1 ] bool_false_true: [ 0, 1 ]"),
        path,
        "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and 'bool_false_true' for CONTROL_SEQUENCE_START for m",
    );
    fails(
        &control("kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0 ]"),
        &format!("{path}.int32_false_true"),
        "sequence batching control 'int32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_READY for m",
    );
    fails(
        &control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 int32_false_true: [ 0, 1 ]"),
        path,
        "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for CONTROL_SEQUENCE_CORRID for m",
    );
    fails(
        &control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32"),
        &format!("{path}.data_type"),
        "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
    );
    fails(
        &at("direct { minimum_slot_utilization: 1.5 }"),
        "sequence_batching.direct.minimum_slot_utilization",
        "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
    );
    fails(
        &at("direct { minimum_slot_utilization: nan }"),
        "sequence_batching.direct.minimum_slot_utilization",
        "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
    );
    fails(
        &at("oldest { preferred_batch_size: 8 }"),
        "sequence_batching.oldest.preferred_batch_size[0]",
        "sequence batching preferred batch size must be <= max batch size for m",
    );
    fails(
        &at("oldest { preferred_batch_size: -8 }"),
        "sequence_batching.oldest.preferred_batch_size[0]",
        "sequence batching preferred batch size must be positive for m",
    );
    fails(
        &format!("{} response_cache {{ enable: true }}", at("")),
        "response_cache",
        "Response Cache does not currently support model m with sequence batching scheduler. Please disable the response cache.",
    );
}

#[test]
fn cache_and_metrics() {
    fails(
        &with("response_cache { enable: true } model_transaction_policy { decoupled: true }"),
        "response_cache",
        "Response Cache does not currently support model m with 'decoupled' transaction policy. Please disable the response cache.",
    );
    let metric = |text: &str| with(&format!("model_metrics {{ metric_control {{ {text} }} }}"));
    let path = "model_metrics.metric_control[0]";
    fails(&metric(""), path, "metric control must specify 'metric_identifier'");
    fails(
        &metric("metric_identifier { }"),
        &format!("{path}.metric_identifier"),
        "metric identifier must specify non-empty 'family'",
    );
    fails(
        &metric("metric_identifier { family: 'f' }"),
        path,
        "metric control must specify 'histogram_options'",
    );
    fails(
        &metric("metric_identifier { family: 'f' } histogram_options { }"),
        &format!("{path}.histogram_options"),
        "histogram options must specify non-empty 'buckets'",
    );
    for (buckets, shown) in [("2, 1", "[2.0, 1.0]"), ("1, 1", "[1.0, 1.0]"), ("1, nan", "[1.0, NaN]")] {
        fails(
            &metric(&format!(
                "metric_identifier {{ family: 'f' }} histogram_options {{ buckets: [ {buckets} ] }}"
            )),
            &format!("{path}.histogram_options.buckets"),
            &format!("bucket boundaries must be strictly sorted, got {shown}"),
        );
    }
    passes(&metric("metric_identifier { family: 'f' } histogram_options { buckets: [ 1, 2 ] }"));
}

#[test]
fn cfg_24_missing_members_of_tensors() {
    fails(
        &with("input { name: 'X' }"),
        "input[0].data_type",
        "model input 'X' must specify 'data_type' for m",
    );
    fails(
        &with("input { data_type: TYPE_FP32 dims: [ -1 ] }"),
        "input[0]",
        "model input must specify 'name' for m",
    );
    fails(
        &with("output { name: 'Y' data_type: TYPE_FP32 }"),
        "output[0].dims",
        "model output 'Y' must specify 'dims' for m",
    );
    let errors = check(&with("\ninput { name: 'X'\n dims: [ 0 ] }"), &MachineFacts::default()).unwrap_err();
    let shown = errors.to_string();
    assert_eq!(errors.len(), 2, "{shown}");
    assert!(shown.contains("config.pbtxt:2:1: model input 'X' must specify 'data_type'"), "{shown}");
    assert!(
        shown.contains("config.pbtxt:3:10: model input 'X' dimension must be integer >= 1, or -1"),
        "{shown}"
    );
    assert!(shown.contains("(input 'X')"), "{shown}");
    fails(
        &with("input { name: 'X' data_type: 99 dims: 1 }"),
        "input[0].data_type",
        "model input 'X' has the unknown 'data_type' 99 for m",
    );
}

#[test]
fn reshapes() {
    let at = |size: i32, dims: &str, reshape: &str| {
        with(&format!(
            "max_batch_size: {size} input {{ name: 'X' data_type: TYPE_FP32 dims: {dims} reshape {{ shape: {reshape} }} }}"
        ))
    };
    let different = "model input 'X' has different size for dims and reshape for m";
    for (dims, reshape) in [
        ("[ 2, 4, -1, 6 ]", "[ 8, -1, 1, 6 ]"),
        ("[ 1 ]", "[ ]"),
        ("[ 4 ]", "[ 2, 2 ]"),
        ("[ -1 ]", "[ 1, -1 ]"),
    ] {
        passes(&at(8, dims, reshape));
    }
    fails(&at(8, "[ 2 ]", "[ ]"), "input[0].reshape", different);
    fails(&at(8, "[ 4 ]", "[ 2, 3 ]"), "input[0].reshape", different);
    fails(&at(8, "[ 4, -1 ]", "[ 2, -1 ]"), "input[0].reshape", different);
    fails(&at(8, "[ -1 ]", "[ 4 ]"), "input[0].reshape", different);
    fails(
        &at(8, "[ -1, -1 ]", "[ -1, 1, -1, -1 ]"),
        "input[0].reshape",
        "model input 'X' has different number of variable-size dimensions for dims and reshape for m",
    );
    fails(
        &at(8, "[ 4 ]", "[ 0 ]"),
        "input[0].reshape",
        "model input 'X' reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension for m",
    );
    fails(
        &at(0, "[ 1 ]", "[ ]"),
        "input[0].reshape",
        "model input 'X' cannot have empty reshape for non-batching model as scalar tensors are not supported for m",
    );
    let huge = "[ 9223372036854775807, 9223372036854775807 ]";
    fails(&at(8, huge, "[ 1 ]"), "input[0].reshape", different);
}

#[test]
fn formats_of_tensors() {
    fails(
        &with("input { name: 'X' data_type: TYPE_FP32 dims: [ 1, 2 ] format: FORMAT_NCHW }"),
        "input[0].format",
        "model input NHWC/NCHW require 3 dims for m",
    );
    fails(
        &with("input { name: 'X' data_type: TYPE_FP32 dims: 1 is_shape_tensor: true }"),
        "input[0].is_shape_tensor",
        "shape tensors are only supported for TensorRT platform for m",
    );
    fails(
        &with("output { name: 'Y' data_type: TYPE_FP32 dims: 1 is_non_linear_format_io: true }"),
        "output[0].is_non_linear_format_io",
        "Non-linear IO format is only supported for the TensorRT platform for m",
    );
    let tensorrt = "name: 'm' backend: 'tensorrt' platform: 'tensorrt_plan' input { name: 'X' data_type: TYPE_FP32 dims: 1 is_non_linear_format_io: true }";
    fails(tensorrt, "input[0].dims", "Non-linear IO format input requires 3 dims for m");
}

#[test]
fn tensors_of_the_batch() {
    let at = |text: &str| with(&format!("max_batch_size: 4 {X} {Y} {text}"));
    passes(&at(
        "batch_input { kind: BATCH_ITEM_SHAPE target_name: 'S' data_type: TYPE_INT32 source_input: 'X' }",
    ));
    fails(
        &at("batch_input { data_type: TYPE_INT32 }"),
        "batch_input[0]",
        "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 0 for m",
    );
    fails(
        &at("batch_input { data_type: TYPE_INT64 source_input: 'X' }"),
        "batch_input[0].data_type",
        "batch input data type must be TYPE_INT32 or TYPE_FP32 for m",
    );
    fails(
        &at("batch_input { data_type: TYPE_INT32 source_input: 'Z' }"),
        "batch_input[0].source_input[0]",
        "unknown source input name 'Z' for m",
    );
    passes(&at("batch_output { target_name: 'Y' source_input: 'X' }"));
    fails(
        &at("batch_output { target_name: 'Z' source_input: 'X' }"),
        "batch_output[0].target_name[0]",
        "unknown target output name 'Z' for m",
    );
    fails(
        &at("batch_output { target_name: [ 'Y', 'Y' ] source_input: 'X' }"),
        "batch_output[0].target_name[1]",
        "target output name 'Y' can only be specified once for m",
    );
}

#[test]
fn cfg_19_gpu_groups_without_gpus() {
    let group = "instance_group [ { count: 1 kind: KIND_GPU gpus: [ 0, 1 ] } ]";
    fails(
        &with(group),
        "instance_group[0].kind",
        "instance group m_0 of model m has kind KIND_GPU but no GPUs are available",
    );
    let errors = check(&with(group), &MachineFacts::default()).unwrap_err();
    assert!(errors.first().hint().unwrap().contains("KIND_AUTO"), "{errors}");
    let two = MachineFacts { gpus: vec![0, 1], default_cpu_instances: 1, ..MachineFacts::default() };
    assert!(check(&with(group), &two).is_ok());
    let one = MachineFacts { gpus: vec![0], default_cpu_instances: 1, ..MachineFacts::default() };
    let errors = check(&with(group), &one).unwrap_err();
    assert!(
        errors
            .first()
            .reason()
            .starts_with("instance group m_0 of model m specifies invalid or unsupported gpu id 1."),
        "{errors}"
    );
}

#[test]
fn instance_groups() {
    let limited = |names: &str| with(&format!("instance_group {{ rate_limiter {{ {names} }} }}"));
    passes(&limited("resources { name: 'R' count: 1 } resources { name: 'S' global: true }"));
    let at = "instance_group[0].rate_limiter.resources[1].name";
    let twice = "instance group m_0 of model m names the rate_limiter resource 'R' twice";
    fails(&limited("resources { name: 'R' } resources { name: 'R' global: true }"), at, twice);
    let nameless = "instance group m_0 of model m has a rate_limiter resource without a name";
    fails(&limited("resources { name: 'R' } resources { }"), at, nameless);
    let idle = "every instance group of model m is passive, so no request could ever run";
    fails(&with("instance_group { passive: true }"), "instance_group[0].passive", idle);
    fails(
        &with("instance_group { kind: KIND_CPU gpus: 0 }"),
        "instance_group[0].gpus",
        "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs",
    );
    fails(
        &with("instance_group { kind: KIND_MODEL gpus: 0 }"),
        "instance_group[0].gpus",
        "instance group m_0 of model m has kind KIND_MODEL but specifies one or more GPUs",
    );
    let too_many = "model m asks for 2000000000 instances; at most 1024 are possible";
    fails(&with("instance_group { count: 2000000000 }"), "instance_group", too_many);
    let groups = "instance_group { count: 1 } ".repeat(1025);
    fails(&with(&groups), "instance_group", "model m asks for 1025 instances; at most 1024 are possible");
    fails(
        &with("instance_group { kind: KIND_CPU profile: '1' }"),
        "instance_group[0].profile[0]",
        "instance group m_0 of model m and platform specifies profile field which is only supported for TensorRT models",
    );
    fails(
        &with("instance_group { kind: 9 }"),
        "instance_group[0].kind",
        "instance group m_0 of model m has unknown kind 9",
    );
    let config = parse_pbtxt(with("").as_bytes(), "c").unwrap().config;
    let errors = validate(&config, &MachineFacts::default()).unwrap_err();
    let last = errors.into_iter().next_back().unwrap();
    assert_eq!(last.reason(), "must specify one or more 'instance group's for m");
}

fn ensemble(text: &str) -> String {
    format!(
        "name: 'e' platform: 'ensemble' input {{ name: 'A' data_type: TYPE_INT32 dims: 1 }} output {{ name: 'B' data_type: TYPE_INT32 dims: 1 }} {text}"
    )
}

fn step(inputs: &str, outputs: &str) -> String {
    let map = |field: &str, text: &str| {
        let entries = text.split(' ').filter(|name| !name.is_empty());
        entries
            .enumerate()
            .map(|(i, name)| format!("{field} {{ key: 'k{i}' value: '{name}' }}"))
            .collect::<String>()
    };
    format!(
        "ensemble_scheduling {{ step [ {{ model_name: 's' {} {} }} ] }}",
        map("input_map", inputs),
        map("output_map", outputs)
    )
}

#[test]
fn ensembles() {
    passes(&ensemble(&step("A", "B")));
    fails(
        &ensemble(""),
        "platform",
        "ensemble scheduling must be set for ensemble e whose platform is ensemble",
    );
    fails(
        &ensemble("ensemble_scheduling { }"),
        "ensemble_scheduling.step",
        "must specify 'step' for ensemble 'e'",
    );
    fails(
        &ensemble("ensemble_scheduling { step { } }"),
        "ensemble_scheduling.step[0]",
        "must specify 'model_name' in step 0 of ensemble 'e'",
    );
    fails(
        &ensemble(&step("A", "")),
        "ensemble_scheduling.step[0]",
        "must specify 'output_map' in step 0 of ensemble 'e'",
    );
    fails(
        &format!("{} instance_group {{ }}", ensemble(&step("A", "B"))),
        "instance_group",
        "instance group should not be specified for ensemble 'e'",
    );
    fails(
        &format!("{} optimization {{ }}", ensemble(&step("A", "B"))),
        "optimization",
        "optimization should not be specified for ensemble 'e'",
    );
    fails(
        &format!("{} model_warmup {{ }}", ensemble(&step("A", "B"))),
        "model_warmup",
        "model_warmup can not be specified for ensemble 'e'",
    );
    fails(&ensemble(&step("Q", "B")), "input[0].name", "ensemble input 'A' for ensemble e' is not used");
    fails(&ensemble(&step("A", "C")), "output[0].name", "ensemble output 'B' for ensemble e' is not used");
    fails(
        &ensemble(&step("A Q", "B")),
        "output[0].name",
        "output 'B' for ensemble 'e' is not written: at least one of its depending tensors, 'Q', is not connected",
    );
    fails(
        &ensemble(&step("A", "B B")),
        "ensemble_scheduling.step[0].output_map[\"k1\"]",
        "ensemble tensor 'B' can appear in an output map only once for ensemble 'e' step 0",
    );
    fails(
        &ensemble(&step("A", "B C")),
        "ensemble_scheduling.step",
        "ensemble tensor 'C' is unused in ensemble 'e'",
    );
    let cycle = ensemble(&step("A C", "B C"));
    fails(
        &cycle,
        "output[0].name",
        "output 'B' for ensemble 'e' is not written: at least one of its depending tensors, 'C', is not connected",
    );
    fails(
        "name: 'e' platform: 'ensemble' backend: 'b'",
        "backend",
        "Ensemble model 'e' must have platform type 'ensemble' and empty backend type",
    );
    let recorded = "name: 'ens' platform: 'ensemble' max_batch_size: 8
        input [ { name: 'A' data_type: TYPE_INT32 dims: [ 16 ] }, { name: 'B' data_type: TYPE_INT32 dims: [ 16 ] } ]
        output [ { name: 'SUM' data_type: TYPE_INT32 dims: [ 16 ] }, { name: 'DIFF2' data_type: TYPE_INT32 dims: [ 16 ] } ]
        ensemble_scheduling { step [
          { model_name: 'simple' model_version: -1 input_map { key: 'INPUT0' value: 'A' } input_map { key: 'INPUT1' value: 'B' } output_map { key: 'OUTPUT0' value: 'SUM' } output_map { key: 'OUTPUT1' value: 'd' } },
          { model_name: 'simple' model_version: -1 input_map { key: 'INPUT0' value: 'd' } input_map { key: 'INPUT1' value: 'B' } output_map { key: 'OUTPUT1' value: 'DIFF2' } } ] }";
    passes(recorded);
}

#[test]
fn large_configurations_take_no_time() {
    let steps = |order: &mut dyn Iterator<Item = usize>| {
        let step = |i: usize| {
            format!(
                "{{ model_name: 's' input_map {{ key: 'x' value: 't{i}' }} output_map {{ key: 'y' value: 't{}' }} }}",
                i + 1
            )
        };
        order.map(step).collect::<Vec<_>>().join(",")
    };
    let count = 5000;
    let text = format!(
        "name: 'e' platform: 'ensemble' input {{ name: 't0' data_type: TYPE_INT32 dims: 1 }} output {{ name: 't{count}' data_type: TYPE_INT32 dims: 1 }}"
    );
    passes(&format!("{text} ensemble_scheduling {{ step [ {} ] }}", steps(&mut (0..count).rev())));
    let nameless = "input { } ".repeat(5000);
    assert_eq!(check(&with(&nameless), &MachineFacts::default()).unwrap_err().len(), 100);
}

#[test]
fn every_error_is_reported_with_the_first_as_in_triton() {
    let text = with(
        "max_batch_size: -1 dynamic_batching { preferred_batch_size: [ 0 ] } input { name: 'X' } instance_group { kind: KIND_GPU }",
    );
    let errors = check(&text, &MachineFacts::default()).unwrap_err();
    let paths: Vec<_> = errors.iter().filter_map(ConfigError::path).collect();
    assert_eq!(
        paths,
        [
            "max_batch_size",
            "dynamic_batching.preferred_batch_size[0]",
            "input[0].data_type",
            "input[0].dims",
            "instance_group[0].kind"
        ]
    );
}

#[test]
fn joining_without_a_scheduler_that_joins_is_a_warning() {
    let ragged =
        "max_batch_size: 4 input { name: 'X' data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }";
    let padded = "max_batch_size: 4 parameters { key: 'padding.inputs' value { string_value: 'X' } }";
    for (text, path, what) in [
        (ragged, "input[0].allow_ragged_batch", "has allow_ragged_batch but no scheduler that joins"),
        (padded, "parameters", "has parameters for padding but no scheduler that joins"),
    ] {
        let notes = check(&with(text), &MachineFacts::default()).unwrap();
        let [note] = notes.as_slice() else { panic!("{notes:?}") };
        assert_eq!((note.path.as_deref(), note.level), (Some(path), crate::NoteLevel::Warning));
        assert!(note.message.contains(what), "{note}");
        let batched =
            check(&with(&format!("{text} dynamic_batching {{ }}")), &MachineFacts::default()).unwrap();
        assert!(batched.is_empty(), "{batched:?}");
    }
}

#[test]
fn sequence_batching_that_does_nothing_or_harm_is_told() {
    let told = |text: &str| -> Vec<String> {
        let text = with(&format!("max_batch_size: 8 sequence_batching {{ {text} }}"));
        let notes = check(&text, &MachineFacts::default()).expect("it is valid");
        notes.into_iter().map(|note| note.message).collect()
    };
    let one = |text: &str, part: &str| {
        let notes = told(text);
        assert!(notes.len() == 1 && notes[0].contains(part), "{text}: {notes:?}");
    };
    let ready =
        "control_input { name: 'R' control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }";
    let start =
        "control_input { name: 'S' control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }";
    assert!(told(ready).is_empty());
    one("", "neither control_input nor state");
    one(start, "rows without a request for requests");
    assert!(told(&format!("{start} oldest {{ max_candidate_sequences: 4 }}")).is_empty());
    one(
        &format!("{start} oldest {{ max_candidate_sequences: 4 preferred_batch_size: 6 }}"),
        "prefers batches of 6",
    );
    one(
        &format!("{start} oldest {{ max_candidate_sequences: 4 max_queue_delay_microseconds: 5 }}"),
        "prefers batches of 8 but has at most 4",
    );
    one(&format!("{ready} direct {{ max_queue_delay_microseconds: 5 }}"), "has no minimum_slot_utilization");
    one(
        &format!("{ready} direct {{ minimum_slot_utilization: 0.5 }}"),
        "has no max_queue_delay_microseconds",
    );
    let both = "direct { minimum_slot_utilization: 0.5 max_queue_delay_microseconds: 5 }";
    assert!(told(&format!("{ready} {both}")).is_empty());
}
