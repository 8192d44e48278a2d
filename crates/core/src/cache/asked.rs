//! One request from its lookup to its answer.
//!
//! A request that is not found runs, and its answer is kept on the way back. With [`PARAMETER`] it may wait instead for
//! an equal one that runs already. *Invariant:* whatever becomes of the one that runs, those that wait for it are
//! answered with its answer or run themselves.

use std::collections::HashMap;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use trireme_types::{Error, InferRequest, InferResponse, Responder, ResponseSink, Result};

use super::answer::Answer;
use super::key::Key;
use crate::executor::Executor;
use crate::model::{InFlight, ModelVersion};
use crate::stats::FailureReason;

/// Parameter of a model: what becomes of a request that equals one that is running.
const PARAMETER: &str = "TRIREME_CACHE_EQUAL_REQUESTS";
/// It runs too, as with Triton.
const RUN: &str = "run";
/// It waits for that one's answer.
const WAIT: &str = "wait";

/// Requests that wait for an equal one that runs, by their key.
pub(super) struct Equals {
    waiting: Mutex<HashMap<Key, Vec<(Asked, InFlight)>>>,
    executor: Executor,
}

impl Equals {
    /// `None` unless the model lets requests wait for equal ones.
    ///
    /// # Errors
    /// The parameter has a value that is none.
    pub(super) fn of(model: &str, parameter: Option<&str>, executor: &Executor) -> Result<Option<Self>> {
        match parameter {
            None | Some(RUN) => Ok(None),
            Some(WAIT) => Ok(Some(Self { waiting: Mutex::default(), executor: executor.clone() })),
            Some(other) => Err(Error::invalid_arg(format!(
                "parameter '{PARAMETER}' of model '{model}' must be '{RUN}' or '{WAIT}', got '{other}'"
            ))),
        }
    }

    /// Has a request wait, and gives it back if nothing runs that it could wait for: from then on it is what others
    /// wait for.
    fn join(&self, asked: Asked, model: &Arc<ModelVersion>) -> Option<Asked> {
        let mut waiting = self.waiting.lock();
        match waiting.get_mut(&asked.key) {
            Some(others) => {
                others.push((asked, model.enter()));
                None
            }
            None => {
                waiting.insert(asked.key, Vec::new());
                Some(asked)
            }
        }
    }

    /// The one that ran has its answer: so have those that waited, or they run themselves.
    fn settle(&self, key: &Key, answer: Option<&InferResponse>) {
        let waited = self.waiting.lock().remove(key).unwrap_or_default();
        if waited.is_empty() {
            return;
        }
        let answer = answer.cloned();
        self.executor.run(Box::new(move || {
            for (asked, in_flight) in waited {
                let model = in_flight.model();
                match &answer {
                    _ if asked.responder.is_closed() => asked.cancel(model),
                    Some(answer) => asked.hit(model, InferResponse { id: String::new(), ..answer.clone() }),
                    None => asked.run(model, false),
                }
            }
        }));
    }
}

/// The value of the parameter in a configuration.
pub(super) fn parameter(config: &trireme_proto::inference::ModelConfig) -> Option<&str> {
    config.parameters.get(PARAMETER).map(|parameter| parameter.string_value.as_str())
}

/// A request while its answer is looked for.
pub(super) struct Asked {
    pub(super) request: InferRequest,
    pub(super) responder: Responder,
    pub(super) key: Key,
    /// The newest load that has part in the model, when the request came.
    pub(super) load: u64,
    /// Time before the lookup began.
    pub(super) queue: Duration,
    pub(super) start: Instant,
}

impl Asked {
    /// Answers with what was found, or has the model answer.
    pub(super) fn settle(self, model: &Arc<ModelVersion>, found: Option<&Answer>) {
        if let Some(answer) = found {
            return self.hit(model, answer.for_request(String::new()));
        }
        let Some(equals) = model.cache().equals() else { return self.run(model, false) };
        if let Some(asked) = equals.join(self, model) {
            asked.run(model, true);
        }
    }

    fn hit(self, model: &ModelVersion, response: InferResponse) {
        model.statistics.cache_hit(self.request.received.elapsed(), self.queue, self.start.elapsed());
        self.responder.finish(Ok(InferResponse { id: self.request.id, ..response }));
    }

    fn cancel(self, model: &ModelVersion) {
        model.statistics.failed(FailureReason::Canceled, self.request.received.elapsed());
        self.responder.finish(Err(Error::new(trireme_types::Code::Cancelled, "the request was cancelled")));
    }

    fn run(self, model: &Arc<ModelVersion>, leads: bool) {
        let keep = Keep {
            responder: Some(self.responder),
            model: Arc::clone(model),
            key: self.key,
            load: self.load,
            lookup: self.start.elapsed(),
            plain: true,
            leads,
        };
        model.schedule(self.request, Responder::new(Box::new(keep)));
    }
}

/// The way back of a request that was not found: keeps its answer if it is the one successful answer, and passes
/// everything on.
struct Keep {
    responder: Option<Responder>,
    model: Arc<ModelVersion>,
    key: Key,
    load: u64,
    lookup: Duration,
    /// Nothing came before the last answer.
    plain: bool,
    /// Others may wait for its answer.
    leads: bool,
}

impl ResponseSink for Keep {
    fn send(&mut self, reply: Option<Result<InferResponse>>, last: bool) {
        if !last {
            self.plain = false;
            if let (Some(responder), Some(reply)) = (&mut self.responder, reply) {
                responder.send(reply);
            }
            return;
        }
        let start = Instant::now();
        let answer = match &reply {
            Some(Ok(response)) if self.plain => Some(response),
            _ => None,
        };
        let cache = self.model.cache();
        if let Some(response) = answer {
            cache.keep(&self.model, self.key, self.load, response);
        }
        self.model.statistics.cache_miss(self.lookup + start.elapsed());
        if let (true, Some(equals)) = (self.leads, cache.equals()) {
            equals.settle(&self.key, answer);
        }
        match (self.responder.take(), reply) {
            (Some(responder), Some(reply)) => responder.finish(reply),
            (Some(responder), None) => responder.close(),
            (None, _) => {}
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
