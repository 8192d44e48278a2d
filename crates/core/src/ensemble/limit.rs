//! `max_inflight_requests`: how much work is inside an ensemble at a time, over all its requests.
//!
//! At most so many requests are inside; the others wait before their first step, first come, first served. Besides, each
//! decoupled step has at most so many responses that are still being worked on: the thread that brings the next one
//! waits, unless what it waits for needs the same instances. So memory is bounded by the limit, whatever number of
//! requests and responses there are.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use trireme_types::{InferRequest, Responder};

use crate::model::InFlight;

/// A request that waits for another to leave.
pub(super) struct Entry {
    pub(super) request: InferRequest,
    pub(super) responder: Responder,
    pub(super) in_flight: InFlight,
    pub(super) arrived: Instant,
}

/// The door of an ensemble.
pub(super) struct Door {
    limit: usize,
    state: Mutex<DoorState>,
}

#[derive(Default)]
struct DoorState {
    inside: usize,
    waiting: VecDeque<Entry>,
}

impl Door {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, state: Mutex::default() }
    }

    /// Lets a request in, counting it, or keeps it waiting. `prepare` is called before it begins to wait.
    pub(super) fn enter(&self, mut entry: Entry, prepare: impl FnOnce(&mut Entry)) -> Option<Entry> {
        let mut state = self.state.lock();
        if state.inside < self.limit {
            state.inside += 1;
            return Some(entry);
        }
        prepare(&mut entry);
        state.waiting.push_back(entry);
        None
    }

    /// A request has left; the next one takes its place.
    pub(super) fn leave(&self) -> Option<Entry> {
        let mut state = self.state.lock();
        let next = state.waiting.pop_front();
        if next.is_none() {
            state.inside = state.inside.saturating_sub(1);
        }
        next
    }

    /// Takes the waiting requests out whose clients have gone away.
    pub(super) fn take_closed(&self) -> Vec<Entry> {
        let mut state = self.state.lock();
        let waiting = std::mem::take(&mut state.waiting);
        let (closed, open) = waiting.into_iter().partition(|entry| entry.responder.is_closed());
        state.waiting = open;
        Vec::from_iter::<VecDeque<Entry>>(closed)
    }

    pub(super) fn waiting(&self) -> usize {
        self.state.lock().waiting.len()
    }
}

/// Responses of one decoupled step that are being worked on.
#[derive(Default)]
pub(super) struct Flood {
    state: Mutex<FloodState>,
    ebb: Condvar,
}

#[derive(Default)]
struct FloodState {
    open: usize,
    /// Number of responses done so far; shows whether things move.
    done: u64,
}

/// How often a thread that waits looks whether its client is still there.
const LOOK: Duration = Duration::from_millis(20);
/// After so long without a single response done, the wait is given up: steps that wait for one another in a circle must
/// not stand still for ever.
const STUCK: Duration = Duration::from_secs(60);

impl Flood {
    pub(super) fn opened(&self) {
        self.state.lock().open += 1;
    }

    pub(super) fn closed(&self) {
        let mut state = self.state.lock();
        state.open = state.open.saturating_sub(1);
        state.done = state.done.wrapping_add(1);
        drop(state);
        self.ebb.notify_all();
    }

    /// Waits until fewer than `limit` responses are being worked on, or nobody wants them any more. `false` if nothing
    /// moved for a minute.
    pub(super) fn wait_below(&self, limit: usize, is_closed: impl Fn() -> bool) -> bool {
        let mut state = self.state.lock();
        let (mut seen, mut since) = (state.done, Instant::now());
        while state.open >= limit {
            if is_closed() {
                return true;
            }
            self.ebb.wait_for(&mut state, LOOK);
            if state.done != seen {
                (seen, since) = (state.done, Instant::now());
            } else if since.elapsed() > STUCK {
                return false;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_producer_waits_for_the_ebb_or_for_its_client_to_go() {
        let flood = Arc::new(Flood::default());
        flood.opened();
        flood.opened();
        assert!(flood.wait_below(3, || false));
        let other = Arc::clone(&flood);
        let waiter = std::thread::spawn(move || other.wait_below(2, || false));
        flood.closed();
        assert!(waiter.join().expect("the thread ends"));
        let gone = Arc::new(AtomicBool::new(false));
        let (other, seen) = (Arc::clone(&flood), Arc::clone(&gone));
        let waiter = std::thread::spawn(move || other.wait_below(1, || seen.load(Ordering::SeqCst)));
        gone.store(true, Ordering::SeqCst);
        assert!(waiter.join().expect("the thread ends"));
    }
}
