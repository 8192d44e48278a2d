//! The oldest strategy: the dynamic batcher over the next requests of the sequences that have a slot.
//!
//! A sequence has one request in a batch at most. Those whose sequences have waited longest come first, counted from the
//! moment at which the request could have run, so that a client who sends ahead does not keep others out.

use std::time::Instant;

use super::direct::{Choice, Row};
use super::table::{Key, Table};
use crate::scheduler::batcher::{Candidate, Decision, Picked, Rules, next_batch};
use crate::scheduler::company::Company;

/// Decides for one idle instance.
pub(super) fn choose<T, M>(
    table: &Table<T, M>,
    instance: usize,
    now: Instant,
    rules: &Rules,
    company: &Company,
) -> Choice {
    let ready: Vec<_> = table
        .ready(instance)
        .filter_map(|(since, key)| table.form(key).map(|form| (since, key, form)))
        .collect();
    let candidates = ready.iter().map(|(since, _, form)| Candidate { rows: 1, kind: form, since: *since });
    let row = |&(_, key, _): &(Instant, Key, _)| Row::Step(key);
    match next_batch(candidates, now, rules, company) {
        Decision::Run(Picked::First(count)) => Choice::Run(ready.iter().take(count).map(row).collect()),
        Decision::Run(Picked::At(places)) => {
            Choice::Run(places.iter().filter_map(|place| ready.get(*place)).map(row).collect())
        }
        Decision::WaitUntil(time) => Choice::WaitUntil(time),
        Decision::Idle => Choice::Idle,
    }
}
