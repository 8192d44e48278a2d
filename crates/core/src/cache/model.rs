//! The cache as one model version uses it: the lookup in front of its scheduler, and where answers are kept.

use std::sync::Arc;
use std::time::Instant;

use trireme_types::{InferRequest, InferResponse, Responder, Result};

use super::asked::{self, Asked, Equals};
use super::content::{Content, Made};
use super::key::{Identity, Key, key};
use super::redis::{Name, RedisCache};
use super::{ResponseCache, Store};
use crate::executor::Executor;
use crate::model::ModelVersion;

/// Inputs above this are hashed on a thread of the executor: these take some 40 us, as long as waking threads does, and
/// more would keep a frontend's thread from serving others.
const INLINE_INPUT_BYTES: usize = 128 << 10;

/// What a model version is to the response cache. What the local cache has kept for it is forgotten with it.
pub(crate) struct ModelCache {
    content: Content,
    identity: Identity,
    /// `None`: the model does not use the cache; an ensemble that runs it may.
    used: Option<Arc<ResponseCache>>,
    equals: Option<Equals>,
}

impl ModelCache {
    /// Of a version that is being loaded in a server with this cache, if it has one. Reads all files of the version if
    /// the cache outlives the load.
    ///
    /// # Errors
    /// A parameter of the cache has a value that is none.
    pub(crate) fn new(cache: Option<&Arc<ResponseCache>>, made: Made<'_>) -> Result<Self> {
        let content = match cache.map(|cache| &cache.store) {
            None | Some(Store::Local(_)) => Content::of_load(),
            Some(Store::Redis(_)) => Content::of_files(made),
        };
        let asked = made.config.response_cache.as_ref().is_some_and(|cache| cache.enable);
        let used = cache.filter(|_| asked).cloned();
        let equals = match &used {
            Some(cache) => Equals::of(made.name, asked::parameter(made.config), &cache.executor)?,
            None => None,
        };
        let identity = Identity::new(made.name, made.version, content.hash());
        Ok(Self { content, identity, used, equals })
    }

    /// Requests that wait for equal ones, if the model lets them.
    pub(super) fn equals(&self) -> Option<&Equals> {
        self.equals.as_ref()
    }

    pub(crate) fn content(&self) -> &Content {
        &self.content
    }

    pub(crate) fn is_used(&self) -> bool {
        self.used.is_some()
    }

    /// Takes a checked request: answers it, or gives it to the model's scheduler with a responder that keeps the
    /// answer.
    pub(crate) fn infer(&self, model: &Arc<ModelVersion>, request: InferRequest, responder: Responder) {
        let Some(cache) = &self.used else { return model.schedule(request, responder) };
        let queued = Instant::now();
        if request.input_bytes() <= INLINE_INPUT_BYTES {
            return self.look_up(cache, model, request, responder, queued);
        }
        let in_flight = model.enter();
        cache.executor.run(Box::new(move || {
            let model = in_flight.model();
            let this = model.cache();
            match &this.used {
                Some(cache) => this.look_up(cache, model, request, responder, queued),
                None => model.schedule(request, responder),
            }
        }));
    }

    fn look_up(
        &self,
        cache: &ResponseCache,
        model: &Arc<ModelVersion>,
        request: InferRequest,
        responder: Responder,
        queued: Instant,
    ) {
        let start = Instant::now();
        let Some((identity, load)) = self.identity(model) else { return model.schedule(request, responder) };
        let key = key(&identity, model.inputs(), model.outputs(), &request, model.ensemble().is_some());
        let asked = Asked { request, responder, key, load, queue: start - queued, start };
        match &cache.store {
            Store::Local(local) => asked.settle(model, local.lookup(&key).as_deref()),
            Store::Redis(redis) if redis.is_down() => {
                redis.skipped();
                asked.settle(model, None);
            }
            Store::Redis(redis) => ask(redis, cache.executor.clone(), model, asked),
        }
    }

    /// What the model is now, with the newest load that has part in it; `None` for an ensemble that cannot run.
    fn identity(&self, model: &ModelVersion) -> Option<(Identity, u64)> {
        if model.ensemble().is_none() {
            return Some((self.identity, self.content.load()));
        }
        let now = Content::now(model)?;
        Some((Identity::new(model.name(), model.version(), now.hash()), now.load()))
    }

    /// Keeps an answer, unless a model that had part in it has been loaded anew since the request came.
    pub(super) fn keep(&self, model: &ModelVersion, key: Key, load: u64, response: &InferResponse) {
        let Some(cache) = &self.used else { return };
        if model.ensemble().is_some() && Content::now(model).is_none_or(|now| now.load() != load) {
            return;
        }
        match &cache.store {
            Store::Local(local) => local.insert(key, self.content.load(), response),
            Store::Redis(redis) => redis.store(Name::new(model.name(), model.version(), key), response),
        }
    }
}

impl Drop for ModelCache {
    fn drop(&mut self) {
        match self.used.as_ref().map(|cache| &cache.store) {
            Some(Store::Local(local)) => local.forget(self.content.load()),
            // Names in Redis hold the content: the same model finds its answers again, another one has other names.
            Some(Store::Redis(_)) | None => {}
        }
    }
}

/// Asks Redis. What was found is settled on a thread of the executor, because a scheduler may run the model on the thread
/// that brings it a request, and a responder may wait for its client.
fn ask(redis: &RedisCache, executor: Executor, model: &Arc<ModelVersion>, asked: Asked) {
    let name = Name::new(model.name(), model.version(), asked.key);
    let in_flight = model.enter();
    redis.look_up(
        name,
        Box::new(move |found| {
            executor.run(Box::new(move || asked.settle(in_flight.model(), found.as_ref())));
        }),
    );
}
