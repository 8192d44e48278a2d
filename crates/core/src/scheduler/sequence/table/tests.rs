//! Random histories and single rules of sequences and slots, with a clock of the test.

use std::collections::{BTreeMap, HashSet};

use proptest::prelude::*;

use super::super::direct::{self, Choice, DirectRules, Row};
use super::super::oldest;
use super::*;
use crate::scheduler::batcher::Rules;
use crate::scheduler::company::Company;

const US: Duration = Duration::from_micros(1);
const MAX_IDLE: Duration = Duration::from_micros(100);

fn limits(instances: usize, slots: usize) -> Limits {
    Limits { instances, slots, max_idle: MAX_IDLE, tell_abandoned: false, initial: Form::new() }
}

fn arrival(item: usize, id: u64, start: bool, end: bool) -> Arrival<usize> {
    let id = CorrelationId::Number(id);
    Arrival { item, id, start, end, kind: Kind::default(), patience: None, alone: false }
}

/// Pushes one request and says whether it was taken.
fn push(table: &mut Table<usize, ()>, now: Instant, item: usize, id: u64, flags: &str) -> bool {
    table.push(arrival(item, id, flags.contains('S'), flags.contains('E')), now, || ()).is_ok()
}

/// Takes the next request of every ready sequence of an instance.
fn take_all(table: &mut Table<usize, ()>, instance: usize) -> Vec<Option<usize>> {
    let ready: Vec<_> = table.ready(instance).map(|(_, key)| key).collect();
    ready.into_iter().map(|key| table.take(key).expect("it is ready").step.item).collect()
}

fn finish(table: &mut Table<usize, ()>, instance: usize, now: Instant) {
    table.finish(instance, now, |()| Some(Form::new()), |_| panic!("nothing was cancelled"));
}

#[test]
fn the_idle_clock_stands_still_while_a_request_waits_or_runs() {
    let now = Instant::now();
    let mut table = Table::new(limits(1, 1));
    assert!(push(&mut table, now, 1, 7, "S"));
    assert_eq!(table.next_deadline(), None, "it waits");
    assert_eq!(take_all(&mut table, 0), [Some(1)]);
    assert_eq!(table.next_deadline(), None, "it runs");
    let later = now + 10 * MAX_IDLE;
    finish(&mut table, 0, later);
    assert_eq!(table.next_deadline(), Some(later + MAX_IDLE));
    assert!(push(&mut table, later + MAX_IDLE - US, 2, 7, ""), "in time");
    take_all(&mut table, 0);
    finish(&mut table, 0, later + MAX_IDLE);
    assert!(!push(&mut table, later + 2 * MAX_IDLE, 3, 7, ""), "too late, to the microsecond");
    assert_eq!(table.slots(0), [None]);
}

#[test]
fn the_backlog_gets_a_slot_when_an_end_has_run_and_not_before() {
    let now = Instant::now();
    let mut table = Table::new(limits(1, 1));
    assert!(push(&mut table, now, 1, 1, "S") && push(&mut table, now, 2, 2, "SE"));
    assert_eq!(take_all(&mut table, 0), [Some(1)]);
    finish(&mut table, 0, now);
    assert_eq!(take_all(&mut table, 0), [], "the first sequence has the slot");
    assert!(push(&mut table, now, 3, 1, "E"));
    assert!(!push(&mut table, now, 4, 1, ""), "nothing comes after an END");
    assert_eq!(take_all(&mut table, 0), [Some(3)]);
    assert_eq!(take_all(&mut table, 0), []);
    finish(&mut table, 0, now);
    assert_eq!(take_all(&mut table, 0), [Some(2)]);
    finish(&mut table, 0, now);
    assert_eq!((table.waiting(), table.slots(0)), (0, &[None][..]));
    assert!(table.ids.is_empty() && table.sequences.is_empty());
}

#[test]
fn a_later_sequence_of_the_same_id_waits_for_the_end_of_the_earlier() {
    let now = Instant::now();
    let mut table = Table::new(limits(2, 2));
    assert!(push(&mut table, now, 1, 7, "SE") && push(&mut table, now, 2, 7, "S"));
    assert!(push(&mut table, now, 3, 7, "E") && push(&mut table, now, 4, 7, "SE"));
    let mut order = Vec::new();
    for _ in 0..4 {
        for instance in [0, 1] {
            order.extend(take_all(&mut table, instance));
            finish(&mut table, instance, now);
        }
    }
    assert_eq!(order, [Some(1), Some(2), Some(3), Some(4)]);
    assert!(table.ids.is_empty() && table.sequences.is_empty());
}

#[test]
fn a_cancelled_sequence_in_between_holds_the_next_back_no_more() {
    let now = Instant::now();
    let mut table = Table::new(limits(1, 2));
    for item in 1..=3 {
        assert!(push(&mut table, now, item, 7, "SE"));
    }
    let mut gone = Vec::new();
    table.cancel(now, |item| *item == 2, |item| gone.push(item));
    assert_eq!(gone, [2]);
    assert_eq!(take_all(&mut table, 0), [Some(1)], "the third goes on waiting for the first");
    finish(&mut table, 0, now);
    assert_eq!(take_all(&mut table, 0), [Some(3)]);
    let mut gone = Vec::new();
    assert!(push(&mut table, now, 4, 7, "SE"));
    table.cancel(now, |item| *item == 4, |item| gone.push(item));
    assert!(push(&mut table, now, 5, 7, "SE"));
    assert_eq!((gone, take_all(&mut table, 0)), (vec![4], vec![]), "the third still runs");
    finish(&mut table, 0, now);
    assert_eq!(take_all(&mut table, 0), [Some(5)]);
}

#[test]
fn a_limit_on_the_wait_for_a_slot_takes_the_whole_sequence() {
    let now = Instant::now();
    let mut table = Table::new(limits(1, 1));
    assert!(push(&mut table, now, 1, 1, "S"));
    let patient =
        |item, patience: u32| Arrival { patience: Some(US * patience), ..arrival(item, 2, item == 2, false) };
    assert!(table.push(patient(2, 50), now, || ()).is_ok());
    assert!(table.push(patient(3, 20), now + US, || ()).is_ok());
    assert_eq!(table.next_deadline(), Some(now + US * 21));
    let mut expired = Vec::new();
    table.expire(now + US * 20, |item| expired.push(item));
    assert!(expired.is_empty());
    table.expire(now + US * 21, |item| expired.push(item));
    assert_eq!((expired, table.next_deadline(), table.waiting()), (vec![2, 3], None, 1));
}

#[test]
fn a_model_that_wants_to_know_gets_one_end_for_a_sequence_it_has_seen() {
    let now = Instant::now();
    let mut table = Table::new(Limits { tell_abandoned: true, ..limits(1, 1) });
    assert!(push(&mut table, now, 1, 1, "S") && push(&mut table, now, 2, 2, "S"));
    table.cancel(now, |item| *item == 2, drop);
    assert_eq!(table.waiting(), 1, "the second was never seen");
    take_all(&mut table, 0);
    finish(&mut table, 0, now);
    table.expire(now + MAX_IDLE, |_| panic!("no client waits"));
    assert_eq!(table.waiting(), 1);
    assert!(push(&mut table, now + MAX_IDLE, 3, 1, "S"), "the id is free again");
    let key = table.ready(0).next().expect("the END").1;
    let step = table.take(key).expect("it is ready").step;
    assert!(step.item.is_none() && step.end && !step.start);
    assert_eq!(take_all(&mut table, 0), [], "the new sequence comes after it");
    finish(&mut table, 0, now + MAX_IDLE);
    assert_eq!(take_all(&mut table, 0), [Some(3)]);
}

#[test]
fn when_nothing_more_comes_the_backlog_need_not_wait_for_those_who_are_idle() {
    let now = Instant::now();
    let mut table = Table::new(limits(1, 1));
    assert!(push(&mut table, now, 1, 1, "S") && push(&mut table, now, 2, 2, "S"));
    assert!(push(&mut table, now, 3, 2, "") && push(&mut table, now, 4, 3, "S"));
    take_all(&mut table, 0);
    finish(&mut table, 0, now);
    assert_eq!(take_all(&mut table, 0), []);
    table.close(now);
    let mut order = Vec::new();
    for _ in 0..4 {
        order.extend(take_all(&mut table, 0));
        finish(&mut table, 0, now);
    }
    assert_eq!((order, table.next_deadline()), (vec![Some(2), Some(3), Some(4)], None));
    assert!(table.sequences.is_empty() && table.ids.is_empty());
}

#[test]
fn a_request_that_runs_again_comes_before_all_others_and_starts_nothing() {
    let now = Instant::now();
    let mut table = Table::new(limits(1, 1));
    let id = CorrelationId::Number(1);
    assert!(table.push(Arrival { alone: true, ..arrival(1, 1, true, false) }, now, || ()).is_ok());
    assert_eq!(take_all(&mut table, 0), [Some(1)]);
    assert!(table.put_back(&id, 1, Kind::default()).is_ok());
    finish(&mut table, 0, now);
    let key = table.ready(0).next().expect("it runs again").1;
    assert!(!table.take(key).expect("it is ready").step.start);
    finish(&mut table, 0, now);
    assert!(table.sequences.is_empty(), "it was not given back, so its sequence is over");
    assert!(table.put_back(&id, 1, Kind::default()).is_err());
}

#[test]
fn rows_keep_their_places_and_gaps_are_filled() {
    let now = Instant::now();
    let rules = DirectRules { max_delay: Duration::ZERO, utilization: 0.0, fixed: true };
    let mut table = Table::new(limits(1, 4));
    for id in 1..=3 {
        assert!(push(&mut table, now, 0, id, "S"));
    }
    let Choice::Run(rows) = direct::choose(&table, 0, now, &rules) else { panic!("three wait") };
    assert_eq!(rows, [Row::Step(0), Row::Step(1), Row::Step(2)]);
    take_all(&mut table, 0);
    finish(&mut table, 0, now);
    assert!(push(&mut table, now, 0, 3, "E"));
    let Choice::Run(rows) = direct::choose(&table, 0, now, &rules) else { panic!("one waits") };
    assert_eq!(rows, [Row::Filler, Row::Filler, Row::Step(2)]);
}

#[test]
fn direct_waits_for_its_share_of_slots_until_the_delay_is_over() {
    let now = Instant::now();
    let rules = |fixed| DirectRules { max_delay: US * 50, utilization: 0.75, fixed };
    let mut table = Table::new(limits(1, 4));
    assert!(push(&mut table, now, 0, 1, "S"));
    let first = direct::choose(&table, 0, now, &rules(true));
    assert_eq!(first, Choice::WaitUntil(now + US * 50));
    assert!(matches!(direct::choose(&table, 0, now, &rules(false)), Choice::Run(_)), "nobody else is here");
    assert!(matches!(direct::choose(&table, 0, now + US * 50, &rules(true)), Choice::Run(_)));
    assert!(push(&mut table, now, 0, 2, "S") && push(&mut table, now, 0, 3, "S"));
    assert!(matches!(direct::choose(&table, 0, now, &rules(true)), Choice::Run(rows) if rows.len() == 3));
}

/// One step of a random history.
#[derive(Clone, Debug)]
enum Act {
    Push {
        id: u64,
        start: bool,
        end: bool,
        kind: i64,
        patience: Option<u32>,
    },
    Run {
        instance: usize,
    },
    /// Ends the run of an instance; the flag cancels the first sequence of it.
    Finish {
        instance: usize,
        cancels: bool,
    },
    Wait(u32),
    /// The client of the so-many-th waiting request goes away.
    Leave(usize),
}

fn act() -> impl Strategy<Value = Act> {
    let push = (
        0..6_u64,
        any::<bool>(),
        prop::bool::weighted(0.3),
        0..2_i64,
        prop::option::weighted(0.2, 1..150_u32),
    );
    prop_oneof![
        6 => push.prop_map(|(id, start, end, kind, patience)| Act::Push { id, start, end, kind, patience }),
        4 => (0..2_usize).prop_map(|instance| Act::Run { instance }),
        4 => (0..2_usize, prop::bool::weighted(0.1)).prop_map(|(instance, cancels)| Act::Finish { instance, cancels }),
        2 => (1..12_u32).prop_map(|tens| Act::Wait(10 * tens)),
        1 => (0..8_usize).prop_map(Act::Leave),
    ]
}

/// What must be true of an open sequence, worked out beside the table.
#[derive(Clone, Debug, Default)]
struct Known {
    waiting: Vec<usize>,
    running: bool,
    idle_since: Option<Instant>,
}

#[derive(Debug)]
struct History {
    table: Table<usize, u64>,
    is_direct: bool,
    now: Instant,
    /// Open sequences by id.
    open: BTreeMap<u64, Known>,
    /// Pushed and not out yet: item and id.
    inside: BTreeMap<usize, u64>,
    /// Last item that ran, by id.
    last: BTreeMap<u64, usize>,
    /// Ids of the batch in each instance.
    running: [Vec<u64>; 2],
    /// Place of the sequence that holds it: instance and row, with its key.
    places: BTreeMap<(usize, usize), Key>,
    next_item: usize,
    tell: bool,
    told: HashSet<Key>,
    ran: HashSet<Key>,
}

impl History {
    fn new(slots: usize, is_direct: bool, tell: bool) -> Self {
        let limits = Limits { tell_abandoned: tell, ..limits(2, slots) };
        Self {
            table: Table::new(limits),
            is_direct,
            now: Instant::now(),
            open: BTreeMap::new(),
            inside: BTreeMap::new(),
            last: BTreeMap::new(),
            running: [Vec::new(), Vec::new()],
            places: BTreeMap::new(),
            next_item: 0,
            tell,
            told: HashSet::new(),
            ran: HashSet::new(),
        }
    }

    fn push(&mut self, id: u64, start: bool, end: bool, kind: i64, patience: Option<u32>) {
        let item = self.next_item;
        self.next_item += 1;
        let is_open = self
            .open
            .get(&id)
            .is_some_and(|known| known.idle_since.is_none_or(|since| self.now < since + MAX_IDLE));
        let arrival = Arrival {
            kind: Kind::of_words(&[kind]),
            patience: patience.map(|patience| US * patience),
            ..arrival(item, id, start, end)
        };
        let taken = self.table.push(arrival, self.now, || id).is_ok();
        assert_eq!(taken, start || is_open, "item {item} of {id}");
        if !taken {
            return;
        }
        if !is_open {
            self.open.insert(id, Known::default());
        }
        let known = self.open.get_mut(&id).expect("it is open");
        known.idle_since = None;
        known.waiting.push(item);
        self.inside.insert(item, id);
        if end {
            self.open.remove(&id);
        }
    }

    fn choose(&self, instance: usize) -> Vec<Row> {
        let choice = if self.is_direct {
            let rules = DirectRules { max_delay: US * 30, utilization: 0.5, fixed: true };
            direct::choose(&self.table, instance, self.now, &rules)
        } else {
            let rules = Rules { max_rows: 2, preferred: vec![2], max_delay: US * 30, single: false };
            oldest::choose(&self.table, instance, self.now, &rules, &Company::new(true, 0))
        };
        match choice {
            Choice::Run(rows) => rows,
            Choice::WaitUntil(time) => {
                assert!(time > self.now && time <= self.now + US * 30, "a wait has an end");
                Vec::new()
            }
            Choice::Idle => {
                assert_eq!(self.table.ready(instance).len(), 0, "who is ready runs or has a time");
                Vec::new()
            }
        }
    }

    fn run(&mut self, instance: usize) {
        if !self.running[instance].is_empty() {
            return;
        }
        let rows = self.choose(instance);
        assert!(rows.len() <= if self.is_direct { self.table.limits.slots } else { 2 });
        assert_ne!(rows.last(), Some(&Row::Filler), "rows behind the last are not filled");
        let mut kinds = HashSet::new();
        for (at, row) in rows.iter().enumerate() {
            let Row::Step(key) = *row else { continue };
            kinds.insert(self.table.form(key).expect("it waits").0.clone());
            let slot = self.table.slots(instance).iter().position(|slot| *slot == Some(key)).expect("a slot");
            assert!(!self.is_direct || slot == at, "a sequence stays in its row");
            let holder = self.places.insert((instance, slot), key);
            assert!(holder.is_none_or(|holder| holder == key || !self.table.sequences.contains_key(&holder)));
            assert!(self.places.iter().all(|(place, other)| *other != key || *place == (instance, slot)));
            let taken = self.table.take(key).expect("it is ready");
            let id = *taken.memory;
            assert_eq!(*taken.id, CorrelationId::Number(id));
            self.running[instance].push(id);
            let Some(item) = taken.step.item else {
                assert!(self.tell && taken.step.end && self.ran.contains(&key) && self.told.insert(key));
                continue;
            };
            self.ran.insert(key);
            assert_eq!(self.inside.remove(&item), Some(id), "item {item} leaves once");
            assert!(self.last.insert(id, item).is_none_or(|last| last < item), "order of {id}");
            if let Some(known) = self.open.get_mut(&id).filter(|known| known.waiting.first() == Some(&item)) {
                known.waiting.remove(0);
                known.running = true;
            }
        }
        assert!(kinds.len() <= 1, "{kinds:?}");
        let ids: HashSet<_> = self.running.iter().flatten().collect();
        assert_eq!(ids.len(), self.running.iter().flatten().count(), "one request of a sequence at a time");
    }

    fn finish(&mut self, instance: usize, cancels: bool) {
        let ids = std::mem::take(&mut self.running[instance]);
        let cancelled = ids.first().copied().filter(|_| cancels);
        let mut out = Vec::new();
        self.table.finish(
            instance,
            self.now,
            |id| (Some(*id) != cancelled).then(Form::new),
            |item| out.push(item),
        );
        for id in ids {
            // An open sequence may be a later one of the same id, of which nothing runs.
            let Some(known) = self.open.get_mut(&id).filter(|known| known.running) else { continue };
            known.running = false;
            if Some(id) == cancelled {
                self.open.remove(&id);
            } else if known.waiting.is_empty() {
                known.idle_since = Some(self.now);
            }
        }
        self.left(out);
    }

    /// Requests that left without running.
    fn left(&mut self, items: Vec<usize>) {
        for item in items {
            let id = self.inside.remove(&item).expect("an item leaves once");
            if self.open.get(&id).is_some_and(|known| known.waiting.contains(&item)) {
                self.open.remove(&id);
            }
        }
    }

    fn wait(&mut self, time: u32) {
        self.now += US * time;
        let mut out = Vec::new();
        self.table.expire(self.now, |item| out.push(item));
        self.left(out);
        self.open.retain(|_, known| known.idle_since.is_none_or(|since| self.now < since + MAX_IDLE));
        let idle =
            self.open.values().filter_map(|known| known.idle_since).min().map(|since| since + MAX_IDLE);
        let deadline = self.table.idle.first().map(|(until, _)| *until);
        assert_eq!(deadline, idle, "idle clocks");
    }

    fn leave(&mut self, place: usize) {
        let Some(gone) = self.inside.keys().nth(place).copied() else { return };
        let mut out = Vec::new();
        self.table.cancel(self.now, |item| *item == gone, |item| out.push(item));
        assert!(out.contains(&gone));
        let ids: HashSet<_> = out.iter().map(|item| self.inside[item]).collect();
        assert_eq!(ids.len(), 1, "only its own sequence");
        self.left(out);
    }

    fn check(&self) {
        let taken: usize = self.table.slots.iter().flatten().flatten().count();
        assert_eq!(taken + self.table.free.len(), 2 * self.table.limits.slots);
        let steps: usize = self.table.sequences.values().map(|sequence| sequence.steps.len()).sum();
        assert_eq!(self.table.waiting(), steps);
        let own = self.table.sequences.values().flat_map(|s| &s.steps).filter(|step| step.item.is_none());
        assert_eq!(self.inside.len() + own.count(), steps);
        assert!(
            self.table.sequences.values().all(|sequence| !sequence.is_running || sequence.ready.is_none())
        );
        assert!(self.table.free.is_empty() || self.table.backlog.is_empty(), "nobody waits for a free slot");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_histories(
        acts in prop::collection::vec(act(), 1..120),
        slots in 1..4_usize,
        is_direct: bool,
        tell: bool,
    ) {
        let mut history = History::new(slots, is_direct, tell);
        for act in acts {
            match act {
                Act::Push { id, start, end, kind, patience } => history.push(id, start, end, kind, patience),
                Act::Run { instance } => history.run(instance),
                Act::Finish { instance, cancels } => history.finish(instance, cancels),
                Act::Wait(time) => history.wait(time),
                Act::Leave(place) => history.leave(place),
            }
            history.check();
        }
        // Time alone must empty it: idle sequences make room for the backlog.
        for _ in 0..400 {
            for instance in [0, 1] {
                history.finish(instance, false);
                history.wait(40);
                history.run(instance);
            }
        }
        for instance in [0, 1] {
            history.finish(instance, false);
        }
        history.wait(200);
        prop_assert!(history.inside.is_empty(), "{:?} never ran", history.inside);
        prop_assert_eq!(history.table.waiting(), 0);
        prop_assert!(history.table.sequences.is_empty() && history.table.ids.is_empty());
        prop_assert_eq!(history.table.free.len(), 2 * slots);
        prop_assert_eq!(history.table.next_deadline(), None);
    }
}
