//! The response cache: answers of models that configure `response_cache { enable: true }`, kept for requests that
//! ask the same again.
//!
//! A server has at most one cache. A request is looked up after it has been checked and before any scheduler sees
//! it: a hit is answered at once, a miss runs and its one successful answer is kept. Invariants: two requests share
//! an answer only if the model could not tell them apart; nothing but a whole, successful, single answer is kept;
//! whatever goes wrong in a cache is a miss, never an error of the request.

mod answer;
mod asked;
mod codec;
mod content;
mod key;
mod local;
mod model;
mod page;
mod redis;
mod settings;

use std::sync::Arc;

use trireme_types::Result;

pub use self::settings::{CacheSettings, RedisSettings, RedisTls};

pub(crate) use self::content::{Content, Made};
pub(crate) use self::model::ModelCache;
pub(crate) use self::page::write_models;

use self::local::LocalCache;
use self::redis::RedisCache;
use crate::executor::Executor;
use crate::options::ServerOptions;

/// The cache of a server.
pub(crate) struct ResponseCache {
    store: Store,
    executor: Executor,
}

/// Where the answers are.
enum Store {
    Local(LocalCache),
    Redis(RedisCache),
}

impl ResponseCache {
    /// The cache that the options ask for.
    ///
    /// # Errors
    /// Settings that no cache can be made of.
    pub(crate) fn of(options: &ServerOptions, executor: &Executor) -> Result<Option<Arc<Self>>> {
        let Some(settings) = &options.cache else { return Ok(None) };
        let store = match settings {
            CacheSettings::Local { size } => Store::Local(LocalCache::new(*size)?),
            CacheSettings::Redis(settings) => Store::Redis(RedisCache::new(settings)?),
        };
        Ok(Some(Arc::new(Self { store, executor: executor.clone() })))
    }

    /// Begins to work: connects to what is outside the process.
    ///
    /// # Errors
    /// What is outside refuses the settings.
    pub(crate) fn open(&self) -> Result<()> {
        match &self.store {
            Store::Local(_) => Ok(()),
            Store::Redis(redis) => redis.open(),
        }
    }

    /// The metrics of the cache itself, beside those of the models.
    pub(crate) fn write_metrics(&self, page: &mut String) {
        match &self.store {
            Store::Local(local) => page::write_local(page, &local.usage()),
            Store::Redis(redis) => page::write_redis(page, redis.is_down(), redis.counters()),
        }
    }
}

#[cfg(test)]
mod tests;
