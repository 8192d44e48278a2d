//! Turns, limits and fairness, with pools that only count how often they are woken.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use trireme_config::ResourceNeed;

use super::*;

fn limits(priority: u32, needs: &[(&str, bool, u32)]) -> RateLimiterSpec {
    let needs = needs.iter().map(|(name, global, count)| ResourceNeed {
        name: (*name).into(),
        global: *global,
        count: *count,
    });
    RateLimiterSpec { resources: needs.collect(), priority }
}

fn given(name: &str, count: u32, device: Option<i32>) -> RateLimitResource {
    RateLimitResource { name: name.into(), count, device }
}

/// Counts how often it is woken.
#[derive(Default)]
struct Pool(AtomicUsize);

impl Wakeable for Pool {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A pool with one gate for these instances on device 0.
fn pool(limiter: &Arc<RateLimiter>, instances: &[RateLimiterSpec]) -> (Gate, Arc<Pool>) {
    let gate = limiter.register(instances.iter().map(|limits| (limits, 0))).expect("enough of everything");
    let pool = Arc::new(Pool::default());
    let weak: Weak<dyn Wakeable> = Arc::downgrade(&pool) as Weak<dyn Wakeable>;
    (gate.expect("an instance needs something").attached(&weak), pool)
}

fn refusal(limiter: &Arc<RateLimiter>, limits: &RateLimiterSpec, device: i32) -> String {
    let refused = limiter.register([(limits, device)].into_iter());
    refused.err().expect("must be refused").message().to_owned()
}

#[test]
fn one_at_a_time_and_the_other_is_woken() {
    let limiter = RateLimiter::new(Vec::new());
    let need = [limits(1, &[("R", true, 1)])];
    let ((a, _a), (b, woken)) = (pool(&limiter, &need), pool(&limiter, &need));
    assert!(a.enter(0));
    a.settle(true).wake();
    assert!(!b.enter(0), "a holds it");
    b.settle(true).wake();
    assert_eq!(woken.0.load(Ordering::SeqCst), 0);
    a.ran(0);
    a.settle(false).wake();
    assert_eq!(woken.0.load(Ordering::SeqCst), 1);
    assert!(b.enter(0));
    assert!(!a.enter(0));
}

#[test]
fn a_turn_that_is_not_used_goes_to_the_next() {
    let limiter = RateLimiter::new(Vec::new());
    let need = [limits(1, &[("R", true, 1)])];
    let ((a, woken_a), (b, woken_b)) = (pool(&limiter, &need), pool(&limiter, &need));
    assert!(a.enter(0));
    assert!(!b.enter(0));
    b.settle(true).wake();
    a.leave(0);
    a.settle(false).wake();
    assert_eq!(woken_b.0.load(Ordering::SeqCst), 1);
    // b was given a turn and has nothing to do any more.
    assert!(!a.enter(0));
    b.settle(false).wake();
    assert_eq!(woken_a.0.load(Ordering::SeqCst), 1);
    assert!(a.enter(0));
}

#[test]
fn a_model_that_is_unloaded_gives_everything_back() {
    let limiter = RateLimiter::new(Vec::new());
    let need = [limits(1, &[("R", false, 2)])];
    let ((a, _a), (b, woken)) = (pool(&limiter, &need), pool(&limiter, &need));
    assert!(a.enter(0));
    assert!(!b.enter(0));
    b.settle(true).wake();
    drop(a);
    assert_eq!(woken.0.load(Ordering::SeqCst), 1);
    assert!(b.enter(0));
    drop(b);
    let state = limiter.state.lock();
    assert!(state.instances.is_empty() && state.waiting.is_empty());
}

#[test]
fn resources_of_devices_are_apart_and_global_ones_are_not() {
    let limiter = RateLimiter::new(vec![given("R", 1, None)]);
    for (global, both) in [(false, true), (true, false)] {
        let need = limits(1, &[("R", global, 1)]);
        let instances = [(&need, 0), (&need, 1)];
        let gate = limiter.register(instances.into_iter()).unwrap().unwrap();
        assert!(gate.enter(0));
        assert_eq!(gate.enter(1), both, "global: {global}");
    }
}

#[test]
fn refuses_what_could_never_run() {
    let limiter = RateLimiter::new(vec![given("R", 3, None), given("R", 1, Some(1)), given("G", 2, Some(7))]);
    assert_eq!(
        refusal(&limiter, &limits(1, &[("R", false, 4)]), 0),
        "Resource count for \"R\" is limited to 3 which will prevent scheduling of one or more model instances, the \
         minimum required count is 4"
    );
    assert!(refusal(&limiter, &limits(1, &[("R", false, 2)]), 1).contains("limited to 1"));
    // The device of a global resource does not count.
    assert!(refusal(&limiter, &limits(1, &[("G", true, 3)]), 0).contains("limited to 2"));
    let (_kept, _) = pool(&limiter, &[limits(1, &[("R", false, 3), ("free", false, 9)])]);
    assert_eq!(
        refusal(&limiter, &limits(1, &[("R", true, 1)]), 0),
        "Resource \"R\" is present as both global and device-specific resource in the model configuration."
    );
    assert_eq!(limiter.state.lock().instances.len(), 1, "a refusal leaves nothing behind");
    let nothing = limits(5, &[]);
    assert!(limiter.register([(&nothing, 0)].into_iter()).unwrap().is_none());
}

#[test]
fn there_is_as_much_as_the_neediest_instance_needs() {
    let limiter = RateLimiter::new(Vec::new());
    let (small, _) = pool(&limiter, &[limits(1, &[("R", true, 1)]), limits(1, &[("R", true, 1)])]);
    assert!(small.enter(0) && !small.enter(1));
    small.settle(true).wake();
    let (large, _) = pool(&limiter, &[limits(1, &[("R", true, 3)])]);
    assert!(small.enter(1), "now there are three");
    assert!(!large.enter(0));
    large.settle(true).wake();
    small.ran(0);
    // The large one is before it in line: nobody takes what it waits for.
    assert!(!small.enter(0));
    small.ran(1);
    small.settle(true).wake();
    assert!(large.enter(0));
}

/// Runs instances that always have work until `turns` were given; how many each got.
fn share(limiter: &Arc<RateLimiter>, instances: &[RateLimiterSpec], turns: usize) -> Vec<usize> {
    let gates: Vec<_> =
        instances.iter().map(|limits| pool(limiter, std::slice::from_ref(limits)).0).collect();
    let mut counts = vec![0; gates.len()];
    let mut running: Vec<usize> = Vec::new();
    for _ in 0..turns {
        for (i, gate) in gates.iter().enumerate().filter(|(i, _)| !running.contains(i)).collect::<Vec<_>>() {
            if gate.enter(0) {
                running.push(i);
                counts[i] += 1;
            }
            drop(gate.settle(true));
        }
        let ended = running.remove(0);
        gates[ended].ran(0);
        // As a pool does: it stands in line again before anything is given on.
        if gates[ended].enter(0) {
            running.push(ended);
            counts[ended] += 1;
        }
        drop(gates[ended].settle(true));
    }
    counts
}

#[test]
fn turns_are_shared_by_priority() {
    let limiter = RateLimiter::new(Vec::new());
    let one = |priority| limits(priority, &[("R", true, 1)]);
    let counts = share(&limiter, &[one(1), one(2), one(4)], 7000);
    for (count, expected) in counts.iter().zip([4000_usize, 2000, 1000]) {
        assert!(count.abs_diff(expected) <= 10, "{counts:?}");
    }
}

#[test]
fn whoever_was_idle_does_not_shut_the_others_out() {
    let limiter = RateLimiter::new(Vec::new());
    let need = [limits(1, &[("R", true, 1)])];
    let ((a, _a), (b, _b)) = (pool(&limiter, &need), pool(&limiter, &need));
    for _ in 0..1000 {
        assert!(a.enter(0));
        a.ran(0);
        a.settle(false).wake();
    }
    // b comes for the first time: they take turns from now on.
    assert!(b.enter(0));
    let mut last = "b";
    for _ in 0..10 {
        let (now, other) = if last == "b" { (&b, &a) } else { (&a, &b) };
        assert!(!other.enter(0));
        other.settle(true).wake();
        now.ran(0);
        assert!(!now.enter(0), "{last} has had its turn");
        now.settle(true).wake();
        assert!(other.enter(0));
        last = if last == "b" { "a" } else { "b" };
    }
}

#[test]
fn no_instance_waits_for_ever() {
    // The greedy ones never leave enough for the big one at once, and one of them enters far behind the others.
    let limiter = RateLimiter::new(vec![given("R", 4, None), given("S", 2, None)]);
    let small = || limits(1, &[("R", true, 1)]);
    let instances = [
        small(),
        small(),
        small(),
        small(),
        limits(1, &[("R", true, 4)]),
        limits(9, &[("R", true, 2), ("S", true, 2)]),
        limits(1, &[("S", true, 1)]),
    ];
    let counts = share(&limiter, &instances, 5000);
    assert!(counts.iter().all(|count| *count >= 20), "{counts:?}");
}

#[test]
fn nobody_is_passed_over_for_long_by_one_who_comes_from_elsewhere() {
    let limiter = RateLimiter::new(Vec::new());
    let (old, _old) = pool(&limiter, &[limits(1, &[("R", true, 1)])]);
    for _ in 0..5000 {
        assert!(old.enter(0));
        old.ran(0);
        old.settle(false).wake();
    }
    // Its second resource is new, so it enters 5000 turns before the other.
    let (new, _new) = pool(&limiter, &[limits(1, &[("R", true, 1), ("S", true, 1)])]);
    let (mut turns, mut now) = ([0, 0], 1);
    assert!(new.enter(0) && !old.enter(0));
    for _ in 0..100 {
        turns[now] += 1;
        let gates = [&old, &new];
        gates[now].ran(0);
        let again = gates[now].enter(0);
        gates[now].settle(true).wake();
        if !again {
            now = 1 - now;
            assert!(gates[now].enter(0), "one of the two has the turn");
        }
    }
    // It is first when it was passed over five times: (priority + 1) * 2 instances, and once more.
    assert!(turns[0] >= 100 / 8, "{turns:?}");
}

/// Threads in place of pools: never over the resources, everybody ends.
#[test]
fn threads_never_take_more_than_there_is() {
    const THREADS: u64 = 8;
    const TURNS: u64 = 400;
    const LOST: Duration = Duration::from_secs(20);
    struct Sleeper(thread::Thread);
    impl Wakeable for Sleeper {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let limiter = RateLimiter::new(vec![given("R", 5, None)]);
    let (taken, most) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for seed in 0..THREADS {
            let (limiter, taken, most) = (&limiter, &taken, &most);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed);
                let need = u32::try_from(seed % 5 + 1).unwrap();
                let limits = limits(random.u32(1..4), &[("R", true, need), ("S", true, 1)]);
                let gate = limiter.register([(&limits, 0)].into_iter()).unwrap().unwrap();
                let sleeper = Arc::new(Sleeper(thread::current()));
                let gate = gate.attached(&(Arc::downgrade(&sleeper) as Weak<dyn Wakeable>));
                let mut left = TURNS;
                while left > 0 {
                    while !gate.enter(0) {
                        gate.settle(true).wake();
                        let asleep = Instant::now();
                        thread::park_timeout(LOST);
                        assert!(asleep.elapsed() < LOST, "a wake-up was lost");
                    }
                    gate.settle(true).wake();
                    if random.u8(..8) == 0 {
                        gate.leave(0);
                    } else {
                        let now = taken.fetch_add(need.into(), Ordering::SeqCst) + u64::from(need);
                        most.fetch_max(now, Ordering::SeqCst);
                        if random.bool() {
                            thread::yield_now();
                        }
                        taken.fetch_sub(need.into(), Ordering::SeqCst);
                        left -= 1;
                        gate.ran(0);
                    }
                    gate.settle(random.bool()).wake();
                }
            });
        }
    });
    assert!((1..=5).contains(&most.load(Ordering::SeqCst)));
    assert!(limiter.state.lock().instances.is_empty());
}
