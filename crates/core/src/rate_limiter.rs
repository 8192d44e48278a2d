//! The rate limiter: instances of all models share resources that the configuration names (`--rate-limit`).
//!
//! An instance runs only while it holds everything that its group needs. Among those that wait for the same, the one
//! with the lowest scaled execution count (executions times priority) is first, as in Triton, so that an instance of
//! priority 2 gets half as many turns as one of priority 1. Two rules keep every instance going: an instance that had
//! nothing to do enters where the others stand and does not catch up for the time it was idle, and one that was passed
//! over more often than its priority explains is first. *Invariants:* what runs never needs more than there is;
//! resources are taken all at once or not at all; an instance later in line never takes a resource that one
//! before it waits for; nobody is woken under the lock, and nobody who holds it waits for a pool.

mod resources;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use smallvec::SmallVec;
use trireme_config::RateLimiterSpec;
use trireme_types::Result;

use self::resources::{Need, Resources};
use crate::scheduler::Wakeable;

/// One `--rate-limit-resource`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateLimitResource {
    pub name: String,
    pub count: u32,
    /// The device that has so much; `None`: every device, or the server if the resource is global.
    pub device: Option<i32>,
}

/// Gives turns to the instances of one server.
pub(crate) struct RateLimiter {
    state: Mutex<State>,
}

struct State {
    resources: Resources,
    instances: BTreeMap<u64, Instance>,
    waiting: BTreeSet<Place>,
    next_id: u64,
    arrivals: u64,
    /// Instances that were given a turn since the last [`Gate::settle`].
    news: Vec<u64>,
}

/// Place in line; the lowest is first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    /// False for those that were passed over too often.
    in_turn: bool,
    turn: u64,
    arrival: u64,
    id: u64,
}

struct Instance {
    needs: SmallVec<[Need; 2]>,
    priority: u64,
    /// Scaled execution count.
    turn: u64,
    standing: Standing,
    pool: Option<Weak<dyn Wakeable>>,
}

enum Standing {
    Idle,
    Waiting {
        place: Place,
        /// Turns that went to others who came later.
        passed_over: u64,
    },
    /// Has its resources and has not begun.
    Granted,
    Running,
}

/// Pools to be woken once no lock is held.
#[derive(Default)]
pub(crate) struct Wakes(Vec<Weak<dyn Wakeable>>);

impl Wakes {
    pub(crate) fn wake(self) {
        for pool in self.0.into_iter().filter_map(|pool| pool.upgrade()) {
            pool.wake();
        }
    }
}

impl RateLimiter {
    pub(crate) fn new(given: Vec<RateLimitResource>) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                resources: Resources::new(given),
                instances: BTreeMap::new(),
                waiting: BTreeSet::new(),
                next_id: 0,
                arrivals: 0,
                news: Vec::new(),
            }),
        })
    }

    /// Makes the instances of one pool known, each with its device. `None` if none of them needs anything.
    ///
    /// # Errors
    /// `INVALID_ARG` with Triton's wording: there is less of a resource than an instance needs, or the resource is
    /// global for one instance and the device's for another.
    pub(crate) fn register<'a>(
        self: &Arc<Self>,
        limits: impl Iterator<Item = (&'a RateLimiterSpec, i32)>,
    ) -> Result<Option<Gate>> {
        let limits: Vec<_> = limits.collect();
        if limits.iter().all(|(limits, _)| limits.resources.is_empty()) {
            return Ok(None);
        }
        // Whatever was registered before an error is taken back when the gate is dropped.
        let mut gate = Gate { limiter: Arc::clone(self), ids: Vec::with_capacity(limits.len()) };
        let mut state = self.state.lock();
        for (limits, device) in limits {
            if limits.resources.is_empty() {
                gate.ids.push(None);
                continue;
            }
            let needs = match state.resources.register(&limits.resources, device) {
                Ok(needs) => needs,
                Err(error) => {
                    drop(state);
                    return Err(error);
                }
            };
            let id = state.next_id;
            state.next_id += 1;
            let priority = u64::from(limits.priority.max(1));
            let instance = Instance { needs, priority, turn: 0, standing: Standing::Idle, pool: None };
            state.instances.insert(id, instance);
            gate.ids.push(Some(id));
        }
        drop(state);
        Ok(Some(gate))
    }
}

/// The way of one pool's instances to the rate limiter.
///
/// A pool calls it under its own lock. Each instance that is given a turn by [`Gate::enter`] ends it by [`Gate::leave`]
/// or [`Gate::ran`], and [`Gate::settle`] comes last, before the pool's lock is given up.
pub(crate) struct Gate {
    limiter: Arc<RateLimiter>,
    /// By index of the instance; `None` for instances that need nothing.
    ids: Vec<Option<u64>>,
}

impl Gate {
    /// Says which pool is to be woken when an instance gets the turn it waits for.
    pub(crate) fn attached(self, pool: &Weak<dyn Wakeable>) -> Self {
        let mut state = self.limiter.state.lock();
        for id in self.ids.iter().flatten() {
            if let Some(instance) = state.instances.get_mut(id) {
                instance.pool = Some(Weak::clone(pool));
            }
        }
        drop(state);
        self
    }

    /// Whether an idle instance may run now. If not it stands in line, and its pool will be woken.
    pub(crate) fn enter(&self, index: usize) -> bool {
        let Some(id) = self.id(index) else { return true };
        let mut state = self.limiter.state.lock();
        state.stand_in_line(id);
        state.grant();
        let Some(instance) = state.instances.get_mut(&id) else { return true };
        if matches!(instance.standing, Standing::Granted) {
            instance.standing = Standing::Running;
            return true;
        }
        false
    }

    /// The instance has nothing to run after all. It keeps its place for the next time.
    pub(crate) fn leave(&self, index: usize) {
        if let Some(id) = self.id(index) {
            self.limiter.state.lock().give_back(id);
        }
    }

    /// The instance has run.
    pub(crate) fn ran(&self, index: usize) {
        let Some(id) = self.id(index) else { return };
        let mut state = self.limiter.state.lock();
        if let Some(instance) = state.instances.get_mut(&id) {
            instance.turn = instance.turn.saturating_add(instance.priority);
        }
        state.give_back(id);
    }

    /// Gives what is free to those in line. Without `work`, no instance of this pool stays there.
    pub(crate) fn settle(&self, work: bool) -> Wakes {
        let mut state = self.limiter.state.lock();
        if !work {
            for id in self.ids.iter().flatten() {
                state.step_aside(*id);
            }
        }
        state.grant();
        state.wakes()
    }

    fn id(&self, index: usize) -> Option<u64> {
        self.ids.get(index).copied().flatten()
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        let mut state = self.limiter.state.lock();
        for id in self.ids.iter().flatten() {
            state.step_aside(*id);
            state.give_back(*id);
            if let Some(instance) = state.instances.remove(id) {
                state.resources.unregister(&instance.needs);
            }
        }
        state.grant();
        let wakes = state.wakes();
        drop(state);
        wakes.wake();
    }
}

impl State {
    fn stand_in_line(&mut self, id: u64) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        if !matches!(instance.standing, Standing::Idle) {
            return;
        }
        instance.turn = instance.turn.max(self.resources.clock(&instance.needs));
        self.arrivals += 1;
        let place = Place { in_turn: true, turn: instance.turn, arrival: self.arrivals, id };
        instance.standing = Standing::Waiting { place, passed_over: 0 };
        self.waiting.insert(place);
    }

    /// Gives up the place in line, or a turn that was given and not begun.
    fn step_aside(&mut self, id: u64) {
        match self.instances.get_mut(&id).map(|instance| &mut instance.standing) {
            Some(standing @ Standing::Waiting { .. }) => {
                if let Standing::Waiting { place, .. } = std::mem::replace(standing, Standing::Idle) {
                    self.waiting.remove(&place);
                }
            }
            Some(Standing::Granted) => self.give_back(id),
            Some(Standing::Idle | Standing::Running) | None => {}
        }
    }

    /// Frees what an instance holds.
    fn give_back(&mut self, id: u64) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        if matches!(instance.standing, Standing::Granted | Standing::Running) {
            instance.standing = Standing::Idle;
            self.resources.free(&instance.needs);
        }
    }

    /// Gives turns in the order of the line. What somebody waits for is not given to those behind.
    fn grant(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let mut spoken_for: SmallVec<[usize; 8]> = SmallVec::new();
        let mut granted: SmallVec<[u64; 4]> = SmallVec::new();
        for place in &self.waiting {
            let Some(instance) = self.instances.get(&place.id) else { continue };
            let free = instance.needs.iter().all(|need| !spoken_for.contains(&need.resource));
            if free && self.resources.take(&instance.needs, instance.turn) {
                granted.push(place.id);
            } else {
                spoken_for.extend(instance.needs.iter().map(|need| need.resource));
            }
        }
        for id in granted {
            self.begin(id);
        }
    }

    /// The instance leaves the line with its resources.
    fn begin(&mut self, id: u64) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        let Standing::Waiting { place, .. } = std::mem::replace(&mut instance.standing, Standing::Granted)
        else {
            return;
        };
        self.waiting.remove(&place);
        self.news.push(id);
        let needs = instance.needs.clone();
        self.pass_over(place, &needs);
    }

    /// The pools of instances that have a turn and did not ask for it just now.
    fn wakes(&mut self) -> Wakes {
        let news = std::mem::take(&mut self.news);
        let given = news.into_iter().filter_map(|id| self.instances.get(&id));
        let given = given.filter(|instance| matches!(instance.standing, Standing::Granted));
        Wakes(given.filter_map(|instance| instance.pool.clone()).collect())
    }

    /// Notes for those who wait for the same and came before that they were passed over.
    fn pass_over(&mut self, winner: Place, needs: &[Need]) {
        let everybody = u64::try_from(self.instances.len()).unwrap_or(u64::MAX);
        let mut moved: SmallVec<[(Place, Place); 4]> = SmallVec::new();
        for place in self.waiting.iter().filter(|place| place.in_turn && place.arrival < winner.arrival) {
            let Some(instance) = self.instances.get_mut(&place.id) else { continue };
            let Standing::Waiting { passed_over, .. } = &mut instance.standing else { continue };
            let shares = |need: &Need| needs.iter().any(|other| other.resource == need.resource);
            if !instance.needs.iter().any(shares) {
                continue;
            }
            *passed_over += 1;
            // While one turn of this instance is due, each of the others has at most so many.
            if *passed_over > instance.priority.saturating_add(1).saturating_mul(everybody) {
                moved.push((*place, Place { in_turn: false, ..*place }));
            }
        }
        for (before, after) in moved {
            self.waiting.remove(&before);
            self.waiting.insert(after);
            if let Some(Standing::Waiting { place, .. }) =
                self.instances.get_mut(&after.id).map(|instance| &mut instance.standing)
            {
                *place = after;
            }
        }
    }
}

#[cfg(test)]
mod tests;
