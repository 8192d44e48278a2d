//! The way back to the client of an ensemble, shared by its steps: they ask whether the client is still there, and have
//! themselves woken when it goes.
//!
//! Schedulers ask under their locks, and sending may take as long as a slow client. So nobody here waits for a lock but
//! the thread that sends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};

use parking_lot::Mutex;
use trireme_types::{InferResponse, Responder, Result};

use super::progress::RunId;

/// See the module.
pub(super) struct WayBack {
    responder: Mutex<Option<Responder>>,
    /// The client has gone away, or the request has ended with an error: steps need not run.
    is_closed: AtomicBool,
    watch: Arc<Watch>,
    /// The watch could not be given to the responder because it was sending.
    owes_watch: AtomicBool,
}

impl WayBack {
    pub(super) fn new(responder: Responder) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            responder: Mutex::new(Some(responder)),
            is_closed: AtomicBool::new(false),
            watch: Arc::new(Watch { way: Weak::clone(me), wakers: Mutex::default() }),
            owes_watch: AtomicBool::new(false),
        })
    }

    /// Whether steps need not run any more. Never waits.
    pub(super) fn is_closed(&self) -> bool {
        if self.is_closed.load(Ordering::Acquire) {
            return true;
        }
        let gone = self
            .responder
            .try_lock()
            .is_some_and(|responder| responder.as_ref().is_some_and(Responder::is_closed));
        if gone {
            self.is_closed.store(true, Ordering::Release);
        }
        gone
    }

    /// Has a step's scheduler woken when the client goes away. Never waits.
    pub(super) fn watch(&self, run: RunId, waker: &Waker) {
        let mut wakers = self.watch.wakers.lock();
        match wakers.iter_mut().find(|(other, _)| *other == run) {
            Some((_, old)) => old.clone_from(waker),
            None => wakers.push((run, waker.clone())),
        }
        drop(wakers);
        match self.responder.try_lock() {
            Some(mut responder) => self.give_watch(responder.as_mut()),
            None => self.owes_watch.store(true, Ordering::Release),
        }
        if self.is_closed.load(Ordering::Acquire) {
            waker.wake_by_ref();
        }
    }

    fn give_watch(&self, responder: Option<&mut Responder>) {
        if let Some(responder) = responder {
            responder.watch_closed(&Waker::from(Arc::clone(&self.watch)));
        }
    }

    /// A step has ended; it need not be woken.
    pub(super) fn forget(&self, run: RunId) {
        self.watch.wakers.lock().retain(|(other, _)| *other != run);
    }

    /// Sends a response that is not the last.
    pub(super) fn send(&self, response: InferResponse) {
        let mut responder = self.responder.lock();
        if let Some(responder) = responder.as_mut() {
            responder.send(Ok(response));
        }
        if self.owes_watch.swap(false, Ordering::AcqRel) {
            self.give_watch(responder.as_mut());
        }
    }

    /// Ends the request. With an error the steps that still run or wait are told that nobody waits for them. `false` if
    /// it had ended before.
    pub(super) fn finish(&self, reply: Option<Result<InferResponse>>) -> bool {
        if matches!(reply, Some(Err(_))) {
            self.close();
        }
        let Some(responder) = self.responder.lock().take() else { return false };
        match reply {
            Some(reply) => responder.finish(reply),
            None => responder.close(),
        }
        true
    }

    fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        let wakers = std::mem::take(&mut *self.watch.wakers.lock());
        for (_, waker) in wakers {
            waker.wake();
        }
    }
}

/// Told by the frontend that the client has gone away.
struct Watch {
    way: Weak<WayBack>,
    wakers: Mutex<Vec<(RunId, Waker)>>,
}

impl Wake for Watch {
    fn wake(self: Arc<Self>) {
        if let Some(way) = self.way.upgrade() {
            way.close();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;

    use trireme_types::{Error, ResponseSink};

    use super::*;

    #[derive(Default)]
    struct Line {
        gone: Arc<AtomicBool>,
        watcher: Arc<Mutex<Option<Waker>>>,
    }

    struct Client(Line, mpsc::Sender<bool>);

    impl ResponseSink for Client {
        fn send(&mut self, _: Option<Result<InferResponse>>, last: bool) {
            self.1.send(last).expect("the test holds the receiver");
        }

        fn is_closed(&self) -> bool {
            self.0.gone.load(Ordering::SeqCst)
        }

        fn watch_closed(&mut self, waker: &Waker) {
            *self.0.watcher.lock() = Some(waker.clone());
        }
    }

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn count() -> (Arc<Count>, Waker) {
        let count = Arc::new(Count(AtomicUsize::new(0)));
        (Arc::clone(&count), Waker::from(count))
    }

    #[test]
    fn every_step_is_woken_when_the_client_goes() {
        let line = Line::default();
        let (gone, watcher) = (Arc::clone(&line.gone), Arc::clone(&line.watcher));
        let (sender, receiver) = mpsc::channel();
        let way = WayBack::new(Responder::new(Box::new(Client(line, sender))));
        let ((first, first_waker), (second, second_waker)) = (count(), count());
        way.watch(0, &first_waker);
        way.watch(1, &second_waker);
        way.forget(1);
        assert!(!way.is_closed());
        gone.store(true, Ordering::SeqCst);
        watcher.lock().take().expect("a watcher").wake();
        assert!(way.is_closed());
        assert_eq!((first.0.load(Ordering::SeqCst), second.0.load(Ordering::SeqCst)), (1, 0));
        way.watch(2, &second_waker);
        assert_eq!(second.0.load(Ordering::SeqCst), 1, "whoever comes late is woken at once");
        assert!(way.finish(None));
        assert_eq!(receiver.try_recv(), Ok(true));
    }

    #[test]
    fn an_error_ends_it_once_and_tells_the_other_steps() {
        let (sender, receiver) = mpsc::channel();
        let way = WayBack::new(Responder::new(Box::new(Client(Line::default(), sender))));
        let (woken, waker) = count();
        way.watch(0, &waker);
        assert!(way.finish(Some(Err(Error::internal("first")))));
        assert!(!way.finish(Some(Err(Error::internal("second")))));
        assert!(way.is_closed());
        assert_eq!(woken.0.load(Ordering::SeqCst), 1);
        drop(way);
        assert_eq!(receiver.iter().collect::<Vec<_>>(), [true]);
    }
}
