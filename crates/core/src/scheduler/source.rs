//! What an instance pool asks which requests run next.
//!
//! A [`Source`] is called under the pool's lock: it decides and moves requests, and never blocks, answers or runs
//! anything. *Invariant:* every request that [`Source::push`] took leaves once, by [`Source::next`] or
//! [`Source::sweep`].

use std::time::{Duration, Instant};

use trireme_types::{Error, InferRequest, Responder, Result};

use super::batcher::{Candidate, Decision, Picked, Rules, next_batch};
use super::company::Company;
use super::queue::{Claim, LevelRules, PolicyQueue, Waiting};
use crate::batch_kind::{Kind, KindRule};
use crate::infer::IdPrefix;
use crate::model::InFlight;
use crate::stats::FailureReason;

/// Longest time after which a refused client is told to come again.
const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// A request on its way through a scheduler.
pub(crate) struct Pending {
    pub(crate) request: InferRequest,
    pub(crate) responder: Responder,
    pub(crate) queued: Instant,
    pub(crate) in_flight: InFlight,
    pub(crate) role: Role,
}

/// What a request is to the scheduler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Role {
    /// A client asked for it.
    #[default]
    Client,
    /// A client asked for it, it ran, and its model gave it back to run again.
    Again,
    /// The server made it up, as a row without a request; nobody waits for its answer and it is not counted.
    Filler,
}

/// A request that ends without an execution.
pub(crate) struct Refused {
    pub(crate) pending: Pending,
    pub(crate) error: Error,
    pub(crate) reason: FailureReason,
}

/// What an idle instance does next.
pub(crate) enum Next {
    /// Runs these together, in this order.
    Run(Vec<Pending>),
    /// Nothing before that time, unless a request comes.
    WaitUntil(Instant),
    Idle,
}

/// Decides which requests of a model run next.
pub(crate) trait Source: Send {
    /// Takes a request, or refuses it.
    fn push(&mut self, pending: Pending, now: Instant) -> Result<(), Box<Refused>>;

    /// What the idle instance of that index does.
    fn next(&mut self, instance: usize, now: Instant) -> Next;

    /// The instance has run what [`Source::next`] gave it.
    fn finished(&mut self, instance: usize, now: Instant);

    /// Takes back a request that ran and whose model wants it to run again. Called before [`Source::finished`].
    ///
    /// # Errors
    /// The request itself, of a model without `iterative_sequence`.
    fn reschedule(&mut self, pending: Pending, _now: Instant) -> Result<(), Box<Refused>> {
        Err(Refused::not_rescheduled(pending))
    }

    /// Removes requests whose time is over and, with `closed`, those whose clients have gone away.
    fn sweep(&mut self, now: Instant, closed: bool, refused: &mut Vec<Refused>);

    /// No further request will come: what only waits for one need wait no longer.
    fn drain(&mut self, _now: Instant) {}

    /// When [`Source::sweep`] has something to do again.
    fn next_deadline(&self) -> Option<Instant>;

    /// Requests that wait.
    fn len(&self) -> usize;

    /// Whether a request may wait although an instance is idle.
    fn may_wait(&self) -> bool;

    /// Whether one instance may have something to run when another has not.
    fn is_per_instance(&self) -> bool {
        false
    }
}

/// Requests in one queue for all instances: the default scheduler and the dynamic batcher.
pub(crate) struct QueueSource {
    queue: PolicyQueue<(Pending, Kind)>,
    rules: Rules,
    kinds: KindRule,
    company: Company,
}

impl QueueSource {
    pub(crate) fn new(rules: Rules, levels: LevelRules, kinds: KindRule, company: Company) -> Self {
        Self { queue: PolicyQueue::new(levels), rules, kinds, company }
    }

    /// About how long it takes until what waits has run, for telling refused clients when to come again.
    fn time_to_serve(&self) -> Duration {
        let runs = self.queue.len() / self.rules.max_rows + 1;
        let runs = u32::try_from(runs / self.company.busy().max(1) + 1).unwrap_or(u32::MAX);
        self.company.run_time().saturating_mul(runs).min(LONGEST_RETRY)
    }
}

impl Source for QueueSource {
    fn push(&mut self, pending: Pending, now: Instant) -> Result<(), Box<Refused>> {
        let claim = Claim {
            priority: pending.request.priority,
            timeout: Duration::from_micros(pending.request.timeout_us),
        };
        let kind = self.kinds.of(&pending.request);
        match self.queue.push((pending, kind), claim, now) {
            Ok(()) => {
                self.company.arrived(self.queue.len());
                Ok(())
            }
            Err(((pending, _), limit)) => {
                let error = Error::unavailable(format!(
                    "Exceeds maximum queue size: {limit} requests wait for model '{}' already; ask again later, or raise \
                     max_queue_size",
                    pending.in_flight.model().name()
                ))
                .prefixed(IdPrefix(&pending.request.id))
                .retry_after(self.time_to_serve());
                Err(Box::new(Refused { pending, error, reason: FailureReason::Rejected }))
            }
        }
    }

    fn next(&mut self, instance: usize, now: Instant) -> Next {
        let candidates = self.queue.iter().map(|waiting| Candidate {
            rows: waiting.item.0.request.batch_size,
            kind: &waiting.item.1,
            since: waiting.since,
        });
        let picked = match next_batch(candidates, now, &self.rules, &self.company) {
            Decision::Run(picked) => picked,
            Decision::WaitUntil(time) => return Next::WaitUntil(time),
            Decision::Idle => return Next::Idle,
        };
        let waiting_before = self.queue.len();
        let (mut batch, mut rows, mut oldest) = (Vec::new(), 0, now);
        let mut taken = |waiting: Waiting<(Pending, Kind)>| {
            let (pending, _) = waiting.item;
            rows += pending.request.batch_size;
            oldest = oldest.min(waiting.since);
            batch.push(pending);
        };
        match &picked {
            Picked::First(count) => self.queue.take_first(*count, &mut taken),
            Picked::At(places) => self.queue.take(places, &mut taken),
        }
        let is_over = now.saturating_duration_since(oldest) >= self.rules.max_delay;
        if self.rules.may_wait() {
            self.company.waited(is_over && rows < self.rules.max_rows, waiting_before);
        }
        self.company.began(instance, batch.len(), now);
        Next::Run(batch)
    }

    fn finished(&mut self, instance: usize, now: Instant) {
        self.company.ended(instance, now);
    }

    fn sweep(&mut self, now: Instant, closed: bool, refused: &mut Vec<Refused>) {
        let retry_after = self.time_to_serve();
        self.queue.expire(now, |waiting| {
            let pending = waiting.item.0;
            let error = Error::unavailable(format!(
                "Request timeout expired: it waited {} us for model '{}'",
                now.saturating_duration_since(waiting.since).as_micros(),
                pending.in_flight.model().name()
            ))
            .retry_after(retry_after);
            refused.push(Refused { pending, error, reason: FailureReason::Rejected });
        });
        if closed {
            self.queue.remove_if(
                |(pending, _)| pending.responder.is_closed(),
                |waiting| refused.push(Refused::cancelled(waiting.item.0)),
            );
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.queue.next_deadline()
    }

    fn len(&self) -> usize {
        self.queue.len()
    }

    fn may_wait(&self) -> bool {
        self.rules.may_wait()
    }
}

impl Refused {
    /// A request whose client has gone away.
    pub(crate) fn cancelled(pending: Pending) -> Self {
        let error = Error::new(trireme_types::Code::Cancelled, "the request was cancelled");
        Self { pending, error, reason: FailureReason::Canceled }
    }

    /// A request that was given back to a scheduler that runs each request once.
    pub(crate) fn not_rescheduled(pending: Pending) -> Box<Self> {
        let error = Error::internal(format!(
            "the backend asked to run the request again, which needs 'sequence_batching {{ iterative_sequence: true }}' \
             in the configuration of model '{}'",
            pending.in_flight.model().name()
        ));
        Box::new(Self { pending, error, reason: FailureReason::Backend })
    }

    /// Counts it and answers it.
    pub(crate) fn answer(self) {
        let Self { pending, error, reason } = self;
        pending.in_flight.model().statistics.failed(reason, pending.request.received.elapsed());
        pending.responder.finish(Err(error));
    }
}
