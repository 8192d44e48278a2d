//! What the server remembers of its loads: from what each model was loaded, who is loading what, and which versions are
//! leaving.
//!
//! *Invariant:* whoever changes a model has claimed it, and with it every model that the change touches. Claims are taken
//! all at once, so no two changes wait for one another.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::load::LoadOverrides;
use crate::model::ModelVersion;
use crate::repository::{ModelSource, Stamp, Upload};

/// What the versions that serve were loaded from.
#[derive(Clone, Debug, Default)]
pub(crate) struct Record {
    pub(crate) stamp: Stamp,
    /// The configuration of the load request, if it had one; never its files.
    pub(crate) overrides: LoadOverrides,
    /// The files of the load request, if it had some.
    pub(crate) upload: Option<Arc<Upload>>,
}

impl Record {
    /// Whether a request brought along what the model was made of.
    pub(crate) fn is_overridden(&self) -> bool {
        self.overrides.config.is_some()
    }
}

#[derive(Debug, Default)]
struct State {
    records: HashMap<String, Record>,
    /// What was last tried and failed.
    failed: HashMap<String, Stamp>,
    claimed: BTreeSet<String>,
    loading: BTreeMap<String, Vec<i64>>,
    leaving: Vec<Weak<ModelVersion>>,
    loads: usize,
    is_stopped: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Control {
    state: Mutex<State>,
    changed: Condvar,
}

impl Control {
    /// Waits until nobody else changes any of these models.
    pub(crate) fn claim(&self, models: impl IntoIterator<Item = String>) -> Claim<'_> {
        let models: BTreeSet<String> = models.into_iter().collect();
        let mut state = self.state.lock();
        while !state.claimed.is_disjoint(&models) {
            self.changed.wait(&mut state);
        }
        state.claimed.extend(models.iter().cloned());
        Claim { control: self, models }
    }

    /// Waits until fewer than `most` loads run, and counts as one.
    pub(crate) fn begin_load(&self, source: &ModelSource, stamp: &Stamp, most: usize) -> Loading<'_> {
        let mut state = self.state.lock();
        while state.loads >= most.max(1) {
            self.changed.wait(&mut state);
        }
        state.loads += 1;
        state.loading.insert(source.name.clone(), stamp.versions().collect());
        Loading { control: self, model: source.name.clone() }
    }

    /// Versions of models that are being loaded.
    pub(crate) fn loading(&self) -> BTreeMap<String, Vec<i64>> {
        self.state.lock().loading.clone()
    }

    pub(crate) fn record(&self, model: &str) -> Option<Record> {
        self.state.lock().records.get(model).cloned()
    }

    /// Names of the models that were loaded, or that a load failed for.
    pub(crate) fn models(&self) -> BTreeSet<String> {
        let state = self.state.lock();
        state.records.keys().chain(state.failed.keys()).cloned().collect()
    }

    /// A model serves what the record says.
    pub(crate) fn loaded(&self, model: &str, record: Record) {
        let mut state = self.state.lock();
        state.failed.remove(model);
        let before = state.records.insert(model.to_owned(), record);
        drop(state);
        // The files of an earlier load request are removed outside of the lock.
        drop(before);
    }

    /// A load failed; what served before still does.
    pub(crate) fn failed(&self, model: &str, stamp: Stamp) {
        self.state.lock().failed.insert(model.to_owned(), stamp);
    }

    /// Whether the last load of a model failed.
    pub(crate) fn has_failed(&self, model: &str) -> bool {
        self.state.lock().failed.contains_key(model)
    }

    /// What the last load of a model saw.
    pub(crate) fn last_try(&self, model: &str) -> Option<Stamp> {
        let state = self.state.lock();
        let failed = state.failed.get(model).cloned();
        failed.or_else(|| state.records.get(model).map(|record| record.stamp.clone()))
    }

    /// A model is out of service.
    pub(crate) fn unloaded(&self, model: &str) {
        let mut state = self.state.lock();
        state.failed.remove(model);
        let before = state.records.remove(model);
        drop(state);
        drop(before);
    }

    /// A version has been taken out of the table; requests may be inside.
    pub(crate) fn leaves(&self, model: &Arc<ModelVersion>) {
        let mut state = self.state.lock();
        state.leaving.retain(|left| left.strong_count() > 0);
        state.leaving.push(Arc::downgrade(model));
    }

    /// Versions out of the table with requests inside.
    pub(crate) fn leaving(&self) -> Vec<Arc<ModelVersion>> {
        let mut state = self.state.lock();
        state.leaving.retain(|left| left.strong_count() > 0);
        let leaving: Vec<_> = state.leaving.iter().filter_map(Weak::upgrade).collect();
        drop(state);
        leaving.into_iter().filter(|model| model.in_flight() > 0).collect()
    }

    /// Waits for `time`, or until the server stops; `false` if it has.
    pub(crate) fn pause(&self, time: Duration) -> bool {
        let end = std::time::Instant::now() + time;
        let mut state = self.state.lock();
        while !state.is_stopped {
            if self.changed.wait_until(&mut state, end).timed_out() {
                return !state.is_stopped;
            }
        }
        false
    }

    /// Ends the watch over the repository and removes the files of load requests.
    pub(crate) fn stop(&self) {
        let mut state = self.state.lock();
        state.is_stopped = true;
        let records = std::mem::take(&mut state.records);
        drop(state);
        drop(records);
        self.changed.notify_all();
    }
}

/// The right to change models, until it is dropped.
#[derive(Debug)]
pub(crate) struct Claim<'a> {
    control: &'a Control,
    models: BTreeSet<String>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut state = self.control.state.lock();
        state.claimed.retain(|model| !self.models.contains(model));
        drop(state);
        self.control.changed.notify_all();
    }
}

/// A load that runs, until it is dropped.
#[derive(Debug)]
pub(crate) struct Loading<'a> {
    control: &'a Control,
    model: String,
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        let mut state = self.control.state.lock();
        state.loads = state.loads.saturating_sub(1);
        state.loading.remove(&self.model);
        drop(state);
        self.control.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn changes_of_one_model_wait_for_each_other() {
        let control = Control::default();
        let inside = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for i in 0..8 {
                let (control, inside) = (&control, &inside);
                scope.spawn(move || {
                    let _claim = control.claim(["shared".to_owned(), format!("own{i}")]);
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                    std::thread::sleep(Duration::from_millis(2));
                    inside.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        let _one = control.claim(["a".to_owned()]);
        let _other = control.claim(["b".to_owned()]);
    }

    #[test]
    fn a_pause_ends_with_the_server() {
        let control = Control::default();
        assert!(control.pause(Duration::from_millis(1)));
        control.stop();
        assert!(!control.pause(Duration::from_secs(60)));
    }
}
