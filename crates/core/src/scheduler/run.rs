//! One execution: the batch, the engine's call with its panics caught, the statistics, the answers.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use trireme_backend::{Batch, BatchRequest, ModelInstance};
use trireme_types::Error;

use super::source::{Pending, Refused, Role};
use super::stream::Stream;
use crate::model::InFlight;
use crate::stats::{Answered, ComputeTimes, Ended, FailureReason};

/// What an execution taught about its model.
#[derive(Default)]
pub(super) struct Outcome {
    /// How long it took, if all of it went well.
    pub(super) time: Option<Duration>,
    pub(super) panicked: bool,
    /// Requests that shall run again.
    pub(super) again: Vec<Pending>,
}

/// What is kept of a request while a backend has it.
struct Kept {
    queued: Instant,
    received: Instant,
    rows: u64,
    /// `None` when the way back holds it.
    in_flight: Option<InFlight>,
    role: Role,
}

/// Runs requests together and answers them. Those whose clients have gone away do not run.
pub(super) fn execute(engine: &mut dyn ModelInstance, mut pending: Vec<Pending>) -> Outcome {
    if pending.iter().any(|pending| pending.responder.is_closed()) {
        let (closed, open) = pending.into_iter().partition(|pending| pending.responder.is_closed());
        pending = open;
        Vec::into_iter(closed).for_each(|pending| Refused::cancelled(pending).answer());
    }
    let Some(model) = pending.first().map(|pending| std::sync::Arc::clone(pending.in_flight.model())) else {
        return Outcome::default();
    };
    let start = Instant::now();
    let decoupled = model.is_decoupled();
    // The last response of a decoupled request may leave before its execution is counted.
    let _counted = decoupled.then(|| model.enter());
    let mut kept = Vec::with_capacity(pending.len());
    let requests = pending.into_iter().map(|Pending { request, responder, queued, in_flight, role }| {
        let (responder, in_flight) = match decoupled && role == Role::Client {
            true => (Stream::between(&request, responder, in_flight, start), None),
            false => (responder, Some(in_flight)),
        };
        kept.push(Kept {
            queued,
            received: request.received,
            rows: request.batch_size as u64,
            in_flight,
            role,
        });
        BatchRequest::new(request, responder)
    });
    let mut batch = Batch::new(requests.collect(), start);
    let result = catch_unwind(AssertUnwindSafe(|| engine.execute(&mut batch)));
    let end = Instant::now();
    let (result, panicked) = match result {
        Ok(result) => (result, false),
        Err(panic) => (Err(panic_error(&*panic)), true),
    };
    if let Err(error) = &result {
        for request in batch.requests.iter_mut().filter(|request| !request.is_answered()) {
            request.answer(Err(error.clone()));
        }
    }
    let times = batch.times();
    let inputs_ready = times.inputs_ready.unwrap_or(start);
    let outputs_start = times.outputs_start.unwrap_or(end);
    let compute = ComputeTimes {
        input: inputs_ready.saturating_duration_since(start),
        infer: outputs_start.saturating_duration_since(inputs_ready),
        output: end.saturating_duration_since(outputs_start),
    };
    let mut answers = Vec::with_capacity(kept.len());
    let mut answered = Vec::with_capacity(kept.len());
    // A request that ends early, as one that is cancelled, teaches nothing about the model's time.
    let mut all_well = result.is_ok();
    let mut again = Vec::new();
    for (request, kept) in batch.requests.into_iter().zip(kept) {
        let is_rescheduled = request.is_rescheduled();
        let (mut request, responder, answer) = request.into_parts();
        if kept.role == Role::Filler {
            continue;
        }
        if is_rescheduled && let Some(responder) = responder {
            // It has run and cost its time, and is counted as a request when it ends.
            let (total, queue) = (end - kept.received, start.saturating_duration_since(kept.queued));
            answered.push(Answered { ended: Ended::Open, total, queue, rows: kept.rows });
            let in_flight = kept.in_flight.unwrap_or_else(|| model.enter());
            again.push(Pending { request, responder, queued: end, in_flight, role: Role::Again });
            continue;
        }
        let answer = answer.map(|mut response| {
            response.id = std::mem::take(&mut request.id);
            response
        });
        // The way back of a decoupled request counts how it ends.
        let well = if decoupled { Ended::Open } else { Ended::Success };
        let ended = match &answer {
            Err(error) if responder.is_some() => {
                (!decoupled).then(|| Ended::Failure(FailureReason::of(error)))
            }
            _ => Some(well),
        };
        all_well &= matches!(ended, Some(Ended::Success));
        if let Some(ended) = ended {
            let (total, queue) = (end - kept.received, start.saturating_duration_since(kept.queued));
            answered.push(Answered { ended, total, queue, rows: kept.rows });
        }
        // A backend that kept the responder answers in its own time.
        answers.extend(responder.map(|responder| (responder, answer, kept.in_flight)));
    }
    model.statistics.executed(compute, &answered);
    for (responder, answer, in_flight) in answers {
        responder.finish(answer);
        drop(in_flight);
    }
    Outcome { time: all_well.then(|| end - start), panicked, again }
}

fn panic_error(panic: &(dyn std::any::Any + Send)) -> Error {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned());
    Error::internal(format!(
        "the backend panicked while it ran this request: {text}; the instance was made anew"
    ))
}
