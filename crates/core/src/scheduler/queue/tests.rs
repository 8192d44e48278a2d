//! Limits exact to the request and to the microsecond, and every request leaving once.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

const US: Duration = Duration::from_micros(1);

fn policy(action: TimeoutAction, timeout: u32, allow_override: bool, size: Option<usize>) -> QueuePolicy {
    QueuePolicy {
        timeout_action: action,
        default_timeout: (timeout > 0).then(|| US * timeout),
        allow_timeout_override: allow_override,
        max_queue_size: size,
    }
}

fn one_level(policy: QueuePolicy) -> LevelRules {
    LevelRules { default_policy: policy, ..LevelRules::default() }
}

fn drained<T>(queue: &mut PolicyQueue<T>) -> Vec<T> {
    let mut items = Vec::new();
    queue.take_first(queue.len(), |waiting| items.push(waiting.item));
    items
}

fn expired<T>(queue: &mut PolicyQueue<T>, now: Instant) -> Vec<T> {
    let mut items = Vec::new();
    queue.expire(now, |waiting| items.push(waiting.item));
    items
}

#[test]
fn the_size_limit_is_exact() {
    let now = Instant::now();
    let mut queue = PolicyQueue::new(one_level(policy(TimeoutAction::Reject, 0, false, Some(2))));
    assert!(queue.push('a', Claim::default(), now).is_ok());
    assert!(queue.push('b', Claim::default(), now).is_ok());
    assert_eq!(queue.push('c', Claim::default(), now), Err(('c', 2)));
    queue.take_first(1, |_| ());
    assert!(queue.push('d', Claim::default(), now).is_ok());
    assert_eq!(drained(&mut queue), ['b', 'd']);
}

#[test]
fn level_one_comes_first_and_unknown_levels_are_the_default() {
    let now = Instant::now();
    let rules = LevelRules { levels: 2, default_level: 2, ..LevelRules::default() };
    let mut queue = PolicyQueue::new(rules);
    for (item, priority) in [('a', 2), ('b', 0), ('c', 1), ('d', 9), ('e', 1)] {
        assert!(queue.push(item, Claim { priority, ..Claim::default() }, now).is_ok());
    }
    assert_eq!(drained(&mut queue), ['c', 'e', 'a', 'b', 'd']);
}

#[test]
fn reject_removes_at_the_microsecond_and_not_before() {
    let now = Instant::now();
    let mut queue = PolicyQueue::new(one_level(policy(TimeoutAction::Reject, 100, true, None)));
    assert!(queue.push('a', Claim::default(), now).is_ok());
    assert!(queue.push('b', Claim { priority: 0, timeout: US * 40 }, now).is_ok());
    assert!(queue.push('c', Claim { priority: 0, timeout: US * 400 }, now).is_ok());
    assert_eq!(queue.next_deadline(), Some(now + US * 40));
    assert!(expired(&mut queue, now + US * 39).is_empty());
    assert_eq!(expired(&mut queue, now + US * 40), ['b']);
    assert_eq!(queue.next_deadline(), Some(now + US * 100));
    assert_eq!(expired(&mut queue, now + US * 100), ['a', 'c'], "a client can only shorten the wait");
    assert_eq!((queue.len(), queue.next_deadline()), (0, None));
}

#[test]
fn a_client_may_limit_its_wait_where_the_model_has_no_limit() {
    let now = Instant::now();
    for (allowed, deadline) in [(true, Some(now + US * 7)), (false, None)] {
        let mut queue = PolicyQueue::new(one_level(policy(TimeoutAction::Reject, 0, allowed, None)));
        assert!(queue.push('a', Claim { priority: 0, timeout: US * 7 }, now).is_ok());
        assert_eq!(queue.next_deadline(), deadline);
    }
}

#[test]
fn delay_puts_a_request_behind_those_in_time() {
    let now = Instant::now();
    let mut queue = PolicyQueue::new(one_level(policy(TimeoutAction::Delay, 100, true, Some(4))));
    assert!(queue.push('a', Claim { priority: 0, timeout: US * 10 }, now).is_ok());
    assert!(queue.push('b', Claim::default(), now).is_ok());
    assert!(expired(&mut queue, now + US * 10).is_empty());
    assert!(queue.push('c', Claim::default(), now + US * 11).is_ok());
    assert_eq!(queue.iter().map(|waiting| waiting.item).collect::<String>(), "bca");
    assert!(queue.push('d', Claim::default(), now).is_ok());
    assert_eq!(queue.push('e', Claim::default(), now), Err(('e', 4)), "a delayed request still takes room");
    assert_eq!(drained(&mut queue), ['b', 'c', 'd', 'a']);
}

#[test]
fn levels_that_clients_name_do_not_pile_up() {
    let now = Instant::now();
    let mut queue =
        PolicyQueue::new(LevelRules { levels: u64::MAX, default_level: 1, ..LevelRules::default() });
    for priority in 1..10_000 {
        assert!(queue.push(priority, Claim { priority, ..Claim::default() }, now).is_ok());
        queue.take_first(1, |_| ());
    }
    assert!(queue.levels.len() <= KEPT_LEVELS + 1);
}

#[derive(Clone, Debug)]
enum Event {
    Push { priority: u64, timeout: u16 },
    Take(usize),
    TakeEvery { step: usize, offset: usize },
    RemoveOdd,
    Time(u16),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        4 => (0..5_u64, 0..300_u16).prop_map(|(priority, timeout)| Event::Push { priority, timeout }),
        1 => (0..4_usize).prop_map(Event::Take),
        1 => (1..4_usize, 0..3_usize).prop_map(|(step, offset)| Event::TakeEvery { step, offset }),
        1 => Just(Event::RemoveOdd),
        2 => (0..200_u16).prop_map(Event::Time),
    ];
    prop::collection::vec(event, 0..80)
}

proptest! {
    /// Whatever happens, each request leaves once, limits hold, and nobody waits past a REJECT deadline.
    #[test]
    fn every_request_leaves_once(
        events in events(),
        delay in any::<bool>(),
        default in 0..200_u32,
        limit in prop::option::of(1..6_usize),
        levels in 0..4_u64,
    ) {
        let action = if delay { TimeoutAction::Delay } else { TimeoutAction::Reject };
        let rules = LevelRules {
            levels,
            default_level: levels.min(1),
            default_policy: policy(action, default, true, limit),
            policies: BTreeMap::new(),
        };
        let mut queue = PolicyQueue::new(rules.clone());
        let mut now = Instant::now();
        let mut inside: HashSet<(u64, u64)> = HashSet::new();
        let mut pushed = 0_u64;
        let mut left = Vec::new();
        for event in events {
            match event {
                Event::Push { priority, timeout } => {
                    let level = rules.level(priority);
                    let claim = Claim { priority, timeout: US * u32::from(timeout) };
                    let full = limit.is_some_and(|limit| inside.iter().filter(|(at, _)| *at == level).count() >= limit);
                    let refused = queue.push((level, pushed), claim, now).is_err();
                    prop_assert_eq!(refused, full);
                    if !refused {
                        inside.insert((level, pushed));
                    }
                    pushed += 1;
                }
                Event::Take(count) => queue.take_first(count, |waiting| left.push(waiting.item)),
                Event::TakeEvery { step, offset } => {
                    let places: Vec<usize> = (offset..queue.len()).step_by(step).collect();
                    let expected: Vec<_> = places.iter().filter_map(|at| queue.iter().nth(*at)).map(|w| w.item).collect();
                    let before = left.len();
                    queue.take(&places, |waiting| left.push(waiting.item));
                    prop_assert_eq!(&left[before..], &expected[..]);
                }
                Event::RemoveOdd => queue.remove_if(|(_, number)| number % 2 == 1, |waiting| left.push(waiting.item)),
                Event::Time(us) => {
                    now += US * u32::from(us);
                    queue.expire(now, |waiting| left.push(waiting.item));
                    prop_assert!(queue.next_deadline().is_none_or(|deadline| deadline > now));
                }
            }
            for item in left.drain(..) {
                prop_assert!(inside.remove(&item), "{item:?} left twice");
            }
            prop_assert_eq!(queue.len(), inside.len());
            prop_assert_eq!(queue.iter().count(), inside.len());
            let order: Vec<u64> = queue.iter().map(|waiting| waiting.item.0).collect();
            prop_assert!(order.is_sorted(), "levels in order");
        }
        prop_assert_eq!(drained(&mut queue).len(), inside.len());
        prop_assert!(queue.deadlines.is_empty());
    }
}
