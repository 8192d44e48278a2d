//! The table of models: an immutable snapshot that requests read without a lock and loads replace as a whole.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use trireme_types::{Error, Result};

use crate::load::LoadFailure;
use crate::model::{Hold, ModelVersion};

/// State of one version, as the repository extension names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelState {
    Unknown,
    Ready,
    Unavailable,
    Loading,
    Unloading,
}

impl ModelState {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "UNKNOWN",
            Self::Ready => "READY",
            Self::Unavailable => "UNAVAILABLE",
            Self::Loading => "LOADING",
            Self::Unloading => "UNLOADING",
        }
    }
}

/// Reason of a version that was unloaded on request; such a version does not make the server unready.
pub(crate) const UNLOADED: &str = "unloaded";

/// State of one version and why it is so.
#[derive(Clone, Debug)]
pub(crate) struct VersionState {
    pub(crate) state: ModelState,
    pub(crate) reason: String,
}

impl VersionState {
    pub(crate) fn ready() -> Self {
        Self { state: ModelState::Ready, reason: String::new() }
    }

    pub(crate) fn unavailable(reason: impl Into<String>) -> Self {
        Self { state: ModelState::Unavailable, reason: reason.into() }
    }
}

/// All that is known of one model.
#[derive(Clone, Debug, Default)]
pub(crate) struct Entry {
    /// Versions that serve, ascending.
    pub(crate) ready: Vec<Arc<ModelVersion>>,
    pub(crate) states: BTreeMap<i64, VersionState>,
    /// Why the model as a whole could not be loaded, or what the failed versions need.
    pub(crate) failures: Vec<LoadFailure>,
}

impl Entry {
    fn version(&self, name: &str, version: Option<i64>) -> Result<&Arc<ModelVersion>> {
        let Some(version) = version else {
            return self.ready.last().ok_or_else(|| {
                Error::not_found(format!("Request for unknown model: '{name}' has no available versions"))
            });
        };
        if let Some(model) = self.ready.iter().find(|model| model.version() == version) {
            return Ok(model);
        }
        Err(if self.states.contains_key(&version) {
            Error::unavailable(format!(
                "Request for unknown model: '{name}' version {version} is not at ready state"
            ))
        } else {
            Error::not_found(format!("Request for unknown model: '{name}' version {version} is not found"))
        })
    }
}

type Models = HashMap<Arc<str>, Arc<Entry>>;

/// The current snapshot.
#[derive(Debug, Default)]
pub(crate) struct ModelTable {
    models: ArcSwap<Models>,
    writer: Mutex<()>,
}

impl ModelTable {
    /// The version that serves a request; the highest one if the request names none.
    pub(crate) fn find(&self, name: &str, version: Option<i64>) -> Result<Arc<ModelVersion>> {
        let models = self.models.load();
        let Some(entry) = models.get(name) else {
            return Err(Error::not_found(format!("Request for unknown model: '{name}' is not found")));
        };
        entry.version(name, version).cloned()
    }

    /// As [`ModelTable::find`], with the promise that the version goes on taking requests while the hold lasts.
    pub(crate) fn hold(&self, name: &str, version: Option<i64>) -> Result<Hold> {
        loop {
            // A version is stopped after it has been taken out of the table, so looking again finds another.
            if let Some(hold) = self.find(name, version)?.hold() {
                return Ok(hold);
            }
        }
    }

    pub(crate) fn entry(&self, name: &str) -> Option<Arc<Entry>> {
        self.models.load().get(name).cloned()
    }

    /// All entries by name.
    pub(crate) fn entries(&self) -> BTreeMap<Arc<str>, Arc<Entry>> {
        self.models.load().iter().map(|(name, entry)| (Arc::clone(name), Arc::clone(entry))).collect()
    }

    /// Versions that serve, by name and version.
    pub(crate) fn serving(&self) -> Vec<Arc<ModelVersion>> {
        let entries = self.entries();
        entries.values().flat_map(|entry| entry.ready.iter().cloned()).collect()
    }

    /// Replaces one model's entry by what `change` makes of it, and returns the entry that was there.
    pub(crate) fn update(
        &self,
        name: &str,
        change: impl FnOnce(Option<&Entry>) -> Entry,
    ) -> Option<Arc<Entry>> {
        let _writing = self.writer.lock();
        let old = self.models.load_full();
        let mut models = Models::clone(&old);
        let before = models.get(name).cloned();
        models.insert(Arc::from(name), Arc::new(change(before.as_deref())));
        self.models.store(Arc::new(models));
        before
    }
}
