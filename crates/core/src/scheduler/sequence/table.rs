//! The sequences of a model, their waiting requests, and the slots of the instances.
//!
//! A sequence gets a slot of one instance when it starts, or waits in the backlog until one is free, and keeps it until
//! its END has run, nothing was heard of it for too long, or one of its requests was cancelled. Time comes in as an
//! argument; nothing here looks at a clock. *Invariants:* the requests of a sequence run one at a time and in the order
//! in which they came; a slot has one sequence at a time; a request leaves once, by [`Table::take`], [`Table::cancel`]
//! or [`Table::expire`]; the idle clock of a sequence runs only while it has no request, waiting or running; a sequence
//! does not begin before an earlier one of the same correlation id has ended.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use trireme_types::CorrelationId;

use crate::batch_kind::Kind;

/// Number of a sequence, ascending in the order in which they started.
pub(super) type Key = u64;

/// Dimensions of the states of a sequence, by which batches are kept apart as well.
pub(super) type Form = SmallVec<[i64; 4]>;

/// What a table is made for.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    pub(super) instances: usize,
    /// Sequences that have a place in one instance at a time; at least 1.
    pub(super) slots: usize,
    /// Time without a request after which a sequence loses its slot.
    pub(super) max_idle: Duration,
    /// Whether the model is told by an END of the server's own when a sequence is given up.
    pub(super) tell_abandoned: bool,
    /// Form of the states before the first request.
    pub(super) initial: Form,
}

/// A request as it comes.
#[derive(Debug)]
pub(super) struct Arrival<T> {
    pub(super) item: T,
    pub(super) id: CorrelationId,
    pub(super) start: bool,
    pub(super) end: bool,
    pub(super) kind: Kind,
    /// Client's limit on the time in the backlog.
    pub(super) patience: Option<Duration>,
    /// No other request can belong to its sequence.
    pub(super) alone: bool,
}

/// A request of a sequence.
#[derive(Debug)]
pub(super) struct Step<T> {
    /// `None` is the END that the server makes up when a sequence is given up.
    pub(super) item: Option<T>,
    pub(super) start: bool,
    pub(super) end: bool,
    kind: Kind,
}

/// What an arrival did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entered {
    /// It continues a sequence, or starts one.
    Well,
    /// It starts anew a sequence that has not ended.
    Restarted,
}

/// One sequence, with what its owner keeps for it.
#[derive(Debug)]
struct Sequence<T, M> {
    id: CorrelationId,
    steps: VecDeque<Step<T>>,
    memory: M,
    /// Instance and slot; `None` is the backlog.
    place: Option<(usize, usize)>,
    is_running: bool,
    /// No further request belongs to it.
    is_closed: bool,
    /// A request of it has run, and no END.
    is_known: bool,
    /// Since when it is ready, while it is in its instance's list of those that are.
    ready: Option<Instant>,
    /// When it is given up for want of a request.
    idle_until: Option<Instant>,
    /// When it is given up for want of a slot.
    patient_until: Option<Instant>,
    /// The earlier sequence of the same id for whose end it waits, and the later one that waits for its own.
    after: Option<Key>,
    before: Option<Key>,
    form: Form,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Table<T, M> {
    limits: Limits,
    sequences: HashMap<Key, Sequence<T, M>>,
    /// The last sequence of each id.
    ids: HashMap<CorrelationId, Key>,
    slots: Vec<Vec<Option<Key>>>,
    /// Slot and instance, so that instances fill evenly.
    free: BTreeSet<(usize, usize)>,
    backlog: BTreeSet<Key>,
    /// Sequences of each instance with a request that may run, those that have waited longest first.
    ready: Vec<BTreeSet<(Instant, Key)>>,
    running: Vec<Vec<Key>>,
    idle: BTreeSet<(Instant, Key)>,
    patience: BTreeSet<(Instant, Key)>,
    waiting: usize,
    next_key: Key,
}

impl<T, M> Table<T, M> {
    pub(super) fn new(limits: Limits) -> Self {
        let (instances, slots) = (limits.instances.max(1), limits.slots.max(1));
        Self {
            sequences: HashMap::new(),
            ids: HashMap::new(),
            slots: (0..instances).map(|_| vec![None; slots]).collect(),
            free: (0..slots).flat_map(|slot| (0..instances).map(move |instance| (slot, instance))).collect(),
            backlog: BTreeSet::new(),
            ready: vec![BTreeSet::new(); instances],
            running: vec![Vec::new(); instances],
            idle: BTreeSet::new(),
            patience: BTreeSet::new(),
            waiting: 0,
            next_key: 0,
            limits,
        }
    }

    /// Requests that wait, ENDs of the server's own among them.
    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Takes a request. `memory` is called if it begins a sequence. Gives the instance where the sequence has its slot,
    /// if it has one.
    ///
    /// # Errors
    /// The request itself, if it neither starts a sequence nor belongs to one.
    pub(super) fn push(
        &mut self,
        arrival: Arrival<T>,
        now: Instant,
        memory: impl FnOnce() -> M,
    ) -> Result<(Entered, Option<usize>), T> {
        self.expire_idle(now);
        let earlier = self.ids.get(&arrival.id).copied();
        let open = earlier.filter(|key| self.sequences.get(key).is_some_and(|sequence| !sequence.is_closed));
        let Arrival { item, id, start, end, kind, patience, alone } = arrival;
        let key = match open {
            Some(key) => key,
            None if start => self.begin(id, earlier, memory()),
            None => return Err(item),
        };
        let Some(sequence) = self.sequences.get_mut(&key) else { return Err(item) };
        sequence.steps.push_back(Step { item: Some(item), start, end, kind });
        sequence.is_closed |= end || alone;
        self.waiting += 1;
        if let Some(until) = sequence.idle_until.take() {
            self.idle.remove(&(until, key));
        }
        if sequence.place.is_none()
            && let Some(until) = patience.and_then(|patience| now.checked_add(patience))
            && sequence.patient_until.is_none_or(|earlier| until < earlier)
        {
            if let Some(earlier) = sequence.patient_until.replace(until) {
                self.patience.remove(&(earlier, key));
            }
            self.patience.insert((until, key));
        }
        self.assign_slots(now);
        self.make_ready(key, now);
        let place = self.sequences.get(&key).and_then(|sequence| sequence.place);
        let entered = if start && open.is_some() { Entered::Restarted } else { Entered::Well };
        Ok((entered, place.map(|(instance, _)| instance)))
    }

    /// Makes a new sequence, which waits for its slot.
    fn begin(&mut self, id: CorrelationId, earlier: Option<Key>, memory: M) -> Key {
        let key = self.next_key;
        self.next_key += 1;
        let after = earlier.filter(|earlier| match self.sequences.get_mut(earlier) {
            Some(earlier) => {
                earlier.before = Some(key);
                true
            }
            None => false,
        });
        if after.is_none() {
            self.backlog.insert(key);
        }
        self.ids.insert(id.clone(), key);
        let sequence = Sequence {
            id,
            steps: VecDeque::new(),
            memory,
            place: None,
            is_running: false,
            is_closed: false,
            is_known: false,
            ready: None,
            idle_until: None,
            patient_until: None,
            after,
            before: None,
            form: self.limits.initial.clone(),
        };
        self.sequences.insert(key, sequence);
        key
    }

    /// Puts a request that ran back in front of its sequence, as a step that is no start.
    ///
    /// # Errors
    /// The request itself, if its sequence is gone.
    pub(super) fn put_back(&mut self, id: &CorrelationId, item: T, kind: Kind) -> Result<(), T> {
        let Some(sequence) = self.ids.get(id).and_then(|key| self.sequences.get_mut(key)) else {
            return Err(item);
        };
        if !sequence.is_running {
            return Err(item);
        }
        sequence.steps.push_front(Step { item: Some(item), start: false, end: false, kind });
        self.waiting += 1;
        Ok(())
    }

    /// Gives free slots to the backlog.
    fn assign_slots(&mut self, now: Instant) {
        while let (Some(&key), Some(&(slot, instance))) = (self.backlog.first(), self.free.first()) {
            self.backlog.remove(&key);
            let Some(sequence) = self.sequences.get_mut(&key) else { continue };
            self.free.remove(&(slot, instance));
            sequence.place = Some((instance, slot));
            if let Some(until) = sequence.patient_until.take() {
                self.patience.remove(&(until, key));
            }
            if let Some(place) = self.slots.get_mut(instance).and_then(|slots| slots.get_mut(slot)) {
                *place = Some(key);
            }
            self.make_ready(key, now);
        }
    }

    /// Lists a sequence that can run from now on, unless it is listed already.
    fn make_ready(&mut self, key: Key, now: Instant) {
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        if sequence.is_running || sequence.ready.is_some() || sequence.steps.is_empty() {
            return;
        }
        let Some(list) = sequence.place.and_then(|(instance, _)| self.ready.get_mut(instance)) else {
            return;
        };
        sequence.ready = Some(now);
        list.insert((now, key));
    }

    /// Sequences of an instance whose next request may run, with the time since when; those that have waited longest
    /// first.
    pub(super) fn ready(&self, instance: usize) -> impl ExactSizeIterator<Item = (Instant, Key)> + '_ {
        const NONE: &BTreeSet<(Instant, Key)> = &BTreeSet::new();
        self.ready.get(instance).unwrap_or(NONE).iter().copied()
    }

    /// The slots of an instance.
    pub(super) fn slots(&self, instance: usize) -> &[Option<Key>] {
        self.slots.get(instance).map_or(&[], Vec::as_slice)
    }

    /// By what the next request of a sequence is kept apart from others in a batch.
    pub(super) fn form(&self, key: Key) -> Option<(&Kind, &Form)> {
        let sequence = self.sequences.get(&key)?;
        let step = sequence.steps.front()?;
        Some((&step.kind, if step.start { &self.limits.initial } else { &sequence.form }))
    }

    /// Since when a sequence is ready, if it is.
    pub(super) fn ready_since(&self, key: Key) -> Option<Instant> {
        self.sequences.get(&key)?.ready
    }

    /// The next request of a sequence, if it waits.
    pub(super) fn next_item(&self, key: Key) -> Option<&T> {
        self.sequences.get(&key)?.steps.front()?.item.as_ref()
    }

    /// Takes the next request of a ready sequence out to run in the instance where its slot is.
    pub(super) fn take(&mut self, key: Key) -> Option<Taken<'_, T, M>> {
        let sequence = self.sequences.get_mut(&key)?;
        let (instance, _) = sequence.place?;
        let since = sequence.ready.take()?;
        let step = sequence.steps.pop_front()?;
        if let Some(list) = self.ready.get_mut(instance) {
            list.remove(&(since, key));
        }
        if let Some(running) = self.running.get_mut(instance) {
            running.push(key);
        }
        sequence.is_running = true;
        sequence.is_known = !step.end;
        self.waiting -= 1;
        Some(Taken { step, id: &sequence.id, memory: &mut sequence.memory })
    }

    /// The requests that an instance had have run. `outcome` says for each sequence what its states look like now, or
    /// `None` if its request was cancelled, which cancels the rest; those requests go to `cancelled`.
    pub(super) fn finish(
        &mut self,
        instance: usize,
        now: Instant,
        mut outcome: impl FnMut(&M) -> Option<Form>,
        mut cancelled: impl FnMut(T),
    ) {
        let Some(running) = self.running.get_mut(instance).map(std::mem::take) else { return };
        for key in running {
            let Some(sequence) = self.sequences.get_mut(&key) else { continue };
            sequence.is_running = false;
            match outcome(&sequence.memory) {
                Some(form) => sequence.form = form,
                None => {
                    self.give_up(key, now, &mut cancelled);
                    continue;
                }
            }
            if !sequence.steps.is_empty() {
                self.make_ready(key, now);
            } else if sequence.is_closed {
                self.end(key, now);
            } else if let Some(until) = now.checked_add(self.limits.max_idle) {
                sequence.idle_until = Some(until);
                self.idle.insert((until, key));
            }
        }
    }

    /// Gives up the sequences of which nothing was heard for too long, and the requests that waited too long for a
    /// slot, which go to `expired`.
    pub(super) fn expire(&mut self, now: Instant, mut expired: impl FnMut(T)) {
        self.expire_idle(now);
        while let Some(&(until, key)) = self.patience.first().filter(|(until, _)| *until <= now) {
            self.patience.remove(&(until, key));
            if let Some(sequence) = self.sequences.get_mut(&key) {
                sequence.patient_until = None;
            }
            self.give_up(key, now, &mut expired);
        }
    }

    fn expire_idle(&mut self, now: Instant) {
        while let Some(&(until, key)) = self.idle.first().filter(|(until, _)| *until <= now) {
            self.idle.remove(&(until, key));
            if let Some(sequence) = self.sequences.get_mut(&key) {
                sequence.idle_until = None;
                tracing::debug!("sequence {} was idle for too long and is given up", Name(&sequence.id));
            }
            self.give_up(key, now, |_| ());
        }
    }

    /// No further request will come: sequences end with what they have, so that the backlog gets their slots.
    pub(super) fn close(&mut self, now: Instant) {
        for sequence in self.sequences.values_mut() {
            sequence.is_closed = true;
        }
        for (until, key) in std::mem::take(&mut self.idle) {
            if let Some(sequence) = self.sequences.get_mut(&key).filter(|each| each.idle_until == Some(until))
            {
                sequence.idle_until = None;
            }
            self.give_up(key, now, |_| ());
        }
    }

    /// When [`Table::expire`] has something to do.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let first = |times: &BTreeSet<(Instant, Key)>| times.first().map(|(until, _)| *until);
        first(&self.idle).into_iter().chain(first(&self.patience)).min()
    }

    /// Gives up every sequence in which `is_gone` holds for a waiting request; all its requests go to `cancelled`.
    pub(super) fn cancel(
        &mut self,
        now: Instant,
        mut is_gone: impl FnMut(&T) -> bool,
        mut cancelled: impl FnMut(T),
    ) {
        let mut gone: Vec<Key> = Vec::new();
        for (key, sequence) in &self.sequences {
            if sequence.steps.iter().filter_map(|step| step.item.as_ref()).any(&mut is_gone) {
                gone.push(*key);
            }
        }
        gone.sort_unstable();
        for key in gone {
            self.give_up(key, now, &mut cancelled);
        }
    }

    /// Takes a sequence's requests away and ends it, after an END of the server's own if the model shall know.
    pub(super) fn give_up(&mut self, key: Key, now: Instant, mut left: impl FnMut(T)) {
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        sequence.is_closed = true;
        let kind = sequence.steps.back().map(|step| step.kind.clone()).unwrap_or_default();
        self.waiting -= sequence.steps.len();
        let steps = std::mem::take(&mut sequence.steps);
        let (is_running, tell) = (sequence.is_running, sequence.is_known && self.limits.tell_abandoned);
        if tell {
            sequence.steps.push_back(Step { item: None, start: false, end: true, kind });
            self.waiting += 1;
            if let Some(until) = sequence.idle_until.take() {
                self.idle.remove(&(until, key));
            }
        }
        steps.into_iter().filter_map(|step| step.item).for_each(&mut left);
        if tell {
            self.make_ready(key, now);
        } else if !is_running {
            self.end(key, now);
        }
    }

    /// Forgets a sequence and gives its slot to the next.
    fn end(&mut self, key: Key, now: Instant) {
        let Some(sequence) = self.sequences.remove(&key) else { return };
        self.waiting -= sequence.steps.len();
        if self.ids.get(&sequence.id) == Some(&key) {
            match sequence.after {
                Some(after) => self.ids.insert(sequence.id, after),
                None => self.ids.remove(&sequence.id),
            };
        }
        if let Some(after) = sequence.after.and_then(|after| self.sequences.get_mut(&after)) {
            after.before = sequence.before;
        }
        if let Some(before) = sequence.before
            && let Some(next) = self.sequences.get_mut(&before)
        {
            next.after = sequence.after;
            if next.after.is_none() {
                self.backlog.insert(before);
            }
        }
        self.backlog.remove(&key);
        if let Some(until) = sequence.idle_until {
            self.idle.remove(&(until, key));
        }
        if let Some(until) = sequence.patient_until {
            self.patience.remove(&(until, key));
        }
        if let Some((instance, slot)) = sequence.place {
            if let (Some(since), Some(list)) = (sequence.ready, self.ready.get_mut(instance)) {
                list.remove(&(since, key));
            }
            if let Some(place) = self.slots.get_mut(instance).and_then(|slots| slots.get_mut(slot)) {
                *place = None;
                self.free.insert((slot, instance));
            }
        }
        self.assign_slots(now);
    }
}

/// A request taken out to run.
#[derive(Debug)]
pub(super) struct Taken<'a, T, M> {
    pub(super) step: Step<T>,
    pub(super) id: &'a CorrelationId,
    pub(super) memory: &'a mut M,
}

/// A correlation id in messages.
pub(super) struct Name<'a>(pub(super) &'a CorrelationId);

impl std::fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            CorrelationId::None => f.write_str("0"),
            CorrelationId::Number(id) => write!(f, "{id}"),
            CorrelationId::Text(id) => f.write_str(id),
        }
    }
}

#[cfg(test)]
mod tests;
