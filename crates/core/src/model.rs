//! One loaded version of a model: what clients may ask of it, and the way to its instances.
//!
//! A version is reference-counted. Requests in flight keep it alive, so replacing it disturbs none of them.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use bytes::Bytes;
use trireme_backend::{Model, ModelTensors};
use trireme_config::{ModelSpec, Scheduling};
use trireme_proto::inference::model_sequence_batching::control::Kind;
use trireme_proto::inference::{self, ModelConfig};
use trireme_types::{DataType, Error, InferInput, InferRequest, Responder, Result, TensorBuffer, TensorSpec};

use crate::cache::{Content, ModelCache};
use crate::ensemble::Ensemble;
use crate::infer::{self, Expectation};
use crate::latencies::Latencies;
use crate::scheduler::Scheduler;
use crate::stats::{ModelStatistics, Statistics};

/// Class names of one output, one a line in its label file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels(Vec<String>);

impl Labels {
    /// Lines of a label file; carriage returns and a last empty line do not count.
    pub fn parse(text: &str) -> Self {
        Self(text.lines().map(|line| line.trim_end_matches('\r').to_owned()).collect())
    }

    /// Name of a class; `None` past the end of the file.
    pub fn get(&self, index: usize) -> Option<&str> {
        self.0.get(index).map(String::as_str).filter(|label| !label.is_empty())
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// One version of a model that is loaded.
pub struct ModelVersion {
    pub(crate) name: Arc<str>,
    version: i64,
    version_text: String,
    platform: String,
    spec: ModelSpec,
    config: Arc<ModelConfig>,
    config_json: Bytes,
    tensors: ModelTensors,
    labels: HashMap<Arc<str>, Labels>,
    text_ids: bool,
    /// `None` for ensembles.
    backend_model: Option<Arc<dyn Model>>,
    scheduler: Scheduler,
    cache: ModelCache,
    pub(crate) statistics: Statistics,
    pub(crate) load_duration: std::time::Duration,
    in_flight: AtomicUsize,
    /// Requests of ensembles that will come here; see [`ModelVersion::hold`].
    held: AtomicUsize,
    is_stopped: AtomicBool,
}

/// What a version is made of; see [`ModelVersion::new`].
pub(crate) struct ModelParts {
    pub(crate) name: Arc<str>,
    pub(crate) version: i64,
    pub(crate) spec: ModelSpec,
    pub(crate) config: Arc<ModelConfig>,
    pub(crate) config_json: Bytes,
    pub(crate) tensors: ModelTensors,
    pub(crate) labels: HashMap<Arc<str>, Labels>,
    pub(crate) backend_model: Option<Arc<dyn Model>>,
    pub(crate) scheduler: Scheduler,
    pub(crate) cache: ModelCache,
    pub(crate) latencies: Option<Latencies>,
    pub(crate) load_duration: std::time::Duration,
}

impl ModelVersion {
    pub(crate) fn new(parts: ModelParts) -> Self {
        let config = &parts.config;
        let platform =
            if config.platform.is_empty() { config.backend.clone() } else { config.platform.clone() };
        Self {
            version_text: parts.version.to_string(),
            name: parts.name,
            version: parts.version,
            platform,
            text_ids: takes_text_ids(&parts.spec),
            spec: parts.spec,
            config: parts.config,
            config_json: parts.config_json,
            tensors: parts.tensors,
            labels: parts.labels,
            backend_model: parts.backend_model,
            scheduler: parts.scheduler,
            cache: parts.cache,
            statistics: Statistics::new(parts.latencies),
            load_duration: parts.load_duration,
            in_flight: AtomicUsize::new(0),
            held: AtomicUsize::new(0),
            is_stopped: AtomicBool::new(false),
        }
    }

    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    pub fn version(&self) -> i64 {
        self.version
    }

    /// The version as text, as protocols write it.
    pub fn version_str(&self) -> &str {
        &self.version_text
    }

    /// `platform` of the metadata extension: the configuration's platform, or its backend.
    pub fn platform(&self) -> &str {
        &self.platform
    }

    /// The completed configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The completed configuration as the HTTP `/config` endpoint serves it.
    pub fn config_json(&self) -> &Bytes {
        &self.config_json
    }

    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Inputs, `dims` without the batch dimension.
    pub fn inputs(&self) -> &[TensorSpec] {
        &self.tensors.inputs
    }

    /// Outputs, `dims` without the batch dimension.
    pub fn outputs(&self) -> &[TensorSpec] {
        &self.tensors.outputs
    }

    /// 0 for models without a batch dimension.
    pub fn max_batch_size(&self) -> usize {
        self.tensors.max_batch_size
    }

    /// Whether one request may have any number of responses.
    pub fn is_decoupled(&self) -> bool {
        self.config.model_transaction_policy.as_ref().is_some_and(|policy| policy.decoupled)
    }

    /// The model's own copy of an input's name, or a new one if it has no such input.
    pub fn input_name(&self, name: &str) -> Arc<str> {
        interned(&self.tensors.inputs, name)
    }

    /// The model's own copy of an output's name, or a new one if it has no such output.
    pub fn output_name(&self, name: &str) -> Arc<str> {
        interned(&self.tensors.outputs, name)
    }

    /// Class names of an output, if its configuration names a label file.
    pub fn labels(&self, output: &str) -> Option<&Labels> {
        self.labels.get(output)
    }

    /// The only input of a raw binary request: name, data type and shape are the model's, the bytes are the body.
    ///
    /// # Errors
    /// `INVALID_ARG` if the model has not exactly one input or the bytes do not fit it.
    pub fn raw_input(&self, body: TensorBuffer) -> Result<InferInput> {
        infer::raw_input(body, &self.expectation())
    }

    /// Whether bytes of an input of that type may change while the model reads them. Not those that are checked and
    /// then used again: strings with their lengths, booleans, and integers that may be indices. Not where a tensor is
    /// compared with others to come, as a cache does, or goes through models that may have one.
    pub fn bears_changes(&self, data_type: DataType) -> bool {
        use DataType::{Bf16, Fp16, Fp32, Fp64, Int8, Int16, Uint8, Uint16};
        matches!(data_type, Fp16 | Bf16 | Fp32 | Fp64 | Int8 | Uint8 | Int16 | Uint16)
            && !self.cache.is_used()
            && !matches!(self.spec.scheduling, Scheduling::Ensemble(_))
    }

    /// Whether every instance can run.
    pub fn is_ready(&self) -> bool {
        self.scheduler.is_ready()
    }

    /// Requests that have entered and have not been answered.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Acquire)
    }

    /// Requests that wait for an instance.
    pub(crate) fn pending(&self) -> usize {
        self.scheduler.pending()
    }

    pub(crate) fn statistics(&self) -> ModelStatistics {
        let memory = self.backend_model.as_ref().map(|model| model.memory_usage()).unwrap_or_default();
        self.statistics.totals().into_statistics(&self.name, self.version, memory)
    }

    /// Checks a request and gives it to the instances. Every error goes through the responder.
    pub(crate) fn infer(self: &Arc<Self>, mut request: InferRequest, responder: Responder) {
        if let Err(error) = infer::normalize(&mut request, &self.expectation()) {
            self.statistics.refused();
            responder.finish(Err(error));
            return;
        }
        self.cache.infer(self, request, responder);
    }

    /// Names of the models whose instances its requests need: its own, or those of an ensemble's steps.
    pub(crate) fn models_inside(&self) -> BTreeSet<Arc<str>> {
        match &self.scheduler {
            Scheduler::Ensemble(ensemble) => ensemble.models().clone(),
            _ => BTreeSet::from([Arc::clone(&self.name)]),
        }
    }

    /// Whether two loads of an ensemble version do the same, so that the later one is not needed.
    pub(crate) fn serves_like(&self, other: &Self) -> bool {
        match (&self.scheduler, &other.scheduler) {
            (Scheduler::Ensemble(mine), Scheduler::Ensemble(theirs)) => {
                self.version == other.version
                    && self.config_json == other.config_json
                    && mine.facts() == theirs.facts()
            }
            _ => false,
        }
    }

    /// Gives a request that has been checked, and was not answered from the cache, to the scheduler.
    pub(crate) fn schedule(self: &Arc<Self>, request: InferRequest, responder: Responder) {
        self.scheduler.enqueue(self, request, responder);
    }

    pub(crate) fn cache(&self) -> &ModelCache {
        &self.cache
    }

    /// What the version is made of, the models of an ensemble's steps aside.
    pub(crate) fn content(&self) -> &Content {
        self.cache.content()
    }

    /// The ensemble, if the model is one.
    pub(crate) fn ensemble(&self) -> Option<&Ensemble> {
        match &self.scheduler {
            Scheduler::Ensemble(ensemble) => Some(ensemble),
            Scheduler::Instances(_) => None,
        }
    }

    /// No further request of a client will come.
    pub(crate) fn drain(&self) {
        self.scheduler.drain();
    }

    /// Refuses new requests; those already inside are answered, and those of ensembles that hold the version are let in.
    pub(crate) fn stop(&self) {
        self.is_stopped.store(true, Ordering::SeqCst);
        if self.held.load(Ordering::SeqCst) == 0 {
            self.scheduler.stop();
        }
    }

    /// Keeps the version taking requests, although it may be stopped, until the hold is dropped. `None` if it has been
    /// stopped already.
    pub(crate) fn hold(self: &Arc<Self>) -> Option<Hold> {
        self.held.fetch_add(1, Ordering::SeqCst);
        let hold = Hold(Arc::clone(self));
        (!self.is_stopped.load(Ordering::SeqCst)).then_some(hold)
    }

    pub(crate) fn enter(self: &Arc<Self>) -> InFlight {
        self.in_flight.fetch_add(1, Ordering::AcqRel);
        InFlight(Arc::clone(self))
    }

    fn expectation(&self) -> Expectation<'_> {
        Expectation {
            model: &self.name,
            max_batch_size: self.tensors.max_batch_size,
            inputs: &self.tensors.inputs,
            outputs: &self.tensors.outputs,
            padding: self.tensors.padding.as_deref(),
            text_ids: self.text_ids,
        }
    }
}

impl fmt::Debug for ModelVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ModelVersion({}:{})", self.name, self.version)
    }
}

/// A promise that a version takes requests.
pub(crate) struct Hold(Arc<ModelVersion>);

impl Hold {
    pub(crate) fn model(&self) -> &Arc<ModelVersion> {
        &self.0
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.0.held.fetch_sub(1, Ordering::SeqCst) == 1 && self.0.is_stopped.load(Ordering::SeqCst) {
            self.0.scheduler.stop();
        }
    }
}

/// A request inside a model; it leaves when this is dropped.
pub(crate) struct InFlight(Arc<ModelVersion>);

impl InFlight {
    pub(crate) fn model(&self) -> &Arc<ModelVersion> {
        &self.0
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Whether a correlation id may be a string: with a CORRID control of that type, or without any. An ensemble leaves it to
/// its steps.
fn takes_text_ids(spec: &ModelSpec) -> bool {
    match &spec.scheduling {
        Scheduling::Sequence(batching) => batching
            .control_input
            .iter()
            .flat_map(|input| &input.control)
            .filter(|control| control.kind() == Kind::ControlSequenceCorrid)
            .all(|control| control.data_type() == inference::DataType::TypeString),
        Scheduling::Ensemble(_) => true,
        Scheduling::Default | Scheduling::Dynamic(_) => false,
    }
}

fn interned(specs: &[TensorSpec], name: &str) -> Arc<str> {
    specs
        .iter()
        .find(|spec| &*spec.name == name)
        .map_or_else(|| Arc::from(name), |spec| Arc::clone(&spec.name))
}

/// Reads a version as protocols write it; the empty text leaves the choice to the server.
///
/// # Errors
/// `INVALID_ARG` with Triton's wording for anything but a whole number above 0.
pub fn parse_version(text: &str) -> Result<Option<i64>> {
    if text.is_empty() {
        return Ok(None);
    }
    match text.parse::<i64>() {
        Ok(version) if version > 0 => Ok(Some(version)),
        Ok(_) => Err(Error::invalid_arg(format!(
            "invalid model version specified '{text}' , version should be an integral value > 0"
        ))),
        Err(error) => {
            let details = match error.kind() {
                std::num::IntErrorKind::PosOverflow | std::num::IntErrorKind::NegOverflow => "out of range",
                _ => "stol",
            };
            Err(Error::invalid_arg(format!(
                "failed to get model version from specified version string '{text}' (details: {details}), version \
                 should be an integral value > 0"
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_versions() {
        assert_eq!(parse_version(""), Ok(None));
        assert_eq!(parse_version("3"), Ok(Some(3)));
        for bad in ["0", "-1", "abc", "1.0", "9223372036854775808", " 1"] {
            let error = parse_version(bad).expect_err(bad);
            assert!(error.message().ends_with("version should be an integral value > 0"), "{error}");
        }
    }

    #[test]
    fn labels_end_with_their_file() {
        let labels = Labels::parse("cat\r\ndog\r\nbird");
        assert_eq!(labels.get(0), Some("cat"));
        assert_eq!(labels.get(2), Some("bird"));
        assert_eq!(labels.get(3), None);
        assert_eq!(Labels::parse("a\n").len(), 1);
    }
}
