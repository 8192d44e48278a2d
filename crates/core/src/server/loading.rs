//! Loading and unloading: in which order, what comes along, and what takes the place of what.
//!
//! *Invariants:* the table changes only here; a version is let go after it has been taken out of the table, and
//! none is refused a request that has found it there.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use trireme_types::{Error, Result};

use super::Server;
use crate::control::{Claim, Record};
use crate::load::{LoadOverrides, Loaded, order};
use crate::model::ModelVersion;
use crate::options::ModelControlMode;
use crate::repository::{self, ModelSource, Stamp, Upload};
use crate::table::{Entry, ModelState, UNLOADED, VersionState};

/// Pause before a failed load is tried again, times the number of tries.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// What a load came to, and what it was made from.
struct Tried {
    loaded: Loaded,
    record: Record,
}

impl Server {
    /// Loads a model or loads it anew. Blocks until it is ready or has failed; the versions that served before keep
    /// serving until the new ones do, and go on if those fail. Nothing happens if the model has not changed since it was
    /// loaded and the request brings nothing along; what an earlier request brought along is forgotten by a plain one.
    ///
    /// # Errors
    /// `UNAVAILABLE` outside explicit mode, `INTERNAL` for a model that no repository holds or whose configuration
    /// cannot be read, `INVALID_ARG` when a version cannot be loaded or a file of the request has no place.
    pub fn load_model(&self, name: &str, overrides: LoadOverrides) -> Result<()> {
        self.check_explicit()?;
        repository::check_model_name(name)?;
        let poll_failed = |detail: &str| {
            Error::internal(format!("failed to load '{name}', failed to poll from model repository{detail}"))
        };
        let LoadOverrides { config, files } = overrides;
        if config.is_none() && !files.is_empty() {
            return Err(Error::invalid_arg(
                "Load parameter 'config' must be specified for model file override",
            ));
        }
        let upload = match files.is_empty() {
            true => None,
            false => Some(Arc::new(Upload::new(name, &files)?)),
        };
        drop(files);
        let overrides = LoadOverrides { config, files: Vec::new() };
        let sources = repository::scan(&self.options.repositories, &self.options.single_models)?;
        let uploaded = upload.as_ref().map(|upload| upload.source(name));
        let Some(source) = uploaded.as_ref().or_else(|| sources.iter().find(|source| source.name == name))
        else {
            return Err(poll_failed(&format!(": no directory '{name}' in {}", self.repositories_text())));
        };
        let _claim = self.claim(source, &sources, &overrides);
        let (steps, mut tried) = match self.load_composing_models(source, &sources, &overrides) {
            Ok(steps) if self.is_unchanged(source, &overrides) => {
                tracing::debug!("model '{name}' has not changed since it was loaded");
                self.dependents.loaded(name, &steps, &overrides, true);
                return Ok(());
            }
            Ok(steps) => (steps, self.try_load(source, &overrides)),
            Err(way) => (Vec::new(), self.not_loaded(source, Loaded::circular(&way))),
        };
        tried.record.upload = upload;
        if let Some(failure) = tried.loaded.failures.iter().find(|failure| failure.version.is_none()) {
            let error = if failure.error.code() == trireme_types::Code::Unsupported {
                failure.error.clone()
            } else if failure.is_version_policy() {
                Error::invalid_arg(format!("load failed for model '{name}': {}\n", failure.error))
            } else {
                poll_failed(&format!(": {}", failure.error))
            };
            if self.serves(name) {
                self.publish(name, tried);
            }
            return Err(error);
        }
        let failed: String = tried
            .loaded
            .failures
            .iter()
            .filter_map(|failure| {
                let version = failure.version?;
                Some(format!("version {version} is at UNAVAILABLE state: {};\n", failure.reason()))
            })
            .collect();
        self.publish(name, tried);
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
        self.take_out(name, unload_dependents);
        Ok(())
    }

    /// As [`Server::unload_model`], in any mode.
    pub(super) fn take_out(&self, name: &str, unload_dependents: bool) {
        let mut gone = vec![name.to_owned()];
        let useless = self.dependents.unloaded(name);
        if unload_dependents {
            gone.extend(useless);
        }
        let users = gone.iter().flat_map(|name| self.dependents.users(name)).map(|(name, _)| name);
        let touched: BTreeSet<String> = gone.iter().cloned().chain(users).collect();
        let _claim = self.control.claim(touched);
        for name in gone.iter().filter(|name| self.table.entry(name).is_some()) {
            self.retire(name);
            self.control.unloaded(name);
        }
        let sources =
            repository::scan(&self.options.repositories, &self.options.single_models).unwrap_or_default();
        for name in &gone {
            self.look_at_users(name, &sources);
        }
    }

    /// The right to change a model, the models that it is made of, and the ensembles that use any of them.
    fn claim(&self, source: &ModelSource, sources: &[ModelSource], overrides: &LoadOverrides) -> Claim<'_> {
        let needed = self.needed(std::slice::from_ref(source), sources, overrides);
        let mut names: BTreeSet<String> = needed.into_iter().map(|source| source.name).collect();
        names.insert(source.name.clone());
        let users = names.iter().flat_map(|name| self.dependents.users(name)).map(|(name, _)| name);
        let users: Vec<String> = users.collect();
        self.control.claim(names.into_iter().chain(users))
    }

    fn serves(&self, name: &str) -> bool {
        self.table.entry(name).is_some_and(|entry| !entry.ready.is_empty())
    }

    /// Whether a model serves exactly what a load would make of it.
    fn is_unchanged(&self, source: &ModelSource, overrides: &LoadOverrides) -> bool {
        if overrides.config.is_some() || !self.serves(&source.name) {
            return false;
        }
        let Some(record) = self.control.record(&source.name).filter(|record| !record.is_overridden()) else {
            return false;
        };
        // A load that failed is tried again, whatever it saw.
        !self.control.has_failed(&source.name) && Stamp::of(source, Some(&record.stamp)) == record.stamp
    }

    /// Loads a model beside what serves. Versions that have not changed are taken over.
    fn try_load(&self, source: &ModelSource, overrides: &LoadOverrides) -> Tried {
        let name = source.name.as_str();
        let before = self.control.record(name);
        let stamp = Stamp::of(source, self.control.last_try(name).as_ref());
        let _loading = self.control.begin_load(source, &stamp, self.options.load_threads);
        let kept: Vec<Arc<ModelVersion>> = match &before {
            Some(before)
                if !before.is_overridden() && overrides.config.is_none() && stamp.shares(&before.stamp) =>
            {
                let entry = self.table.entry(name);
                let ready = entry.iter().flat_map(|entry| &entry.ready);
                let same = |model: &&Arc<ModelVersion>| {
                    model.ensemble().is_none() && stamp.has_same_version(&before.stamp, model.version())
                };
                ready.filter(same).cloned().collect()
            }
            _ => Vec::new(),
        };
        tracing::info!("loading: {name}");
        let mut loaded = self.loader.load_beside(source, overrides, &kept);
        for retry in 1..=self.options.load_retries {
            let Some(failure) = loaded.failures.first() else { break };
            tracing::warn!(
                "loading '{name}' failed, try {retry} of {} follows: {}",
                self.options.load_retries,
                failure.reason()
            );
            thread::sleep(RETRY_PAUSE.saturating_mul(u32::try_from(retry.min(10)).unwrap_or(1)));
            loaded = self.loader.load_beside(source, overrides, &kept);
        }
        Tried { loaded, record: Record { stamp, overrides: overrides.clone(), upload: None } }
    }

    /// A load that ended before it began.
    fn not_loaded(&self, source: &ModelSource, loaded: Loaded) -> Tried {
        let stamp = Stamp::of(source, self.control.last_try(&source.name).as_ref());
        Tried { loaded, record: Record { stamp, ..Record::default() } }
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

    pub(super) fn load_at_start(&self, sources: Vec<ModelSource>) -> Result<()> {
        let (asked_for, needed) = self.wanted_at_start(sources)?;
        let names: Vec<String> = asked_for.iter().map(|source| source.name.clone()).collect();
        self.load_in_order(&[asked_for, needed].concat(), &names);
        Ok(())
    }

    /// Loads models that have come or changed, and sees to the ensembles that use them.
    pub(super) fn load_changed(&self, changed: &[ModelSource], sources: &[ModelSource]) {
        let names: Vec<String> = changed.iter().map(|source| source.name.clone()).collect();
        self.load_in_order(changed, &names);
        for name in &names {
            self.look_at_users(name, sources);
        }
    }

    /// Loads models, an ensemble after those of its steps, and those that do not need one another side by side.
    fn load_in_order(&self, wanted: &[ModelSource], asked_for: &[String]) {
        let none = LoadOverrides::default();
        let steps =
            wanted.iter().map(|source| (source.name.clone(), self.loader.composing_models(source, &none)));
        let steps: Vec<(String, Vec<String>)> = steps.collect();
        let order = order(&steps);
        let ended = AtomicUsize::new(0);
        for wave in &order.waves {
            let next = AtomicUsize::new(0);
            let load = || {
                while let Some(place) = wave.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (Some(source), Some((name, steps))) = (wanted.get(*place), steps.get(*place)) else {
                        continue;
                    };
                    self.publish(name, self.try_load(source, &none));
                    self.dependents.loaded(name, steps, &none, asked_for.contains(name));
                    let ended = ended.fetch_add(1, Ordering::Relaxed) + 1;
                    if wanted.len() > 1 {
                        tracing::info!("loaded {ended} of {} models", wanted.len());
                    }
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
            if let Some(source) = wanted.get(*place) {
                self.publish(&source.name, self.not_loaded(source, Loaded::circular(way)));
            }
        }
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
                let loaded = Loaded::missing(name, &self.repositories_text());
                self.publish(name, Tried { loaded, record: Record::default() });
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

    /// Loads the models that an ensemble is made of, unless they serve already and have not changed. Returns those of its own steps.
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
            let is_overridden = self.control.record(name).is_some_and(|record| record.is_overridden());
            if self.serves(name) && (is_overridden || self.is_unchanged(source, &none)) {
                continue;
            }
            self.publish(name, self.try_load(source, &none));
            self.dependents.loaded(name, steps, &none, false);
            self.look_at_users(name, sources);
        }
        Ok(steps)
    }

    /// Checks the ensembles that use a model again after it has come or gone. One that fits no more is out of service
    /// until it does.
    fn look_at_users(&self, model: &str, sources: &[ModelSource]) {
        for (name, overrides) in self.dependents.users(model) {
            let record = self.control.record(&name).unwrap_or_default();
            let uploaded = record.upload.as_ref().map(|upload| upload.source(&name));
            let Some(source) =
                uploaded.as_ref().or_else(|| sources.iter().find(|source| source.name == name))
            else {
                continue;
            };
            let stamp = Stamp::of(source, Some(&record.stamp));
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
                let record = Record { stamp, overrides, upload: record.upload };
                self.publish(&name, Tried { loaded, record });
            }
        }
    }

    /// Puts loaded versions in place of the old ones, at once. If any version failed and an older load serves, that one
    /// stays, and the failure is told in the log and the index. Requests that have found an old version before are served
    /// by it; it goes with the last of them.
    fn publish(&self, name: &str, tried: Tried) {
        let Tried { loaded, record } = tried;
        for failure in &loaded.failures {
            let version = failure.version.map(|version| format!(" version {version}")).unwrap_or_default();
            tracing::error!("failed to load '{name}'{version}: {}", failure.reason());
        }
        let mut kept = false;
        let before = self.table.update(name, |old| {
            kept = old.is_some_and(|old| !old.ready.is_empty()) && !loaded.failures.is_empty();
            match old {
                Some(old) if kept => still_serving(old, &loaded),
                Some(old) => in_place_of(old, &loaded),
                None => loaded.to_entry(),
            }
        });
        if kept {
            tracing::warn!("'{name}' serves on as it was loaded before");
            self.control.failed(name, record.stamp);
            return;
        }
        let old: &[Arc<ModelVersion>] = before.as_ref().map_or(&[], |before| &before.ready);
        let is_in = |list: &[Arc<ModelVersion>], model| list.iter().any(|one| Arc::ptr_eq(one, model));
        for model in loaded.versions.iter().filter(|model| !is_in(old, model)) {
            tracing::info!("successfully loaded '{name}' version {}", model.version());
        }
        for model in old.iter().filter(|model| !is_in(&loaded.versions, model)) {
            self.let_go(model);
            if !loaded.versions.iter().any(|new| new.version() == model.version()) {
                tracing::info!("successfully unloaded '{name}' version {}", model.version());
            }
        }
        let failed = (!loaded.failures.is_empty()).then(|| record.stamp.clone());
        if !loaded.versions.is_empty() {
            self.control.loaded(name, record);
        }
        if let Some(stamp) = failed {
            self.control.failed(name, stamp);
        }
    }

    /// Takes a model out of the table. Returns the versions that were there.
    pub(super) fn retire(&self, name: &str) -> Vec<Arc<ModelVersion>> {
        let before = self.table.update(name, |old| {
            let versions = old.iter().flat_map(|old| &old.ready).map(|model| model.version());
            Entry {
                ready: Vec::new(),
                states: versions.map(|version| (version, VersionState::unavailable(UNLOADED))).collect(),
                failures: Vec::new(),
            }
        });
        let gone = before.map(|entry| entry.ready.clone()).unwrap_or_default();
        for model in &gone {
            self.let_go(model);
            tracing::info!("successfully unloaded '{name}' version {}", model.version());
        }
        gone
    }

    /// A version is out of the table: nothing need wait for more requests in it.
    fn let_go(&self, model: &Arc<ModelVersion>) {
        self.control.leaves(model);
        model.drain();
    }
}

/// An entry whose reload failed.
fn still_serving(old: &Entry, loaded: &Loaded) -> Entry {
    let mut entry = old.clone();
    let reasons: Vec<String> = loaded.failures.iter().map(|failure| failure.reason()).collect();
    let reason = format!("the last load failed, what was loaded before serves on: {}", reasons.join("; "));
    for state in entry.states.values_mut().filter(|state| state.state == ModelState::Ready) {
        state.reason.clone_from(&reason);
    }
    entry
}

/// An entry that takes the place of another. Versions that are no more are told as unloaded.
fn in_place_of(old: &Entry, loaded: &Loaded) -> Entry {
    let mut entry = loaded.to_entry();
    for model in &old.ready {
        entry.states.entry(model.version()).or_insert_with(|| VersionState::unavailable(UNLOADED));
    }
    entry
}
