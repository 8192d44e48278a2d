//! The direct strategy: a sequence has a row of the batch to itself for as long as it lives.
//!
//! Rows without a request are filled, up to the last row that has one, so that every other stays where it is. The rule
//! for when to run is Triton's (`DirectSequenceBatch`): at once, unless there is a delay and a slot utilization that is
//! not reached. Ours is one more: when every sequence of the instance has a request, nobody is waited for.

use std::time::{Duration, Instant};

use super::table::{Key, Table};

/// How batches of one model are formed.
#[derive(Clone, Debug)]
pub(super) struct DirectRules {
    pub(super) max_delay: Duration,
    /// Part of the slots with a request at which a batch does not wait.
    pub(super) utilization: f32,
    /// Triton's plain rule of waiting.
    pub(super) fixed: bool,
}

/// One row of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Row {
    /// The next request of this sequence.
    Step(Key),
    /// Nothing: READY is false.
    Filler,
}

/// What an idle instance does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    Run(Vec<Row>),
    /// Nothing before that time, unless a request comes.
    WaitUntil(Instant),
    Idle,
}

/// Decides for one idle instance.
pub(super) fn choose<T, M>(
    table: &Table<T, M>,
    instance: usize,
    now: Instant,
    rules: &DirectRules,
) -> Choice {
    let ready = table.ready(instance).len();
    let Some((oldest, _)) = table.ready(instance).next() else { return Choice::Idle };
    let slots = table.slots(instance);
    if !rules.max_delay.is_zero() && rules.utilization > 0.0 {
        let until = oldest.checked_add(rules.max_delay).unwrap_or(now);
        let taken = slots.iter().flatten().count();
        let is_enough = ready as f32 / slots.len().max(1) as f32 >= rules.utilization;
        let is_everybody = !rules.fixed && ready >= taken;
        if now < until && !is_enough && !is_everybody {
            return Choice::WaitUntil(until);
        }
    }
    let is_ready = |key: &Option<Key>| key.filter(|key| table.ready_since(*key).is_some());
    // The oldest request says which shapes this batch has, so that none is passed over for ever.
    let form = table.ready(instance).next().and_then(|(_, key)| table.form(key));
    let mut rows: Vec<Row> = slots
        .iter()
        .map(|slot| match is_ready(slot).filter(|key| table.form(*key) == form) {
            Some(key) => Row::Step(key),
            None => Row::Filler,
        })
        .collect();
    let used = rows.iter().rposition(|row| *row != Row::Filler).map_or(0, |last| last + 1);
    rows.truncate(used);
    Choice::Run(rows)
}
