//! Delays that end early when nobody waits for the answer any more.

use std::sync::Arc;
use std::task::{Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use trireme_backend::BatchRequest;
use trireme_types::{Code, Error, Responder};

/// Time between looks, for protocols that cannot wake who waits.
const LOOK: Duration = Duration::from_millis(50);

/// Wakes a thread that is parked.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits for the delay, or until `is_over`. Whether the whole delay has passed.
fn park<T: ?Sized>(
    waiting: &mut T,
    delay: Duration,
    watch: impl FnOnce(&mut T, &Waker),
    is_over: impl Fn(&T) -> bool,
) -> bool {
    if is_over(waiting) {
        return false;
    }
    if delay.is_zero() {
        return true;
    }
    let end = Instant::now() + delay;
    watch(waiting, &Waker::from(Arc::new(Unpark(std::thread::current()))));
    loop {
        if is_over(waiting) {
            return false;
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return true;
        }
        std::thread::park_timeout(left.min(LOOK));
    }
}

/// Waits; ends early with `false` when the client has gone away.
pub(crate) fn wait(responder: &mut Responder, delay: Duration) -> bool {
    park(responder, delay, Responder::watch_closed, Responder::is_closed)
}

/// Waits; ends early with `false` when the clients of all requests have gone away.
pub(crate) fn wait_for_batch(requests: &mut [BatchRequest], delay: Duration) -> bool {
    park(
        requests,
        delay,
        |requests, waker| requests.iter_mut().for_each(|request| request.watch_closed(waker)),
        |requests| requests.iter().all(BatchRequest::is_cancelled),
    )
}

/// The end of a request that was cancelled while it ran.
pub(crate) fn cancelled() -> Error {
    Error::new(Code::Cancelled, "the request was cancelled")
}
