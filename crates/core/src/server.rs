//! The façade that every frontend uses: everything that can be asked of the server, in the words of the protocol.

mod index;
mod loading;
mod polling;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use trireme_backend::Backend;
use trireme_types::{Error, InferRequest, Responder, Result};

pub use self::index::IndexEntry;
use crate::cache::ResponseCache;
use crate::control::Control;
use crate::executor::Executor;
use crate::load::{Dependents, LoadFailure, Loader};
use crate::log_settings::{LogControl, LogSettings, LogValue};
use crate::metrics::{Families, Metrics};
use crate::model::ModelVersion;
use crate::options::ServerOptions;
use crate::repository;
use crate::shm::SharedMemory;
use crate::stats::ModelStatistics;
use crate::table::{ModelState, ModelTable, UNLOADED};
use crate::threads::ThreadBudget;

/// Extensions of the protocol that the server names in its metadata, in Triton's order.
const EXTENSIONS: &[&str] = &[
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
];

/// Answer of the server metadata endpoint.
#[derive(Clone, Debug)]
pub struct ServerMetadata {
    pub name: String,
    pub version: String,
    pub extensions: &'static [&'static str],
}

/// One line of the start-up table.
#[derive(Clone, Debug)]
pub struct LoadRow {
    pub model: String,
    pub version: Option<i64>,
    /// As Triton prints it: `READY`, `UNAVAILABLE: <reason>` or `Not loaded: <reason>`.
    pub status: String,
    /// For failures: what was looked for, what was found, what to do.
    pub advice: Option<String>,
    /// A model that should serve does not. An empty folder is told about, but is no model.
    pub failed: bool,
}

/// A running server.
pub struct Server {
    options: ServerOptions,
    metadata: ServerMetadata,
    loader: Loader,
    cache: Option<Arc<ResponseCache>>,
    table: Arc<ModelTable>,
    dependents: Dependents,
    control: Arc<Control>,
    shared_memory: SharedMemory,
    metrics: Metrics,
    stopping: AtomicBool,
    entered: AtomicUsize,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Server {
    /// Loads the models that the options ask for and returns when each is ready or has failed. A model that fails
    /// fails alone; [`Server::load_report`] tells why.
    ///
    /// # Errors
    /// A repository does not exist, or the options contradict one another.
    pub fn start(options: ServerOptions, backends: Vec<Arc<dyn Backend>>) -> Result<Arc<Self>> {
        let metadata = ServerMetadata {
            name: options.id.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            extensions: EXTENSIONS,
        };
        let budget = ThreadBudget::new(options.cores);
        let executor = Executor::new();
        let cache = ResponseCache::of(&options, &executor)?;
        if let Some(cache) = &cache {
            cache.open()?;
        }
        let table = Arc::new(ModelTable::default());
        let loader =
            Loader::new(options.clone(), backends, executor, budget, cache.clone(), Arc::clone(&table))?;
        let shared_memory = SharedMemory::new(options.shared_memory.clone());
        let server = Self {
            options,
            metadata,
            loader,
            cache,
            table,
            dependents: Dependents::default(),
            control: Arc::default(),
            shared_memory,
            metrics: Metrics::default(),
            stopping: AtomicBool::new(false),
            entered: AtomicUsize::new(0),
        };
        let sources = repository::scan(&server.options.repositories, &server.options.single_models)?;
        server.load_at_start(sources)?;
        let server = Arc::new(server);
        Self::watch_repositories(&server)?;
        Ok(server)
    }

    pub fn options(&self) -> &ServerOptions {
        &self.options
    }

    pub fn metadata(&self) -> &ServerMetadata {
        &self.metadata
    }

    /// Regions of memory that clients have registered.
    pub fn shared_memory(&self) -> &SharedMemory {
        &self.shared_memory
    }

    /// Cores that engines share.
    pub fn thread_budget(&self) -> ThreadBudget {
        self.loader.budget()
    }

    /// Name, place and settings of every backend, for the start-up table.
    pub fn backend_rows(&self) -> Vec<(String, String, String)> {
        self.loader.backend_rows()
    }

    pub fn is_live(&self) -> bool {
        !self.is_stopping()
    }

    /// Whether the server takes requests and, under strict readiness, every version of every model does: a version
    /// that was unloaded on request does not count.
    pub fn is_ready(&self) -> bool {
        if self.is_stopping() {
            return false;
        }
        if !self.options.strict_readiness {
            return true;
        }
        self.table.entries().values().all(|entry| {
            let whole = !entry.failures.iter().any(LoadFailure::is_failure);
            let versions = entry.states.values().all(|version| match version.state {
                ModelState::Ready => true,
                ModelState::Unavailable => version.reason == UNLOADED,
                _ => false,
            });
            whole && versions && entry.ready.iter().all(|model| model.is_ready())
        })
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// The version that serves a request: the one named, or the highest that is ready.
    ///
    /// # Errors
    /// `NOT_FOUND` for an unknown model or version, `UNAVAILABLE` for a version that is not ready.
    pub fn model(&self, name: &str, version: Option<i64>) -> Result<Arc<ModelVersion>> {
        self.table.find(name, version)
    }

    /// Whether a version takes requests.
    ///
    /// # Errors
    /// `NOT_FOUND` for an unknown model or version.
    pub fn model_is_ready(&self, name: &str, version: Option<i64>) -> Result<bool> {
        match self.table.find(name, version) {
            Ok(model) => Ok(!self.is_stopping() && model.is_ready()),
            Err(error) if error.code() == trireme_types::Code::Unavailable => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Versions of a model that are ready, ascending.
    pub fn ready_versions(&self, name: &str) -> Vec<i64> {
        let entry = self.table.entry(name);
        entry.iter().flat_map(|entry| &entry.ready).map(|model| model.version()).collect()
    }

    /// Statistics of one version, of all versions of a model, or of everything (the empty name).
    ///
    /// # Errors
    /// `INVALID_ARG`, as Triton answers, for a model or version that is not ready.
    pub fn statistics(&self, name: &str, version: Option<i64>) -> Result<Vec<ModelStatistics>> {
        if name.is_empty() {
            return Ok(self.table.serving().iter().map(|model| model.statistics()).collect());
        }
        let entry = self.table.entry(name).filter(|entry| !entry.ready.is_empty());
        let Some(entry) = entry else {
            return Err(Error::invalid_arg(format!("requested model '{name}' is not available")));
        };
        let wanted = |model: &&Arc<ModelVersion>| version.is_none_or(|version| model.version() == version);
        let found: Vec<_> = entry.ready.iter().filter(wanted).map(|model| model.statistics()).collect();
        if found.is_empty() {
            return Err(Error::invalid_arg(format!(
                "requested model version is not available for model '{name}', its ready versions are {:?}",
                self.ready_versions(name)
            )));
        }
        Ok(found)
    }

    /// Checks a request and lets the model run it. Returns before the model has run, unless the model is known to
    /// be quick. The answer, an error included, goes through the responder.
    pub fn infer(&self, model: &Arc<ModelVersion>, request: InferRequest, responder: Responder) {
        self.entered.fetch_add(1, Ordering::AcqRel);
        if self.is_stopping() {
            responder.finish(Err(Error::unavailable("Server exiting")));
        } else {
            model.infer(request, responder);
        }
        self.entered.fetch_sub(1, Ordering::AcqRel);
    }

    /// The log settings.
    ///
    /// # Errors
    /// `UNSUPPORTED` if the process keeps its log to itself.
    pub fn log_settings(&self) -> Result<LogSettings> {
        self.log().map(|log| log.settings())
    }

    /// Changes all of the log settings that are named, or none; gives what they are then.
    ///
    /// # Errors
    /// As [`LogSettings::set`], and `UNSUPPORTED` if the process keeps its log to itself.
    pub fn change_log_settings(
        &self,
        changes: impl IntoIterator<Item = (String, LogValue)>,
        prefix: &str,
    ) -> Result<LogSettings> {
        let log = self.log()?;
        let before = log.settings();
        let mut settings = before.clone();
        for (name, value) in changes {
            settings.set(&name, value, prefix)?;
        }
        if settings != before {
            log.follow(&settings);
        }
        Ok(settings)
    }

    fn log(&self) -> Result<&Arc<dyn LogControl>> {
        let absent = || {
            Error::unsupported("the logging extension is not available: this process keeps its log to itself")
        };
        self.options.log.as_ref().ok_or_else(absent)
    }

    /// Counts an inference request that a frontend refused before it could name a model or its inputs.
    pub fn record_refused_request(&self) {
        self.metrics.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// The page of the metrics endpoint.
    pub fn metrics_text(&self) -> String {
        let families = Families {
            counter_latencies: self.options.counter_latencies,
            cpu: self.options.allow_cpu_metrics,
        };
        let mut page = self.metrics.page(&self.table.serving(), families);
        if let Some(cache) = &self.cache {
            cache.write_metrics(&mut page);
        }
        self.shared_memory.write_metrics(&mut page);
        page
    }

    /// Refuses new requests from now on.
    pub fn begin_stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.table.serving().iter().for_each(|model| model.drain());
    }

    /// Waits until every request is answered, at most `timeout`; returns how many are not.
    pub fn wait_idle(&self, timeout: Duration) -> usize {
        let deadline = Instant::now() + timeout;
        let mut pause = Duration::from_micros(200);
        loop {
            let models = [self.table.serving(), self.control.leaving()].concat();
            let left = self.entered.load(Ordering::Acquire)
                + models.iter().map(|model| model.in_flight()).sum::<usize>();
            let now = Instant::now();
            if left == 0 || now >= deadline {
                return left;
            }
            thread::sleep(pause.min(deadline - now));
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }

    /// Takes every model out of service.
    pub fn unload_all(&self) {
        for name in self.table.entries().keys() {
            for model in self.retire(name) {
                model.stop();
            }
        }
        self.control.stop();
    }

    /// The start-up table with advice for every failure.
    pub fn load_report(&self) -> Vec<LoadRow> {
        let mut rows = Vec::new();
        for (name, entry) in self.table.entries() {
            for (version, state) in &entry.states {
                let failure = entry.failures.iter().find(|failure| failure.version == Some(*version));
                let status = match state.state {
                    ModelState::Ready => "READY".to_owned(),
                    other => format!("{}: {}", other.as_str(), state.reason),
                };
                let advice = failure.map(|failure| failure.advice.clone());
                let failed = failure.is_some();
                rows.push(LoadRow {
                    model: name.to_string(),
                    version: Some(*version),
                    status,
                    advice,
                    failed,
                });
            }
            for failure in entry.failures.iter().filter(|failure| failure.version.is_none()) {
                let status = if failure.is_version_policy() {
                    "Not loaded: No model version was found".to_owned()
                } else {
                    format!("Not loaded: {}", failure.reason())
                };
                let advice = Some(failure.advice.clone());
                let failed = failure.is_failure();
                rows.push(LoadRow { model: name.to_string(), version: None, status, advice, failed });
            }
        }
        rows
    }
}
