//! Whether a completed configuration and the model file agree: names, data types, shapes.
//!
//! Wording of Triton's ONNX Runtime backend, with full shapes, the batch dimension included.
//! Source: `ValidateInputs`, `ValidateOutputs`, `CompareDimsSupported` in Triton's backends.

use trireme_proto::inference::model_config::SchedulingChoice;
use trireme_proto::inference::{ModelConfig, ModelTensorReshape};
use trireme_types::{DataType, ModelReport, ReportedTensor, Shape};

use crate::complete::{is_scattered, is_supplied};
use crate::error::{ConfigError, ConfigErrors};
use crate::nearest::nearest;

/// Errors that one configuration can have; more of them help nobody.
const MAX_ERRORS: usize = 100;

/// A configured tensor, input or output.
struct Configured<'a> {
    side: &'static str,
    index: usize,
    name: &'a str,
    data_type: i32,
    dims: &'a [i64],
    reshape: Option<&'a ModelTensorReshape>,
    ragged: bool,
}

/// Compares a completed configuration with what the backend read in the model file.
///
/// # Errors
/// Each tensor that does not fit, with both shapes.
pub fn check_report(config: &ModelConfig, report: &ModelReport) -> Result<(), ConfigErrors> {
    let mut errors = Vec::new();
    missing_inputs(config, report, &mut errors);
    controls(config, report, &mut errors);
    for (index, io) in config.input.iter().enumerate() {
        let (dims, reshape) = (io.dims.as_slice(), io.reshape.as_ref());
        let configured = Configured {
            side: "input",
            index,
            name: &io.name,
            data_type: io.data_type,
            dims,
            reshape,
            ragged: io.allow_ragged_batch,
        };
        check_tensor(config, &configured, &report.inputs, true, &mut errors);
    }
    for (index, io) in config.output.iter().enumerate() {
        let (dims, reshape) = (io.dims.as_slice(), io.reshape.as_ref());
        let configured = Configured {
            side: "output",
            index,
            name: &io.name,
            data_type: io.data_type,
            dims,
            reshape,
            ragged: false,
        };
        // A batch output is scattered over the requests and need not have the model's shape.
        check_tensor(config, &configured, &report.outputs, !is_scattered(config, &io.name), &mut errors);
    }
    errors.truncate(MAX_ERRORS);
    ConfigErrors::check(errors, ())
}

/// Inputs that the model needs and nobody gives it.
fn missing_inputs(config: &ModelConfig, report: &ModelReport, errors: &mut Vec<ConfigError>) {
    let given = |name: &str| config.input.iter().any(|io| io.name == name) || is_supplied(config, name);
    let required: Vec<&ReportedTensor> = report.inputs.iter().filter(|tensor| !tensor.optional).collect();
    let missing: Vec<&str> = required.iter().filter(|t| !given(&t.name)).map(|t| t.name.as_str()).collect();
    if missing.is_empty() {
        return;
    }
    let reason = format!(
        "unable to load model '{}', configuration expects {} inputs, model provides {}",
        config.name,
        config.input.len(),
        required.len()
    );
    let stranger =
        config.input.iter().position(|io| report.inputs.iter().all(|tensor| tensor.name != io.name));
    // A misspelt name is told below, with the names that there are.
    if stranger.is_none() || config.input.len() < required.len() {
        let hint = format!("the configuration lacks {}", missing.join(", "));
        errors.push(ConfigError::new(reason).at_path("input").with_hint(hint));
    }
}

/// Inputs that the server makes must exist in the model.
fn controls(config: &ModelConfig, report: &ModelReport, errors: &mut Vec<ConfigError>) {
    let exists = |name: &str| report.inputs.iter().any(|tensor| tensor.name == name);
    let mut absent = |path: String, what: &str, name: &str| {
        if !exists(name) {
            let reason = format!(
                "unable to load model '{}', {what} '{name}' is not an input of the model",
                config.name
            );
            errors
                .push(ConfigError::new(reason).at_path(path).with_hint(names_hint("inputs", &report.inputs)));
        }
    };
    if let Some(SchedulingChoice::SequenceBatching(sequence)) = &config.scheduling_choice {
        for (i, control) in sequence.control_input.iter().enumerate() {
            absent(format!("sequence_batching.control_input[{i}].name"), "sequence control", &control.name);
        }
        for (i, state) in sequence.state.iter().enumerate() {
            absent(format!("sequence_batching.state[{i}].input_name"), "state input", &state.input_name);
        }
    }
    for (i, batch) in config.batch_input.iter().enumerate() {
        for (j, target) in batch.target_name.iter().enumerate() {
            absent(format!("batch_input[{i}].target_name[{j}]"), "batch input", target);
        }
    }
}

fn names_hint(what: &str, tensors: &[ReportedTensor]) -> String {
    let names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    format!("its {what} are {}", names.join(", "))
}

fn check_tensor(
    config: &ModelConfig,
    io: &Configured<'_>,
    tensors: &[ReportedTensor],
    with_shape: bool,
    errors: &mut Vec<ConfigError>,
) {
    let path = format!("{}[{}]", io.side, io.index);
    let Some(tensor) = tensors.iter().find(|tensor| tensor.name == io.name) else {
        let mut names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        names.sort_unstable();
        let reason = format!(
            "unexpected inference {} '{}', allowed {}s are: {}",
            io.side,
            io.name,
            io.side,
            names.join(", ")
        );
        let error = ConfigError::new(reason).at_path(format!("{path}.name"));
        errors.push(match nearest(io.name, names) {
            Some(name) => error.with_hint(format!("did you mean \"{name}\"?")),
            None => error,
        });
        return;
    };
    if DataType::from_config_number(io.data_type) != Some(tensor.data_type) {
        let expects =
            DataType::from_config_number(io.data_type).map_or("TYPE_INVALID", DataType::config_name);
        let reason = format!(
            "unable to load model '{}', configuration expects datatype {expects} for {} '{}', model provides {}",
            config.name,
            io.side,
            io.name,
            tensor.data_type.config_name()
        );
        let hint = format!("write data_type: {}", tensor.data_type.config_name());
        errors.push(ConfigError::new(reason).at_path(format!("{path}.data_type")).with_hint(hint));
    }
    if with_shape && let Some(error) = check_shape(config, io, &tensor.shape) {
        let member = if io.reshape.is_some() { "reshape" } else { "dims" };
        errors.push(error.at_path(format!("{path}.{member}")));
    }
}

fn check_shape(config: &ModelConfig, io: &Configured<'_>, model: &Shape) -> Option<ConfigError> {
    let batching = config.max_batch_size > 0;
    let dims = Shape::new(io.reshape.map_or(io.dims, |reshape| &reshape.shape));
    let what = format!("model '{}', tensor '{}'", config.name, io.name);
    let full = if batching { Shape::with_leading(-1, &dims) } else { dims.clone() };
    if io.ragged {
        return (model[..] != [-1]).then(|| {
            ConfigError::new(format!(
                "unable to load model '{}', configuration expects model provides input with shape [-1] for ragged \
                 input '{}', model provides {model}",
                config.name, io.name
            ))
            .with_hint("a ragged input is one flat dimension; remove allow_ragged_batch")
        });
    }
    let adds = "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making complete shape";
    if batching && (model.first() != Some(&-1)) {
        let reason = format!(
            "{what}: for the model to support batching the shape should have at least 1 dimension and the first \
             dimension must be -1; but shape expected by the model is {model}, and the model configuration specifies \
             {dims} ({adds} {full})"
        );
        let hint = "set max_batch_size: 0 and write the whole shape in dims, or export the model with an open first dimension";
        return Some(ConfigError::new(reason).with_hint(hint));
    }
    if model.is_empty() {
        // Scalars of models without batching are configured as [1].
        return dims.iter().any(|&dim| dim != 1).then(|| {
            ConfigError::new(format!(
                "unable to load model '{}', scalar tensor '{}', should only provide 1 in the model configuration when \
                 the model doesn't support batching. Model configuration provided: {dims}.",
                config.name, io.name
            ))
            .with_hint("write dims: [ 1 ]")
        });
    }
    if model.len() != full.len() {
        let specifies = if batching {
            format!("{} dimensions ({adds} {full})", full.len())
        } else {
            format!("{} dimensions (shape {full})", full.len())
        };
        let reason = format!(
            "{what}: the model expects {} dimensions (shape {model}) but the model configuration specifies {specifies}",
            model.len()
        );
        let rest = Shape::new(model.get(usize::from(batching)..).unwrap_or_default());
        let hint = if rest.is_empty() {
            "write dims: [ 1 ] with an empty reshape { }".to_owned()
        } else if batching && dims[..] == model[..] {
            format!("dims must not hold the batch axis when max_batch_size > 0: write {rest}")
        } else {
            format!("write dims {rest}")
        };
        return Some(ConfigError::new(reason).with_hint(hint));
    }
    let fits = model.iter().zip(full.iter()).all(|(&m, &c)| m == -1 || c == -1 || m == c);
    (!fits).then(|| {
        let rest = Shape::new(model.get(usize::from(batching)..).unwrap_or_default());
        ConfigError::new(format!(
            "{what}: the model expects shape {model} but the model configuration specifies shape {full}"
        ))
        .with_hint(format!("write dims {rest}"))
    })
}
