//! What a model has answered and the connection has not yet sent.
//!
//! *Invariants:* events leave in the order in which they came; a model that answers faster than its client reads waits
//! once [`MAX_WAITING`] are here, but only on a thread of an engine; when the reader is dropped the request is closed
//! and whoever watches it is woken.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use parking_lot::{Condvar, Mutex};
use trireme_types::Error;

use crate::http::reply::{Reply, say_when_to_retry};
use crate::status::http_status;

/// Events that may wait for a slow client before its model has to.
const MAX_WAITING: usize = 256;

/// One response, written.
#[derive(Debug)]
pub(super) struct Event {
    pub(super) status: EventStatus,
    pub(super) text: Bytes,
}

/// What the head of an answer tells of its first event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EventStatus {
    pub(super) code: StatusCode,
    retry_after: Option<Duration>,
}

impl EventStatus {
    pub(super) const OK: Self = Self { code: StatusCode::OK, retry_after: None };

    pub(super) fn of(error: &Error) -> Self {
        Self { code: http_status(error.code()), retry_after: error.retry_hint() }
    }

    pub(super) fn write(self, reply: &mut Reply) {
        *reply.status_mut() = self.code;
        say_when_to_retry(reply, self.retry_after);
    }
}

#[derive(Debug, Default)]
pub(super) struct Events {
    state: Mutex<State>,
    room: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Event>,
    ended: bool,
    closed: bool,
    reader: Option<Waker>,
    watcher: Option<Waker>,
}

impl Events {
    pub(super) fn put(&self, event: Event) {
        let mut state = self.state.lock();
        // Only an engine's own thread can wait; a thread of the runtime may be the one that sends.
        if state.waiting.len() >= MAX_WAITING && tokio::runtime::Handle::try_current().is_err() {
            self.room.wait_while(&mut state, |state| state.waiting.len() >= MAX_WAITING && !state.closed);
        }
        if !state.closed {
            state.waiting.push_back(event);
            wake(state.reader.take());
        }
    }

    pub(super) fn end(&self) {
        let mut state = self.state.lock();
        state.ended = true;
        wake(state.reader.take());
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state.lock().closed
    }

    pub(super) fn watch(&self, waker: &Waker) {
        let mut state = self.state.lock();
        if state.closed {
            waker.wake_by_ref();
        } else {
            state.watcher = Some(waker.clone());
        }
    }

    fn poll_next(&self, cx: &Context<'_>) -> Poll<Option<Event>> {
        let mut state = self.state.lock();
        if let Some(event) = state.waiting.pop_front() {
            self.room.notify_one();
            return Poll::Ready(Some(event));
        }
        if state.ended {
            return Poll::Ready(None);
        }
        state.reader = Some(cx.waker().clone());
        Poll::Pending
    }
}

fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// The reader's end.
#[derive(Debug)]
pub(crate) struct EventStream(Arc<Events>);

impl EventStream {
    pub(super) fn new(events: Arc<Events>) -> Self {
        Self(events)
    }

    /// The next event; `None` when the model has ended its request.
    pub(super) async fn next(&self) -> Option<Event> {
        poll_fn(|cx| self.0.poll_next(cx)).await
    }

    /// Status of the first event, which stays; 200 if the model ends without one.
    pub(super) async fn first_status(&self) -> EventStatus {
        poll_fn(|cx| {
            let mut state = self.0.state.lock();
            match state.waiting.front() {
                Some(event) => Poll::Ready(event.status),
                None if state.ended => Poll::Ready(EventStatus::OK),
                None => {
                    state.reader = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }

    pub(crate) fn poll_text(&self, cx: &Context<'_>) -> Poll<Option<Bytes>> {
        self.0.poll_next(cx).map(|event| event.map(|event| event.text))
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        let watcher = {
            let mut state = self.0.state.lock();
            state.closed = true;
            state.waiting.clear();
            self.0.room.notify_all();
            state.watcher.take()
        };
        wake(watcher);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn event(text: &'static str) -> Event {
        Event { status: EventStatus::OK, text: Bytes::from_static(text.as_bytes()) }
    }

    #[tokio::test]
    async fn events_come_in_order_and_end() {
        let events = Arc::new(Events::default());
        let stream = EventStream::new(Arc::clone(&events));
        let model = thread::spawn(move || {
            for text in ["a", "b", "c"] {
                thread::sleep(Duration::from_millis(5));
                events.put(event(text));
            }
            events.end();
        });
        assert_eq!(stream.first_status().await, EventStatus::OK);
        let mut got = Vec::new();
        while let Some(event) = stream.next().await {
            got.push(event.text);
        }
        assert_eq!(got, ["a", "b", "c"]);
        model.join().expect("the model ends");
    }

    #[test]
    fn a_fast_model_waits_for_a_slow_client_until_it_leaves() {
        let events = Arc::new(Events::default());
        let stream = EventStream::new(Arc::clone(&events));
        let fast = Arc::clone(&events);
        let model = thread::spawn(move || (0..MAX_WAITING + 10).for_each(|_| fast.put(event("x"))));
        thread::sleep(Duration::from_millis(50));
        assert_eq!(events.state.lock().waiting.len(), MAX_WAITING);
        assert!(!model.is_finished());
        drop(stream);
        model.join().expect("it goes on when nobody reads");
        assert!(events.is_closed());
    }
}
