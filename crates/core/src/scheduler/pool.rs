//! From a checked request to an instance that runs it.
//!
//! No thread stands between the queue and the instances: whoever holds an instance takes the next requests
//! itself. A request that finds an idle instance takes it along to a thread of the executor, or, when the model is
//! known to be quick, runs right on the thread that brought it, since waking another thread would cost more than
//! the model does.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use trireme_backend::ModelInstance;
use trireme_types::{Error, InferRequest, Responder, Result};

use super::{Scheduler, run};
use crate::executor::Executor;
use crate::model::{InFlight, ModelVersion};
use crate::stats::FailureReason;

/// An execution below this runs on the thread that brought the request: two thread wake-ups cost as much.
const QUICK: Duration = Duration::from_micros(100);
/// Inputs above this are never run on a frontend's thread, however quick the model was with small ones.
const QUICK_INPUT_BYTES: usize = 64 << 10;
/// Queued requests that a frontend's thread serves before it hands the instance over.
const QUICK_BURST: usize = 4;

/// A request that waits for an instance.
pub(crate) struct Pending {
    pub(crate) request: InferRequest,
    pub(crate) responder: Responder,
    pub(crate) queued: Instant,
    pub(crate) in_flight: InFlight,
}

/// Makes a new instance in place of one that panicked.
pub(crate) type Remake = Box<dyn Fn(usize) -> Result<Box<dyn ModelInstance>> + Send + Sync>;

/// An instance and its place among the instances of its model.
pub(crate) struct Instance {
    pub(crate) index: usize,
    pub(crate) engine: Box<dyn ModelInstance>,
}

/// The instances of one model version and the requests that wait for them.
pub(crate) struct InstancePool {
    state: Mutex<State>,
    executor: Executor,
    remake: Remake,
    instances: usize,
    /// Moving average of the time of an execution, nanoseconds; starts above [`QUICK`].
    average_ns: AtomicU64,
}

struct State {
    queue: VecDeque<Pending>,
    idle: Vec<Instance>,
    stopped: bool,
}

impl InstancePool {
    pub(crate) fn new(instances: Vec<Box<dyn ModelInstance>>, executor: Executor, remake: Remake) -> Self {
        let count = instances.len();
        let idle =
            instances.into_iter().enumerate().map(|(index, engine)| Instance { index, engine }).collect();
        Self {
            state: Mutex::new(State { queue: VecDeque::new(), idle, stopped: false }),
            executor,
            remake,
            instances: count,
            average_ns: AtomicU64::new(nanoseconds(4 * QUICK)),
        }
    }

    /// Takes a checked request. Runs it before returning only if the model is quick.
    pub(crate) fn enqueue(&self, model: &Arc<ModelVersion>, request: InferRequest, responder: Responder) {
        let quick = self.is_quick() && request.input_bytes() <= QUICK_INPUT_BYTES;
        let pending = Pending { request, responder, queued: Instant::now(), in_flight: model.enter() };
        let mut state = self.state.lock();
        if state.stopped {
            drop(state);
            model.statistics.failed(FailureReason::Other, pending.request.received.elapsed());
            let name = model.name();
            pending.responder.finish(Err(Error::unavailable(format!(
                "Server is stopping, scheduler for model '{name}' has stopped accepting new inference requests"
            ))));
            return;
        }
        let Some(instance) = state.idle.pop() else {
            state.queue.push_back(pending);
            return;
        };
        drop(state);
        if quick {
            let instance = self.run_one(instance, pending);
            self.serve_queue(model, instance, QUICK_BURST);
        } else {
            self.hand_over(model, instance, pending);
        }
    }

    /// Serves queued requests with an instance, at most `limit` of them here; what is then left goes to a thread
    /// of the executor. An instance with nothing to do becomes idle.
    fn serve_queue(&self, model: &Arc<ModelVersion>, mut instance: Instance, limit: usize) {
        for _ in 0..limit {
            let Some(next) = self.next(&mut Some(instance)) else { return };
            let (pending, taken) = next;
            instance = self.run_one(taken, pending);
        }
        if let Some((pending, taken)) = self.next(&mut Some(instance)) {
            self.hand_over(model, taken, pending);
        }
    }

    /// The next request with the instance to run it, or none, the instance then being idle.
    fn next(&self, instance: &mut Option<Instance>) -> Option<(Pending, Instance)> {
        let mut state = self.state.lock();
        match state.queue.pop_front() {
            Some(pending) => instance.take().map(|instance| (pending, instance)),
            None => {
                state.idle.extend(instance.take());
                None
            }
        }
    }

    fn hand_over(&self, model: &Arc<ModelVersion>, instance: Instance, pending: Pending) {
        let model = Arc::clone(model);
        self.executor.run(Box::new(move || {
            let pool = match model.scheduler() {
                Scheduler::Instances(pool) => pool,
            };
            let instance = pool.run_one(instance, pending);
            pool.serve_queue(&model, instance, usize::MAX);
        }));
    }

    /// Runs one request and gives the instance back, a new one if it panicked.
    fn run_one(&self, mut instance: Instance, pending: Pending) -> Instance {
        if pending.responder.is_closed() {
            run::drop_cancelled(pending);
            return instance;
        }
        let outcome = run::execute(&mut instance, pending);
        if let Some(time) = outcome.time {
            self.learn(time);
        }
        if outcome.panicked {
            match (self.remake)(instance.index) {
                Ok(engine) => instance.engine = engine,
                Err(error) => tracing::error!("an instance panicked and could not be made anew: {error}"),
            }
        }
        instance
    }

    fn is_quick(&self) -> bool {
        self.average_ns.load(Ordering::Relaxed) < nanoseconds(QUICK)
    }

    fn learn(&self, time: Duration) {
        let average = self.average_ns.load(Ordering::Relaxed);
        let time = nanoseconds(time).min(nanoseconds(100 * QUICK));
        self.average_ns.store(average - average / 8 + time / 8, Ordering::Relaxed);
    }

    /// Requests that wait.
    pub(crate) fn pending(&self) -> usize {
        self.state.lock().queue.len()
    }

    /// Whether the idle instances can run; a busy one counts as able.
    pub(crate) fn is_ready(&self) -> bool {
        let state = self.state.lock();
        self.instances > 0 && state.idle.iter().all(|instance| instance.engine.is_ready())
    }

    /// Refuses new requests. Those in the queue are still served.
    pub(crate) fn stop(&self) {
        self.state.lock().stopped = true;
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
