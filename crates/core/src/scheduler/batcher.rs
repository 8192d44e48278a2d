//! Which requests form the next batch, or when to look again: a pure function of queue, clock and company.
//!
//! Requests that cannot run together (other dimensions, other optional inputs) form lanes; each lane is looked at as if
//! it were alone, and the first that may run does. The rules for one lane are Triton's (`DynamicBatchScheduler`), in
//! its order: a preferred size that is reached runs at once; a full lane runs; a lane whose oldest request has
//! waited `max_queue_delay_microseconds` runs whole. Ours is one more: a lane runs when no company can be expected in
//! time (see [`Company`]).

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::company::Company;

/// Requests looked at in one decision. Behind them, a request of a lane of its own waits for those before it.
const SCAN_LIMIT: usize = 2048;
/// Lanes looked at in one decision.
const LANE_LIMIT: usize = 16;

/// How batches of one model are formed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rules {
    /// Rows of one batch at most; at least 1.
    pub(crate) max_rows: usize,
    /// Sizes at which a batch does not wait, ascending.
    pub(crate) preferred: Vec<usize>,
    /// Longest wait for company.
    pub(crate) max_delay: Duration,
    /// Each request alone, whatever its rows.
    pub(crate) single: bool,
}

impl Rules {
    /// No joining: the default scheduler.
    pub(crate) fn single() -> Self {
        Self { max_rows: 1, preferred: Vec::new(), max_delay: Duration::ZERO, single: true }
    }

    /// Whether a request may wait although an instance is idle.
    pub(crate) fn may_wait(&self) -> bool {
        !self.single && !self.max_delay.is_zero()
    }
}

/// A waiting request as the decision sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate<'a, K> {
    pub(crate) rows: usize,
    /// Only requests of equal kind run together.
    pub(crate) kind: &'a K,
    pub(crate) since: Instant,
}

/// What an idle instance does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    Run(Picked),
    /// Nothing yet; look again at that time or when a request comes.
    WaitUntil(Instant),
    /// The queue is empty.
    Idle,
}

/// Places in the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Picked {
    /// The first so many.
    First(usize),
    /// These, ascending.
    At(Vec<usize>),
}

struct Lane<'a, K> {
    kind: &'a K,
    oldest: Instant,
    places: SmallVec<[usize; 32]>,
    rows: usize,
    /// Requests that make up the largest preferred size reached.
    best: Option<usize>,
    /// Nothing more may join.
    closed: bool,
}

/// Decides for one idle instance. `queue` has the waiting requests in the order in which they are served.
pub(crate) fn next_batch<'a, K: PartialEq + 'a>(
    queue: impl Iterator<Item = Candidate<'a, K>>,
    now: Instant,
    rules: &Rules,
    company: &Company,
) -> Decision {
    let mut queue = queue.enumerate().take(SCAN_LIMIT);
    if rules.single {
        return queue.next().map_or(Decision::Idle, |_| Decision::Run(Picked::First(1)));
    }
    let mut lanes: SmallVec<[Lane<'a, K>; 2]> = SmallVec::new();
    let mut seen = 0;
    for (place, candidate) in queue {
        seen = place + 1;
        let lane = match lanes.iter_mut().position(|lane| lane.kind == candidate.kind) {
            Some(at) => lanes.get_mut(at),
            None if lanes.len() < LANE_LIMIT => {
                lanes.push(Lane::new(&candidate));
                lanes.last_mut()
            }
            None => None,
        };
        let Some(lane) = lane else { continue };
        lane.add(place, candidate.rows.max(1), rules);
        if lanes.first().is_some_and(|lane| lane.closed) {
            break;
        }
    }
    let mut look_again: Option<Instant> = None;
    for lane in &lanes {
        match lane.decide(now, rules, company, seen) {
            Decision::WaitUntil(time) => {
                look_again = Some(look_again.map_or(time, |earliest| earliest.min(time)));
            }
            decision => return decision,
        }
    }
    look_again.map_or(Decision::Idle, Decision::WaitUntil)
}

impl<'a, K> Lane<'a, K> {
    fn new(first: &Candidate<'a, K>) -> Self {
        Self {
            kind: first.kind,
            oldest: first.since,
            places: SmallVec::new(),
            rows: 0,
            best: None,
            closed: false,
        }
    }

    fn add(&mut self, place: usize, rows: usize, rules: &Rules) {
        if self.closed {
            return;
        }
        let sum = self.rows.saturating_add(rows);
        let largest = rules.preferred.last().copied().unwrap_or(rules.max_rows);
        if sum > largest && self.best.is_none() && self.rows > 0 {
            // The largest preferred size cannot be met any more; what there is below it counts as preferred.
            self.best = Some(self.places.len());
        }
        if sum > rules.max_rows && self.rows > 0 {
            self.closed = true;
            return;
        }
        self.places.push(place);
        self.rows = sum;
        if rules.preferred.binary_search(&sum).is_ok() {
            self.best = Some(self.places.len());
        }
        self.closed = sum >= rules.max_rows;
    }

    fn decide(&self, now: Instant, rules: &Rules, company: &Company, seen: usize) -> Decision {
        let limit = self.oldest.checked_add(rules.max_delay).unwrap_or(now);
        let is_over = now >= limit;
        if let Some(best) = self.best.filter(|_| !is_over) {
            return self.run(best);
        }
        let largest = rules.preferred.last().copied().unwrap_or(rules.max_rows);
        if self.closed || self.rows >= largest || is_over || !company.is_expected(seen, now, limit) {
            return self.run(self.places.len());
        }
        Decision::WaitUntil(limit)
    }

    fn run(&self, count: usize) -> Decision {
        let places = self.places.get(..count).unwrap_or(&self.places);
        Decision::Run(match places.last() {
            Some(last) if *last + 1 == places.len() => Picked::First(places.len()),
            _ => Picked::At(places.to_vec()),
        })
    }
}

#[cfg(test)]
mod tests;
