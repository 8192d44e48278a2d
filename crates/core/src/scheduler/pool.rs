//! The instances of one model version and the requests that wait for them.
//!
//! No thread stands between the queue and the instances: whoever holds an instance asks the [`Source`] what to run
//! next and runs it. A request that finds an idle instance takes it along to a thread of the executor, or, when the
//! model is known to be quick, runs right on the thread that brought it, since waking another thread would cost more
//! than the model does. *Invariants:* an instance is idle, in the pool, or runs on exactly one thread; nobody is
//! answered under the lock.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use smallvec::SmallVec;
use trireme_backend::ModelInstance;
use trireme_types::{Error, InferRequest, Responder, Result};

use super::order::Order;
use super::run;
use super::source::{Next, Pending, Refused, Role, Source};
use super::timer::{Timer, Wakeable};
use crate::executor::Executor;
use crate::model::ModelVersion;
use crate::rate_limiter::{Gate, Wakes};
use crate::stats::FailureReason;

/// An execution below this runs on the thread that brought the request: two thread wake-ups cost as much.
const QUICK: Duration = Duration::from_micros(100);
/// Inputs above this are never run on a frontend's thread, however quick the model was with small ones.
const QUICK_INPUT_BYTES: usize = 64 << 10;
/// Batches that a frontend's thread runs before it hands the instance over.
const QUICK_BURST: usize = 4;

/// Makes a new instance in place of one that panicked.
pub(crate) type Remake = Box<dyn Fn(usize) -> Result<Box<dyn ModelInstance>> + Send + Sync>;

/// An instance and its place among the instances of its model.
struct Instance {
    index: usize,
    engine: Box<dyn ModelInstance>,
}

/// An instance and what it runs next.
struct Work {
    instance: Instance,
    batch: Vec<Pending>,
}

/// What was decided under the lock and is done outside of it.
#[derive(Default)]
struct Step {
    work: SmallVec<[Work; 1]>,
    refused: Vec<Refused>,
    /// Pools that may run now because of what was decided here.
    wakes: Wakes,
}

/// What a pool is made of.
pub(crate) struct PoolParts {
    pub(crate) instances: Vec<Box<dyn ModelInstance>>,
    pub(crate) source: Box<dyn Source>,
    pub(crate) preserve_ordering: bool,
    /// The rate limiter's, if an instance needs resources.
    pub(crate) gate: Option<Gate>,
    pub(crate) executor: Executor,
    pub(crate) timer: Timer,
    pub(crate) remake: Remake,
}

/// See the module.
pub(crate) struct InstancePool {
    state: Mutex<State>,
    order: Option<Order>,
    gate: Option<Gate>,
    executor: Executor,
    timer: Timer,
    remake: Remake,
    instances: usize,
    /// Moving average of the time of an execution, nanoseconds; starts above [`QUICK`].
    average_ns: AtomicU64,
    me: Weak<Self>,
    /// Woken when the client of a waiting request goes away.
    leaver: Waker,
    /// A client has gone away since the last sweep.
    somebody_left: AtomicBool,
}

struct State {
    source: Box<dyn Source>,
    idle: Vec<Instance>,
    stopped: bool,
    /// The earliest time at which the timer will wake the pool.
    alarm: Option<Instant>,
}

impl InstancePool {
    pub(crate) fn new(parts: PoolParts) -> Arc<Self> {
        let instances = parts.instances.len();
        let idle = parts.instances.into_iter().enumerate().map(|(index, engine)| Instance { index, engine });
        let state = State { source: parts.source, idle: idle.collect(), stopped: false, alarm: None };
        Arc::new_cyclic(|me| Self {
            state: Mutex::new(state),
            order: parts.preserve_ordering.then(Order::default),
            gate: parts.gate.map(|gate| gate.attached(&(me.clone() as Weak<dyn Wakeable>))),
            executor: parts.executor,
            timer: parts.timer,
            remake: parts.remake,
            instances,
            average_ns: AtomicU64::new(nanoseconds(4 * QUICK)),
            me: me.clone(),
            leaver: Waker::from(Arc::new(Leaver(me.clone()))),
            somebody_left: AtomicBool::new(false),
        })
    }

    /// Takes a checked request. Runs it before returning only if the model is quick.
    pub(crate) fn enqueue(
        self: &Arc<Self>,
        model: &Arc<ModelVersion>,
        request: InferRequest,
        responder: Responder,
    ) {
        let now = Instant::now();
        let mut pending =
            Pending { request, responder, queued: now, in_flight: model.enter(), role: Role::Client };
        let mut state = self.state.lock();
        if state.stopped {
            drop(state);
            let error = Error::unavailable(format!(
                "Server is stopping, scheduler for model '{}' has stopped accepting new inference requests",
                model.name()
            ));
            return Refused { pending, error, reason: FailureReason::Other }.answer();
        }
        if let Some(order) = &self.order {
            pending.responder = order.enter(pending.responder);
        }
        if state.idle.is_empty() || self.gate.is_some() || state.source.may_wait() {
            pending.responder.watch_closed(&self.leaver);
        }
        if let Err(refused) = state.source.push(pending, now) {
            drop(state);
            return refused.answer();
        }
        let step = self.step(&mut state, now);
        drop(state);
        self.go(step, Some(QUICK_BURST));
    }

    /// Finds work for idle instances and sees to it that the pool is woken in time for what waits.
    fn step(&self, state: &mut State, now: Instant) -> Step {
        let mut step = Step::default();
        let sweep = |state: &mut State, step: &mut Step| {
            if state.source.next_deadline().is_some_and(|deadline| deadline <= now) {
                state.source.sweep(now, false, &mut step.refused);
            }
        };
        sweep(state, &mut step);
        let mut look_again: Option<Instant> = None;
        let mut all_asked = true;
        // From the end: the instance that ran last has the warmest caches.
        let mut place = state.idle.len();
        while place > 0 && state.source.len() > 0 {
            place -= 1;
            let Some(index) = state.idle.get(place).map(|instance| instance.index) else { break };
            if self.gate.as_ref().is_some_and(|gate| !gate.enter(index)) {
                continue;
            }
            let next = state.source.next(index, now);
            if let (Some(gate), Next::WaitUntil(_) | Next::Idle) = (&self.gate, &next) {
                gate.leave(index);
            }
            match next {
                Next::Run(batch) => {
                    let instance = state.idle.remove(place);
                    step.work.push(Work { instance, batch });
                    place = state.idle.len();
                }
                Next::WaitUntil(time) => {
                    look_again = Some(look_again.map_or(time, |earliest| earliest.min(time)));
                    all_asked = state.source.is_per_instance();
                }
                Next::Idle => all_asked = state.source.is_per_instance(),
            }
            if !all_asked {
                break;
            }
        }
        if let Some(gate) = &self.gate {
            step.wakes = gate.settle(all_asked && state.source.len() > 0);
        }
        // Choosing may have found requests whose clients are gone.
        sweep(state, &mut step);
        let alarm = look_again.into_iter().chain(state.source.next_deadline()).min();
        if let Some(at) = alarm.filter(|at| state.alarm.is_none_or(|alarm| *at < alarm)) {
            state.alarm = Some(at);
            self.timer.wake_at(at, Weak::clone(&self.me) as Weak<dyn Wakeable>);
        }
        step
    }

    /// Does what was decided, and what comes after it until there is nothing to do. On a thread that is not of the
    /// executor at most `guest` batches run, of a quick model; the rest is handed over.
    fn go(self: &Arc<Self>, mut step: Step, mut guest: Option<usize>) {
        loop {
            step.wakes.wake();
            for refused in step.refused {
                refused.answer();
            }
            let Some(work) = step.work.pop() else { return };
            for other in step.work {
                self.hand_over(other);
            }
            if let Some(left) = &mut guest {
                if *left == 0 || !self.is_quick(&work.batch) {
                    return self.hand_over(work);
                }
                *left -= 1;
            }
            step = self.run(work);
        }
    }

    fn hand_over(self: &Arc<Self>, work: Work) {
        let pool = Arc::clone(self);
        self.executor.run(Box::new(move || {
            let step = pool.run(work);
            pool.go(step, None);
        }));
    }

    /// Runs one batch, gives the instance back, a new one if it panicked, and decides what is next.
    fn run(&self, work: Work) -> Step {
        let Work { mut instance, batch } = work;
        let outcome = run::execute(&mut *instance.engine, batch);
        if let Some(time) = outcome.time {
            self.learn(time);
        }
        if outcome.panicked {
            match (self.remake)(instance.index) {
                Ok(engine) => instance.engine = engine,
                Err(error) => tracing::error!("an instance panicked and could not be made anew: {error}"),
            }
        }
        let now = Instant::now();
        let mut state = self.state.lock();
        let again = outcome.again.into_iter().filter_map(|again| state.source.reschedule(again, now).err());
        let refused: Vec<Refused> = again.map(|refused| *refused).collect();
        if let Some(gate) = &self.gate {
            gate.ran(instance.index);
        }
        state.source.finished(instance.index, now);
        state.idle.push(instance);
        let mut step = self.step(&mut state, now);
        step.refused.extend(refused);
        step
    }

    fn is_quick(&self, batch: &[Pending]) -> bool {
        let quick = self.average_ns.load(Ordering::Relaxed) < nanoseconds(QUICK);
        quick && batch.iter().map(|pending| pending.request.input_bytes()).sum::<usize>() <= QUICK_INPUT_BYTES
    }

    fn learn(&self, time: Duration) {
        let average = self.average_ns.load(Ordering::Relaxed);
        let time = nanoseconds(time).min(nanoseconds(100 * QUICK));
        self.average_ns.store(average - average / 8 + time / 8, Ordering::Relaxed);
    }

    /// Requests that wait.
    pub(crate) fn pending(&self) -> usize {
        self.state.lock().source.len()
    }

    /// Whether the idle instances can run; a busy one counts as able.
    pub(crate) fn is_ready(&self) -> bool {
        let state = self.state.lock();
        self.instances > 0 && state.idle.iter().all(|instance| instance.engine.is_ready())
    }

    /// Refuses new requests. Those in the queue are still served.
    pub(crate) fn stop(&self) {
        self.state.lock().stopped = true;
        self.drain();
    }

    /// No further request will come, though none is refused here.
    pub(crate) fn drain(&self) {
        let now = Instant::now();
        let mut state = self.state.lock();
        state.source.drain(now);
        let step = self.step(&mut state, now);
        drop(state);
        if let Some(pool) = self.me.upgrade() {
            pool.go(step, Some(0));
        }
    }
}

impl Wakeable for InstancePool {
    fn wake(self: Arc<Self>) {
        let now = Instant::now();
        let somebody_left = self.somebody_left.swap(false, Ordering::AcqRel);
        let mut refused = Vec::new();
        let mut state = self.state.lock();
        state.alarm = state.alarm.filter(|alarm| *alarm > now);
        if somebody_left {
            state.source.sweep(now, true, &mut refused);
        }
        let mut step = self.step(&mut state, now);
        drop(state);
        step.refused.append(&mut refused);
        self.go(step, Some(0));
    }
}

/// Told by frontends that a client has gone away. It may be told while the pool's lock is held, so it leaves the rest
/// to the timer, which sweeps once for many of them.
struct Leaver(Weak<InstancePool>);

impl Wake for Leaver {
    fn wake(self: Arc<Self>) {
        let Some(pool) = self.0.upgrade() else { return };
        if !pool.somebody_left.swap(true, Ordering::AcqRel) {
            pool.timer.wake_at(Instant::now(), self.0.clone());
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
