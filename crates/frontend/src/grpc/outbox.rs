//! The responses of one stream between the models that produce them and the connection that sends them.
//!
//! Responses of models that are not decoupled leave in the order of their requests; those of decoupled models leave
//! as they are produced. The outbox knows how much is under way, so that the stream stops reading requests when
//! answers pile up, and a model thread can be made to wait for a slow client.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;
use tonic::Status;

/// Requests of one stream that may be under way at the same time.
const MAX_OUTSTANDING: usize = 1024;
/// Input bytes of one stream that may be under way at the same time; one request may be larger.
const MAX_OUTSTANDING_BYTES: usize = 256 << 20;

/// Where the answer of a request goes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    /// Into its turn.
    InOrder(u64),
    /// Out at once.
    AsProduced,
}

/// `T` is a response that is not encoded yet.
#[derive(Debug)]
pub(super) struct Outbox<T> {
    state: Mutex<State<T>>,
    /// Responses that may wait before a model thread has to.
    max_ready: usize,
    closed: AtomicBool,
    /// A producer may go on, or never needs to.
    drained: Condvar,
    /// The reader of requests may go on.
    room: Notify,
    on_close: Notify,
}

#[derive(Debug)]
struct State<T> {
    /// One for each request that answers in order, the oldest first.
    turns: VecDeque<Turn<T>>,
    /// Number of the oldest turn.
    first_turn: u64,
    ready: VecDeque<T>,
    outstanding: usize,
    outstanding_bytes: usize,
    no_more_requests: bool,
    /// The reader of requests waits for room.
    reader_waits: bool,
    /// How the stream ends once nothing is outstanding.
    end: Option<Status>,
    waker: Option<Waker>,
    /// Woken when the stream is closed, each with the number of requests that want it: the requests that wait for
    /// one model share its waker.
    watchers: Vec<(Waker, usize)>,
}

#[derive(Debug)]
struct Turn<T> {
    response: Option<T>,
    done: bool,
}

impl<T> Outbox<T> {
    pub(super) fn new(max_ready: usize) -> Self {
        Self {
            state: Mutex::new(State {
                turns: VecDeque::new(),
                first_turn: 0,
                ready: VecDeque::new(),
                outstanding: 0,
                outstanding_bytes: 0,
                no_more_requests: false,
                reader_waits: false,
                end: None,
                waker: None,
                watchers: Vec::new(),
            }),
            max_ready: max_ready.max(1),
            closed: AtomicBool::new(false),
            drained: Condvar::new(),
            room: Notify::new(),
            on_close: Notify::new(),
        }
    }

    /// Notes a request that is about to start; `bytes` are those of its inputs.
    pub(super) fn begin(&self, in_order: bool, bytes: usize) -> Place {
        let mut state = self.state.lock();
        state.outstanding += 1;
        state.outstanding_bytes = state.outstanding_bytes.saturating_add(bytes);
        if !in_order {
            return Place::AsProduced;
        }
        let turn = state.first_turn + state.turns.len() as u64;
        state.turns.push_back(Turn { response: None, done: false });
        Place::InOrder(turn)
    }

    /// Takes a response. In order, a request has one: `merge` decides what becomes of an earlier one.
    pub(super) fn put(&self, place: Place, response: T, merge: impl FnOnce(T, T) -> T) {
        if self.is_closed() {
            return;
        }
        let mut state = self.state.lock();
        match place {
            Place::InOrder(number) => {
                let Some(turn) = state.turn(number) else { return };
                turn.response = Some(match turn.response.take() {
                    Some(earlier) => merge(earlier, response),
                    None => response,
                });
            }
            Place::AsProduced => {
                // Only an engine's own thread can wait; a thread of the runtime may be the one that sends.
                if state.ready.len() >= self.max_ready && tokio::runtime::Handle::try_current().is_err() {
                    self.drained.wait_while(&mut state, |state| {
                        state.ready.len() >= self.max_ready && !self.closed.load(Ordering::Acquire)
                    });
                }
                state.ready.push_back(response);
                wake(state);
            }
        }
    }

    /// Changes the response that waits for its turn, if there is one.
    pub(super) fn amend(&self, place: Place, change: impl FnOnce(&mut T)) -> bool {
        let Place::InOrder(number) = place else { return false };
        let mut state = self.state.lock();
        let waiting = state.turn(number).and_then(|turn| turn.response.as_mut());
        waiting.map(change).is_some()
    }

    /// Notes that a request has had its last response.
    pub(super) fn finish(&self, place: Place, bytes: usize) {
        let mut state = self.state.lock();
        state.outstanding = state.outstanding.saturating_sub(1);
        state.outstanding_bytes = state.outstanding_bytes.saturating_sub(bytes);
        if let Place::InOrder(number) = place {
            if let Some(turn) = state.turn(number) {
                turn.done = true;
            }
            while state.turns.front().is_some_and(|turn| turn.done) {
                let response = state.turns.pop_front().and_then(|turn| turn.response);
                state.first_turn += 1;
                state.ready.extend(response);
            }
        }
        let reader_waits = std::mem::take(&mut state.reader_waits);
        wake(state);
        if reader_waits {
            self.room.notify_one();
        }
    }

    /// Notes that no further request comes; the stream ends with `end` when everything is answered.
    pub(super) fn end_requests(&self, end: Status) {
        let mut state = self.state.lock();
        state.no_more_requests = true;
        state.end = Some(end);
        wake(state);
    }

    /// Waits until another request may start; at once when the stream is closed.
    pub(super) async fn room(&self) {
        loop {
            {
                let mut state = self.state.lock();
                let has_room = state.ready.len() < MAX_OUTSTANDING
                    && state.outstanding < MAX_OUTSTANDING
                    && (state.outstanding == 0 || state.outstanding_bytes < MAX_OUTSTANDING_BYTES);
                if has_room || self.is_closed() {
                    return;
                }
                state.reader_waits = true;
            }
            self.room.notified().await;
        }
    }

    /// Waits until the stream is closed.
    pub(super) async fn closed(&self) {
        while !self.is_closed() {
            self.on_close.notified().await;
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Has `waker` woken when the stream is closed, at once if it is.
    pub(super) fn watch(&self, waker: &Waker) {
        let mut state = self.state.lock();
        if self.is_closed() {
            drop(state);
            return waker.wake_by_ref();
        }
        match state.watchers.iter_mut().find(|(watcher, _)| watcher.will_wake(waker)) {
            Some((_, count)) => *count += 1,
            None => state.watchers.push((waker.clone(), 1)),
        }
    }

    /// One request that had `waker` watch needs it no more.
    pub(super) fn unwatch(&self, waker: &Waker) {
        let mut state = self.state.lock();
        let found = state.watchers.iter().position(|(watcher, _)| watcher.will_wake(waker));
        let Some(place) = found else { return };
        if let Some((_, count)) = state.watchers.get_mut(place) {
            *count -= 1;
            if *count == 0 {
                state.watchers.swap_remove(place);
            }
        }
    }

    /// Nobody takes responses any more.
    pub(super) fn close(&self) {
        let (ready, turns, watchers) = {
            let mut state = self.state.lock();
            let state = &mut *state;
            self.closed.store(true, Ordering::Release);
            let watchers = std::mem::take(&mut state.watchers);
            (std::mem::take(&mut state.ready), std::mem::take(&mut state.turns), watchers)
        };
        drop((ready, turns));
        for (watcher, _) in watchers {
            watcher.wake();
        }
        self.drained.notify_all();
        self.room.notify_one();
        self.on_close.notify_one();
    }

    /// The next response to send, or the status with which the stream ends.
    pub(super) fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Result<T, Status>> {
        let mut state = self.state.lock();
        if let Some(response) = state.ready.pop_front() {
            let reader_waits = std::mem::take(&mut state.reader_waits);
            drop(state);
            self.drained.notify_one();
            if reader_waits {
                self.room.notify_one();
            }
            return Poll::Ready(Ok(response));
        }
        if state.no_more_requests && state.outstanding == 0 {
            return Poll::Ready(Err(state.end.take().unwrap_or_else(|| Status::ok(""))));
        }
        match &mut state.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        Poll::Pending
    }
}

impl<T> State<T> {
    fn turn(&mut self, number: u64) -> Option<&mut Turn<T>> {
        let index = number.checked_sub(self.first_turn)?;
        self.turns.get_mut(usize::try_from(index).ok()?)
    }
}

fn wake<T>(mut state: parking_lot::MutexGuard<'_, State<T>>) {
    let waker = state.waker.take();
    drop(state);
    if let Some(waker) = waker {
        waker.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    fn poll<T>(outbox: &Outbox<T>) -> Poll<Result<T, Status>> {
        outbox.poll_next(&mut Context::from_waker(Waker::noop()))
    }

    fn ready<T>(outbox: &Outbox<T>) -> T {
        match poll(outbox) {
            Poll::Ready(Ok(response)) => response,
            _ => panic!("no response is ready"),
        }
    }

    fn first<T>(first: T, _: T) -> T {
        first
    }

    #[test]
    fn ordered_responses_wait_for_their_turn() {
        let outbox = Outbox::new(usize::MAX);
        let places = [outbox.begin(true, 1), outbox.begin(false, 1), outbox.begin(true, 1)];
        outbox.put(places[2], "second", first);
        outbox.finish(places[2], 1);
        assert!(poll(&outbox).is_pending());
        outbox.put(places[1], "decoupled", first);
        assert_eq!(ready(&outbox), "decoupled");
        outbox.put(places[0], "first", first);
        assert!(poll(&outbox).is_pending(), "the request may still have something to say");
        assert!(outbox.amend(places[0], |response| *response = "amended"));
        outbox.finish(places[0], 1);
        assert_eq!([ready(&outbox), ready(&outbox)], ["amended", "second"]);
        outbox.end_requests(Status::ok(""));
        assert!(poll(&outbox).is_pending(), "the decoupled request is still under way");
        outbox.finish(places[1], 1);
        assert!(matches!(poll(&outbox), Poll::Ready(Err(status)) if status.code() == tonic::Code::Ok));
    }

    #[test]
    fn a_second_response_in_order_is_merged() {
        let outbox = Outbox::new(usize::MAX);
        let place = outbox.begin(true, 0);
        outbox.put(place, "a".to_owned(), |_, _| unreachable!());
        outbox.put(place, "b".to_owned(), |a, b| a + &b);
        outbox.finish(place, 0);
        assert_eq!(ready(&outbox), "ab");
    }

    #[tokio::test]
    async fn reading_stops_when_too_much_is_under_way() {
        let outbox: Outbox<()> = Outbox::new(usize::MAX);
        let waits = async |outbox: &Outbox<()>| {
            tokio::time::timeout(Duration::from_millis(5), outbox.room()).await.is_err()
        };
        let large = outbox.begin(true, MAX_OUTSTANDING_BYTES);
        assert!(waits(&outbox).await);
        outbox.finish(large, MAX_OUTSTANDING_BYTES);
        assert!(!waits(&outbox).await);
        let places: Vec<_> = (0..MAX_OUTSTANDING).map(|_| outbox.begin(true, 0)).collect();
        assert!(waits(&outbox).await);
        outbox.finish(places[7], 0);
        assert!(!waits(&outbox).await);
    }

    #[test]
    fn a_model_thread_waits_for_a_slow_client() {
        let outbox = Arc::new(Outbox::new(2));
        let place = outbox.begin(false, 0);
        let producer = std::thread::spawn({
            let outbox = Arc::clone(&outbox);
            move || (0..5).for_each(|i| outbox.put(place, i, first))
        });
        let mut got = Vec::new();
        while got.len() < 3 {
            assert!(outbox.state.lock().ready.len() <= 2);
            if let Poll::Ready(Ok(response)) = poll(&outbox) {
                got.push(response);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        outbox.close();
        producer.join().expect("the producer ends when the stream is closed");
        assert_eq!(got, [0, 1, 2]);
    }

    struct Counter(std::sync::atomic::AtomicUsize);

    impl std::task::Wake for Counter {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn those_who_watch_are_woken_once_when_the_stream_is_closed() {
        let outbox: Outbox<()> = Outbox::new(1);
        let counters = [0; 3].map(|_| Arc::new(Counter(0.into())));
        let wakers = counters.each_ref().map(|counter| Waker::from(Arc::clone(counter)));
        let counts = || counters.each_ref().map(|counter| counter.0.load(Ordering::SeqCst));
        for waker in [&wakers[0], &wakers[0], &wakers[1], &wakers[2], &wakers[2]] {
            outbox.watch(waker);
        }
        assert_eq!(outbox.state.lock().watchers.len(), 3);
        outbox.unwatch(&wakers[1]);
        outbox.unwatch(&wakers[2]);
        outbox.close();
        assert_eq!(counts(), [1, 0, 1]);
        outbox.watch(&wakers[1]);
        assert_eq!(counts(), [1, 1, 1], "woken at once");
        outbox.unwatch(&wakers[1]);
    }

    #[tokio::test]
    async fn a_closed_stream_holds_nobody_up() {
        let outbox: Outbox<()> = Outbox::new(1);
        let _place = outbox.begin(true, MAX_OUTSTANDING_BYTES);
        let (_, ()) = tokio::join!(outbox.room(), async { outbox.close() });
        assert!(outbox.is_closed());
        tokio::time::timeout(Duration::from_secs(5), outbox.closed()).await.expect("closed");
    }
}
