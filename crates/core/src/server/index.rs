//! The repository index: what there is, in which state, and why.

use std::collections::BTreeSet;

use super::Server;
use crate::repository;
use crate::table::ModelState;

/// One line of the repository index. A model that was never loaded has a name only.
#[derive(Clone, Debug)]
pub struct IndexEntry {
    pub name: String,
    pub version: Option<i64>,
    pub state: Option<ModelState>,
    /// Why a version does not serve, or why its last reload failed although it does.
    pub reason: String,
}

impl Server {
    /// Every model that the repositories hold or that was ever loaded, by name.
    pub fn repository_index(&self, ready_only: bool) -> Vec<IndexEntry> {
        let mut index = Vec::new();
        // What loads is looked at first: it is in the table by the time that it no longer loads.
        let loading = self.control.loading();
        let entries = self.table.entries();
        let leaving: BTreeSet<(String, i64)> =
            self.control.leaving().iter().map(|model| (model.name().to_string(), model.version())).collect();
        for (name, entry) in &entries {
            let loads = |version: &i64| loading.get(&**name).is_some_and(|list| list.contains(version));
            for (version, known) in &entry.states {
                let (state, reason) = match known.state {
                    ModelState::Unavailable if loads(version) => (ModelState::Loading, String::new()),
                    ModelState::Unavailable if leaving.contains(&(name.to_string(), *version)) => {
                        (ModelState::Unloading, String::new())
                    }
                    state => (state, known.reason.clone()),
                };
                index.push(IndexEntry {
                    name: name.to_string(),
                    version: Some(*version),
                    state: Some(state),
                    reason,
                });
            }
            let is_loading = loading.contains_key(&**name);
            if entry.states.is_empty() && !is_loading {
                let reason = entry.failures.first().map(|failure| failure.reason()).unwrap_or_default();
                let state = (!reason.is_empty()).then_some(ModelState::Unavailable);
                index.push(IndexEntry { name: name.to_string(), version: None, state, reason });
            }
        }
        for (name, versions) in &loading {
            let known = entries.get(name.as_str());
            let is_new = |version: &&i64| known.is_none_or(|entry| !entry.states.contains_key(*version));
            index.extend(versions.iter().filter(is_new).map(|version| IndexEntry {
                name: name.clone(),
                version: Some(*version),
                state: Some(ModelState::Loading),
                reason: String::new(),
            }));
        }
        let on_disk = repository::scan(&self.options.repositories, &[]).unwrap_or_default();
        let is_told = |name: &str| entries.contains_key(name) || loading.contains_key(name);
        for source in on_disk.iter().filter(|source| !is_told(&source.name)) {
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
}
