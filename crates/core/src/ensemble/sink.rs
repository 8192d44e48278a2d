//! Where the answers of a step go: into the flow of its request.

use std::cell::Cell;
use std::sync::Arc;
use std::task::Waker;

use trireme_types::{InferResponse, ResponseSink, Result};

use super::flow::{Flow, Reply};
use super::progress::RunId;

thread_local! {
    /// Flows that this thread is working on, one inside the other.
    static WORKING: Cell<usize> = const { Cell::new(0) };
}

/// Marks that this thread works on a flow and must not be made to wait for one.
pub(super) struct Working(());

impl Working {
    pub(super) fn begin() -> Self {
        WORKING.set(WORKING.get() + 1);
        Self(())
    }

    fn is_any() -> bool {
        WORKING.get() > 0
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        WORKING.set(WORKING.get().saturating_sub(1));
    }
}

/// See the module.
pub(super) struct StepSink {
    pub(super) flow: Arc<Flow>,
    pub(super) run: RunId,
    pub(super) step: usize,
}

impl ResponseSink for StepSink {
    fn send(&mut self, reply: Option<Result<InferResponse>>, last: bool) {
        let starts_work = matches!(reply, Some(Ok(_)));
        if starts_work {
            self.flow.response_comes(self.step);
        }
        self.flow.deliver(Reply { run: self.run, step: self.step, reply, last });
        if starts_work && !last && !Working::is_any() {
            self.flow.slow_down(self.step);
        }
    }

    fn is_closed(&self) -> bool {
        self.flow.way().is_closed()
    }

    fn watch_closed(&mut self, waker: &Waker) {
        self.flow.way().watch(self.run, waker);
    }
}
