//! Ensembles: models made of other models, whose tensors flow from step to step.
//!
//! An ensemble has no engine and no instances. A request becomes a [`flow::Flow`], which sends requests to the models of
//! the steps just as a client would: they are checked, scheduled, batched and counted there. What runs when is decided in
//! [`progress`], which knows nothing of models. *Invariants:* a tensor is handed on, never copied, and let go after its
//! last reader; the models of the steps are looked up when a request begins, so a reload of one is followed; a request is
//! answered once, whatever its steps do; no stack grows with the length of the ensemble.

mod flow;
mod limit;
mod plan;
mod progress;
mod shape;
mod sink;
mod way_back;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};
use std::time::Instant;

use trireme_config::{EnsembleFlow, ModelSpec};
use trireme_proto::inference::ModelEnsembling;
use trireme_types::{Code, Error, InferRequest, Responder, Result, TensorSpec};

use self::flow::Flow;
use self::limit::{Door, Entry, Flood};
use self::plan::Plan;
use crate::executor::Executor;
use crate::model::{Hold, ModelVersion};
use crate::scheduler::{Timer, Wakeable};
use crate::stats::FailureReason;
use crate::table::ModelTable;

/// Parameter of an ensemble: what becomes of a step none of whose inputs came.
const PARAMETER: &str = "TRIREME_STEPS_WITHOUT_INPUT";
/// Its model is asked, as with Triton; the model says whether it can do without.
const RUN: &str = "run";
/// It is left out, and so are the outputs that it would have written.
const SKIP: &str = "skip";

/// The scheduler of an ensemble.
pub(crate) struct Ensemble {
    plan: Arc<Plan>,
    facts: EnsembleFlow,
    inputs: Vec<TensorSpec>,
    outputs: Vec<TensorSpec>,
    /// All outputs, by name: their order in a response for which the client named none.
    all_outputs: Vec<usize>,
    batching: bool,
    /// The table holds this ensemble.
    table: Weak<ModelTable>,
    executor: Executor,
    limit: Option<Limit>,
    is_stopped: AtomicBool,
    /// By step: whether its thread may be kept waiting.
    may_wait: Vec<bool>,
    /// Models of the steps, those within ensembles too.
    models: BTreeSet<Arc<str>>,
    me: Weak<Self>,
}

/// `max_inflight_requests`
struct Limit {
    count: usize,
    door: Door,
    /// By step; `None` for steps whose thread must not be kept waiting.
    floods: Vec<Option<Flood>>,
    /// Woken when the client of a waiting request goes away.
    leaver: Waker,
}

impl Ensemble {
    /// An ensemble whose configuration has passed all checks; `facts` is what they found, `members` are the models of
    /// its steps.
    ///
    /// # Errors
    /// A parameter has a value that is none.
    pub(crate) fn new(
        spec: &ModelSpec,
        ensemble: &ModelEnsembling,
        facts: EnsembleFlow,
        members: &[Arc<ModelVersion>],
        table: &Arc<ModelTable>,
        executor: Executor,
        timer: Timer,
    ) -> Result<Arc<Self>> {
        let skips = match spec.parameters.get(PARAMETER).map(String::as_str) {
            None | Some(RUN) => false,
            Some(SKIP) => true,
            Some(other) => {
                return Err(Error::invalid_arg(format!(
                    "parameter '{PARAMETER}' of ensemble '{}' must be '{RUN}' or '{SKIP}', got '{other}'",
                    spec.name
                )));
            }
        };
        let plan = Arc::new(Plan::new(ensemble, &spec.inputs, &spec.outputs, &facts, skips));
        let mut all_outputs: Vec<usize> = (0..spec.outputs.len()).collect();
        all_outputs.sort_by_key(|output| spec.outputs.get(*output).map(|spec| Arc::clone(&spec.name)));
        let models: Vec<BTreeSet<Arc<str>>> = members.iter().map(|model| model.models_inside()).collect();
        let may_wait: Vec<bool> = (0..plan.steps.len()).map(|step| may_wait(&plan, &models, step)).collect();
        let count = usize::try_from(ensemble.max_inflight_requests).unwrap_or(usize::MAX);
        Ok(Arc::new_cyclic(|me: &Weak<Self>| Self {
            inputs: spec.inputs.clone(),
            outputs: spec.outputs.clone(),
            all_outputs,
            batching: spec.max_batch_size > 0,
            table: Arc::downgrade(table),
            executor,
            limit: (count > 0).then(|| Limit {
                count,
                door: Door::new(count),
                floods: floods(&may_wait),
                leaver: Waker::from(Arc::new(Leaver {
                    ensemble: me.clone(),
                    is_asked: AtomicBool::new(false),
                    timer,
                })),
            }),
            plan,
            facts,
            is_stopped: AtomicBool::new(false),
            may_wait,
            models: models.iter().flatten().cloned().collect(),
            me: me.clone(),
        }))
    }

    /// What the checks at load found of the models of the steps.
    pub(crate) fn facts(&self) -> &EnsembleFlow {
        &self.facts
    }

    /// Models of the steps, those within ensembles too.
    pub(crate) fn models(&self) -> &BTreeSet<Arc<str>> {
        &self.models
    }

    /// Takes a checked request.
    pub(crate) fn enqueue(&self, model: &Arc<ModelVersion>, request: InferRequest, responder: Responder) {
        let entry = Entry { request, responder, in_flight: model.enter(), arrived: Instant::now() };
        if self.is_stopped.load(Ordering::Acquire) {
            let error = Error::unavailable(format!(
                "Server is stopping, scheduler for model '{}' has stopped accepting new inference requests",
                model.name()
            ));
            return refuse(entry, error, FailureReason::Other);
        }
        let entry = match &self.limit {
            None => Some(entry),
            Some(limit) => limit.door.enter(entry, |entry| entry.responder.watch_closed(&limit.leaver)),
        };
        if let Some(entry) = entry {
            self.begin(entry);
        }
    }

    fn begin(&self, entry: Entry) {
        let Some(ensemble) = self.me.upgrade() else { return };
        if entry.responder.is_closed() {
            cancel(entry);
            ensemble.leave();
        } else {
            Flow::begin(ensemble, entry);
        }
    }

    /// A request has left. The next one starts on a thread of its own, for this one may be anybody's.
    fn leave(&self) {
        let Some(limit) = &self.limit else { return };
        if let Some(next) = limit.door.leave()
            && let Some(ensemble) = self.me.upgrade()
        {
            self.executor.run(Box::new(move || ensemble.begin(next)));
        }
    }

    /// Requests that wait to be let in.
    pub(crate) fn pending(&self) -> usize {
        self.limit.as_ref().map_or(0, |limit| limit.door.waiting())
    }

    /// The models that the steps run now, one for each; `None` while one of them is not there.
    pub(crate) fn members(&self) -> Option<Vec<Arc<ModelVersion>>> {
        let table = self.table.upgrade()?;
        self.plan.steps.iter().map(|step| table.find(&step.model, step.version).ok()).collect()
    }

    /// The models of the steps as they are now.
    ///
    /// # Errors
    /// The first step whose model, or the version that it names, is not ready.
    fn hold_models(&self) -> Result<Vec<Hold>, (usize, Error)> {
        let Some(table) = self.table.upgrade() else { return Err((0, Error::unavailable("Server exiting"))) };
        let steps = self.plan.steps.iter().enumerate();
        steps.map(|(i, step)| table.hold(&step.model, step.version).map_err(|error| (i, error))).collect()
    }

    /// Whether the models of all steps can run.
    pub(crate) fn is_ready(&self) -> bool {
        let Some(table) = self.table.upgrade() else { return false };
        let is_ready = |model: Result<Arc<ModelVersion>>| model.is_ok_and(|model| model.is_ready());
        self.plan.steps.iter().all(|step| is_ready(table.find(&step.model, step.version)))
    }

    /// Refuses new requests. Those already taken are still served.
    pub(crate) fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
    }
}

/// What counts the responses of each step that may be kept waiting.
fn floods(may_wait: &[bool]) -> Vec<Option<Flood>> {
    may_wait.iter().map(|may_wait| may_wait.then(Flood::default)).collect()
}

/// Whether a step may be kept waiting for what runs behind it: only a decoupled one, and not if that needs the same instances.
fn may_wait(plan: &Plan, models: &[BTreeSet<Arc<str>>], step: usize) -> bool {
    let Some(mine) = models.get(step) else { return false };
    let is_decoupled = plan.steps.get(step).is_some_and(|step| step.is_decoupled);
    is_decoupled
        && plan
            .behind(step)
            .into_iter()
            .filter_map(|other| models.get(other))
            .all(|other| other.is_disjoint(mine))
}

fn refuse(entry: Entry, error: Error, reason: FailureReason) {
    let Entry { request, responder, in_flight, .. } = entry;
    in_flight.model().statistics.failed(reason, request.received.elapsed());
    responder.finish(Err(error));
}

fn cancelled() -> Error {
    Error::new(Code::Cancelled, "the request was cancelled")
}

fn cancel(entry: Entry) {
    refuse(entry, cancelled(), FailureReason::Canceled);
}

/// Told by frontends that the client of a waiting request has gone away. It may be told under the lock of the door, so it
/// leaves the rest to the timer, which sweeps once for many of them.
struct Leaver {
    ensemble: Weak<Ensemble>,
    is_asked: AtomicBool,
    timer: Timer,
}

impl Wake for Leaver {
    fn wake(self: Arc<Self>) {
        if !self.is_asked.swap(true, Ordering::AcqRel) {
            let me: Weak<Self> = Arc::downgrade(&self);
            self.timer.wake_at(Instant::now(), me);
        }
    }
}

impl Wakeable for Leaver {
    fn wake(self: Arc<Self>) {
        self.is_asked.store(false, Ordering::Release);
        let Some(ensemble) = self.ensemble.upgrade() else { return };
        if let Some(limit) = &ensemble.limit {
            limit.door.take_closed().into_iter().for_each(cancel);
        }
    }
}
