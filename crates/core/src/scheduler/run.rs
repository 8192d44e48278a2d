//! One execution: the batch, the engine's call with its panics caught, the statistics, the answers.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use trireme_backend::{Batch, BatchRequest};
use trireme_types::{Error, InferResponse, Responder, ResponseSink, Result};

use super::pool::{Instance, Pending};
use crate::model::InFlight;
use crate::stats::{Answered, ComputeTimes, FailureReason};

/// What an execution taught about its model.
pub(super) struct Outcome {
    /// How long it took, if all of it went well.
    pub(super) time: Option<Duration>,
    pub(super) panicked: bool,
}

/// Ends a request whose client has gone away before it ran.
pub(super) fn drop_cancelled(pending: Pending) {
    let statistics = &pending.in_flight.model().statistics;
    statistics.failed(FailureReason::Canceled, pending.request.received.elapsed());
    pending.responder.finish(Err(Error::new(trireme_types::Code::Cancelled, "the request was cancelled")));
}

/// Runs one request on an instance and answers it.
pub(super) fn execute(instance: &mut Instance, pending: Pending) -> Outcome {
    let Pending { request, responder, queued, in_flight } = pending;
    let model = std::sync::Arc::clone(in_flight.model());
    let (received, rows) = (request.received, request.batch_size as u64);
    let start = Instant::now();
    let decoupled = model.is_decoupled();
    let (responder, in_flight) = if decoupled {
        let stream = Stream {
            id: request.id.clone(),
            responder: Some(responder),
            in_flight,
            received,
            since: start,
            sent: 0,
            failed: false,
        };
        (Responder::new(Box::new(stream)), None)
    } else {
        (responder, Some(in_flight))
    };
    let mut batch = Batch::new(vec![BatchRequest::new(request, responder)], start);
    let result = catch_unwind(AssertUnwindSafe(|| instance.engine.execute(&mut batch)));
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
        input: inputs_ready - start,
        infer: outputs_start.saturating_duration_since(inputs_ready),
        output: end.saturating_duration_since(outputs_start),
    };

    for request in batch.requests {
        let (mut request, responder, answer) = request.into_parts();
        let Some(responder) = responder else {
            // The backend keeps the responder and answers in its own time; the stream counts its request.
            model.statistics.executed(
                compute,
                &[Answered { success: true, total: end - received, queue: start - queued, rows }],
            );
            continue;
        };
        let answer = answer.map(|mut response| {
            response.id = std::mem::take(&mut request.id);
            response
        });
        let success = answer.is_ok();
        if !decoupled || !success {
            model.statistics.executed(
                compute,
                &[Answered { success, total: end - received, queue: start - queued, rows }],
            );
        }
        responder.finish(answer);
    }
    drop(in_flight);
    Outcome { time: (result.is_ok() && !decoupled).then(|| end - start), panicked }
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

/// The way back of a decoupled request: counts each response and keeps the request in flight until the last.
struct Stream {
    id: String,
    responder: Option<Responder>,
    in_flight: InFlight,
    received: Instant,
    since: Instant,
    sent: u32,
    failed: bool,
}

impl ResponseSink for Stream {
    fn send(&mut self, reply: Option<Result<InferResponse>>, last: bool) {
        let statistics = &self.in_flight.model().statistics;
        let now = Instant::now();
        let success = reply.as_ref().map(Result::is_ok);
        statistics.responded(self.sent, success, now - self.since);
        self.since = now;
        self.sent = self.sent.saturating_add(1);
        let reply = reply.map(|reply| {
            reply.map(|mut response| {
                response.id.clone_from(&self.id);
                response
            })
        });
        if success == Some(false) && !self.failed {
            self.failed = true;
            statistics.failed(FailureReason::Backend, self.received.elapsed());
        }
        match (reply, last) {
            (Some(reply), false) => {
                if let Some(responder) = &mut self.responder {
                    responder.send(reply);
                }
            }
            (reply, _) => {
                if let Some(responder) = self.responder.take() {
                    match reply {
                        Some(reply) => responder.finish(reply),
                        None => responder.close(),
                    }
                }
            }
        }
    }

    fn is_closed(&self) -> bool {
        self.responder.as_ref().is_none_or(Responder::is_closed)
    }
}
