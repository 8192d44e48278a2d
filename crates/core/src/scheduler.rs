//! How the requests of a model reach what answers them.

mod pool;
mod run;

use std::sync::Arc;

use trireme_types::{InferRequest, Responder};

pub(crate) use pool::{InstancePool, Remake};

use crate::model::ModelVersion;

/// The scheduler of one model version.
pub(crate) enum Scheduler {
    /// Instances of a backend's model.
    Instances(InstancePool),
}

impl Scheduler {
    /// Takes a checked request.
    pub(crate) fn enqueue(&self, model: &Arc<ModelVersion>, request: InferRequest, responder: Responder) {
        match self {
            Self::Instances(pool) => pool.enqueue(model, request, responder),
        }
    }

    /// Requests that wait.
    pub(crate) fn pending(&self) -> usize {
        match self {
            Self::Instances(pool) => pool.pending(),
        }
    }

    /// Whether what answers the requests can run.
    pub(crate) fn is_ready(&self) -> bool {
        match self {
            Self::Instances(pool) => pool.is_ready(),
        }
    }

    /// Refuses new requests. Those already taken are still served.
    pub(crate) fn stop(&self) {
        match self {
            Self::Instances(pool) => pool.stop(),
        }
    }
}
