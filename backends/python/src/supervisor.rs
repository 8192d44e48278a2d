//! Keeps one worker process running for an instance.
//!
//! A worker that ends is started again at once if it had done something; after starts that fail, or workers that
//! end before they did anything, the next start waits, longer each time.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use serde_json::Value;
use trireme_types::{Error, Result};

use crate::launch::Launch;
use crate::promise::Promise;
use crate::worker::Worker;

const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// What every worker of an instance is started with.
pub(crate) struct Setup {
    pub(crate) name: String,
    pub(crate) launch: Launch,
    pub(crate) open: Value,
    pub(crate) initialize: Value,
    pub(crate) promise: Arc<Promise>,
    /// How long finalize may take.
    pub(crate) stop_limit: Duration,
}

pub(crate) struct Supervisor {
    setup: Setup,
    state: Mutex<State>,
    changed: Condvar,
}

enum Status {
    Starting,
    Ready(Arc<Worker>),
    /// The last start failed; another one follows.
    Down(Error),
    Stopped,
}

struct State {
    status: Status,
    /// Whether the worker has ended an execution.
    has_worked: bool,
    wait: Duration,
}

impl Supervisor {
    /// Starts the first worker, or makes `worker`, which has opened the model, the first.
    ///
    /// # Errors
    /// The worker cannot be started, or the model's `initialize` fails.
    pub(crate) fn new(setup: Setup, worker: Option<Arc<Worker>>) -> Result<Arc<Self>> {
        let state = State { status: Status::Starting, has_worked: true, wait: FIRST_WAIT };
        let supervisor = Arc::new(Self { setup, state: Mutex::new(state), changed: Condvar::new() });
        let worker = supervisor.start(worker)?;
        supervisor.state.lock().status = Status::Ready(Arc::clone(&worker));
        supervisor.watch(&worker);
        Ok(supervisor)
    }

    fn start(&self, opened: Option<Arc<Worker>>) -> Result<Arc<Worker>> {
        let setup = &self.setup;
        let worker = match opened {
            Some(worker) => worker,
            None => {
                let worker = Worker::start(&setup.launch, &setup.name)?;
                worker.request(&setup.open).inspect_err(|_| worker.abandon())?;
                worker
            }
        };
        worker.set_promise(Arc::clone(&setup.promise));
        worker.request(&setup.initialize).inspect_err(|_| worker.abandon())?;
        Ok(worker)
    }

    fn watch(self: &Arc<Self>, worker: &Worker) {
        let supervisor = Arc::downgrade(self);
        worker.on_end(Box::new(move || {
            if let Some(supervisor) = supervisor.upgrade() {
                supervisor.restart();
            }
        }));
    }

    fn restart(self: Arc<Self>) {
        {
            let mut state = self.state.lock();
            match std::mem::replace(&mut state.status, Status::Starting) {
                Status::Ready(worker) => {
                    if let Some(error) = worker.ended() {
                        tracing::error!("{error} It is started again.");
                    }
                }
                Status::Stopped => {
                    state.status = Status::Stopped;
                    return;
                }
                Status::Starting | Status::Down(_) => {}
            }
        }
        self.changed.notify_all();
        let restarter = Arc::clone(&self);
        let made =
            std::thread::Builder::new().name("trireme-pystart".into()).spawn(move || restarter.bring_up());
        if let Err(error) = made {
            let text =
                format!("no thread to start the worker process of '{}' again: {error}", self.setup.name);
            tracing::error!("{text}");
            self.state.lock().status = Status::Down(Error::internal(text));
            self.changed.notify_all();
        }
    }

    fn bring_up(self: Arc<Self>) {
        let mut must_wait = {
            let mut state = self.state.lock();
            let had_worked = std::mem::take(&mut state.has_worked);
            if had_worked {
                state.wait = FIRST_WAIT;
            }
            !had_worked
        };
        loop {
            {
                let mut state = self.state.lock();
                if must_wait {
                    let wait = state.wait;
                    state.wait = (wait * 2).min(LONGEST_WAIT);
                    let is_stopped = |state: &mut State| !matches!(state.status, Status::Stopped);
                    self.changed.wait_while_for(&mut state, is_stopped, wait);
                }
                if matches!(state.status, Status::Stopped) {
                    return;
                }
            }
            match self.start(None) {
                Ok(worker) => {
                    let mut state = self.state.lock();
                    if matches!(state.status, Status::Stopped) {
                        drop(state);
                        worker.stop(self.setup.stop_limit);
                        return;
                    }
                    state.status = Status::Ready(Arc::clone(&worker));
                    drop(state);
                    self.changed.notify_all();
                    tracing::info!("the worker process of '{}' serves again", self.setup.name);
                    self.watch(&worker);
                    return;
                }
                Err(error) => {
                    tracing::error!("the worker process of '{}' did not start: {error}", self.setup.name);
                    let mut state = self.state.lock();
                    if !matches!(state.status, Status::Stopped) {
                        state.status = Status::Down(error);
                    }
                    drop(state);
                    self.changed.notify_all();
                    must_wait = true;
                }
            }
        }
    }

    /// The worker, once it runs.
    ///
    /// # Errors
    /// UNAVAILABLE: its last start failed.
    pub(crate) fn worker(&self) -> Result<Arc<Worker>> {
        let mut state = self.state.lock();
        loop {
            match &state.status {
                Status::Ready(worker) if worker.ended().is_none() => return Ok(Arc::clone(worker)),
                // The process has just ended, and its restart is about to begin.
                Status::Ready(_) | Status::Starting => self.changed.wait(&mut state),
                Status::Down(error) => {
                    let text = format!("the worker process of '{}' does not start: {error}", self.setup.name);
                    return Err(Error::unavailable(text));
                }
                Status::Stopped => return Err(Error::unavailable("the model is being unloaded")),
            }
        }
    }

    /// An execution has come to its end.
    pub(crate) fn has_worked(&self) {
        self.state.lock().has_worked = true;
    }

    pub(crate) fn is_ready(&self) -> bool {
        matches!(&self.state.lock().status, Status::Ready(worker) if worker.ended().is_none())
    }

    /// Ends the worker for good.
    pub(crate) fn stop(&self) {
        let before = std::mem::replace(&mut self.state.lock().status, Status::Stopped);
        self.changed.notify_all();
        if let Status::Ready(worker) = before {
            worker.stop(self.setup.stop_limit);
        }
    }
}
