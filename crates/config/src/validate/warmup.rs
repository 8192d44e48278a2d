//! Rules of `model_warmup`.
//!
//! Triton finds most of these only when it builds the requests, and then without a place.

use std::path::{Component, Path};

use trireme_proto::inference::model_config::SchedulingChoice;
use trireme_proto::inference::model_warmup::Input;
use trireme_proto::inference::model_warmup::input::InputDataType;
use trireme_proto::inference::{DataType, ModelConfig, ModelInput, ModelWarmup};
use trireme_types::Shape;

use super::Checker;

pub(super) fn check(checker: &mut Checker<'_>) {
    let config = checker.config;
    // The rule for ensembles is that they have none.
    if matches!(config.scheduling_choice, Some(SchedulingChoice::EnsembleScheduling(_))) {
        return;
    }
    let added = added_inputs(config);
    for (i, sample) in config.model_warmup.iter().enumerate() {
        let path = format!("model_warmup[{i}]");
        batch_size(checker, sample, &path);
        for (name, input) in &sample.inputs {
            let path = format!("{path}.inputs[\"{name}\"]");
            match config.input.iter().find(|input| input.name == *name) {
                Some(declared) => model_input(checker, declared, input, &path),
                None if added.contains(&name.as_str()) => {}
                None => unknown(checker, sample, name, &added, &path),
            }
            data(checker, name, input, &path);
        }
        let absent = |input: &&ModelInput| !input.optional && !sample.inputs.contains_key(&input.name);
        let missing: Vec<&str> =
            config.input.iter().filter(absent).map(|input| input.name.as_str()).collect();
        if !missing.is_empty() && sample.batch_size > 0 {
            let reason = format!(
                "warmup sample '{}' of model {} lacks the required input(s) {}",
                sample.name,
                config.name,
                quoted(&missing)
            );
            let hint = "add `inputs { key: \"NAME\" value { data_type: ... dims: [ ... ] zero_data: true } }` for each";
            checker.fail_with_hint(path, reason, hint);
        }
    }
}

/// Tensors that the sequence batcher adds to requests.
fn added_inputs(config: &ModelConfig) -> Vec<&str> {
    let Some(SchedulingChoice::SequenceBatching(batching)) = &config.scheduling_choice else {
        return Vec::new();
    };
    let controls = batching.control_input.iter().map(|control| control.name.as_str());
    controls.chain(batching.state.iter().map(|state| state.input_name.as_str())).collect()
}

fn batch_size(checker: &mut Checker<'_>, sample: &ModelWarmup, path: &str) {
    let config = checker.config;
    let most = u32::try_from(config.max_batch_size).unwrap_or(0).max(1);
    if sample.batch_size <= most {
        return;
    }
    let (name, size) = (&sample.name, sample.batch_size);
    let (reason, hint) = if config.max_batch_size == 0 {
        let reason = format!(
            "warmup sample '{name}' has batch_size {size}, but model {} has no batch dimension",
            config.name
        );
        (reason, "write `batch_size: 1`, and `count` for repeats".to_owned())
    } else {
        let reason = format!(
            "warmup sample '{name}' has batch_size {size}, which is above max_batch_size {} of model {}",
            config.max_batch_size, config.name
        );
        (reason, format!("write a batch_size from 1 to {most}"))
    };
    checker.fail_with_hint(format!("{path}.batch_size"), reason, hint);
}

fn unknown(checker: &mut Checker<'_>, sample: &ModelWarmup, name: &str, added: &[&str], path: &str) {
    let model = &checker.config.name;
    let inputs: Vec<&str> =
        checker.config.input.iter().map(|input| input.name.as_str()).chain(added.iter().copied()).collect();
    let reason = format!(
        "warmup sample '{}' names the input '{name}', which model {model} does not have; its inputs are {}",
        sample.name,
        quoted(&inputs)
    );
    match crate::nearest::nearest(name, inputs.iter().copied()) {
        Some(meant) => {
            let hint = format!("did you mean \"{meant}\"?");
            checker.fail_with_hint(path, reason, hint);
        }
        None => checker.fail(path, reason),
    }
}

/// An input that clients send as well.
fn model_input(checker: &mut Checker<'_>, declared: &ModelInput, input: &Input, path: &str) {
    let (model, name) = (&checker.config.name, &declared.name);
    if input.data_type() != DataType::TypeInvalid && input.data_type != declared.data_type {
        let wanted = declared.data_type().as_str_name();
        let reason = format!(
            "warmup input '{name}' has data_type {}, but model {model} expects {wanted}",
            input.data_type().as_str_name()
        );
        checker.fail_with_hint(format!("{path}.data_type"), reason, format!("write `data_type: {wanted}`"));
    }
    let (dims, wanted) = (Shape::new(&input.dims), Shape::new(&declared.dims));
    if dims.is_fixed() && !wanted.accepts(&dims) {
        let reason = format!(
            "unexpected shape for warmup input '{name}' of model {model}: its dims are {wanted}, the sample has {dims}"
        );
        let hint = match input.dims.split_first() {
            Some((_, rest)) if checker.config.max_batch_size > 0 && wanted.accepts(rest) => {
                "leave the batch dimension out of dims; batch_size says how many rows there are"
            }
            _ => "dims of a sample are those of the input, with numbers in place of -1",
        };
        checker.fail_with_hint(format!("{path}.dims"), reason, hint);
    }
}

/// What every input of a sample needs.
fn data(checker: &mut Checker<'_>, name: &str, input: &Input, path: &str) {
    if input.data_type() == DataType::TypeInvalid {
        let reason = format!("warmup setting expects input '{name}' to have data_type set");
        checker.fail(format!("{path}.data_type"), reason);
    }
    if input.dims.iter().any(|&dim| dim < 0) {
        let reason =
            format!("warmup setting expects all variable-size dimensions are specified for input '{name}'");
        checker.fail_with_hint(format!("{path}.dims"), reason, "write a number in place of -1");
    }
    match &input.input_data_type {
        None => {
            let reason = format!("warmup setting expects input '{name}' to have input_data_type set");
            let hint = "write `zero_data: true`, `random_data: true` or `input_data_file: \"FILE\"`";
            checker.fail_with_hint(path, reason, hint);
        }
        Some(InputDataType::InputDataFile(file)) if !stays_inside(file) => {
            let reason = format!(
                "input_data_file '{file}' of warmup input '{name}' is no file in the model's warmup folder"
            );
            let hint = "put the file into the folder `warmup` of the model directory and write its name";
            checker.fail_with_hint(format!("{path}.input_data_file"), reason, hint);
        }
        Some(_) => {}
    }
}

/// Whether a path stays in the folder that it is relative to.
fn stays_inside(path: &str) -> bool {
    !path.is_empty() && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
}

fn quoted(names: &[&str]) -> String {
    names.iter().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
