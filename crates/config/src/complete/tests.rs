//! Completion, rule by rule and case by case.

use proptest::prelude::*;
use trireme_types::DataType;

use super::*;
use crate::{MachineFacts, check_report, normalize, parse_pbtxt, print_pbtxt, to_json, validate};

fn tensor(name: &str, data_type: DataType, shape: &[i64]) -> ReportedTensor {
    ReportedTensor { name: name.to_owned(), data_type, shape: Shape::new(shape), optional: false }
}

fn report(inputs: Vec<ReportedTensor>, outputs: Vec<ReportedTensor>) -> ModelReport {
    let batch_dimension = inputs.iter().chain(&outputs).all(|t| t.shape.first() == Some(&-1));
    ModelReport { inputs, outputs, batch_dimension, ..ModelReport::default() }
}

/// `X` and `Y` of the given shape.
fn identity(shape: &[i64]) -> ModelReport {
    report(vec![tensor("X", DataType::Fp32, shape)], vec![tensor("Y", DataType::Fp32, shape)])
}

/// The pipeline of a model: complete, default, validate, compare.
fn load(text: &str, report: &ModelReport, default: i32) -> Result<(ModelConfig, Vec<Note>), ConfigErrors> {
    let text = format!("name: 'm' backend: 'onnxruntime' platform: 'onnxruntime_onnx' {text}");
    let parsed = parse_pbtxt(text.as_bytes(), "c").unwrap_or_else(|e| panic!("{e}"));
    let mut config = parsed.config;
    let mut notes = complete(&mut config, report, default, false)?;
    let facts = MachineFacts { gpus: vec![], default_cpu_instances: 2, ..MachineFacts::default() };
    normalize(&mut config, &facts);
    notes.extend(validate(&config, &facts)?);
    check_report(&config, report)?;
    Ok((config, notes))
}

#[track_caller]
fn fails(text: &str, report: &ModelReport, words: &[&str]) {
    let errors = load(text, report, 4).unwrap_err();
    let shown = errors.to_string();
    for word in words {
        assert!(shown.contains(word), "`{word}` is not in:\n{shown}");
    }
}

#[test]
fn an_empty_configuration_becomes_what_triton_shows() {
    let model = report(
        vec![tensor("INPUT1", DataType::Int32, &[-1, 16]), tensor("INPUT0", DataType::Int32, &[-1, 16])],
        vec![tensor("OUTPUT1", DataType::Int32, &[-1, 16]), tensor("OUTPUT0", DataType::Int32, &[-1, 16])],
    );
    let (mut config, notes) = load("default_model_filename: 'model.onnx'", &model, 4).unwrap();
    config.name = "auto_batch".to_owned();
    config.instance_group[0].name = "auto_batch".to_owned();
    let recorded = r#"{"name":"auto_batch","platform":"onnxruntime_onnx","backend":"onnxruntime","runtime":"","version_policy":{"latest":{"num_versions":1}},"max_batch_size":4,"input":[{"name":"INPUT1","data_type":"TYPE_INT32","format":"FORMAT_NONE","dims":[16],"is_shape_tensor":false,"allow_ragged_batch":false,"optional":false,"is_non_linear_format_io":false},{"name":"INPUT0","data_type":"TYPE_INT32","format":"FORMAT_NONE","dims":[16],"is_shape_tensor":false,"allow_ragged_batch":false,"optional":false,"is_non_linear_format_io":false}],"output":[{"name":"OUTPUT1","data_type":"TYPE_INT32","dims":[16],"label_filename":"","is_shape_tensor":false,"is_non_linear_format_io":false},{"name":"OUTPUT0","data_type":"TYPE_INT32","dims":[16],"label_filename":"","is_shape_tensor":false,"is_non_linear_format_io":false}],"batch_input":[],"batch_output":[],"optimization":{"priority":"PRIORITY_DEFAULT","input_pinned_memory":{"enable":true},"output_pinned_memory":{"enable":true},"gather_kernel_buffer_threshold":0,"eager_batching":false},"dynamic_batching":{"preferred_batch_size":[4],"max_queue_delay_microseconds":0,"preserve_ordering":false,"priority_levels":0,"default_priority_level":0,"priority_queue_policy":{}},"instance_group":[{"name":"auto_batch","kind":"KIND_CPU","count":2,"gpus":[],"secondary_devices":[],"profile":[],"passive":false,"host_policy":""}],"default_model_filename":"model.onnx","cc_model_filenames":{},"metric_tags":{},"parameters":{},"model_warmup":[]}"#;
    assert_eq!(to_json(&config), recorded);
    assert!(notes.iter().any(|note| note.message.contains("autofilled max_batch_size to 4")), "{notes:?}");
}

#[test]
fn a_model_without_a_batch_dimension() {
    let (config, _) = load("", &identity(&[1, 16]), 4).unwrap();
    assert_eq!((config.max_batch_size, config.input[0].dims.as_slice()), (0, &[1, 16][..]));
    assert!(config.scheduling_choice.is_none());
    fails(
        "max_batch_size: 8",
        &identity(&[1, 16]),
        &[
            "autofill failed for model 'm': model does not support batching while non-zero max_batch_size is specified",
            "X [1,16], Y [1,16]",
        ],
    );
}

#[test]
fn configured_tensors_are_left_alone() {
    let tensors = "input { name: 'X' data_type: TYPE_FP32 dims: [ 16 ] } output { name: 'Y' data_type: TYPE_FP32 dims: [ 16 ] }";
    let (config, notes) = load(&format!("max_batch_size: 8 {tensors}"), &identity(&[-1, 16]), 4).unwrap();
    assert_eq!(config.max_batch_size, 8);
    assert!(config.scheduling_choice.is_none() && notes.is_empty(), "{notes:?}");
    let (config, _) = load("max_batch_size: 1", &identity(&[-1, 16]), 4).unwrap();
    assert!(config.scheduling_choice.is_none() && config.max_batch_size == 1);
    let mut strict = ModelConfig::default();
    assert_eq!(complete(&mut strict, &identity(&[-1]), 4, true), Ok(vec![]));
    assert_eq!(strict, ModelConfig::default());
}

#[test]
fn cfg_12_scalars_are_one_element() {
    let (config, _) = load("", &identity(&[-1]), 4).unwrap();
    let input = &config.input[0];
    assert_eq!((input.dims.as_slice(), &input.reshape), (&[1][..], &Some(ModelTensorReshape::default())));
    let (config, _) = load("", &identity(&[]), 4).unwrap();
    let input = &config.input[0];
    assert_eq!((config.max_batch_size, input.dims.as_slice(), &input.reshape), (0, &[1][..], &None));
    let explicit = "max_batch_size: 32 input [ { name:\"X\" data_type: TYPE_FP32 dims:[1] reshape:{ shape:[ ] } } ] output [ { name:\"Y\" data_type: TYPE_FP32 dims:[1] reshape:{ shape:[] } } ]";
    let (config, _) = load(explicit, &identity(&[-1]), 4).unwrap();
    let spec = crate::ModelSpec::from_config(&config).unwrap();
    assert_eq!(spec.inputs[0].engine_dims(), &Shape::new(&[]));
}

#[test]
fn cfg_17_auto_max_batch_size_comes_before_other_checks() {
    let (config, _) =
        load("dynamic_batching { preferred_batch_size: [ 2 ] }", &identity(&[-1, -1]), 128).unwrap();
    assert_eq!(config.max_batch_size, 128);
    let (config, _) = load("dynamic_batching { }", &identity(&[-1, -1]), 128).unwrap();
    assert!(to_json(&config).contains(r#""preferred_batch_size":[128]"#));
}

#[test]
fn cfg_18_batching_without_a_batch_axis_is_warned_of() {
    let text = "dynamic_batching { } input { name: 'X' data_type: TYPE_FP32 dims: [ -1, -1 ] }";
    for text in
        [text.to_owned(), format!("{text} output {{ name: 'Y' data_type: TYPE_FP32 dims: [ -1, -1 ] }}")]
    {
        let (config, notes) = load(&text, &identity(&[-1, -1]), 4).unwrap();
        assert_eq!(config.max_batch_size, 0);
        let warnings: Vec<_> = notes
            .iter()
            .filter(|n| n.message.contains("dynamic_batching") && n.message.contains("max_batch_size is 0"))
            .collect();
        assert_eq!(warnings.len(), 1, "{notes:?}");
        assert!(warnings[0].to_string().contains("max_batch_size: 4"), "{}", warnings[0]);
    }
}

#[test]
fn cfg_22_shapes_are_shown_whole() {
    let tensors = "input { name: 'X' data_type: TYPE_FP32 dims: [ 1, 4 ] } output { name: 'Y' data_type: TYPE_FP32 dims: [ 1, 4 ] }";
    fails(
        &format!("max_batch_size: 1 {tensors}"),
        &identity(&[1, 4]),
        &[
            "tensor 'X'",
            "shape expected by the model is [1,4]",
            "max_batch_size > 0",
            "complete shape [-1,1,4]",
            "set max_batch_size: 0",
        ],
    );
    fails(
        &format!("max_batch_size: 1 {tensors}"),
        &identity(&[-1, 4]),
        &[
            "the model expects 2 dimensions (shape [-1,4]) but the model configuration specifies 3 dimensions",
            "making complete shape [-1,1,4]",
            "write dims [4]",
        ],
    );
    fails(
        tensors,
        &identity(&[-1, 5]),
        &["the model expects shape [-1,5] but the model configuration specifies shape [1,4]"],
    );
    fails(tensors, &identity(&[]), &["scalar tensor 'X', should only provide 1"]);
}

#[test]
fn cfg_24_the_model_supplies_what_is_missing() {
    let model = identity(&[-1, 16]);
    let (config, notes) = load("input { name: 'X' }", &model, 4).unwrap();
    assert_eq!((config.input[0].data_type, config.input[0].dims.as_slice()), (11, &[16][..]));
    assert_eq!(config.output[0].name, "Y");
    assert!(notes.iter().any(|note| note.message.contains("dims of input 'X'")), "{notes:?}");
    let (config, _) = load("output { name: 'Y' data_type: TYPE_FP32 dims: [ 16 ] }", &model, 4).unwrap();
    assert_eq!(config.input[0].name, "X");
    fails(
        "input { data_type: TYPE_FP32 dims:[-1] }",
        &model,
        &["model input must specify 'name' for m", "the model has the inputs X"],
    );
    fails(
        "input { name: 'X' } output { name: 'YY' }",
        &model,
        &["model output 'YY' must specify 'data_type' for m"],
    );
}

#[test]
fn names_and_types_must_be_those_of_the_model() {
    let model = report(
        vec![tensor("INPUT0", DataType::Int32, &[-1, 16]), tensor("INPUT1", DataType::Int32, &[-1, 16])],
        vec![tensor("OUTPUT1", DataType::Int32, &[-1, 16]), tensor("OUTPUT0", DataType::Int32, &[-1, 16])],
    );
    let io = |name: &str| format!("{{ name: '{name}' data_type: TYPE_INT32 dims: [ 16 ] }}");
    let text = |inputs: &[&str], outputs: &[&str]| {
        let list = |names: &[&str]| names.iter().map(|n| io(n)).collect::<Vec<_>>().join(", ");
        format!("max_batch_size: 8 input [ {} ] output [ {} ]", list(inputs), list(outputs))
    };
    // Recorded from Triton.
    let errors = load(&text(&["INPUT0", "INPUT1"], &["OUTPUT0", "OUTPUTX"]), &model, 4).unwrap_err();
    assert_eq!(
        errors.first().reason(),
        "unexpected inference output 'OUTPUTX', allowed outputs are: OUTPUT0, OUTPUT1"
    );
    assert_eq!((errors.len(), errors.first().path()), (1, Some("output[1].name")));
    fails(
        &text(&["INPUT0"], &["OUTPUT0"]),
        &model,
        &["unable to load model 'm', configuration expects 1 inputs, model provides 2", "lacks INPUT1"],
    );
    fails(
        &text(&["INPUT0", "INPUTT1"], &["OUTPUT0"]),
        &model,
        &["unexpected inference input 'INPUTT1'", "did you mean \"INPUT1\"?"],
    );
    let wrong = text(&["INPUT0", "INPUT1"], &["OUTPUT0"]).replacen("INT32", "FP32", 1);
    fails(
        &wrong,
        &model,
        &["configuration expects datatype TYPE_FP32 for input 'INPUT0', model provides TYPE_INT32"],
    );
    let mut optional = model.clone();
    optional.inputs[1].optional = true;
    assert!(load(&text(&["INPUT0"], &["OUTPUT0"]), &optional, 4).is_ok());
}

#[test]
fn sequence_controls_are_not_inputs_of_the_configuration() {
    let model = report(
        vec![tensor("X", DataType::Fp32, &[-1, 1]), tensor("START", DataType::Int32, &[-1, 1])],
        vec![tensor("Y", DataType::Fp32, &[-1, 1])],
    );
    let text = "sequence_batching { control_input { name: 'START' control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } } }";
    let (config, _) = load(text, &model, 4).unwrap();
    assert_eq!(config.input.len(), 1);
    fails(
        &text.replace("'START'", "'STARTS'"),
        &model,
        &["sequence control 'STARTS' is not an input of the model"],
    );
}

#[test]
fn settings_of_the_model_itself() {
    let mut model = identity(&[-1, 2]);
    model.max_batch_size = Some(16);
    model.decoupled = Some(true);
    model.dynamic_batching = true;
    let (config, _) = load("", &model, 4).unwrap();
    assert_eq!(config.max_batch_size, 16);
    assert!(config.model_transaction_policy.unwrap().decoupled);
    assert!(matches!(config.scheduling_choice, Some(SchedulingChoice::DynamicBatching(_))));
}

fn any_report() -> impl Strategy<Value = ModelReport> {
    let shape = prop::collection::vec(prop_oneof![Just(-1_i64), 0_i64..5, Just(1_i64 << 40)], 0..5);
    let tensor = (shape, 0_usize..14).prop_map(|(shape, kind)| (shape, DataType::ALL[kind]));
    let side = prop::collection::vec(tensor, 1..4);
    (side.clone(), side, any::<bool>()).prop_map(|(inputs, outputs, open)| {
        let make = |prefix: &str, side: Vec<(Vec<i64>, DataType)>| {
            let tensors = side.into_iter().enumerate().map(|(i, (mut shape, data_type))| {
                if open {
                    shape.insert(0, -1);
                }
                super::tests::tensor(&format!("{prefix}{i}"), data_type, &shape)
            });
            tensors.collect::<Vec<_>>()
        };
        report(make("X", inputs), make("Y", outputs))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever a model is, the configuration made from it loads, and reads back from its text.
    #[test]
    fn a_generated_configuration_always_loads(model in any_report(), default in 0_i32..200) {
        let (config, _) = load("", &model, default).map_err(|e| TestCaseError::fail(e.to_string()))?;
        let text = print_pbtxt(&config);
        let again = parse_pbtxt(text.as_bytes(), "c").map_err(|e| TestCaseError::fail(e.to_string()))?;
        prop_assert_eq!(&again.config, &config);
        let facts = MachineFacts { gpus: vec![], default_cpu_instances: 2, ..MachineFacts::default() };
        prop_assert!(validate(&again.config, &facts).is_ok());
        prop_assert!(check_report(&again.config, &model).is_ok());
    }
}

#[test]
fn what_is_flat_in_the_model_keeps_its_open_dimension() {
    let model = report(
        vec![tensor("X", DataType::Fp32, &[-1]), tensor("ENDS", DataType::Fp32, &[-1])],
        vec![tensor("Y", DataType::Fp32, &[-1]), tensor("END", DataType::Fp32, &[-1])],
    );
    let text = "max_batch_size: 4 input { name: 'X' allow_ragged_batch: true }
        batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: 'ENDS' data_type: TYPE_FP32 source_input: 'X' }
        batch_output { target_name: 'Y' source_input: 'X' }";
    let (config, _) = load(text, &model, 4).unwrap();
    assert_eq!((config.input.len(), config.input[0].dims.as_slice()), (1, &[-1][..]));
    assert_eq!(config.input[0].reshape, None);
    assert_eq!((config.output[0].dims.as_slice(), config.output[0].reshape.clone()), (&[-1][..], None));
    assert_eq!(
        (config.output[1].dims.as_slice(), config.output[1].reshape.clone()),
        (&[1][..], Some(ModelTensorReshape::default()))
    );
    let (config, _) =
        load(&format!("{text} output [ {{ name: 'Y' }}, {{ name: 'END' }} ]"), &model, 4).unwrap();
    assert_eq!((config.output[0].dims.as_slice(), config.output[1].dims.as_slice()), (&[-1][..], &[1][..]));
}

#[test]
fn states_are_no_outputs_of_their_own() {
    let model = report(
        vec![tensor("X", DataType::Fp32, &[-1, 1]), tensor("S", DataType::Fp32, &[-1, 1])],
        vec![tensor("Y", DataType::Fp32, &[-1, 1]), tensor("NEXT", DataType::Fp32, &[-1, 1])],
    );
    let text = "max_batch_size: 4 sequence_batching { control_input { name: 'S' control { kind: CONTROL_SEQUENCE_START
        fp32_false_true: [ 0, 1 ] } } }";
    let (config, _) = load(text, &model, 4).unwrap();
    assert_eq!(config.output.len(), 2);
    let text = "max_batch_size: 4 sequence_batching { state { input_name: 'S' output_name: 'NEXT' data_type: TYPE_FP32
        dims: [ 1 ] } }";
    let (config, _) = load(text, &model, 4).unwrap();
    assert_eq!(config.output.iter().map(|io| io.name.as_str()).collect::<Vec<_>>(), ["Y"]);
    assert_eq!(config.input.iter().map(|io| io.name.as_str()).collect::<Vec<_>>(), ["X"]);
}
