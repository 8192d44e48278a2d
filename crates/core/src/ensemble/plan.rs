//! The shape of an ensemble, fixed when it is loaded: which step reads and writes which tensor, and in which stream of
//! responses it runs.
//!
//! A decoupled step starts a *stream*: everything behind it runs once for each of its responses. Stream 0 is the request
//! itself, stream `k + 1` the responses of step `k`. A step reads tensors of one stream and, besides, of stream 0; the
//! checks at load see to it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use trireme_config::EnsembleFlow;
use trireme_proto::inference::ModelEnsembling;
use trireme_types::TensorSpec;

/// Index into [`Plan::tensors`].
pub(super) type TensorId = usize;
/// 0: the request; `k + 1`: the responses of step `k`.
pub(super) type StreamId = usize;

/// One ensemble tensor.
#[derive(Debug)]
pub(super) struct PlannedTensor {
    pub(super) name: Arc<str>,
    pub(super) stream: StreamId,
    /// Place among the tensors of its stream.
    pub(super) slot: usize,
    /// Steps that read it, each once.
    pub(super) readers: Vec<usize>,
}

/// One step.
#[derive(Debug)]
pub(super) struct PlannedStep {
    pub(super) model: Arc<str>,
    /// `None`: the highest that is ready.
    pub(super) version: Option<i64>,
    /// Input of the model, and the tensor that it gets.
    pub(super) inputs: Vec<(Arc<str>, TensorId)>,
    /// Output of the model, and the tensor that it becomes.
    pub(super) outputs: Vec<(Arc<str>, TensorId)>,
    /// Stream that it runs in.
    pub(super) stream: StreamId,
    /// Place among the steps of that stream.
    pub(super) place: usize,
    /// Whether it starts a stream of its own.
    pub(super) is_decoupled: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) tensors: Vec<PlannedTensor>,
    pub(super) steps: Vec<PlannedStep>,
    /// Tensors of the ensemble's inputs, in the order of its configuration.
    pub(super) inputs: Vec<TensorId>,
    /// Tensors of the ensemble's outputs, likewise.
    pub(super) outputs: Vec<TensorId>,
    /// Steps of each stream.
    pub(super) steps_of_stream: Vec<Vec<usize>>,
    /// Number of tensors of each stream.
    pub(super) slots_of_stream: Vec<usize>,
    /// A step none of whose inputs came is skipped, and what it would have written counts as left out.
    pub(super) skip_without_input: bool,
}

impl Plan {
    /// Lays an ensemble out. `flow` is what the checks at load found; the configuration has passed them.
    pub(super) fn new(
        ensemble: &ModelEnsembling,
        inputs: &[TensorSpec],
        outputs: &[TensorSpec],
        flow: &EnsembleFlow,
        skip_without_input: bool,
    ) -> Self {
        let streams = ensemble.step.len() + 1;
        let mut plan = Self {
            tensors: Vec::new(),
            steps: Vec::with_capacity(ensemble.step.len()),
            inputs: Vec::new(),
            outputs: Vec::new(),
            steps_of_stream: vec![Vec::new(); streams],
            slots_of_stream: vec![0; streams],
            skip_without_input,
        };
        let mut known = BTreeMap::new();
        plan.inputs = inputs.iter().map(|input| plan.tensor(&mut known, &input.name, 0)).collect();
        for (index, step) in ensemble.step.iter().enumerate() {
            let stream = flow.source_of_step.get(index).copied().flatten().map_or(0, |source| source + 1);
            let is_decoupled = flow.is_decoupled.get(index) == Some(&true);
            let writes_to = if is_decoupled { index + 1 } else { stream };
            let outputs = step
                .output_map
                .iter()
                .map(|(name, tensor)| (Arc::from(name.as_str()), plan.tensor(&mut known, tensor, writes_to)))
                .collect();
            let place = plan.steps_of_stream.get_mut(stream).map_or(0, |steps| {
                steps.push(index);
                steps.len() - 1
            });
            plan.steps.push(PlannedStep {
                model: Arc::from(step.model_name.as_str()),
                version: (step.model_version > 0).then_some(step.model_version),
                inputs: Vec::new(),
                outputs,
                stream,
                place,
                is_decoupled,
            });
        }
        for (index, step) in ensemble.step.iter().enumerate() {
            let inputs: Vec<_> = step
                .input_map
                .iter()
                .map(|(name, tensor)| (Arc::from(name.as_str()), plan.tensor(&mut known, tensor, 0)))
                .collect();
            for tensor in inputs.iter().map(|(_, tensor)| *tensor).collect::<BTreeSet<_>>() {
                if let Some(tensor) = plan.tensors.get_mut(tensor) {
                    tensor.readers.push(index);
                }
            }
            if let Some(step) = plan.steps.get_mut(index) {
                step.inputs = inputs;
            }
        }
        plan.outputs = outputs.iter().map(|output| plan.tensor(&mut known, &output.name, 0)).collect();
        plan
    }

    /// The tensor of that name, a new one in `stream` if it was not named before.
    fn tensor(&mut self, known: &mut BTreeMap<Arc<str>, TensorId>, name: &str, stream: StreamId) -> TensorId {
        if let Some(id) = known.get(name) {
            return *id;
        }
        let id = self.tensors.len();
        let name: Arc<str> = Arc::from(name);
        known.insert(Arc::clone(&name), id);
        let slot = self.slots_of_stream.get_mut(stream).map_or(0, |slots| {
            *slots += 1;
            *slots - 1
        });
        self.tensors.push(PlannedTensor { name, stream, slot, readers: Vec::new() });
        id
    }

    /// Steps that run, directly or in streams within, for the responses of a decoupled step.
    pub(super) fn behind(&self, step: usize) -> Vec<usize> {
        let mut found = Vec::new();
        let mut streams = vec![step + 1];
        while let Some(stream) = streams.pop() {
            for member in self.steps_of_stream.get(stream).into_iter().flatten() {
                found.push(*member);
                if self.steps.get(*member).is_some_and(|step| step.is_decoupled) {
                    streams.push(member + 1);
                }
            }
        }
        found
    }

    /// Stream of the response that gives these outputs: at most one besides stream 0.
    pub(super) fn stream_of(&self, outputs: &[usize]) -> StreamId {
        let stream =
            |output: &usize| self.tensors.get(*self.outputs.get(*output)?).map(|tensor| tensor.stream);
        outputs.iter().filter_map(stream).max().unwrap_or(0)
    }
}
