//! Who uses whom among the models that a server has loaded: which ensembles to look at again when a model comes or goes,
//! and which models nobody needs once an ensemble is gone.

use std::collections::{BTreeMap, BTreeSet};

use parking_lot::Mutex;

use super::LoadOverrides;

/// An ensemble that shall serve. It stays known while a model of its steps is missing, and serves again when that model
/// does.
#[derive(Clone, Debug, Default)]
struct Known {
    steps: BTreeSet<String>,
    /// What its load request brought along.
    overrides: LoadOverrides,
}

#[derive(Debug, Default)]
struct State {
    /// Models that somebody asked for by name, and not only as a step.
    asked_for: BTreeSet<String>,
    ensembles: BTreeMap<String, Known>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Dependents(Mutex<State>);

impl Dependents {
    /// A model was loaded. `steps` are the models that it is made of, `is_asked_for` whether it was named itself.
    pub(crate) fn loaded(&self, name: &str, steps: &[String], overrides: &LoadOverrides, is_asked_for: bool) {
        let mut state = self.0.lock();
        if is_asked_for {
            state.asked_for.insert(name.to_owned());
        }
        if steps.is_empty() {
            state.ensembles.remove(name);
        } else {
            let known = Known { steps: steps.iter().cloned().collect(), overrides: overrides.clone() };
            state.ensembles.insert(name.to_owned(), known);
        }
    }

    /// A model was unloaded on request. Returns the models that it used, that nobody asked for by name, and that no other
    /// ensemble uses, those of its steps first.
    pub(crate) fn unloaded(&self, name: &str) -> Vec<String> {
        let mut state = self.0.lock();
        state.asked_for.remove(name);
        let mut useless = Vec::new();
        let mut gone = vec![name.to_owned()];
        while let Some(ensemble) = gone.pop() {
            let Some(known) = state.ensembles.remove(&ensemble) else { continue };
            for step in known.steps {
                let is_used = state.ensembles.values().any(|other| other.steps.contains(&step));
                if !is_used && !state.asked_for.contains(&step) && !useless.contains(&step) {
                    useless.push(step.clone());
                    gone.push(step);
                }
            }
        }
        useless
    }

    /// Ensembles that use a model, directly or through other ensembles, each after those that it uses.
    pub(crate) fn users(&self, model: &str) -> Vec<(String, LoadOverrides)> {
        let state = self.0.lock();
        let mut found: BTreeSet<&str> = BTreeSet::new();
        let mut to_do = vec![model];
        while let Some(used) = to_do.pop() {
            for (name, _) in state.ensembles.iter().filter(|(_, known)| known.steps.contains(used)) {
                if name != model && found.insert(name) {
                    to_do.push(name);
                }
            }
        }
        let list: Vec<(String, Vec<String>)> = found
            .iter()
            .filter_map(|name| {
                let known = state.ensembles.get(*name)?;
                Some(((*name).to_owned(), known.steps.iter().cloned().collect()))
            })
            .collect();
        let order = super::order(&list);
        order
            .waves
            .into_iter()
            .flatten()
            .filter_map(|place| {
                let (name, _) = list.get(place)?;
                Some((name.clone(), state.ensembles.get(name)?.overrides.clone()))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> Dependents {
        let dependents = Dependents::default();
        let load = |name: &str, steps: &[&str], asked: bool| {
            let steps: Vec<String> = steps.iter().map(|step| (*step).to_owned()).collect();
            dependents.loaded(name, &steps, &LoadOverrides::default(), asked);
        };
        load("a", &[], false);
        load("b", &[], true);
        load("c", &[], false);
        load("inner", &["a", "b"], false);
        load("outer", &["inner", "c"], true);
        load("other", &["c"], true);
        dependents
    }

    fn names(users: Vec<(String, LoadOverrides)>) -> Vec<String> {
        users.into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn ensembles_that_use_a_model_in_order() {
        let dependents = known();
        assert_eq!(names(dependents.users("a")), ["inner", "outer"]);
        assert_eq!(names(dependents.users("c")), ["other", "outer"]);
        assert!(dependents.users("outer").is_empty());
    }

    #[test]
    fn nobody_loses_a_model_that_is_used_or_was_asked_for() {
        let dependents = known();
        // b was asked for by name, c is used by another ensemble.
        assert_eq!(dependents.unloaded("outer"), ["inner", "a"]);
        assert_eq!(dependents.unloaded("other"), ["c"]);
        assert!(dependents.unloaded("never loaded").is_empty());
    }
}
