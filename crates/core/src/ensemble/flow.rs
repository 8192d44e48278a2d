//! One request on its way through an ensemble.
//!
//! Answers of the steps arrive on whatever threads they come from and are put into an inbox; one thread at a time empties
//! it, asks [`Progress`] what follows, and does that. A step that answers before its start has returned only adds to the
//! inbox, so the stack stays flat however many steps run one after the other on this thread.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use trireme_types::{
    Code, CorrelationId, DataType, Error, InferInput, InferRequest, InferResponse, OutputTensor,
    ParameterValue, Parameters, RequestedOutput, Responder, Result, Shape, TensorBuffer,
};

use super::limit::{Entry, Flood};
use super::plan::PlannedStep;
use super::progress::{Effects, Launch, Progress, RunId};
use super::shape::fit;
use super::sink::{StepSink, Working};
use super::way_back::WayBack;
use super::{Ensemble, cancelled, floods};
use crate::model::{Hold, InFlight};
use crate::stats::{Answered, ComputeTimes, Ended, FailureReason, Sent};

/// Responses of one decoupled step of one request that may be in work where `max_inflight_requests` is not given: a client
/// that reads slowly slows the model down, and does not fill the memory.
const UNLIMITED: usize = 64;

/// What a step says.
pub(super) struct Reply {
    pub(super) run: RunId,
    pub(super) step: usize,
    /// `None`: an end without a further response.
    pub(super) reply: Option<Result<InferResponse>>,
    pub(super) last: bool,
}

/// A tensor between steps. Cloning copies no bytes.
#[derive(Clone)]
pub(super) struct Tensor {
    data_type: DataType,
    shape: Shape,
    data: TensorBuffer,
}

/// See the module.
pub(super) struct Flow {
    ensemble: Arc<Ensemble>,
    /// The request without its tensors: what every step's request takes over.
    template: InferRequest,
    /// The models of the steps as they were when the request began; it ends with the versions it began with.
    models: Vec<Hold>,
    /// Outputs that the client wants, by their index in the configuration.
    wanted: Vec<usize>,
    way: Arc<WayBack>,
    /// By step, of this request alone; used by ensembles without a limit of their own.
    floods: Vec<Option<Flood>>,
    inbox: Mutex<Inbox>,
    /// Touched only by the thread that empties the inbox.
    work: Mutex<Work>,
    in_flight: InFlight,
    started: Instant,
    waited: Duration,
}

struct Inbox {
    replies: VecDeque<Reply>,
    is_worked_on: bool,
}

struct Work {
    progress: Progress<Tensor>,
    /// Responses sent.
    sent: u32,
    last_sent: Instant,
    /// The client has its last answer.
    is_ended: bool,
}

impl Flow {
    /// Starts a request. Returns when nothing more can be done without waiting for a model.
    pub(super) fn begin(ensemble: Arc<Ensemble>, entry: Entry) {
        let Entry { request: mut template, responder, in_flight, arrived } = entry;
        let mut inputs = std::mem::take(&mut template.inputs);
        let outputs = std::mem::take(&mut template.outputs);
        let wanted: Vec<usize> = if outputs.is_empty() {
            ensemble.all_outputs.clone()
        } else {
            let index =
                |output: &RequestedOutput| ensemble.outputs.iter().position(|spec| spec.name == output.name);
            outputs.iter().filter_map(index).collect()
        };
        let values = ensemble.inputs.iter().map(|spec| {
            let place = inputs.iter().position(|input| *input.name == *spec.name)?;
            let InferInput { data_type, shape, data, .. } = inputs.swap_remove(place);
            Some(Tensor { data_type, shape, data })
        });
        let values = values.collect();
        let now = Instant::now();
        let waited = now.saturating_duration_since(arrived);
        let progress = Progress::new(Arc::clone(&ensemble.plan), &wanted);
        let (models, missing) = match ensemble.hold_models() {
            Ok(models) => (models, None),
            Err(missing) => (Vec::new(), Some(missing)),
        };
        let flow = Arc::new(Self {
            template,
            models,
            wanted,
            way: WayBack::new(responder),
            floods: if ensemble.limit.is_none() { floods(&ensemble.may_wait) } else { Vec::new() },
            inbox: Mutex::new(Inbox { replies: VecDeque::new(), is_worked_on: true }),
            work: Mutex::new(Work { progress, sent: 0, last_sent: now, is_ended: false }),
            in_flight,
            started: now,
            waited,
            ensemble,
        });
        if let Some((step, error)) = missing {
            return flow.fail(&mut flow.work.lock(), flow.told(step, &error));
        }
        let _working = Working::begin();
        flow.handle(|_, work| work.progress.start(values));
        flow.empty_inbox(flow.inbox.lock());
    }

    pub(super) fn way(&self) -> &WayBack {
        &self.way
    }

    /// What counts the responses of a decoupled step that are in work, and how many there may be.
    fn flood(&self, step: usize) -> Option<(&Flood, usize)> {
        let (floods, count) = match &self.ensemble.limit {
            Some(limit) => (&limit.floods, limit.count),
            None => (&self.floods, UNLIMITED),
        };
        Some((floods.get(step)?.as_ref()?, count))
    }

    /// A response of a decoupled step is about to be delivered.
    pub(super) fn response_comes(&self, step: usize) {
        if let Some((flood, _)) = self.flood(step) {
            flood.opened();
        }
    }

    /// Work for a response of a decoupled step is done.
    fn response_done(&self, step: usize) {
        if let Some((flood, _)) = self.flood(step) {
            flood.closed();
        }
    }

    /// Keeps the thread of a decoupled model until there is room for what it says next.
    pub(super) fn slow_down(&self, step: usize) {
        let Some((flood, limit)) = self.flood(step) else { return };
        if !flood.wait_below(limit, || self.way.is_closed()) {
            tracing::error!(
                "ensemble '{}': step {step} has {limit} responses in work and none got done for a minute; it goes on",
                self.name()
            );
        }
    }

    fn name(&self) -> &str {
        self.in_flight.model().name()
    }

    fn step(&self, step: usize) -> Option<&PlannedStep> {
        self.ensemble.plan.steps.get(step)
    }

    /// Puts a reply into the inbox and empties the inbox, unless another thread is at it.
    pub(super) fn deliver(self: &Arc<Self>, reply: Reply) {
        let mut inbox = self.inbox.lock();
        inbox.replies.push_back(reply);
        if std::mem::replace(&mut inbox.is_worked_on, true) {
            return;
        }
        let _working = Working::begin();
        self.empty_inbox(inbox);
    }

    fn empty_inbox<'a>(self: &'a Arc<Self>, mut inbox: MutexGuard<'a, Inbox>) {
        while let Some(reply) = inbox.replies.pop_front() {
            drop(inbox);
            self.handle(|flow, work| flow.take(work, reply));
            inbox = self.inbox.lock();
        }
        inbox.is_worked_on = false;
    }

    /// Lets something happen and does what follows.
    fn handle(self: &Arc<Self>, event: impl FnOnce(&Self, &mut Work) -> Effects<Tensor>) {
        let mut work = self.work.lock();
        let effects = event(self, &mut work);
        self.act(&mut work, effects);
        if work.progress.is_over() && !work.is_ended {
            self.end(&mut work);
        }
    }

    fn take(&self, work: &mut Work, reply: Reply) -> Effects<Tensor> {
        let Reply { run, step, reply, last } = reply;
        if last {
            self.way.forget(run);
        }
        match reply {
            None => work.progress.reply(run, None, last),
            Some(Ok(response)) => {
                let effects = work.progress.reply(run, Some(self.values(step, response)), last);
                if self.step(step).is_some_and(|step| step.is_decoupled) && effects.opened.is_empty() {
                    // It came after the end.
                    self.response_done(step);
                }
                effects
            }
            Some(Err(error)) => {
                self.fail(work, self.told(step, &error));
                work.progress.reply(run, None, last)
            }
        }
    }

    /// Does what follows from an event.
    fn act(self: &Arc<Self>, work: &mut Work, effects: Effects<Tensor>) {
        let Effects { answers, launches, opened: _, closed } = effects;
        for answer in answers {
            self.answer(work, answer);
        }
        for stream in closed {
            self.response_done(stream.saturating_sub(1));
        }
        for launch in launches {
            // Asked once: the client may leave between two questions.
            if !work.progress.is_aborted() && self.way.is_closed() {
                self.fail(work, cancelled());
            }
            let (run, step) = (launch.run, launch.step);
            let failed = match work.progress.is_aborted() {
                true => true,
                false => {
                    self.launch(launch).map_err(|error| self.fail(work, self.told(step, &error))).is_err()
                }
            };
            if failed {
                // Nothing follows any more; the count of what runs is all that is left to keep.
                let _nothing = work.progress.reply(run, None, true);
            }
        }
    }

    /// Sends a step's request to its model.
    ///
    /// # Errors
    /// There is no such step; the plan has none that is not there.
    fn launch(self: &Arc<Self>, launch: Launch<Tensor>) -> Result<()> {
        let Launch { run, step, inputs } = launch;
        let planned = self.step(step).ok_or_else(|| Error::internal(format!("no step {step}")))?;
        let model = self
            .models
            .get(step)
            .ok_or_else(|| Error::internal(format!("no model for step {step}")))?
            .model();
        let batching = model.max_batch_size() > 0;
        let inputs = planned.inputs.iter().zip(inputs).filter_map(|((name, _), tensor)| {
            let Tensor { data_type, shape, data } = tensor?;
            let spec = model.inputs().iter().find(|spec| spec.name == *name);
            let shape = match spec {
                Some(spec) => fit(shape, &spec.dims, batching),
                None => shape,
            };
            Some(InferInput { name: Arc::clone(name), data_type, shape, data })
        });
        let outputs = planned.outputs.iter().map(|(name, _)| RequestedOutput { name: Arc::clone(name) });
        let request = InferRequest {
            inputs: inputs.collect(),
            outputs: outputs.collect(),
            received: Instant::now(),
            batch_size: 1,
            ..self.template.clone()
        };
        let sink = StepSink { flow: Arc::clone(self), run, step };
        model.infer(request, Responder::new(Box::new(sink)));
        Ok(())
    }

    /// The tensors of a step's response, by the step's outputs.
    fn values(&self, step: usize, mut response: InferResponse) -> Vec<Option<Tensor>> {
        let outputs = self.step(step).map(|step| step.outputs.as_slice()).unwrap_or_default();
        let value = |(name, _): &(Arc<str>, usize)| {
            let place = response.outputs.iter().position(|output| output.name == *name)?;
            let OutputTensor { data_type, shape, data, .. } = response.outputs.swap_remove(place);
            Some(Tensor { data_type, shape, data })
        };
        outputs.iter().map(value).collect()
    }

    /// Triton's wording, and which step it was.
    fn told(&self, step: usize, error: &Error) -> Error {
        let model = self.step(step).map_or("", |step| &step.model);
        let text =
            format!("in ensemble '{}', {} (step {step}, model '{model}')", self.name(), error.message());
        let told = Error::new(error.code(), text);
        match error.retry_hint() {
            Some(time) => told.retry_after(time),
            None => told,
        }
    }

    /// Ends the request with an error. Steps that have not started never will.
    fn fail(&self, work: &mut Work, error: Error) {
        for stream in work.progress.abort().closed {
            self.response_done(stream.saturating_sub(1));
        }
        if std::mem::replace(&mut work.is_ended, true) {
            return;
        }
        // As with Triton, whatever went wrong in a step counts as OTHER here, and by its reason at the step's model.
        let (sent, reason) = match error.code() {
            Code::Cancelled => (Sent::Cancelled, FailureReason::Canceled),
            _ => (Sent::Error, FailureReason::Other),
        };
        let statistics = &self.in_flight.model().statistics;
        if self.ensemble.facts.decoupled() {
            statistics.responded(work.sent, sent, work.last_sent.elapsed());
        }
        statistics.failed(reason, self.template.received.elapsed());
        self.way.finish(Some(Err(error)));
    }

    /// Nothing runs any more.
    fn end(&self, work: &mut Work) {
        if self.ensemble.facts.decoupled() {
            work.is_ended = true;
            let statistics = &self.in_flight.model().statistics;
            statistics.responded(work.sent, Sent::Empty, work.last_sent.elapsed());
            self.count();
            self.way.finish(None);
            return;
        }
        let missing = work.progress.undecided().join("', '");
        let error = Error::internal(format!(
            "in ensemble '{}', unexpected deadlock, at least one output is not set while no more ensemble steps can be \
             made: '{missing}'",
            self.name()
        ));
        self.fail(work, error);
    }

    /// Sends a response of the ensemble.
    fn answer(&self, work: &mut Work, values: Vec<Option<Tensor>>) {
        let mut response = InferResponse {
            id: self.template.id.clone(),
            parameters: sequence_parameters(&self.template),
            ..InferResponse::default()
        };
        for (output, value) in self.wanted.iter().zip(values) {
            let (Some(spec), Some(value)) = (self.ensemble.outputs.get(*output), value) else { continue };
            response.outputs.push(OutputTensor {
                name: Arc::clone(&spec.name),
                data_type: value.data_type,
                shape: fit(value.shape, &spec.dims, self.ensemble.batching),
                data: value.data,
            });
        }
        if self.ensemble.facts.decoupled() {
            let statistics = &self.in_flight.model().statistics;
            statistics.responded(work.sent, Sent::Response, work.last_sent.elapsed());
            if work.sent == 0 {
                statistics.first_response(self.template.received.elapsed());
            }
            work.sent = work.sent.saturating_add(1);
            work.last_sent = Instant::now();
            self.way.send(response);
        } else if !std::mem::replace(&mut work.is_ended, true) {
            self.count();
            self.way.finish(Some(Ok(response)));
        }
    }

    /// Counts a request that went well: an ensemble computes for as long as its steps take together.
    fn count(&self) {
        let infer = self.started.elapsed();
        let times = ComputeTimes { input: Duration::ZERO, infer, output: Duration::ZERO };
        let total = self.template.received.elapsed();
        let decoupled = self.ensemble.facts.decoupled();
        // The first response of a decoupled request has long been sent.
        let ended = if decoupled { Ended::Open } else { Ended::Success };
        let rows = self.template.batch_size as u64;
        let statistics = &self.in_flight.model().statistics;
        statistics.executed(times, &[Answered { ended, total, queue: self.waited, rows }]);
        if decoupled {
            statistics.completed(total);
        }
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.ensemble.leave();
    }
}

/// Where a request stands in its sequence, which Triton writes into the response of every ensemble.
fn sequence_parameters(request: &InferRequest) -> Parameters {
    let id = match &request.sequence.id {
        CorrelationId::None => ParameterValue::Int(0),
        CorrelationId::Number(id) => {
            i64::try_from(*id).map_or(ParameterValue::Uint(*id), ParameterValue::Int)
        }
        CorrelationId::Text(id) => ParameterValue::String(id.clone()),
    };
    let mut parameters = Parameters::default();
    parameters.insert("sequence_id", id);
    parameters.insert("sequence_start", ParameterValue::Bool(request.sequence.start));
    parameters.insert("sequence_end", ParameterValue::Bool(request.sequence.end));
    parameters
}
