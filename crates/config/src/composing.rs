//! Rules of an ensemble that need the models of its steps: the names that it maps exist, types and shapes agree along
//! every tensor, batches fit, and no step waits for two streams of responses that have nothing to do with each other.
//!
//! Source: `ValidateTensorMapping`, `ValidateTensorConsistency`, `ValidateEnsembleConfig` in Triton's
//! `ensemble_utils.cc`.

use std::collections::{BTreeMap, BTreeSet};

use trireme_proto::inference::model_config::SchedulingChoice;
use trireme_proto::inference::{ModelConfig, ModelEnsembling};
use trireme_types::{DataType, Shape, TensorSpec};

use crate::error::{ConfigError, ConfigErrors, Note};

/// The model of one step, as its completed configuration promises it.
#[derive(Clone, Copy, Debug)]
pub struct ComposingModel<'a> {
    pub name: &'a str,
    /// 0: no batch dimension.
    pub max_batch_size: usize,
    pub inputs: &'a [TensorSpec],
    pub outputs: &'a [TensorSpec],
    pub decoupled: bool,
}

/// What follows for an ensemble from the models of its steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EnsembleFlow {
    /// By step: the decoupled step whose responses it runs for, once for each of them; `None` if it runs once for a
    /// request.
    pub source_of_step: Vec<Option<usize>>,
    /// By step: whether it answers any number of times.
    pub is_decoupled: Vec<bool>,
}

impl EnsembleFlow {
    /// Whether the ensemble as a whole may answer any number of times.
    pub fn decoupled(&self) -> bool {
        self.is_decoupled.contains(&true)
    }
}

/// Checks an ensemble that [`crate::validate`] has passed against the models of its steps; `models` has one entry for
/// each step, in their order. Returns also what is valid but fails for some requests.
///
/// # Errors
/// Every rule that is broken, with the step's path.
pub fn check_ensemble(
    config: &ModelConfig,
    models: &[ComposingModel<'_>],
) -> Result<(EnsembleFlow, Vec<Note>), ConfigErrors> {
    let Some(SchedulingChoice::EnsembleScheduling(ensemble)) = &config.scheduling_choice else {
        return Ok((EnsembleFlow::default(), Vec::new()));
    };
    let mut check = Check { config, ensemble, models, tensors: BTreeMap::new(), errors: Vec::new() };
    check.own_tensors();
    for step in 0..ensemble.step.len() {
        check.step(step);
    }
    let flow = check.flow();
    let notes = check.optional_inputs();
    ConfigErrors::check(check.errors, (flow, notes))
}

/// What one side says of an ensemble tensor.
struct Seen<'a> {
    model: &'a str,
    data_type: DataType,
    dims: Shape,
    batching: bool,
}

impl Seen<'_> {
    fn full(&self) -> Shape {
        if self.batching { Shape::with_leading(-1, &self.dims) } else { self.dims.clone() }
    }

    fn agrees(&self, other: &Self) -> bool {
        fits(&self.dims, &other.dims) || fits(&self.full(), &other.full())
    }
}

/// Equal but for dimensions that one of the two leaves open.
fn fits(a: &Shape, b: &Shape) -> bool {
    a.len() == b.len() && a.iter().zip(b.iter()).all(|(x, y)| x == y || *x < 0 || *y < 0)
}

struct Check<'a> {
    config: &'a ModelConfig,
    ensemble: &'a ModelEnsembling,
    models: &'a [ComposingModel<'a>],
    tensors: BTreeMap<&'a str, Seen<'a>>,
    errors: Vec<ConfigError>,
}

impl<'a> Check<'a> {
    fn fail(&mut self, path: String, reason: String, hint: &str) {
        self.errors.push(ConfigError::new(reason).at_path(path).with_hint(hint));
    }

    /// The ensemble's own inputs and outputs say first what their tensors are.
    fn own_tensors(&mut self) {
        let config = self.config;
        let batching = config.max_batch_size > 0;
        let inputs = config.input.iter().map(|io| (&io.name, io.data_type, &io.dims));
        let outputs = config.output.iter().map(|io| (&io.name, io.data_type, &io.dims));
        for (name, data_type, dims) in inputs.chain(outputs) {
            let Some(data_type) = DataType::from_config_number(data_type) else { continue };
            let seen = Seen { model: &config.name, data_type, dims: Shape::new(dims), batching };
            self.tensors.entry(name).or_insert(seen);
        }
    }

    fn step(&mut self, index: usize) {
        let (Some(step), Some(&model)) = (self.ensemble.step.get(index), self.models.get(index)) else {
            return;
        };
        let ensemble = &self.config.name;
        let path = format!("ensemble_scheduling.step[{index}]");
        let largest = usize::try_from(self.config.max_batch_size).unwrap_or(0);
        if model.max_batch_size > 0 && model.max_batch_size < largest {
            self.fail(
                path.clone(),
                format!(
                    "ensemble {ensemble} allows maximum batch size {largest}, but it contains model {} which only allows \
                     maximum batch size of {} (step {index})",
                    model.name, model.max_batch_size
                ),
                "lower the ensemble's max_batch_size, or raise that of the model",
            );
        }
        for (side, map, specs) in
            [("input", &step.input_map, model.inputs), ("output", &step.output_map, model.outputs)]
        {
            for (name, tensor) in map {
                let place = format!("{path}.{side}_map[{name:?}]");
                match specs.iter().find(|spec| *spec.name == **name) {
                    Some(spec) => self.tensor(tensor, model, spec, index, place),
                    None => {
                        let known: Vec<String> =
                            specs.iter().map(|spec| format!("'{}'", spec.name)).collect();
                        self.fail(
                            place,
                            format!(
                                "in ensemble {ensemble}, ensemble tensor {tensor} is mapping to non-existing {side} {name} \
                                 in model {} (step {index})",
                                model.name
                            ),
                            &format!("the {side}s of model {} are {}", model.name, known.join(", ")),
                        );
                    }
                }
            }
        }
        for spec in
            model.inputs.iter().filter(|spec| !spec.optional && !step.input_map.contains_key(&*spec.name))
        {
            self.fail(
                format!("{path}.input_map"),
                format!(
                    "in ensemble {ensemble}, input {} in model {} is not mapped to any ensemble tensor (step {index})",
                    spec.name, model.name
                ),
                &format!("write `input_map {{ key: \"{}\" value: \"<ensemble tensor>\" }}`", spec.name),
            );
        }
    }

    /// Compares what a step's model says of a tensor with what was said before.
    fn tensor(
        &mut self,
        tensor: &'a str,
        model: ComposingModel<'a>,
        spec: &TensorSpec,
        index: usize,
        path: String,
    ) {
        let ensemble = &self.config.name;
        let seen = Seen {
            model: model.name,
            data_type: spec.data_type,
            dims: spec.dims.clone(),
            batching: model.max_batch_size > 0,
        };
        let Some(known) = self.tensors.get(tensor) else {
            self.tensors.insert(tensor, seen);
            return;
        };
        let start = format!("in ensemble {ensemble}, ensemble tensor {tensor}: inconsistent");
        let problem = if known.data_type != seen.data_type {
            let (a, b) = (known.data_type.config_name(), seen.data_type.config_name());
            Some((
                format!(
                    "{start} data type: {a} is inferred from model {} while {b} is inferred from model",
                    known.model
                ),
                "a tensor has one data type; put a step between that converts it",
            ))
        } else if !known.agrees(&seen) {
            let (a, b) = (known.full(), seen.full());
            Some((
                format!(
                    "{start} shape: {a} is inferred from model {} while {b} is inferred from model",
                    known.model
                ),
                "make the dims of the two sides agree, -1 fits every size",
            ))
        } else {
            None
        };
        if let Some((reason, hint)) = problem {
            self.fail(path, format!("{reason} {} (step {index})", seen.model), hint);
        }
    }

    /// Inputs that a client may leave out and that go where they must not be missing.
    fn optional_inputs(&self) -> Vec<Note> {
        let mut notes = Vec::new();
        for input in self.config.input.iter().filter(|input| input.optional) {
            for (index, (step, model)) in self.ensemble.step.iter().zip(self.models).enumerate() {
                let fed = |spec: &&TensorSpec| step.input_map.get(&*spec.name) == Some(&input.name);
                // A step that reads nothing else may be skipped as a whole.
                let is_alone = step.input_map.values().all(|tensor| *tensor == input.name);
                for spec in model.inputs.iter().filter(fed).filter(|spec| !spec.optional && !is_alone) {
                    let message = format!(
                        "input '{}' of ensemble '{}' is optional, but input '{}' of model '{}' (step {index}), which it \
                         feeds, is not: a request without it fails",
                        input.name, self.config.name, spec.name, model.name
                    );
                    let path = format!("ensemble_scheduling.step[{index}].input_map[{:?}]", &*spec.name);
                    notes.push(
                        Note::warning(path, message)
                            .with_hint("write `optional: true` at the model's input too"),
                    );
                }
            }
        }
        notes
    }

    /// Follows the data from the inputs and finds for each step the decoupled step that it runs for.
    fn flow(&mut self) -> EnsembleFlow {
        let steps = &self.ensemble.step;
        let is_decoupled: Vec<bool> =
            (0..steps.len()).map(|i| self.models.get(i).is_some_and(|model| model.decoupled)).collect();
        let mut origin: BTreeMap<&str, Option<usize>> =
            self.config.input.iter().map(|input| (input.name.as_str(), None)).collect();
        let mut source_of_step: Vec<Option<Option<usize>>> = vec![None; steps.len()];
        let mut moved = true;
        while moved {
            moved = false;
            for (i, step) in steps.iter().enumerate() {
                if source_of_step.get(i).is_none_or(Option::is_some) {
                    continue;
                }
                let from: Option<BTreeSet<Option<usize>>> =
                    step.input_map.values().map(|tensor| origin.get(tensor.as_str()).copied()).collect();
                let Some(from) = from else { continue };
                let mut streams = from.into_iter().flatten();
                let source = streams.next();
                if let Some(other) = streams.next() {
                    self.two_streams(
                        format!("ensemble_scheduling.step[{i}].input_map"),
                        &format!("step {i}"),
                        source,
                        other,
                    );
                }
                if let Some(slot) = source_of_step.get_mut(i) {
                    *slot = Some(source);
                }
                let result = if is_decoupled.get(i) == Some(&true) { Some(i) } else { source };
                for tensor in step.output_map.values() {
                    origin.insert(tensor, result);
                }
                moved = true;
            }
        }
        let streams: BTreeSet<usize> = self
            .config
            .output
            .iter()
            .filter_map(|output| origin.get(output.name.as_str()).copied().flatten())
            .collect();
        if let [first, second, ..] = Vec::from_iter(streams).as_slice() {
            self.two_streams("output".to_owned(), "the ensemble's response", Some(*first), *second);
        }
        let source_of_step = source_of_step.into_iter().map(Option::flatten).collect();
        EnsembleFlow { source_of_step, is_decoupled }
    }

    fn two_streams(&mut self, path: String, who: &str, first: Option<usize>, second: usize) {
        let name = |step: usize| {
            let model = self.ensemble.step.get(step).map_or("", |step| step.model_name.as_str());
            format!("'{model}' (step {step})")
        };
        let reason = format!(
            "in ensemble {}, {who} receives inputs originated from different decoupled models: {} and {}",
            self.config.name,
            first.map(name).unwrap_or_default(),
            name(second)
        );
        self.fail(path, reason, "responses of one decoupled model cannot be paired with those of another");
    }
}

#[cfg(test)]
mod tests;
