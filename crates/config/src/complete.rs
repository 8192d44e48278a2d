//! Inputs, outputs and batch size, where the configuration leaves them out, from what the backend read in the model
//! file.
//!
//! The rules are those of Triton's ONNX Runtime backend. Beyond them, a tensor that is configured in part gets its
//! missing data type and dims, and an explicit batch axis in configured dims keeps batching off.
//! Source: `AutoCompleteMaxBatch`, `AutoCompleteIO` in `onnxruntime_backend`.

use trireme_proto::inference::model_config::SchedulingChoice;
use trireme_proto::inference::{
    ModelConfig, ModelDynamicBatching, ModelInput, ModelOutput, ModelTensorReshape, ModelTransactionPolicy,
};
use trireme_types::{ModelReport, ReportedTensor, Shape};

use crate::error::{ConfigError, ConfigErrors, Note};
use crate::normalize::fill_batching;

/// Fills in what the model file can tell. Nothing that is configured is changed, except that `max_batch_size` 0
/// becomes `default_max_batch_size` when the model can batch and its tensors are not all configured. `strict` fills
/// nothing in.
///
/// # Errors
/// The configuration asks for batches and the model has no batch dimension; a tensor is configured without a name.
pub fn complete(
    config: &mut ModelConfig,
    report: &ModelReport,
    default_max_batch_size: i32,
    strict: bool,
) -> Result<Vec<Note>, ConfigErrors> {
    let mut notes = Vec::new();
    if strict {
        return Ok(notes);
    }
    apply_own_settings(config, report, &mut notes);
    unnamed_tensors(config, report)?;
    if config.input.is_empty() || config.output.is_empty() {
        complete_max_batch_size(config, report, default_max_batch_size, &mut notes)?;
    }
    let batching = config.max_batch_size > 0;
    if config.input.is_empty() {
        let required = report.inputs.iter().filter(|tensor| !tensor.optional);
        config.input = required
            .filter(|tensor| !is_supplied(config, &tensor.name))
            .map(|t| input_of(t, batching))
            .collect();
        note_tensors("input", config.input.iter().map(|io| io.name.as_str()), config, &mut notes);
    } else {
        fill_inputs(config, report, &mut notes);
    }
    if config.output.is_empty() {
        let visible = report.outputs.iter().filter(|tensor| !is_state_output(config, &tensor.name));
        config.output = visible
            .map(|tensor| output_of(tensor, batching && !is_scattered(config, &tensor.name)))
            .collect();
        note_tensors("output", config.output.iter().map(|io| io.name.as_str()), config, &mut notes);
    } else {
        fill_outputs(config, report, &mut notes);
    }
    fill_batching(config);
    Ok(notes)
}

/// What the model file says of itself beyond its tensors.
fn apply_own_settings(config: &mut ModelConfig, report: &ModelReport, notes: &mut Vec<Note>) {
    if let Some(size) = report.max_batch_size.filter(|&size| size > config.max_batch_size) {
        notes.push(Note::info(
            "max_batch_size",
            format!("max_batch_size is {size}, which the model sets itself"),
        ));
        config.max_batch_size = size;
    }
    if let Some(decoupled) = report.decoupled {
        config.model_transaction_policy.get_or_insert(ModelTransactionPolicy { decoupled });
    }
    if report.dynamic_batching && config.scheduling_choice.is_none() {
        notes.push(Note::info("dynamic_batching", "dynamic_batching is on, which the model sets itself"));
        config.scheduling_choice = Some(SchedulingChoice::DynamicBatching(ModelDynamicBatching::default()));
    }
}

fn unnamed_tensors(config: &ModelConfig, report: &ModelReport) -> Result<(), ConfigErrors> {
    let inputs = config.input.iter().map(|io| io.name.is_empty());
    let outputs = config.output.iter().map(|io| io.name.is_empty());
    let check = |side: &str, mut unnamed: Box<dyn Iterator<Item = bool> + '_>, tensors: &[ReportedTensor]| {
        let index = unnamed.position(|is_unnamed| is_unnamed)?;
        let names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        let error = ConfigError::new(format!("model {side} must specify 'name' for {}", config.name));
        Some(
            error
                .at_path(format!("{side}[{index}]"))
                .with_hint(format!("the model has the {side}s {}", names.join(", "))),
        )
    };
    let errors = [
        check("input", Box::new(inputs), &report.inputs),
        check("output", Box::new(outputs), &report.outputs),
    ];
    ConfigErrors::check(errors.into_iter().flatten().collect(), ())
}

fn complete_max_batch_size(
    config: &mut ModelConfig,
    report: &ModelReport,
    default_max_batch_size: i32,
    notes: &mut Vec<Note>,
) -> Result<(), ConfigErrors> {
    if !report.batch_dimension {
        if config.max_batch_size <= 0 {
            return Ok(());
        }
        let reason = format!(
            "autofill failed for model '{}': model does not support batching while non-zero max_batch_size is specified",
            config.name
        );
        let hint = format!("set max_batch_size: 0; the model's tensors are {}", list_shapes(report));
        return Err(ConfigError::new(reason).at_path("max_batch_size").with_hint(hint).into());
    }
    if config.max_batch_size == 0 {
        if let Some(path) = explicit_batch_axis(config, report) {
            notes.push(
                Note::warning(
                    path,
                    format!(
                        "max_batch_size of model '{}' stays 0: its dims hold the batch axis",
                        config.name
                    ),
                )
                .with_hint("to batch requests, leave the first dimension out of dims and set max_batch_size"),
            );
            return Ok(());
        }
        let size = default_max_batch_size.max(0);
        config.max_batch_size = size;
        notes.push(
            Note::info(
                "max_batch_size",
                format!(
                    "autofilled max_batch_size to {size} for model '{}': the model can batch and its configuration \
                     gives no max_batch_size",
                    config.name
                ),
            )
            .with_hint("set max_batch_size for larger batches, or configure inputs and outputs to keep it 0"),
        );
    }
    if config.max_batch_size > 1 && config.scheduling_choice.is_none() {
        notes.push(Note::info(
            "dynamic_batching",
            format!("turned dynamic_batching on for model '{}', because it can batch", config.name),
        ));
        config.scheduling_choice = Some(SchedulingChoice::DynamicBatching(ModelDynamicBatching::default()));
    }
    Ok(())
}

/// Path of the first tensor whose configured dims have as many dimensions as the model's, the batch axis included.
fn explicit_batch_axis(config: &ModelConfig, report: &ModelReport) -> Option<String> {
    let holds =
        |tensors: &[ReportedTensor], name: &str, dims: &[i64], reshape: Option<&ModelTensorReshape>| {
            let dims = reshape.map_or(dims, |reshape| &reshape.shape);
            tensors.iter().any(|tensor| {
                tensor.name == name && tensor.shape.len() > 1 && dims.len() == tensor.shape.len()
            })
        };
    let input =
        config.input.iter().position(|io| holds(&report.inputs, &io.name, &io.dims, io.reshape.as_ref()));
    let output =
        config.output.iter().position(|io| holds(&report.outputs, &io.name, &io.dims, io.reshape.as_ref()));
    input.map(|i| format!("input[{i}].dims")).or_else(|| output.map(|i| format!("output[{i}].dims")))
}

/// Whether the server itself gives the model this input: a sequence control, a state or a batch input.
pub(crate) fn is_supplied(config: &ModelConfig, name: &str) -> bool {
    let by_batch =
        config.batch_input.iter().any(|batch| batch.target_name.iter().any(|target| target == name));
    let by_sequence = match &config.scheduling_choice {
        Some(SchedulingChoice::SequenceBatching(sequence)) => {
            sequence.control_input.iter().any(|control| control.name == name)
                || sequence.state.iter().any(|state| state.input_name == name)
        }
        _ => false,
    };
    by_batch || by_sequence
}

/// Whether the output is a state that the server keeps to itself.
pub(crate) fn is_state_output(config: &ModelConfig, name: &str) -> bool {
    match &config.scheduling_choice {
        Some(SchedulingChoice::SequenceBatching(sequence)) => {
            sequence.state.iter().any(|state| state.output_name == name)
        }
        _ => false,
    }
}

/// Whether the output is flat in the model and goes back in pieces.
pub(crate) fn is_scattered(config: &ModelConfig, name: &str) -> bool {
    config.batch_output.iter().any(|batch| batch.target_name.iter().any(|target| target == name))
}

/// Dims without the batch dimension, and the reshape that makes a scalar of them. Dimensions of size 0 become open,
/// because a configuration cannot name them.
fn dims_of(tensor: &ReportedTensor, batching: bool) -> (Vec<i64>, Option<ModelTensorReshape>) {
    let skip = usize::from(batching);
    let dims: Vec<i64> = tensor.shape.iter().skip(skip).map(|&dim| if dim < 1 { -1 } else { dim }).collect();
    if dims.is_empty() { (vec![1], batching.then(ModelTensorReshape::default)) } else { (dims, None) }
}

fn input_of(tensor: &ReportedTensor, batching: bool) -> ModelInput {
    let (dims, reshape) = dims_of(tensor, batching);
    ModelInput {
        name: tensor.name.clone(),
        data_type: tensor.data_type.config_number(),
        dims,
        reshape,
        ..ModelInput::default()
    }
}

fn output_of(tensor: &ReportedTensor, batching: bool) -> ModelOutput {
    let (dims, reshape) = dims_of(tensor, batching);
    ModelOutput {
        name: tensor.name.clone(),
        data_type: tensor.data_type.config_number(),
        dims,
        reshape,
        ..ModelOutput::default()
    }
}

/// Data type and dims of inputs that are configured without them.
fn fill_inputs(config: &mut ModelConfig, report: &ModelReport, notes: &mut Vec<Note>) {
    let batching = config.max_batch_size > 0;
    for (index, io) in config.input.iter_mut().enumerate() {
        let Some(tensor) = report.inputs.iter().find(|tensor| tensor.name == io.name) else { continue };
        // A ragged input is flat in the model and has no batch dimension there.
        let filled = input_of(tensor, batching && !io.allow_ragged_batch);
        if io.data_type == 0 {
            io.data_type = filled.data_type;
            notes.push(Note::info(
                format!("input[{index}]"),
                format!(
                    "data_type of input '{}' is the model's, {}",
                    io.name,
                    tensor.data_type.config_name()
                ),
            ));
        }
        if io.dims.is_empty() {
            notes.push(Note::info(
                format!("input[{index}]"),
                format!("dims of input '{}' are the model's, {}", io.name, Shape::new(&filled.dims)),
            ));
            io.dims = filled.dims;
            io.reshape = io.reshape.take().or(filled.reshape);
        }
    }
}

/// Data type and dims of outputs that are configured without them.
fn fill_outputs(config: &mut ModelConfig, report: &ModelReport, notes: &mut Vec<Note>) {
    let batching = config.max_batch_size > 0;
    let scattered: Vec<bool> = config.output.iter().map(|io| is_scattered(config, &io.name)).collect();
    for (index, (io, scattered)) in config.output.iter_mut().zip(scattered).enumerate() {
        let Some(tensor) = report.outputs.iter().find(|tensor| tensor.name == io.name) else { continue };
        let filled = output_of(tensor, batching && !scattered);
        if io.data_type == 0 {
            io.data_type = filled.data_type;
            notes.push(Note::info(
                format!("output[{index}]"),
                format!(
                    "data_type of output '{}' is the model's, {}",
                    io.name,
                    tensor.data_type.config_name()
                ),
            ));
        }
        if io.dims.is_empty() {
            notes.push(Note::info(
                format!("output[{index}]"),
                format!("dims of output '{}' are the model's, {}", io.name, Shape::new(&filled.dims)),
            ));
            io.dims = filled.dims;
            io.reshape = io.reshape.take().or(filled.reshape);
        }
    }
}

fn note_tensors<'a>(
    side: &str,
    names: impl Iterator<Item = &'a str>,
    config: &ModelConfig,
    notes: &mut Vec<Note>,
) {
    let names: Vec<&str> = names.collect();
    if !names.is_empty() {
        let message =
            format!("{side} of model '{}' is taken from the model file: {}", config.name, names.join(", "));
        notes.push(Note::info(side, message));
    }
}

fn list_shapes(report: &ModelReport) -> String {
    let shapes: Vec<String> = report
        .inputs
        .iter()
        .chain(&report.outputs)
        .map(|tensor| format!("{} {}", tensor.name, tensor.shape))
        .collect();
    shapes.join(", ")
}

#[cfg(test)]
mod tests;
