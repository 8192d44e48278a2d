//! In which order models are loaded: an ensemble after the models of its steps.

use std::collections::{BTreeMap, BTreeSet};

/// Models by their place in the list that was asked about.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct LoadOrder {
    /// Those of one wave do not depend on one another, only on those of earlier waves.
    pub(crate) waves: Vec<Vec<usize>>,
    /// Models that depend on themselves, or on such models, with the way around.
    pub(crate) circular: Vec<(usize, String)>,
}

/// Orders models, each with the names of the models that it needs. Names that are not in the list do not count.
pub(crate) fn order(models: &[(String, Vec<String>)]) -> LoadOrder {
    let places: BTreeMap<&str, usize> =
        models.iter().enumerate().map(|(i, (name, _))| (name.as_str(), i)).collect();
    let needs: Vec<BTreeSet<usize>> = models
        .iter()
        .map(|(_, needs)| needs.iter().filter_map(|name| places.get(name.as_str()).copied()).collect())
        .collect();
    let mut done = BTreeSet::new();
    let mut left: BTreeSet<usize> = (0..models.len()).collect();
    let mut found = LoadOrder::default();
    loop {
        let is_free = |model: &&usize| needs.get(**model).is_none_or(|needs| needs.is_subset(&done));
        let wave: Vec<usize> = left.iter().filter(is_free).copied().collect();
        if wave.is_empty() {
            break;
        }
        for model in &wave {
            left.remove(model);
        }
        done.extend(&wave);
        found.waves.push(wave);
    }
    let name = |model: usize| models.get(model).map_or("", |(name, _)| name.as_str());
    for model in &left {
        let mut way = vec![*model];
        let mut seen = BTreeSet::from([*model]);
        // Everything left has a need that is left; following it comes around.
        while let Some(next) =
            way.last().and_then(|last| needs.get(*last)?.iter().find(|next| left.contains(*next)))
        {
            way.push(*next);
            if !seen.insert(*next) {
                break;
            }
        }
        let way: Vec<&str> = way.into_iter().map(name).collect();
        found.circular.push((*model, way.join(" -> ")));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn models(list: &[(&str, &[&str])]) -> Vec<(String, Vec<String>)> {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        list.iter().map(|(name, needs)| ((*name).to_owned(), owned(needs))).collect()
    }

    #[test]
    fn steps_come_before_their_ensembles() {
        let list = models(&[
            ("outer", &["inner", "a"]),
            ("a", &[]),
            ("inner", &["a", "b"]),
            ("b", &[]),
            ("c", &["gone"]),
        ]);
        let order = order(&list);
        assert_eq!(order.waves, [vec![1, 3, 4], vec![2], vec![0]]);
        assert!(order.circular.is_empty());
    }

    #[test]
    fn a_circle_is_told_and_keeps_nobody_else() {
        let order = order(&models(&[
            ("a", &["b"]),
            ("b", &["c"]),
            ("c", &["a"]),
            ("on", &["a"]),
            ("m", &[]),
            ("s", &["s"]),
        ]));
        assert_eq!(order.waves, [vec![4]]);
        let ways: Vec<&str> = order.circular.iter().map(|(_, way)| way.as_str()).collect();
        assert_eq!(
            ways,
            ["a -> b -> c -> a", "b -> c -> a -> b", "c -> a -> b -> c", "on -> a -> b -> c -> a", "s -> s"]
        );
    }
}
