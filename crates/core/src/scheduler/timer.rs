//! One thread that wakes schedulers at the times they asked for.
//!
//! It starts with the first time asked for, and never runs a model itself: what it wakes hands work on. Times are not
//! taken back; whoever is woken looks whether there is still something to do.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// Something that wants to look at the clock.
pub(crate) trait Wakeable: Send + Sync {
    fn wake(self: Arc<Self>);
}

/// The shared alarm clock of one server.
#[derive(Clone, Default)]
pub(crate) struct Timer {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    earlier: Condvar,
}

#[derive(Default)]
struct State {
    alarms: BinaryHeap<Reverse<Alarm>>,
    number: u64,
    is_running: bool,
    /// When the thread wakes by itself.
    sleeps_until: Option<Instant>,
}

struct Alarm {
    at: Instant,
    number: u64,
    who: Weak<dyn Wakeable>,
}

impl Timer {
    /// Wakes `who` at `at`, unless it is gone by then. Waking late by the scheduling of the system is possible, early
    /// is not.
    pub(crate) fn wake_at(&self, at: Instant, who: Weak<dyn Wakeable>) {
        let mut state = self.shared.state.lock();
        let number = state.number;
        state.number += 1;
        state.alarms.push(Reverse(Alarm { at, number, who }));
        if !state.is_running {
            let shared = Arc::clone(&self.shared);
            let spawned = thread::Builder::new().name("trireme-timer".into()).spawn(move || run(&shared));
            match spawned {
                Ok(_) => state.is_running = true,
                Err(error) => {
                    tracing::error!("no thread for the timer: {error}; waiting requests may run late");
                }
            }
        } else if state.sleeps_until.is_none_or(|until| at < until) {
            state.sleeps_until = Some(at);
            self.shared.earlier.notify_one();
        }
    }
}

fn run(shared: &Shared) {
    let mut state = shared.state.lock();
    loop {
        let now = Instant::now();
        match state.alarms.peek() {
            Some(Reverse(alarm)) if alarm.at <= now => {
                if let Some(Reverse(alarm)) = state.alarms.pop()
                    && let Some(who) = alarm.who.upgrade()
                {
                    parking_lot::MutexGuard::unlocked(&mut state, || who.wake());
                }
            }
            Some(Reverse(alarm)) => {
                let at = alarm.at;
                state.sleeps_until = Some(at);
                shared.earlier.wait_until(&mut state, at);
            }
            None => {
                state.sleeps_until = None;
                shared.earlier.wait(&mut state);
            }
        }
    }
}

impl PartialEq for Alarm {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}

impl Eq for Alarm {}

impl PartialOrd for Alarm {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Alarm {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    struct Bell(&'static str, Mutex<mpsc::Sender<(&'static str, Instant)>>);

    impl Wakeable for Bell {
        fn wake(self: Arc<Self>) {
            self.1.lock().send((self.0, Instant::now())).expect("the test listens");
        }
    }

    #[test]
    fn wakes_in_the_order_of_time_and_never_early() {
        let (sender, receiver) = mpsc::channel();
        let timer = Timer::default();
        let start = Instant::now();
        let bells = [("third", 60), ("first", 10), ("second", 30), ("gone", 20)].map(|(name, ms)| {
            let bell = Arc::new(Bell(name, Mutex::new(sender.clone())));
            let weak: Weak<Bell> = Arc::downgrade(&bell);
            timer.wake_at(start + Duration::from_millis(ms), weak);
            bell
        });
        let kept: Vec<_> = bells.into_iter().filter(|bell| bell.0 != "gone").collect();
        for (expected, ms) in [("first", 10), ("second", 30), ("third", 60)] {
            let (name, at) = receiver.recv_timeout(Duration::from_secs(5)).expect("a bell rings");
            assert_eq!(name, expected);
            assert!(at >= start + Duration::from_millis(ms), "{name} rang early");
        }
        assert_eq!(kept.len(), 3);
    }
}
