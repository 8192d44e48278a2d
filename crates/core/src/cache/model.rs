//! The cache as one model version uses it: the lookup in front of its scheduler, and the way back that keeps the
//! answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;
use std::time::{Duration, Instant};

use trireme_types::{InferRequest, InferResponse, Responder, ResponseSink, Result};

use super::answer::Answer;
use super::key::{Identity, Key, key};
use super::{ResponseCache, Store};
use crate::model::ModelVersion;

/// Inputs above this are hashed on a thread of the executor: hashing a megabyte takes some hundred microseconds, in
/// which a frontend's thread could have served others.
const INLINE_INPUT_BYTES: usize = 256 << 10;

/// Numbers of loads; the local cache keeps loads apart by them.
static LOADS: AtomicU64 = AtomicU64::new(0);

/// The cache of one load of a model version. What it has kept is forgotten with it.
pub(crate) struct ModelCache {
    cache: Arc<ResponseCache>,
    identity: Identity,
    load: u64,
}

impl ModelCache {
    pub(crate) fn new(cache: &Arc<ResponseCache>, model: &str, version: i64) -> Self {
        let load = LOADS.fetch_add(1, Ordering::Relaxed);
        let identity = Identity::new(model, version, &load.to_le_bytes());
        Self { cache: Arc::clone(cache), identity, load }
    }

    /// Takes a checked request: answers it, or gives it to the model's scheduler with a responder that keeps the
    /// answer.
    pub(crate) fn infer(&self, model: &Arc<ModelVersion>, request: InferRequest, responder: Responder) {
        let queued = Instant::now();
        if request.input_bytes() <= INLINE_INPUT_BYTES {
            return self.look_up(model, request, responder, queued);
        }
        let in_flight = model.enter();
        self.cache.executor.run(Box::new(move || {
            let model = in_flight.model();
            match model.cache() {
                Some(cache) => cache.look_up(model, request, responder, queued),
                None => model.schedule(request, responder),
            }
        }));
    }

    fn look_up(
        &self,
        model: &Arc<ModelVersion>,
        request: InferRequest,
        responder: Responder,
        queued: Instant,
    ) {
        let start = Instant::now();
        let key = key(&self.identity, model.inputs(), model.outputs(), &request);
        let found = match &self.cache.store {
            Store::Local(local) => local.lookup(&key),
        };
        let lookup = start.elapsed();
        match found {
            Some(answer) => hit(model, request, responder, &answer, start - queued, lookup),
            None => {
                let keep =
                    Keep { responder: Some(responder), model: Arc::clone(model), key, lookup, plain: true };
                model.schedule(request, Responder::new(Box::new(keep)));
            }
        }
    }

    fn keep(&self, key: Key, response: &InferResponse) {
        match &self.cache.store {
            Store::Local(local) => local.insert(key, self.load, response),
        }
    }
}

impl Drop for ModelCache {
    fn drop(&mut self) {
        match &self.cache.store {
            Store::Local(local) => local.forget(self.load),
        }
    }
}

fn hit(
    model: &ModelVersion,
    request: InferRequest,
    responder: Responder,
    answer: &Answer,
    queue: Duration,
    lookup: Duration,
) {
    model.statistics.cache_hit(request.received.elapsed(), queue, lookup);
    responder.finish(Ok(answer.for_request(request.id)));
}

/// The way back of a request that was not found: keeps its answer if it is the one successful answer, and passes
/// everything on.
struct Keep {
    responder: Option<Responder>,
    model: Arc<ModelVersion>,
    key: Key,
    lookup: Duration,
    /// Nothing came before the last answer.
    plain: bool,
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
        if let (true, Some(Ok(response)), Some(cache)) = (self.plain, &reply, self.model.cache()) {
            cache.keep(self.key, response);
        }
        self.model.statistics.cache_miss(self.lookup + start.elapsed());
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
