//! Rules of an ensemble that can be told without the models of its steps: every tensor is written once, every
//! output is reached from the inputs, nothing is left over.

use std::collections::{BTreeMap, BTreeSet};

use trireme_proto::inference::ModelEnsembling;
use trireme_proto::inference::model_config::SchedulingChoice;

use super::Checker;

/// What is known of one ensemble tensor.
#[derive(Default)]
struct Tensor {
    /// Step that writes it.
    written_by: Option<usize>,
    is_read: bool,
    is_ready: bool,
}

type Tensors<'a> = BTreeMap<&'a str, Tensor>;

pub(super) fn check(checker: &mut Checker<'_>) {
    let config = checker.config;
    let name = &config.name;
    let Some(SchedulingChoice::EnsembleScheduling(ensemble)) = &config.scheduling_choice else {
        if config.platform == "ensemble" {
            let reason =
                format!("ensemble scheduling must be set for ensemble {name} whose platform is ensemble");
            checker.fail_with_hint("platform", reason, "write `ensemble_scheduling { step [ ... ] }`");
        }
        return;
    };
    if config.platform != "ensemble" {
        let reason =
            format!("ensemble scheduling cannot be set for model '{name}' whose platform is not ensemble");
        checker.fail_with_hint("ensemble_scheduling", reason, "write `platform: \"ensemble\"`");
    }
    if !config.instance_group.is_empty() {
        checker
            .fail("instance_group", format!("instance group should not be specified for ensemble '{name}'"));
    }
    if config.optimization.is_some() {
        checker.fail("optimization", format!("optimization should not be specified for ensemble '{name}'"));
    }
    if !config.model_warmup.is_empty() {
        checker.fail("model_warmup", format!("model_warmup can not be specified for ensemble '{name}'"));
    }
    if ensemble.step.is_empty() {
        checker.fail("ensemble_scheduling.step", format!("must specify 'step' for ensemble '{name}'"));
        return;
    }
    if let Some(mut tensors) = steps(checker, ensemble) {
        data_flow(checker, ensemble, &mut tensors);
    }
}

/// Checks the steps one by one and collects their tensors; `None` if a step is incomplete.
fn steps<'a>(checker: &mut Checker<'_>, ensemble: &'a ModelEnsembling) -> Option<Tensors<'a>> {
    let name = checker.config.name.clone();
    let mut tensors = Tensors::new();
    let mut complete = true;
    for (i, step) in ensemble.step.iter().enumerate() {
        let path = format!("ensemble_scheduling.step[{i}]");
        let required = [
            ("model_name", step.model_name.is_empty()),
            ("input_map", step.input_map.is_empty()),
            ("output_map", step.output_map.is_empty()),
        ];
        for (member, _) in required.into_iter().filter(|(_, is_missing)| *is_missing) {
            checker.fail(path.clone(), format!("must specify '{member}' in step {i} of ensemble '{name}'"));
            complete = false;
        }
        for (output, tensor) in &step.output_map {
            let entry = tensors.entry(tensor).or_default();
            if entry.written_by.replace(i).is_some() {
                let reason = format!(
                    "ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}' step {i}"
                );
                checker.fail(format!("{path}.output_map[{output:?}]"), reason);
                complete = false;
            }
        }
        for tensor in step.input_map.values() {
            tensors.entry(tensor).or_default().is_read = true;
        }
    }
    complete.then_some(tensors)
}

/// Follows the data from the ensemble's inputs through the steps that can run.
fn data_flow<'a>(checker: &mut Checker<'_>, ensemble: &'a ModelEnsembling, tensors: &mut Tensors<'a>) {
    let config = checker.config;
    let name = &config.name;
    for (i, input) in config.input.iter().enumerate() {
        match tensors.get_mut(input.name.as_str()) {
            Some(tensor) => tensor.is_ready = true,
            None => {
                let reason = format!("ensemble input '{}' for ensemble {name}' is not used", input.name);
                checker.fail_with_hint(
                    format!("input[{i}].name"),
                    reason,
                    "name it in the input_map of a step",
                );
            }
        }
    }
    run_steps(ensemble, tensors);
    let mut outputs = BTreeSet::new();
    for (i, output) in config.output.iter().enumerate() {
        let path = format!("output[{i}].name");
        match tensors.get(output.name.as_str()) {
            None => {
                let reason = format!("ensemble output '{}' for ensemble {name}' is not used", output.name);
                checker.fail_with_hint(path, reason, "name it in the output_map of a step");
            }
            Some(tensor) if !tensor.is_ready => {
                let mut reason = format!("output '{}' for ensemble '{name}' is not written", output.name);
                if let Some(source) = unready_source(&output.name, ensemble, tensors) {
                    reason.push_str(&format!(
                        ": at least one of its depending tensors, '{source}', is not connected"
                    ));
                }
                checker.fail(path, reason);
            }
            Some(_) => {
                outputs.insert(output.name.as_str());
            }
        }
    }
    let is_left_over = |(tensor, state): &(&&str, &Tensor)| {
        !outputs.contains(**tensor) && (!state.is_ready || !state.is_read)
    };
    // Told only when nothing else is wrong: an unready tensor is most often the result of one of the above.
    if checker.errors.is_empty()
        && let Some((tensor, state)) = tensors.iter().find(is_left_over)
    {
        let reason = format!("ensemble tensor '{tensor}' is unused in ensemble '{name}'");
        let hint = if state.is_ready {
            "a step writes it and nobody reads it; remove it from the output_map, or make it an output"
        } else {
            "a step reads it and nobody writes it; make it an input, or the output of another step"
        };
        checker.fail_with_hint("ensemble_scheduling.step", reason, hint);
    }
}

/// Marks the tensors that get ready: a step runs when all its inputs are.
fn run_steps<'a>(ensemble: &'a ModelEnsembling, tensors: &mut Tensors<'a>) {
    let mut readers: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    let mut missing: Vec<usize> = Vec::with_capacity(ensemble.step.len());
    for (i, step) in ensemble.step.iter().enumerate() {
        let inputs: BTreeSet<&str> = step.input_map.values().map(String::as_str).collect();
        missing.push(inputs.len());
        for tensor in inputs {
            readers.entry(tensor).or_default().push(i);
        }
    }
    let mut ready: Vec<&str> =
        tensors.iter().filter(|(_, tensor)| tensor.is_ready).map(|(name, _)| *name).collect();
    while let Some(tensor) = ready.pop() {
        for &i in readers.get(tensor).into_iter().flatten() {
            let (Some(step), Some(left)) = (ensemble.step.get(i), missing.get_mut(i)) else { continue };
            *left = left.saturating_sub(1);
            if *left > 0 {
                continue;
            }
            for output in step.output_map.values() {
                if let Some(state) = tensors.get_mut(output.as_str()).filter(|state| !state.is_ready) {
                    state.is_ready = true;
                    ready.push(output);
                }
            }
        }
    }
}

/// The tensor furthest up from an output that never gets ready. Every tensor is visited once, so a cycle ends.
fn unready_source<'a>(
    output: &'a str,
    ensemble: &'a ModelEnsembling,
    tensors: &Tensors<'_>,
) -> Option<&'a str> {
    let mut seen = BTreeSet::new();
    let mut current = output;
    let mut source = None;
    loop {
        let writer = tensors.get(current).and_then(|tensor| tensor.written_by);
        let step = writer.and_then(|i| ensemble.step.get(i));
        let unready = |tensor: &&String| tensors.get(tensor.as_str()).is_some_and(|t| !t.is_ready);
        let next = step.and_then(|step| {
            step.input_map.values().filter(unready).find(|tensor| seen.insert(tensor.as_str()))
        });
        let Some(next) = next else { return source };
        current = next;
        source = Some(current);
    }
}
