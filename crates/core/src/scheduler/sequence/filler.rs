//! Requests of the server's own: rows of a batch without a request, and the END of a sequence that is given up.

use std::sync::Arc;
use std::time::Instant;

use trireme_types::{
    CorrelationId, HostBuffer, InferInput, InferRequest, InferResponse, Responder, ResponseSink, Result,
    TensorBuffer,
};

use super::super::source::{Pending, Role};
use super::SequencePlan;
use super::controls::NOT_READY;
use crate::model::ModelVersion;

/// Where answers to nobody go.
struct Nowhere;

impl ResponseSink for Nowhere {
    fn send(&mut self, _: Option<Result<InferResponse>>, _: bool) {}

    fn is_closed(&self) -> bool {
        false
    }
}

/// Pattern of the rows of one batch that have no request.
pub(super) struct Filler {
    model: Arc<ModelVersion>,
    request: InferRequest,
}

/// The shapes of inputs without their contents.
pub(super) fn shapes(inputs: &[InferInput]) -> Vec<InferInput> {
    inputs.iter().map(|input| InferInput { data: TensorBuffer::default(), ..input.clone() }).collect()
}

/// Inputs of the same shapes, all zero. BYTES elements are empty.
fn zeroed<'a>(inputs: impl Iterator<Item = &'a InferInput>) -> impl Iterator<Item = InferInput> {
    inputs.map(|input| {
        // The shape is that of a request that was checked: it came with no fewer bytes than this.
        let element = input.data_type.byte_size().unwrap_or(4);
        let size = input.shape.element_count().map_or(0, |count| count.saturating_mul(element));
        InferInput { data: HostBuffer::zeroed(size).into(), ..input.clone() }
    })
}

/// A filler for a batch in which `pattern`, with the inputs of the server, is a row.
pub(super) fn like(pattern: &Pending, plan: &SequencePlan) -> Filler {
    let mut request = InferRequest::received_at(pattern.request.received);
    let controls = plan.controls.of(&CorrelationId::None, NOT_READY).unwrap_or_default();
    let own = pattern.request.inputs.iter().filter(|input| !controls.iter().any(|c| c.name == input.name));
    request.inputs = zeroed(own).collect();
    request.inputs.extend(controls);
    Filler { model: Arc::clone(pattern.in_flight.model()), request }
}

impl Filler {
    /// One row.
    pub(super) fn again(&self, now: Instant) -> Pending {
        as_pending(&self.model, self.request.clone(), now)
    }
}

/// The END that tells a model that a sequence is given up, with inputs of the shapes of `last`.
pub(super) fn pending(
    model: &Arc<ModelVersion>,
    last: &[InferInput],
    id: &CorrelationId,
    now: Instant,
) -> Pending {
    let mut request = InferRequest::received_at(now);
    request.inputs = zeroed(last.iter()).collect();
    request.sequence.id = id.clone();
    request.sequence.end = true;
    as_pending(model, request, now)
}

fn as_pending(model: &Arc<ModelVersion>, request: InferRequest, now: Instant) -> Pending {
    Pending {
        request,
        responder: Responder::new(Box::new(Nowhere)),
        queued: now,
        in_flight: model.enter(),
        role: Role::Filler,
    }
}
