//! Poll mode: the repositories are looked at again and again, and what changed is loaded, loaded anew or taken out of
//! service.
//!
//! *Invariant:* a model that is still being written is left alone: it must look the same twice, [`SETTLE`] apart.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use trireme_types::{Error, Result};

use super::Server;
use crate::options::ModelControlMode;
use crate::repository::{self, ModelSource, Stamp};

/// How long a model must lie unchanged before it is loaded.
const SETTLE: Duration = Duration::from_secs(1);

impl Server {
    /// Starts the watch, in poll mode. It ends with the server.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub(super) fn watch_repositories(server: &Arc<Self>) -> Result<()> {
        if server.options.control_mode != ModelControlMode::Poll {
            return Ok(());
        }
        let watched: Weak<Self> = Arc::downgrade(server);
        let (control, interval) = (Arc::clone(&server.control), server.options.poll_interval);
        let watch = move || {
            while control.pause(interval) {
                match watched.upgrade() {
                    Some(server) if !server.is_stopping() => server.poll_repositories(),
                    _ => return,
                }
            }
        };
        let thread = thread::Builder::new().name("trireme-poll".into()).spawn(watch);
        thread
            .map(drop)
            .map_err(|error| Error::internal(format!("no thread to poll the repository: {error}")))
    }

    /// One look. What cannot be read now is looked at again next time.
    fn poll_repositories(&self) {
        let Some((sources, mut stamps)) = self.look() else { return };
        let is_changed = |name: &str, stamp: &Stamp| self.control.last_try(name).as_ref() != Some(stamp);
        stamps.retain(|name, stamp| is_changed(name, stamp));
        let known = self.control.models();
        let gone = |sources: &[ModelSource]| -> Vec<String> {
            known.iter().filter(|name| !sources.iter().any(|source| source.name == **name)).cloned().collect()
        };
        let missing = gone(&sources);
        if stamps.is_empty() && missing.is_empty() {
            return;
        }
        if !self.control.pause(SETTLE) {
            return;
        }
        let Some((sources, again)) = self.look() else { return };
        let still_missing = gone(&sources);
        for name in missing.iter().filter(|name| still_missing.contains(name)) {
            tracing::info!("model '{name}' is no longer in the repository, unloading it");
            self.take_out(name, false);
        }
        let settled = |source: &&ModelSource| match (stamps.get(&source.name), again.get(&source.name)) {
            (Some(first), Some(second)) if first == second => true,
            (Some(_), _) => {
                tracing::debug!("model '{}' is being written, looking again later", source.name);
                false
            }
            (None, _) => false,
        };
        let changed: Vec<ModelSource> = sources.iter().filter(settled).cloned().collect();
        if !changed.is_empty() {
            self.load_changed(&changed, &sources);
        }
    }

    fn look(&self) -> Option<(Vec<ModelSource>, HashMap<String, Stamp>)> {
        let sources = match repository::scan(&self.options.repositories, &self.options.single_models) {
            Ok(sources) => sources,
            Err(error) => {
                tracing::warn!("polling the model repository failed, everything serves on as it is: {error}");
                return None;
            }
        };
        let stamp = |source: &ModelSource| {
            (source.name.clone(), Stamp::of(source, self.control.last_try(&source.name).as_ref()))
        };
        let stamps = sources.iter().map(stamp).collect();
        Some((sources, stamps))
    }
}
