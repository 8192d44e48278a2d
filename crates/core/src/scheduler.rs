//! How the requests of a model reach what answers them.
//!
//! `pool` holds the instances; a `source` decides what they run next: `queue` and `batcher` are the default scheduler and
//! the dynamic batcher, with `company` to say whether waiting pays, `sequence` is the sequence batcher. `order` keeps
//! answers in line, `timer` wakes pools, `run` is one execution.

mod batcher;
mod company;
mod order;
mod pool;
mod queue;
mod run;
mod sequence;
mod source;
mod stream;
mod timer;

use std::path::Path;
use std::sync::Arc;

use trireme_config::{ModelSpec, Scheduling};
use trireme_types::{Error, InferRequest, Responder, Result};

use self::batcher::Rules;
use self::company::Company;
pub(crate) use self::pool::{InstancePool, PoolParts, Remake};
use self::queue::LevelRules;
pub(crate) use self::sequence::SequencePlan;
use self::sequence::SequenceSource;
use self::source::{QueueSource, Source};
pub(crate) use self::timer::{Timer, Wakeable};
use crate::batch_kind::KindRule;
use crate::ensemble::Ensemble;
use crate::model::ModelVersion;

/// Clients that a batcher expects before it has seen any.
const FIRST_CLIENTS: usize = 16;

/// The scheduler of one model version.
pub(crate) enum Scheduler {
    /// Instances of a backend's model.
    Instances(Arc<InstancePool>),
    /// Other models.
    Ensemble(Arc<Ensemble>),
}

impl Scheduler {
    /// Takes a checked request.
    pub(crate) fn enqueue(&self, model: &Arc<ModelVersion>, request: InferRequest, responder: Responder) {
        match self {
            Self::Instances(pool) => pool.enqueue(model, request, responder),
            Self::Ensemble(ensemble) => ensemble.enqueue(model, request, responder),
        }
    }

    /// Requests that wait.
    pub(crate) fn pending(&self) -> usize {
        match self {
            Self::Instances(pool) => pool.pending(),
            Self::Ensemble(ensemble) => ensemble.pending(),
        }
    }

    /// Whether what answers the requests can run.
    pub(crate) fn is_ready(&self) -> bool {
        match self {
            Self::Instances(pool) => pool.is_ready(),
            Self::Ensemble(ensemble) => ensemble.is_ready(),
        }
    }

    /// No further request will come, though none is refused here.
    pub(crate) fn drain(&self) {
        match self {
            Self::Instances(pool) => pool.drain(),
            Self::Ensemble(_) => {}
        }
    }

    /// Refuses new requests. Those already taken are still served.
    pub(crate) fn stop(&self) {
        match self {
            Self::Instances(pool) => pool.stop(),
            Self::Ensemble(ensemble) => ensemble.stop(),
        }
    }
}

/// What the configuration says of sequences, if it does; `model_dir` has the files that it names.
///
/// # Errors
/// A state or a parameter of the scheduler that is none.
pub(crate) fn sequence_plan(spec: &ModelSpec, model_dir: &Path) -> Result<Option<SequencePlan>> {
    let Scheduling::Sequence(batching) = &spec.scheduling else { return Ok(None) };
    SequencePlan::new(spec, batching, is_delay_fixed(spec)?, model_dir).map(Some)
}

/// What decides which requests of a model run next.
///
/// # Errors
/// A parameter of the scheduler has a value that is none.
pub(crate) fn source_of(spec: &ModelSpec, sequences: Option<SequencePlan>) -> Result<Box<dyn Source>> {
    let kinds = KindRule::new(spec);
    if let Some(plan) = sequences {
        return Ok(Box::new(SequenceSource::new(plan, kinds, spec.instance_count())));
    }
    Ok(Box::new(match &spec.scheduling {
        Scheduling::Dynamic(batching) => {
            let rules = Rules {
                max_rows: spec.max_batch_size.max(1),
                preferred: batching.preferred_batch_sizes.clone(),
                max_delay: batching.max_queue_delay,
                single: spec.max_batch_size == 0,
            };
            let company = Company::new(is_delay_fixed(spec)?, rules.max_rows.min(FIRST_CLIENTS));
            QueueSource::new(rules, LevelRules::of(batching), kinds, company)
        }
        _ => QueueSource::new(Rules::single(), LevelRules::default(), kinds, Company::new(true, 0)),
    }))
}

/// Whether the model asks for Triton's rule of waiting.
fn is_delay_fixed(spec: &ModelSpec) -> Result<bool> {
    match spec.parameters.get(company::PARAMETER).map(String::as_str) {
        None | Some(company::ADAPTIVE) => Ok(false),
        Some(company::FIXED) => Ok(true),
        Some(other) => Err(Error::invalid_arg(format!(
            "parameter '{}' of model '{}' must be '{}' or '{}', got '{other}'",
            company::PARAMETER,
            spec.name,
            company::ADAPTIVE,
            company::FIXED
        ))),
    }
}
