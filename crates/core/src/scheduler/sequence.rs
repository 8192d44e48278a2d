//! The sequence batcher: requests of one sequence go to one instance, one after the other.
//!
//! `table` knows the sequences and their slots, `direct` and `oldest` choose what an instance runs next, `controls` and
//! `state` are the inputs that the server adds, `tap` takes the states out of the answers. Source:
//! `sequence_batch_scheduler.cc` in Triton, whose words the errors are.

mod controls;
mod direct;
mod filler;
mod oldest;
mod state;
mod table;
mod tap;

use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use trireme_config::ModelSpec;
use trireme_proto::inference::ModelSequenceBatching;
use trireme_proto::inference::model_sequence_batching::StrategyChoice;
use trireme_types::{CorrelationId, DataType, Error, InferInput, Result, TensorSpec};

use self::controls::{Controls, NOT_READY, Signals};
use self::direct::{Choice, DirectRules, Row};
use self::state::{Memory, States};
use self::table::{Arrival, Entered, Key, Limits, Name, Table};
use self::tap::Tap;
use super::batcher::Rules;
use super::company::Company;
use super::order::Order;
use super::source::{Next, Pending, Refused, Role, Source};
use crate::batch_kind::KindRule;
use crate::model::ModelVersion;
use crate::stats::FailureReason;

/// `parameters` key of the model configuration that says what becomes of the model's own memory of a sequence that is
/// given up, and its values.
const ABANDONED: &str = "TRIREME_ABANDONED_SEQUENCE";
const TELL: &str = "end";
const FORGET: &str = "forget";

/// Most sequences that have a place in one instance at a time.
const MAX_SLOTS: usize = 1 << 20;

/// What a configuration says of the sequences of a model.
#[derive(Clone, Debug)]
pub(crate) struct SequencePlan {
    controls: Controls,
    states: Arc<States>,
    strategy: Strategy,
    slots: usize,
    max_idle: Duration,
    is_iterative: bool,
    tell_abandoned: bool,
}

#[derive(Clone, Debug)]
enum Strategy {
    Direct(DirectRules),
    Oldest { rules: Rules, fixed: bool, preserve_ordering: bool },
}

impl SequencePlan {
    /// Takes over a validated configuration, and reads the initial values of its states. `fixed`: batches wait by
    /// Triton's plain rule.
    ///
    /// # Errors
    /// A state or a parameter that is none.
    pub(crate) fn new(
        spec: &ModelSpec,
        batching: &ModelSequenceBatching,
        fixed: bool,
        model_dir: &Path,
    ) -> Result<Self> {
        let has_batch = spec.max_batch_size > 0;
        let max_rows = spec.max_batch_size.max(1);
        let (strategy, slots) = match &batching.strategy_choice {
            Some(StrategyChoice::Oldest(oldest)) => {
                let candidates = usize::try_from(oldest.max_candidate_sequences).unwrap_or(0);
                let slots = if candidates == 0 { max_rows } else { candidates };
                // A batch has one request of each sequence, so none is larger than there are candidates.
                let max_rows = max_rows.min(slots);
                let sizes = oldest.preferred_batch_size.iter().filter_map(|size| usize::try_from(*size).ok());
                let mut preferred: Vec<usize> = sizes.filter(|size| *size <= max_rows).collect();
                preferred.sort_unstable();
                preferred.dedup();
                let max_delay = Duration::from_micros(oldest.max_queue_delay_microseconds);
                let rules = Rules { max_rows, preferred, max_delay, single: !has_batch };
                let preserve_ordering = oldest.preserve_ordering;
                (Strategy::Oldest { rules, fixed, preserve_ordering }, slots)
            }
            Some(StrategyChoice::Direct(direct)) => {
                let max_delay = Duration::from_micros(direct.max_queue_delay_microseconds);
                let utilization = direct.minimum_slot_utilization;
                (Strategy::Direct(DirectRules { max_delay, utilization, fixed }), max_rows)
            }
            None => (
                Strategy::Direct(DirectRules { max_delay: Duration::ZERO, utilization: 0.0, fixed }),
                max_rows,
            ),
        };
        if slots > MAX_SLOTS {
            return Err(Error::invalid_arg(format!(
                "model '{}' asks for {slots} sequences at a time in one instance, the most is {MAX_SLOTS}; lower \
                 max_candidate_sequences or max_batch_size",
                spec.name
            )));
        }
        Ok(Self {
            controls: Controls::new(batching, has_batch),
            states: Arc::new(States::new(&spec.name, batching, has_batch, &spec.outputs, model_dir)?),
            strategy,
            slots,
            max_idle: Duration::from_micros(batching.max_sequence_idle_microseconds.max(1)),
            is_iterative: batching.iterative_sequence,
            tell_abandoned: tells_abandoned(spec)?,
        })
    }

    /// Names and types of the inputs that the server adds to requests.
    pub(crate) fn inputs(&self) -> Vec<(Arc<str>, DataType)> {
        self.controls.inputs().chain(self.states.inputs()).collect()
    }

    /// Outputs that every response must have.
    pub(crate) fn states(&self) -> Vec<TensorSpec> {
        self.states.outputs()
    }
}

/// Whether the model shall be told of sequences that are given up.
fn tells_abandoned(spec: &ModelSpec) -> Result<bool> {
    match spec.parameters.get(ABANDONED).map(String::as_str) {
        None | Some(FORGET) => Ok(false),
        Some(TELL) => Ok(true),
        Some(other) => Err(Error::invalid_arg(format!(
            "parameter '{ABANDONED}' of model '{}' must be '{FORGET}' or '{TELL}', got '{other}'",
            spec.name
        ))),
    }
}

/// What is kept for a sequence beside its requests.
#[derive(Debug, Default)]
struct Record {
    memory: Arc<Memory>,
    /// Inputs of its last request without their contents, for an END of the server's own.
    last: Vec<InferInput>,
}

/// The requests of a sequence model; see the module.
pub(crate) struct SequenceSource {
    plan: SequencePlan,
    kinds: KindRule,
    table: Table<Pending, Record>,
    /// Of each instance, because a sequence does not change it.
    company: Vec<Company>,
    order: Vec<Order>,
    /// Waits for the next sweep to be answered.
    left: Vec<Refused>,
    model: Weak<ModelVersion>,
    next_id: u64,
}

impl SequenceSource {
    pub(crate) fn new(plan: SequencePlan, kinds: KindRule, instances: usize) -> Self {
        let limits = Limits {
            instances,
            slots: plan.slots,
            max_idle: plan.max_idle,
            tell_abandoned: plan.tell_abandoned,
            initial: plan.states.initial_form(),
        };
        let (fixed, ordered) = match &plan.strategy {
            Strategy::Direct(rules) => (rules.fixed, false),
            Strategy::Oldest { fixed, preserve_ordering, .. } => (*fixed, *preserve_ordering),
        };
        Self {
            kinds,
            table: Table::new(limits),
            company: vec![Company::new(fixed, 0); instances],
            order: (0..instances).filter(|_| ordered).map(|_| Order::default()).collect(),
            left: Vec::new(),
            model: Weak::new(),
            next_id: 0,
            plan,
        }
    }

    /// What a request must be to have a place in a sequence.
    fn check(&self, pending: &Pending) -> Result<()> {
        let (request, model) = (&pending.request, pending.in_flight.model().name());
        if request.batch_size > 1 {
            return Err(Error::invalid_arg(format!(
                "inference request to model '{model}' must specify batch-size 1 due to requirements of sequence batcher"
            )));
        }
        if self.plan.is_iterative {
            return Ok(());
        }
        if request.sequence.id == CorrelationId::None {
            return Err(Error::invalid_arg(format!(
                "inference request to model '{model}' must specify a non-zero or non-empty correlation ID"
            )));
        }
        self.plan.controls.of(&request.sequence.id, NOT_READY).map(drop)
    }

    /// Takes the next request of a sequence out and makes it ready to run.
    fn take(&mut self, key: Key, instance: usize, now: Instant, rows: usize) -> Option<Pending> {
        let model = self.model.upgrade()?;
        let taken = self.table.take(key)?;
        let signals = Signals { start: taken.step.start, end: taken.step.end, ready: true };
        let mut pending = match taken.step.item {
            Some(pending) => pending,
            None => filler::pending(&model, &taken.memory.last, taken.id, now),
        };
        if self.plan.tell_abandoned {
            taken.memory.last = filler::shapes(&pending.request.inputs);
        }
        // The id was found to fit when the request came.
        let controls = self.plan.controls.of(taken.id, signals).unwrap_or_default();
        pending.request.inputs.extend(controls);
        if taken.step.start {
            taken.memory.memory = Arc::default();
        }
        taken.memory.memory.begin();
        pending.request.inputs.extend(self.plan.states.of(&taken.memory.memory, taken.step.start));
        if pending.role == Role::Client {
            let is_direct = matches!(self.plan.strategy, Strategy::Direct(_));
            let tap = Tap {
                responder: None,
                states: Arc::clone(&self.plan.states),
                memory: Arc::clone(&taken.memory.memory),
                outputs: pending.request.outputs.clone(),
                copy: rows > 1,
                // A row that is taken out of a batch would move the rows behind it.
                hides_closing: is_direct,
            };
            if let Some(order) = self.order.get(instance) {
                pending.responder = order.enter(pending.responder);
            }
            pending.responder = tap.around(pending.responder);
        }
        Some(pending)
    }

    /// Gives up the sequences of which a waiting client has gone away.
    fn cancel(&mut self, now: Instant) {
        let left = &mut self.left;
        self.table.cancel(
            now,
            |pending| pending.responder.is_closed(),
            |pending| left.push(Refused::cancelled(pending)),
        );
    }

    fn choose(&self, instance: usize, now: Instant) -> Choice {
        match &self.plan.strategy {
            Strategy::Direct(rules) => direct::choose(&self.table, instance, now, rules),
            Strategy::Oldest { rules, .. } => match self.company.get(instance) {
                Some(company) => oldest::choose(&self.table, instance, now, rules, company),
                None => Choice::Idle,
            },
        }
    }
}

impl Source for SequenceSource {
    fn push(&mut self, mut pending: Pending, now: Instant) -> Result<(), Box<Refused>> {
        if let Err(error) = self.check(&pending) {
            return Err(Box::new(Refused { pending, error, reason: FailureReason::Other }));
        }
        if self.model.strong_count() == 0 {
            self.model = Arc::downgrade(pending.in_flight.model());
        }
        let is_iterative = self.plan.is_iterative;
        if is_iterative {
            self.next_id += 1;
            pending.request.sequence.id = CorrelationId::Number(self.next_id);
            pending.request.sequence.start = true;
            pending.request.sequence.end = false;
        }
        let sequence = pending.request.sequence.clone();
        let patience = pending.request.timeout_us;
        let arrival = Arrival {
            kind: self.kinds.of(&pending.request),
            item: pending,
            id: sequence.id.clone(),
            start: sequence.start,
            end: sequence.end,
            patience: (patience > 0).then(|| Duration::from_micros(patience)),
            alone: is_iterative,
        };
        match self.table.push(arrival, now, Record::default) {
            Ok((Entered::Well, place)) => self.arrived(place),
            Ok((Entered::Restarted, place)) => {
                self.arrived(place);
                let model = self.model.upgrade();
                tracing::warn!(
                    "sequence {} for model '{}' has a conflict. The previous sequence did not end before this sequence \
                     start. Previous sequence will be terminated early.",
                    Name(&sequence.id),
                    model.as_ref().map_or("", |model| model.name())
                );
            }
            Err(pending) => {
                let error = Error::invalid_arg(format!(
                    "inference request for sequence {} to model '{}' must specify the START flag on the first request of \
                     the sequence",
                    Name(&sequence.id),
                    pending.in_flight.model().name()
                ));
                return Err(Box::new(Refused { pending, error, reason: FailureReason::Other }));
            }
        }
        Ok(())
    }

    fn next(&mut self, instance: usize, now: Instant) -> Next {
        loop {
            let rows = match self.choose(instance, now) {
                Choice::Run(rows) => rows,
                Choice::WaitUntil(time) => return Next::WaitUntil(time),
                Choice::Idle => return Next::Idle,
            };
            let keys = || {
                rows.iter().filter_map(|row| match row {
                    Row::Step(key) => Some(*key),
                    Row::Filler => None,
                })
            };
            if keys().any(|key| self.table.next_item(key).is_some_and(|item| item.responder.is_closed())) {
                // Clients who cannot tell that they go away are found out here.
                self.cancel(now);
                continue;
            }
            if self.model.strong_count() == 0 {
                return Next::Idle;
            }
            let (waiting, oldest) = (self.table.ready(instance).len(), self.table.ready(instance).next());
            let steps: Vec<Option<Pending>> = rows
                .iter()
                .map(|row| match row {
                    Row::Step(key) => self.take(*key, instance, now, rows.len()),
                    Row::Filler => None,
                })
                .collect();
            let Some(pattern) = steps.iter().flatten().next() else { return Next::Idle };
            let filler = rows.contains(&Row::Filler).then(|| filler::like(pattern, &self.plan));
            let requests = steps.iter().flatten().count();
            if let Some(company) = self.company.get_mut(instance) {
                if let (Strategy::Oldest { rules, .. }, Some((since, _))) = (&self.plan.strategy, oldest)
                    && rules.may_wait()
                {
                    let is_over = now.saturating_duration_since(since) >= rules.max_delay;
                    company.waited(is_over && requests < rules.max_rows, waiting);
                }
                company.began(instance, requests, now);
            }
            let batch = steps.into_iter().map(|step| step.or_else(|| Some(filler.as_ref()?.again(now))));
            return Next::Run(batch.flatten().collect());
        }
    }

    fn finished(&mut self, instance: usize, now: Instant) {
        if let Some(company) = self.company.get_mut(instance) {
            company.ended(instance, now);
        }
        let left = &mut self.left;
        self.table.finish(
            instance,
            now,
            |record| record.memory.outcome(),
            |pending| left.push(Refused::cancelled(pending)),
        );
    }

    fn reschedule(&mut self, mut pending: Pending, _: Instant) -> Result<(), Box<Refused>> {
        if !self.plan.is_iterative {
            return Err(Refused::not_rescheduled(pending));
        }
        let added = self.plan.inputs();
        pending.request.inputs.retain(|input| !added.iter().any(|(name, _)| *name == input.name));
        let id = pending.request.sequence.id.clone();
        let kind = self.kinds.of(&pending.request);
        self.table.put_back(&id, pending, kind).map_err(|pending| {
            let error = Error::internal("the sequence of a rescheduled request is gone");
            Box::new(Refused { pending, error, reason: FailureReason::Other })
        })
    }

    fn sweep(&mut self, now: Instant, closed: bool, refused: &mut Vec<Refused>) {
        let left = &mut self.left;
        self.table.expire(now, |pending| {
            let error = Error::unavailable("timeout of the corresponding sequence has been expired");
            left.push(Refused { pending, error, reason: FailureReason::Rejected });
        });
        if closed {
            self.cancel(now);
        }
        refused.append(&mut self.left);
    }

    fn drain(&mut self, now: Instant) {
        self.table.close(now);
    }

    fn next_deadline(&self) -> Option<Instant> {
        // Anything in the past: there are requests to be answered.
        let at_once = self.left.first().map(|refused| refused.pending.queued);
        at_once.or_else(|| self.table.next_deadline())
    }

    fn len(&self) -> usize {
        self.table.waiting()
    }

    fn may_wait(&self) -> bool {
        true
    }

    fn is_per_instance(&self) -> bool {
        true
    }
}

impl SequenceSource {
    /// A request has come to a sequence that has its slot in this instance.
    fn arrived(&mut self, instance: Option<usize>) {
        let Some(instance) = instance else { return };
        let waiting = self.table.ready(instance).len();
        if let Some(company) = self.company.get_mut(instance) {
            company.arrived(waiting);
        }
    }
}
