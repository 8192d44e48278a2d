//! Loading and unloading: in which order, what comes along, and what takes the place of what.
//!
//! *Invariants:* the table changes only here; a version is stopped after it has been taken out of the table.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use trireme_types::{Error, Result};

use super::Server;
use crate::load::{LoadOverrides, Loaded, order};
use crate::model::ModelVersion;
use crate::options::ModelControlMode;
use crate::repository::{self, ModelSource};
use crate::table::{Entry, UNLOADED, VersionState};

impl Server {
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

    pub(super) fn retire(&self, name: &str) {
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
