//! The requests that wait for a scheduler: priority levels, size limits and time limits.
//!
//! A level has the policy of its `ModelQueuePolicy`. Within a level requests keep the order in which they came, except
//! that those whose time is over under the DELAY action stand behind the others. Time comes in as an argument; nothing
//! here looks at a clock. *Invariants:* a request leaves exactly once, by [`PolicyQueue::take`], [`PolicyQueue::expire`]
//! or [`PolicyQueue::remove_if`]; no level ever holds more than its `max_queue_size`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use trireme_config::{DynamicBatching, QueuePolicy, TimeoutAction};

/// Levels that stay when they are empty; more than these are made and dropped as requests come and go.
const KEPT_LEVELS: usize = 8;

/// Which level a request belongs to, and the policies of the levels.
#[derive(Clone, Debug, Default)]
pub(crate) struct LevelRules {
    /// Number of levels; 0 is one level without a number.
    levels: u64,
    default_level: u64,
    default_policy: QueuePolicy,
    policies: BTreeMap<u64, QueuePolicy>,
}

impl LevelRules {
    pub(crate) fn of(batching: &DynamicBatching) -> Self {
        Self {
            levels: batching.priority_levels,
            default_level: batching.default_priority_level,
            default_policy: batching.default_queue_policy,
            policies: batching.priority_queue_policies.clone(),
        }
    }

    /// Level of a request: the one it names, or the default for 0 and for numbers that are no level.
    fn level(&self, priority: u64) -> u64 {
        match self.levels {
            0 => 0,
            levels if (1..=levels).contains(&priority) => priority,
            _ => self.default_level,
        }
    }

    fn policy(&self, level: u64) -> QueuePolicy {
        self.policies.get(&level).copied().unwrap_or(self.default_policy)
    }

    /// Whether any request may have a time limit.
    fn has_timeouts(&self) -> bool {
        self.policies
            .values()
            .chain([&self.default_policy])
            .any(|policy| policy.default_timeout.is_some() || policy.allow_timeout_override)
    }
}

/// What a queue needs to know of a request.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Claim {
    /// Priority as the client gave it; 0 is none.
    pub(crate) priority: u64,
    /// Client's limit on its time in the queue; zero is none.
    pub(crate) timeout: Duration,
}

/// A request in the queue.
#[derive(Debug)]
pub(crate) struct Waiting<T> {
    pub(crate) item: T,
    /// When it came.
    pub(crate) since: Instant,
    /// Arrival number, ascending.
    number: u64,
    level: u64,
    deadline: Option<Instant>,
}

#[derive(Debug)]
struct Level<T> {
    policy: QueuePolicy,
    /// In the order of arrival.
    waiting: VecDeque<Waiting<T>>,
    /// Those whose time is over and that may wait on, in the order in which it ran out.
    delayed: VecDeque<Waiting<T>>,
}

impl<T> Level<T> {
    fn len(&self) -> usize {
        self.waiting.len() + self.delayed.len()
    }

    fn iter(&self) -> impl Iterator<Item = &Waiting<T>> {
        self.waiting.iter().chain(&self.delayed)
    }

    /// Removes the request at a place counted over both parts.
    fn remove(&mut self, place: usize) -> Option<Waiting<T>> {
        match place.checked_sub(self.waiting.len()) {
            None => self.waiting.remove(place),
            Some(place) => self.delayed.remove(place),
        }
    }
}

/// A queue with priority levels.
#[derive(Debug)]
pub(crate) struct PolicyQueue<T> {
    rules: LevelRules,
    has_timeouts: bool,
    levels: BTreeMap<u64, Level<T>>,
    /// Deadline, level and number of each request that has a deadline to come.
    deadlines: BTreeSet<(Instant, u64, u64)>,
    count: usize,
    next_number: u64,
}

impl<T> PolicyQueue<T> {
    pub(crate) fn new(rules: LevelRules) -> Self {
        Self {
            has_timeouts: rules.has_timeouts(),
            rules,
            levels: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            count: 0,
            next_number: 0,
        }
    }

    /// Requests that wait.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Puts a request at the end of its level.
    ///
    /// # Errors
    /// The request itself and the limit, when the level is full.
    pub(crate) fn push(&mut self, item: T, claim: Claim, now: Instant) -> Result<(), (T, usize)> {
        let number = self.next_number;
        let at = self.rules.level(claim.priority);
        let level = self.levels.entry(at).or_insert_with(|| Level {
            policy: self.rules.policy(at),
            waiting: VecDeque::new(),
            delayed: VecDeque::new(),
        });
        if let Some(limit) = level.policy.max_queue_size
            && level.len() >= limit
        {
            return Err((item, limit));
        }
        let deadline = match self.has_timeouts {
            true => timeout(level.policy, claim.timeout).and_then(|timeout| now.checked_add(timeout)),
            false => None,
        };
        if let Some(deadline) = deadline {
            self.deadlines.insert((deadline, at, number));
        }
        level.waiting.push_back(Waiting { item, since: now, number, level: at, deadline });
        self.next_number += 1;
        self.count += 1;
        Ok(())
    }

    /// Requests in the order in which they are served.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Waiting<T>> {
        self.levels.values().flat_map(Level::iter)
    }

    /// Removes the first `count` requests.
    pub(crate) fn take_first(&mut self, count: usize, mut taken: impl FnMut(Waiting<T>)) {
        for _ in 0..count {
            let Some(level) = self.levels.values_mut().find(|level| level.len() > 0) else { return };
            if let Some(waiting) = level.remove(0) {
                self.count -= 1;
                self.forget(&waiting);
                taken(waiting);
            }
        }
        self.drop_empty_levels();
    }

    /// Removes the requests at ascending places of [`PolicyQueue::iter`].
    pub(crate) fn take(&mut self, places: &[usize], mut taken: impl FnMut(Waiting<T>)) {
        let mut before = 0;
        let mut places = places.iter().copied().peekable();
        let mut out = Vec::with_capacity(places.len());
        for level in self.levels.values_mut() {
            let len = level.len();
            let mut removed = 0;
            while let Some(place) = places.next_if(|place| *place < before + len) {
                if let Some(waiting) = level.remove(place - before - removed) {
                    removed += 1;
                    out.push(waiting);
                }
            }
            before += len;
        }
        self.count -= out.len();
        for waiting in out {
            self.forget(&waiting);
            taken(waiting);
        }
        self.drop_empty_levels();
    }

    /// Moves on what has waited too long: REJECT removes a request, DELAY puts it behind the others of its level.
    pub(crate) fn expire(&mut self, now: Instant, mut rejected: impl FnMut(Waiting<T>)) {
        while let Some(&(deadline, at, number)) = self.deadlines.first().filter(|(at, _, _)| *at <= now) {
            self.deadlines.remove(&(deadline, at, number));
            let Some(level) = self.levels.get_mut(&at) else { continue };
            let place = level.waiting.binary_search_by_key(&number, |waiting| waiting.number);
            let Some(mut waiting) = place.ok().and_then(|place| level.waiting.remove(place)) else {
                continue;
            };
            waiting.deadline = None;
            match level.policy.timeout_action {
                TimeoutAction::Delay => level.delayed.push_back(waiting),
                TimeoutAction::Reject => {
                    self.count -= 1;
                    rejected(waiting);
                }
            }
        }
    }

    /// Removes the requests for which `gone` holds.
    pub(crate) fn remove_if(&mut self, mut gone: impl FnMut(&T) -> bool, removed: impl FnMut(Waiting<T>)) {
        let mut places = Vec::new();
        for (place, waiting) in self.iter().enumerate() {
            if gone(&waiting.item) {
                places.push(place);
            }
        }
        self.take(&places, removed);
    }

    /// When the next request will have waited too long.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(deadline, _, _)| *deadline)
    }

    fn forget(&mut self, waiting: &Waiting<T>) {
        if let Some(deadline) = waiting.deadline {
            self.deadlines.remove(&(deadline, waiting.level, waiting.number));
        }
    }

    fn drop_empty_levels(&mut self) {
        if self.levels.len() > KEPT_LEVELS {
            self.levels.retain(|_, level| level.len() > 0);
        }
    }
}

/// Longest wait of a request: the level's, or the client's own if that is allowed and shorter.
fn timeout(policy: QueuePolicy, wanted: Duration) -> Option<Duration> {
    let wanted = (policy.allow_timeout_override && !wanted.is_zero()).then_some(wanted);
    match (policy.default_timeout, wanted) {
        (Some(default), Some(wanted)) => Some(default.min(wanted)),
        (default, wanted) => default.or(wanted),
    }
}

#[cfg(test)]
mod tests;
