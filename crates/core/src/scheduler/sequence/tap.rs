//! Between a model and the client of a request in a sequence: states are taken out of the answers and kept.

use std::sync::Arc;
use std::task::Waker;

use smallvec::SmallVec;
use trireme_types::{Code, InferResponse, RequestedOutput, Responder, ResponseSink, Result};

use super::state::{Memory, States};

/// The way back of one request.
pub(super) struct Tap {
    pub(super) responder: Option<Responder>,
    pub(super) states: Arc<States>,
    pub(super) memory: Arc<Memory>,
    /// What the client asked for; empty is everything.
    pub(super) outputs: SmallVec<[RequestedOutput; 2]>,
    /// Other requests share the memory of the answer.
    pub(super) copy: bool,
    /// An instance that has the request is not told that the client has gone away.
    pub(super) hides_closing: bool,
}

impl Tap {
    pub(super) fn around(mut self, responder: Responder) -> Responder {
        self.responder = Some(responder);
        Responder::new(Box::new(self))
    }

    fn keep(&self, reply: Result<InferResponse>) -> Result<InferResponse> {
        let wants = |name: &str| self.outputs.is_empty() || self.outputs.iter().any(|o| &*o.name == name);
        let kept = reply.and_then(|mut response| {
            self.states.keep(&self.memory, &mut response, self.copy, wants)?;
            Ok(response)
        });
        if kept.as_ref().is_err_and(|error| error.code() == Code::Cancelled) {
            self.memory.cancel();
        }
        kept
    }
}

impl ResponseSink for Tap {
    fn send(&mut self, reply: Option<Result<InferResponse>>, last: bool) {
        let reply = reply.map(|reply| self.keep(reply));
        match (reply, last) {
            (Some(reply), false) => {
                if let Some(responder) = &mut self.responder {
                    responder.send(reply);
                }
            }
            (reply, _) => match (self.responder.take(), reply) {
                (Some(responder), Some(reply)) => responder.finish(reply),
                (Some(responder), None) => responder.close(),
                (None, _) => {}
            },
        }
    }

    fn is_closed(&self) -> bool {
        let is_hidden = self.hides_closing && self.memory.is_running();
        !is_hidden && self.responder.as_ref().is_none_or(Responder::is_closed)
    }

    fn watch_closed(&mut self, waker: &Waker) {
        if let Some(responder) = &mut self.responder {
            responder.watch_closed(waker);
        }
    }
}
