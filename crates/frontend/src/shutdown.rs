//! The end of the network side: one switch that every listener and connection watches, and the count of the tasks
//! that are still at work.
//!
//! Invariant: a task spawned here is known to [`Shutdown::wait`] until it has ended, so that nothing of a frontend
//! outlives the server that it serves.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;

/// Switch and task tracker, shared by all frontends. Clones are the same switch.
#[derive(Clone, Debug, Default)]
pub struct Shutdown(Arc<State>);

#[derive(Debug, Default)]
struct State {
    begun: AtomicBool,
    aborted: AtomicBool,
    tasks: AtomicUsize,
    on_begin: Arc<Notify>,
    on_abort: Arc<Notify>,
    on_idle: Notify,
}

impl Shutdown {
    pub fn new() -> Self {
        Self::default()
    }

    /// Tells every listener to stop accepting and every connection to close when it is idle.
    pub fn begin(&self) {
        self.0.begun.store(true, Ordering::SeqCst);
        self.0.on_begin.notify_waiters();
    }

    pub fn is_begun(&self) -> bool {
        self.0.begun.load(Ordering::SeqCst)
    }

    /// Ready once [`Shutdown::begin`] was called.
    pub fn begun(&self) -> Begun {
        Begun { shutdown: self.clone(), waiting: None }
    }

    /// Runs a task that [`Shutdown::wait`] waits for and may abort.
    pub fn spawn<F>(&self, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let guard = self.track();
        let aborted = Arc::clone(&self.0.on_abort).notified_owned();
        tokio::runtime::Handle::current().spawn(async move {
            let guard = guard;
            let task = pin!(task);
            let aborted = pin!(aborted);
            if !guard.0.0.aborted.load(Ordering::SeqCst) {
                UntilAborted { task, aborted, shutdown: &guard.0, registered: false }.await;
            }
        });
    }

    /// Counts work that is not a task of its own; it counts until the guard is dropped.
    pub fn track(&self) -> TaskGuard {
        self.0.tasks.fetch_add(1, Ordering::SeqCst);
        TaskGuard(self.clone())
    }

    /// Tasks at work.
    pub fn tasks(&self) -> usize {
        self.0.tasks.load(Ordering::SeqCst)
    }

    /// Waits until every task has ended, at most `timeout`. Whether all have; nothing is dropped.
    pub async fn ended_within(&self, timeout: Duration) -> bool {
        tokio::time::timeout(timeout, self.idle()).await.is_ok()
    }

    /// Waits until every task has ended, at most `timeout`; then drops those that are left and returns how many
    /// they were.
    pub async fn wait(&self, timeout: Duration) -> usize {
        if self.ended_within(timeout).await {
            return 0;
        }
        let left = self.tasks();
        self.0.aborted.store(true, Ordering::SeqCst);
        self.0.on_abort.notify_waiters();
        // A task ends at its next poll; one that is inside a long poll is left behind.
        let _ = tokio::time::timeout(Duration::from_millis(200), self.idle()).await;
        left
    }

    async fn idle(&self) {
        loop {
            let mut idle = pin!(self.0.on_idle.notified());
            idle.as_mut().enable();
            if self.tasks() == 0 {
                return;
            }
            idle.await;
        }
    }
}

/// See [`Shutdown::track`].
#[derive(Debug)]
pub struct TaskGuard(Shutdown);

impl Drop for TaskGuard {
    fn drop(&mut self) {
        if self.0.0.tasks.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.0.on_idle.notify_waiters();
        }
    }
}

/// See [`Shutdown::begun`]. Polled again and again beside a connection it costs one atomic load: the waker is
/// registered once and again only when it changes.
#[must_use = "a future does nothing until it is polled"]
#[derive(Debug)]
pub struct Begun {
    shutdown: Shutdown,
    waiting: Option<(Waker, Pin<Box<OwnedNotified>>)>,
}

impl Future for Begun {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.shutdown.is_begun() {
            self.waiting = None;
            return Poll::Ready(());
        }
        if self.waiting.as_ref().is_some_and(|(waker, _)| waker.will_wake(cx.waker())) {
            return Poll::Pending;
        }
        let mut notified = Box::pin(Arc::clone(&self.shutdown.0.on_begin).notified_owned());
        let told = notified.as_mut().poll(cx).is_ready();
        // The switch may have been turned between the first look and the registration.
        if told || self.shutdown.is_begun() {
            self.waiting = None;
            return Poll::Ready(());
        }
        self.waiting = Some((cx.waker().clone(), notified));
        Poll::Pending
    }
}

/// A task, until it ends or is told to. A spawned task keeps its waker for life, so that one registration is enough.
struct UntilAborted<'a, F> {
    task: Pin<&'a mut F>,
    aborted: Pin<&'a mut OwnedNotified>,
    shutdown: &'a Shutdown,
    registered: bool,
}

impl<F: Future<Output = ()>> Future for UntilAborted<'_, F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if !self.registered {
            self.registered = true;
            if self.aborted.as_mut().poll(cx).is_ready() {
                return Poll::Ready(());
            }
        }
        if self.shutdown.0.aborted.load(Ordering::SeqCst) {
            return Poll::Ready(());
        }
        self.task.as_mut().poll(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[tokio::test]
    async fn waits_for_tasks_that_watch_the_switch() {
        let shutdown = Shutdown::new();
        for _ in 0..10 {
            let begun = shutdown.begun();
            shutdown.spawn(begun);
        }
        assert_eq!(shutdown.tasks(), 10);
        tokio::task::yield_now().await;
        let started = Instant::now();
        shutdown.begin();
        assert!(shutdown.is_begun());
        assert_eq!(shutdown.wait(Duration::from_secs(10)).await, 0);
        assert!(started.elapsed() < Duration::from_secs(5));
        shutdown.begun().await;
    }

    #[tokio::test]
    async fn drops_what_does_not_end_in_time() {
        let shutdown = Shutdown::new();
        shutdown.spawn(std::future::pending());
        let guard = shutdown.track();
        shutdown.begin();
        drop(guard);
        assert_eq!(shutdown.wait(Duration::from_millis(20)).await, 1);
        assert_eq!(shutdown.tasks(), 0);
    }

    #[tokio::test]
    async fn a_switch_turned_before_the_look_is_seen() {
        let shutdown = Shutdown::new();
        let begun = shutdown.begun();
        shutdown.begin();
        begun.await;
        assert_eq!(shutdown.wait(Duration::ZERO).await, 0);
    }
}
