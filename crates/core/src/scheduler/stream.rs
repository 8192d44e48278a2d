//! The answers of a decoupled request on their way out.

use std::task::Waker;
use std::time::Instant;

use trireme_types::{InferRequest, InferResponse, Responder, ResponseSink, Result};

use crate::model::InFlight;
use crate::stats::{FailureReason, Sent};

/// The way back of a decoupled request: counts each response and how the request ends, and keeps the request in flight until the last.
pub(super) struct Stream {
    id: String,
    responder: Option<Responder>,
    in_flight: InFlight,
    received: Instant,
    since: Instant,
    sent: u32,
    failed: bool,
}

impl Stream {
    /// Puts itself between a request that begins to run and its client.
    pub(super) fn between(
        request: &InferRequest,
        responder: Responder,
        in_flight: InFlight,
        start: Instant,
    ) -> Responder {
        Responder::new(Box::new(Self {
            id: request.id.clone(),
            responder: Some(responder),
            in_flight,
            received: request.received,
            since: start,
            sent: 0,
            failed: false,
        }))
    }
}

impl ResponseSink for Stream {
    fn send(&mut self, reply: Option<Result<InferResponse>>, last: bool) {
        let statistics = &self.in_flight.model().statistics;
        let now = Instant::now();
        let failure = match &reply {
            Some(Err(error)) => Some(FailureReason::of(error)),
            _ => None,
        };
        let sent = match (&reply, failure) {
            (None, _) => Sent::Empty,
            (Some(_), None) => Sent::Response,
            (Some(_), Some(FailureReason::Canceled)) => Sent::Cancelled,
            (Some(_), Some(_)) => Sent::Error,
        };
        statistics.responded(self.sent, sent, now - self.since);
        if self.sent == 0 && sent == Sent::Response {
            statistics.first_response(now - self.received);
        }
        self.since = now;
        self.sent = self.sent.saturating_add(1);
        let reply = reply.map(|reply| {
            reply.map(|mut response| {
                response.id.clone_from(&self.id);
                response
            })
        });
        if let Some(reason) = failure.filter(|_| !self.failed) {
            self.failed = true;
            statistics.failed(reason, now - self.received);
        } else if last && !self.failed {
            statistics.completed(now - self.received);
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

    fn watch_closed(&mut self, waker: &Waker) {
        if let Some(responder) = &mut self.responder {
            responder.watch_closed(waker);
        }
    }
}
