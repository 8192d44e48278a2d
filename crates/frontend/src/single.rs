//! The one response of a request whose model answers once, on its way from the model to the call that waits for it.
//!
//! *Invariants:* the call gets exactly one result, whatever the model sends; when the call is dropped, because its
//! client is gone or its time is over, the request is closed at once, and whoever watches it is woken.

use std::fmt;
use std::future::{Future as _, poll_fn};
use std::pin::pin;
use std::task::{Context, Waker};

use tokio::sync::oneshot;
use trireme_types::{Error, InferResponse, ResponseSink, Result};

/// The model's end.
pub(crate) struct SingleSink {
    sender: Option<oneshot::Sender<Result<InferResponse>>>,
    held: Option<Result<InferResponse>>,
    count: usize,
}

/// The call's end.
pub(crate) struct SingleResponse(oneshot::Receiver<Result<InferResponse>>);

/// Both ends.
pub(crate) fn single() -> (SingleSink, SingleResponse) {
    let (sender, receiver) = oneshot::channel();
    (SingleSink { sender: Some(sender), held: None, count: 0 }, SingleResponse(receiver))
}

/// Error for a model that answers none or more than once without being decoupled.
pub(crate) fn wrong_count(got: impl fmt::Display) -> Error {
    Error::internal(format!("expected a single response, got {got}"))
}

impl SingleResponse {
    /// Waits for the response.
    pub(crate) async fn received(self) -> Result<InferResponse> {
        let dropped = |_| Err(Error::internal("the request was dropped before it was answered"));
        self.0.await.unwrap_or_else(dropped)
    }
}

impl ResponseSink for SingleSink {
    fn send(&mut self, reply: Option<Result<InferResponse>>, last: bool) {
        if let Some(reply) = reply {
            self.count += 1;
            if !matches!(self.held, Some(Err(_))) {
                self.held = Some(reply);
            }
        }
        if last && let Some(sender) = self.sender.take() {
            let answer = match (self.count, self.held.take()) {
                (1, Some(answer)) | (_, Some(answer @ Err(_))) => answer,
                (count, _) => Err(wrong_count(count)),
            };
            // Nobody waits any more if the client has gone.
            let _ = sender.send(answer);
        }
    }

    fn is_closed(&self) -> bool {
        self.sender.as_ref().is_none_or(oneshot::Sender::is_closed)
    }

    fn watch_closed(&mut self, waker: &Waker) {
        let Some(sender) = &mut self.sender else { return waker.wake_by_ref() };
        // The budget of the task that happens to run here must not keep the waker from being noted.
        let closed = tokio::task::unconstrained(poll_fn(|cx| sender.poll_closed(cx)));
        if pin!(closed).poll(&mut Context::from_waker(waker)).is_ready() {
            waker.wake_by_ref();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use trireme_types::Responder;

    use super::*;

    fn answer(sends: impl FnOnce(Responder)) -> Result<InferResponse> {
        let (sink, mut response) = single();
        sends(Responder::new(Box::new(sink)));
        response.0.try_recv().expect("an answer")
    }

    #[test]
    fn a_request_has_exactly_one_response() {
        assert!(answer(|responder| responder.finish(Ok(InferResponse::default()))).is_ok());
        assert!(
            answer(|mut responder| {
                responder.send(Ok(InferResponse::default()));
                responder.close();
            })
            .is_ok()
        );
        let none = answer(Responder::close).expect_err("no response");
        assert_eq!(none.message(), "expected a single response, got 0");
        let two = answer(|mut responder| {
            responder.send(Ok(InferResponse::default()));
            responder.finish(Ok(InferResponse::default()));
        });
        assert_eq!(two.expect_err("two responses").message(), "expected a single response, got 2");
        let failed = answer(|mut responder| {
            responder.send(Err(Error::internal("first")));
            responder.finish(Ok(InferResponse::default()));
        });
        assert_eq!(failed.expect_err("an error").message(), "first");
    }

    #[derive(Default)]
    struct Counter(AtomicUsize);

    impl Wake for Counter {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_call_that_is_dropped_wakes_the_watcher() {
        let (earlier, counter) = (Arc::new(Counter::default()), Arc::new(Counter::default()));
        let count = |counter: &Counter| counter.0.load(Ordering::SeqCst);
        let (sink, response) = single();
        let mut responder = Responder::new(Box::new(sink));
        responder.watch_closed(&Waker::from(Arc::clone(&earlier)));
        responder.watch_closed(&Waker::from(Arc::clone(&counter)));
        assert!(!responder.is_closed());
        drop(response);
        assert!(responder.is_closed());
        assert_eq!((count(&earlier), count(&counter)), (0, 1), "the last waker counts");
        responder.watch_closed(&Waker::from(Arc::clone(&counter)));
        assert_eq!(count(&counter), 2, "woken at once");
    }

    #[tokio::test]
    async fn a_task_without_budget_is_noted_all_the_same() {
        let counter = Arc::new(Counter::default());
        let waker = Waker::from(Arc::clone(&counter));
        let mut calls = Vec::new();
        let mut sinks = Vec::new();
        // More than the operations that a task may do at one go.
        for _ in 0..300 {
            let (mut sink, response) = single();
            sink.watch_closed(&waker);
            sinks.push(sink);
            calls.push(response);
        }
        assert_eq!(counter.0.load(Ordering::SeqCst), 0);
        drop(calls);
        assert_eq!(counter.0.load(Ordering::SeqCst), 300);
    }

    #[tokio::test]
    async fn a_lost_request_is_an_error() {
        let (sink, response) = single();
        drop(sink);
        let error = response.received().await.expect_err("no answer");
        assert_eq!(error.message(), "the request was dropped before it was answered");
    }
}
