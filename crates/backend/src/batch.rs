//! A batch on its way through an instance: requests, their answers, and the moments that statistics need.

use std::task::Waker;
use std::time::Instant;

use trireme_types::{Error, InferRequest, InferResponse, Responder, Result};

/// When the parts of an execution began. `start` to `inputs_ready` is "compute input", to `outputs_start` "compute
/// infer", to the end of the execution "compute output".
#[derive(Clone, Copy, Debug)]
pub struct BatchTimes {
    pub start: Instant,
    pub inputs_ready: Option<Instant>,
    pub outputs_start: Option<Instant>,
}

/// Requests that run together. The order is the order of the rows in the batch dimension.
#[derive(Debug)]
pub struct Batch {
    pub requests: Vec<BatchRequest>,
    times: BatchTimes,
}

impl Batch {
    pub fn new(requests: Vec<BatchRequest>, start: Instant) -> Self {
        Self { requests, times: BatchTimes { start, inputs_ready: None, outputs_start: None } }
    }

    /// Rows of all requests together.
    pub fn rows(&self) -> usize {
        self.requests.iter().map(|r| r.request.batch_size).sum()
    }

    /// Marks that the inputs stand where the engine wants them.
    pub fn inputs_ready(&mut self) {
        self.times.inputs_ready = Some(Instant::now());
    }

    /// Marks that the engine is done and outputs are being taken apart.
    pub fn outputs_start(&mut self) {
        self.times.outputs_start = Some(Instant::now());
    }

    pub fn times(&self) -> BatchTimes {
        self.times
    }
}

/// One request of a batch and the way back to its client.
#[derive(Debug)]
pub struct BatchRequest {
    pub request: InferRequest,
    answer: Option<Result<InferResponse>>,
    responder: Option<Responder>,
    rescheduled: bool,
}

impl BatchRequest {
    pub fn new(request: InferRequest, responder: Responder) -> Self {
        Self { request, answer: None, responder: Some(responder), rescheduled: false }
    }

    /// Gives the one answer of a request. The server sends it when the execution has ended and its statistics are
    /// written, so a client that asks for statistics after its answer finds itself counted.
    pub fn answer(&mut self, answer: Result<InferResponse>) {
        self.answer = Some(answer);
        self.rescheduled = false;
    }

    /// Asks the scheduler to run the request again instead of answering it, for models with `iterative_sequence`. A
    /// model that wants to send responses on the way must be decoupled and send them with
    /// [`BatchRequest::respond`], which leaves the responder here.
    pub fn reschedule(&mut self) {
        self.rescheduled = true;
    }

    /// Whether the request shall run again.
    pub fn is_rescheduled(&self) -> bool {
        self.rescheduled
    }

    /// Sends a response that is not the last, of a decoupled model; see [`BatchRequest::reschedule`].
    pub fn respond(&mut self, reply: Result<InferResponse>) {
        if let Some(responder) = &mut self.responder {
            responder.send(reply);
        }
    }

    /// The response of a request that has been answered without an error.
    pub fn answer_mut(&mut self) -> Option<&mut InferResponse> {
        self.answer.as_mut()?.as_mut().ok()
    }

    /// Whether an answer or the responder has been taken care of.
    pub fn is_answered(&self) -> bool {
        self.answer.is_some() || self.responder.is_none()
    }

    /// Takes the responder, for models that answer many times or after the execution has ended.
    pub fn take_responder(&mut self) -> Option<Responder> {
        self.responder.take()
    }

    /// Whether the client has gone away.
    pub fn is_cancelled(&self) -> bool {
        self.responder.as_ref().is_some_and(Responder::is_closed)
    }

    /// Has `waker` woken when the client goes away, at once if it has; see [`trireme_types::ResponseSink::watch_closed`].
    pub fn watch_closed(&mut self, waker: &Waker) {
        if let Some(responder) = &mut self.responder {
            responder.watch_closed(waker);
        }
    }

    /// Splits the request for the server after an execution: what was answered, and the responder to send it by.
    /// The responder is `None` when the backend took it.
    pub fn into_parts(self) -> (InferRequest, Option<Responder>, Result<InferResponse>) {
        let silent =
            || Err(Error::internal("the backend ended the execution without an answer to this request"));
        (self.request, self.responder, self.answer.unwrap_or_else(silent))
    }
}
