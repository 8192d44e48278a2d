//! The façade that every frontend uses: everything that can be asked of the server, in the words of the protocol.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use trireme_backend::Backend;
use trireme_types::{Error, InferRequest, Responder, Result};

use crate::cache::ResponseCache;
use crate::executor::Executor;
use crate::load::{Dependents, LoadFailure, LoadOverrides, Loaded, Loader, order};
use crate::metrics::{Families, Metrics};
use crate::model::ModelVersion;
use crate::options::{ModelControlMode, ServerOptions};
use crate::repository::{self, ModelSource};
use crate::stats::ModelStatistics;
use crate::table::{Entry, ModelState, ModelTable, UNLOADED, VersionState};
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

/// One line of the repository index. A model that was never loaded has a name only.
#[derive(Clone, Debug)]
pub struct IndexEntry {
    pub name: String,
    pub version: Option<i64>,
    pub state: Option<ModelState>,
    pub reason: String,
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
        let server = Self {
            options,
            metadata,
            loader,
            cache,
            table,
            dependents: Dependents::default(),
            metrics: Metrics::default(),
            stopping: AtomicBool::new(false),
            entered: AtomicUsize::new(0),
        };
        let sources = repository::scan(&server.options.repositories, &server.options.single_models)?;
        server.load_at_start(sources)?;
        Ok(Arc::new(server))
    }

    pub fn options(&self) -> &ServerOptions {
        &self.options
    }

    pub fn metadata(&self) -> &ServerMetadata {
        &self.metadata
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

    /// Every model that the repositories hold or that was ever loaded, by name.
    pub fn repository_index(&self, ready_only: bool) -> Vec<IndexEntry> {
        let mut index = Vec::new();
        let entries = self.table.entries();
        for (name, entry) in &entries {
            for (version, state) in &entry.states {
                index.push(IndexEntry {
                    name: name.to_string(),
                    version: Some(*version),
                    state: Some(state.state),
                    reason: state.reason.clone(),
                });
            }
            if entry.states.is_empty() {
                let reason = entry.failures.first().map(|failure| failure.reason()).unwrap_or_default();
                let state = (!reason.is_empty()).then_some(ModelState::Unavailable);
                index.push(IndexEntry { name: name.to_string(), version: None, state, reason });
            }
        }
        let on_disk = repository::scan(&self.options.repositories, &[]).unwrap_or_default();
        for source in on_disk.iter().filter(|source| !entries.contains_key(source.name.as_str())) {
            index.push(IndexEntry {
                name: source.name.clone(),
                version: None,
                state: None,
                reason: String::new(),
            });
        }
        if ready_only {
            index.retain(|entry| entry.state == Some(ModelState::Ready));
        }
        index.sort_by(|a, b| (&a.name, a.version).cmp(&(&b.name, b.version)));
        index
    }

    /// Loads a model or loads it anew. Blocks until it is ready or has failed; the versions that served before keep
    /// serving until the new ones do, and go on if those fail.
    ///
    /// # Errors
    /// `UNAVAILABLE` outside explicit mode, `INTERNAL` for a model that no repository holds or whose configuration
    /// cannot be read, `INVALID_ARG` when a version cannot be loaded.
    pub fn load_model(&self, name: &str, overrides: LoadOverrides) -> Result<()> {
        self.check_explicit()?;
        repository::check_model_name(name)?;
        let poll_failed = |detail: &str| {
            Error::internal(format!("failed to load '{name}', failed to poll from model repository{detail}"))
        };
        let sources = repository::scan(&self.options.repositories, &self.options.single_models)?;
        let Some(source) = sources.iter().find(|source| source.name == name) else {
            return Err(poll_failed(&format!(": no directory '{name}' in {}", self.repositories_text())));
        };
        let (steps, loaded) = match self.load_composing_models(source, &sources, &overrides) {
            Ok(steps) => (steps, self.loader.load(source, &overrides)),
            Err(way) => (Vec::new(), Loaded::circular(&way)),
        };
        if let Some(failure) = loaded.failures.iter().find(|failure| failure.version.is_none()) {
            return Err(if failure.error.code() == trireme_types::Code::Unsupported {
                failure.error.clone()
            } else if failure.is_version_policy() {
                Error::invalid_arg(format!("load failed for model '{name}': {}\n", failure.error))
            } else {
                poll_failed(&format!(": {}", failure.error))
            });
        }
        let failed: String = loaded
            .failures
            .iter()
            .filter_map(|failure| {
                let version = failure.version?;
                Some(format!("version {version} is at UNAVAILABLE state: {};\n", failure.reason()))
            })
            .collect();
        self.publish(name, loaded);
        self.dependents.loaded(name, &steps, &overrides, true);
        self.look_at_users(name, &sources);
        if failed.is_empty() {
            Ok(())
        } else {
            Err(Error::invalid_arg(format!("load failed for model '{name}': {failed}")))
        }
    }

    /// Takes a model out of service, and with `unload_dependents` the models of an ensemble's steps that nobody else
    /// needs. Requests in flight are answered; nothing happens if the model is not loaded. Ensembles that use it are out
    /// of service until it is loaded again.
    ///
    /// # Errors
    /// `UNAVAILABLE` outside explicit mode.
    pub fn unload_model(&self, name: &str, unload_dependents: bool) -> Result<()> {
        self.check_explicit()?;
        let mut gone = vec![name.to_owned()];
        let useless = self.dependents.unloaded(name);
        if unload_dependents {
            gone.extend(useless);
        }
        for name in gone.iter().filter(|name| self.table.entry(name).is_some()) {
            self.retire(name);
        }
        let sources =
            repository::scan(&self.options.repositories, &self.options.single_models).unwrap_or_default();
        for name in &gone {
            self.look_at_users(name, &sources);
        }
        Ok(())
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
            let models = self.table.serving();
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
            self.retire(name);
        }
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

    fn check_explicit(&self) -> Result<()> {
        if self.options.control_mode == ModelControlMode::Explicit {
            return Ok(());
        }
        Err(Error::unavailable("explicit model load / unload is not allowed if polling is enabled"))
    }

    fn repositories_text(&self) -> String {
        let paths: Vec<String> =
            self.options.repositories.iter().map(|path| format!("'{}'", path.display())).collect();
        if paths.is_empty() { "any repository".to_owned() } else { paths.join(", ") }
    }

    fn load_at_start(&self, sources: Vec<ModelSource>) -> Result<()> {
        let none = LoadOverrides::default();
        let (asked_for, needed) = self.wanted_at_start(sources)?;
        let names: Vec<String> = asked_for.iter().map(|source| source.name.clone()).collect();
        let wanted = [asked_for, needed].concat();
        let steps =
            wanted.iter().map(|source| (source.name.clone(), self.loader.composing_models(source, &none)));
        let steps: Vec<(String, Vec<String>)> = steps.collect();
        let order = order(&steps);
        for wave in &order.waves {
            let next = AtomicUsize::new(0);
            let load = || {
                while let Some(place) = wave.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (Some(source), Some((name, steps))) = (wanted.get(*place), steps.get(*place)) else {
                        continue;
                    };
                    self.publish(name, self.loader.load(source, &none));
                    self.dependents.loaded(name, steps, &none, names.contains(name));
                }
            };
            thread::scope(|scope| {
                for _ in 1..self.options.load_threads.clamp(1, wave.len().max(1)) {
                    scope.spawn(load);
                }
                load();
            });
        }
        for (place, way) in &order.circular {
            if let Some((name, _)) = steps.get(*place) {
                self.publish(name, Loaded::circular(way));
            }
        }
        Ok(())
    }

    /// Models to load at start: those asked for, and those that they need as steps.
    fn wanted_at_start(&self, sources: Vec<ModelSource>) -> Result<(Vec<ModelSource>, Vec<ModelSource>)> {
        let names = &self.options.load_models;
        if self.options.control_mode != ModelControlMode::Explicit || names.iter().any(|name| name == "*") {
            return Ok((sources, Vec::new()));
        }
        let single =
            |source: &ModelSource| self.options.single_models.iter().any(|one| one.name == source.name);
        for name in names {
            repository::check_model_name(name)?;
            if !sources.iter().any(|source| source.name == *name) {
                self.publish(name, Loaded::missing(name, &self.repositories_text()));
            }
        }
        let is_asked_for = |source: &ModelSource| names.contains(&source.name) || single(source);
        let asked_for: Vec<ModelSource> =
            sources.iter().filter(|source| is_asked_for(source)).cloned().collect();
        let mut needed = self.needed(&asked_for, &sources, &LoadOverrides::default());
        needed.retain(|source| !is_asked_for(source));
        Ok((asked_for, needed))
    }

    /// The models of the steps of these models, of their steps, and so on.
    fn needed(
        &self,
        models: &[ModelSource],
        sources: &[ModelSource],
        overrides: &LoadOverrides,
    ) -> Vec<ModelSource> {
        let mut found: Vec<ModelSource> = Vec::new();
        let mut names: Vec<String> =
            models.iter().flat_map(|source| self.loader.composing_models(source, overrides)).collect();
        while let Some(name) = names.pop() {
            let is_known = found.iter().any(|source| source.name == name);
            if let Some(source) = sources.iter().find(|source| source.name == name && !is_known) {
                names.extend(self.loader.composing_models(source, &LoadOverrides::default()));
                found.push(source.clone());
            }
        }
        found
    }

    /// Loads the models that an ensemble is made of, unless they serve already. Returns those of its own steps.
    ///
    /// # Errors
    /// It is made of itself: the way around.
    fn load_composing_models(
        &self,
        source: &ModelSource,
        sources: &[ModelSource],
        overrides: &LoadOverrides,
    ) -> Result<Vec<String>, String> {
        let none = LoadOverrides::default();
        let mut needed = self.needed(std::slice::from_ref(source), sources, overrides);
        needed.retain(|other| other.name != source.name);
        let steps = self.loader.composing_models(source, overrides);
        let list =
            needed.iter().map(|other| (other.name.clone(), self.loader.composing_models(other, &none)));
        let list: Vec<_> = list.chain([(source.name.clone(), steps.clone())]).collect();
        let order = order(&list);
        if let Some((_, way)) = order.circular.into_iter().find(|(place, _)| *place == needed.len()) {
            return Err(way);
        }
        for place in order.waves.into_iter().flatten() {
            let (Some(source), Some((name, steps))) = (needed.get(place), list.get(place)) else { continue };
            let serves = self.table.entry(name).is_some_and(|entry| !entry.ready.is_empty());
            if !serves {
                self.publish(name, self.loader.load(source, &none));
                self.dependents.loaded(name, steps, &none, false);
            }
        }
        Ok(steps)
    }

    /// Checks the ensembles that use a model again after it has come or gone. One that fits no more is out of service
    /// until it does.
    fn look_at_users(&self, model: &str, sources: &[ModelSource]) {
        for (name, overrides) in self.dependents.users(model) {
            let Some(source) = sources.iter().find(|source| source.name == name) else { continue };
            let loaded = self.loader.load(source, &overrides);
            if let Some(failure) = loaded.failures.first() {
                tracing::warn!("ensemble '{name}' is out of service: {}", failure.error);
                if self.table.entry(&name).is_some_and(|entry| !entry.ready.is_empty()) {
                    self.retire(&name);
                }
                continue;
            }
            let serves = self.table.entry(&name);
            let same = |old: &Arc<ModelVersion>, new: &Arc<ModelVersion>| old.serves_like(new);
            let is_unchanged = serves.is_some_and(|entry| {
                entry.ready.len() == loaded.versions.len()
                    && entry.ready.iter().zip(&loaded.versions).all(|(old, new)| same(old, new))
            });
            if !is_unchanged {
                self.publish(&name, loaded);
            }
        }
    }

    /// Puts loaded versions in place of the old ones. If any version failed and an older load serves, that one
    /// stays and the failure is only told.
    fn publish(&self, name: &str, loaded: Loaded) {
        for failure in &loaded.failures {
            let version = failure.version.map(|version| format!(" version {version}")).unwrap_or_default();
            tracing::error!("failed to load '{name}'{version}: {}", failure.reason());
        }
        for model in &loaded.versions {
            tracing::info!("successfully loaded '{name}' version {}", model.version());
        }
        let mut useless = Vec::new();
        let mut kept = false;
        let before = self.table.update(name, |old| {
            let serving = old.is_some_and(|old| !old.ready.is_empty());
            kept = serving && !loaded.failures.is_empty();
            match old {
                Some(old) if kept => {
                    useless.clone_from(&loaded.versions);
                    old.clone()
                }
                _ => loaded.to_entry(),
            }
        });
        let replaced = match before {
            Some(before) if !kept => before.ready.clone(),
            _ => useless,
        };
        for model in replaced {
            model.stop();
        }
    }

    fn retire(&self, name: &str) {
        let before = self.table.update(name, |old| {
            let versions = old.iter().flat_map(|old| &old.ready).map(|model| model.version());
            Entry {
                ready: Vec::new(),
                states: versions.map(|version| (version, VersionState::unavailable(UNLOADED))).collect(),
                failures: Vec::new(),
            }
        });
        for model in before.iter().flat_map(|entry| &entry.ready) {
            model.stop();
            tracing::info!("successfully unloaded '{name}' version {}", model.version());
        }
    }
}
