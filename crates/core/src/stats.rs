//! Counts and durations of one model version, as the statistics extension and the metrics show them.
//!
//! One short lock per execution; readers take a copy. A request is counted before its answer leaves, so a client
//! that asks after its answer finds itself counted.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use trireme_types::{Code, Error, MemoryUsage};

use crate::latencies::{Latencies, Observer, Part};

/// Number of events and their time together, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DurationCount {
    pub count: u64,
    pub ns: u64,
}

impl DurationCount {
    pub(crate) fn add(&mut self, count: u64, time: Duration) {
        self.count += count;
        self.ns = self.ns.saturating_add(nanoseconds(time).saturating_mul(count));
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Why a request failed: label `reason` of `nv_inference_request_failure`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureReason {
    /// Refused by a scheduler: queue full or time in the queue over.
    Rejected,
    /// The client went away.
    Canceled,
    /// The backend answered with an error.
    Backend,
    Other,
}

impl FailureReason {
    pub const ALL: [Self; 4] = [Self::Rejected, Self::Canceled, Self::Backend, Self::Other];

    /// Why a request that ran failed.
    pub(crate) fn of(error: &Error) -> Self {
        if error.code() == Code::Cancelled { Self::Canceled } else { Self::Backend }
    }

    pub const fn label(self) -> &'static str {
        match self {
            Self::Rejected => "REJECTED",
            Self::Canceled => "CANCELED",
            Self::Backend => "BACKEND",
            Self::Other => "OTHER",
        }
    }
}

/// Message `InferStatistics` of the protocol.
#[derive(Clone, Copy, Debug, Default)]
pub struct InferStatistics {
    pub success: DurationCount,
    pub fail: DurationCount,
    pub queue: DurationCount,
    pub compute_input: DurationCount,
    pub compute_infer: DurationCount,
    pub compute_output: DurationCount,
    pub cache_hit: DurationCount,
    pub cache_miss: DurationCount,
}

/// Message `InferBatchStatistics`: executions of one batch size.
#[derive(Clone, Copy, Debug, Default)]
pub struct BatchStatistics {
    pub batch_size: u64,
    pub compute_input: DurationCount,
    pub compute_infer: DurationCount,
    pub compute_output: DurationCount,
}

/// Message `InferResponseStatistics`: the n-th response of decoupled requests.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResponseStatistics {
    pub compute_infer: DurationCount,
    pub compute_output: DurationCount,
    pub success: DurationCount,
    pub fail: DurationCount,
    pub empty_response: DurationCount,
    pub cancel: DurationCount,
}

/// Message `ModelStatistics`.
#[derive(Clone, Debug, Default)]
pub struct ModelStatistics {
    pub name: String,
    pub version: i64,
    /// Milliseconds since the epoch; 0 before the first inference.
    pub last_inference_ms: u64,
    /// Rows executed.
    pub inference_count: u64,
    /// Batches executed.
    pub execution_count: u64,
    pub inference_stats: InferStatistics,
    pub response_stats: BTreeMap<String, ResponseStatistics>,
    pub batch_stats: Vec<BatchStatistics>,
    pub memory_usage: Vec<MemoryUsage>,
}

/// Durations of the parts of one execution.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ComputeTimes {
    pub(crate) input: Duration,
    pub(crate) infer: Duration,
    pub(crate) output: Duration,
}

/// Running totals of one model version.
#[derive(Debug, Default)]
pub(crate) struct Statistics {
    totals: Mutex<Totals>,
    /// Distributions, if the metrics shall have them.
    latencies: Option<Latencies>,
}

/// A copy of the totals.
#[derive(Clone, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) infer: InferStatistics,
    pub(crate) last_inference_ms: u64,
    pub(crate) inference_count: u64,
    pub(crate) execution_count: u64,
    pub(crate) failures: [u64; 4],
    batches: BTreeMap<u64, BatchStatistics>,
    responses: BTreeMap<u32, ResponseStatistics>,
}

/// What became of a request in an execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Success,
    Failure(FailureReason),
    /// It has run; whether it succeeds is known when its last response is sent.
    Open,
}

/// What is sent for a decoupled request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    Response,
    Error,
    Cancelled,
    /// The end without a further response.
    Empty,
}

/// One request of an execution.
pub(crate) struct Answered {
    pub(crate) ended: Ended,
    /// From the arrival of the request to its answer.
    pub(crate) total: Duration,
    /// From the scheduler to the start of the execution.
    pub(crate) queue: Duration,
    pub(crate) rows: u64,
}

impl Statistics {
    pub(crate) fn new(latencies: Option<Latencies>) -> Self {
        Self { totals: Mutex::default(), latencies }
    }

    /// Counts one execution and the requests it answered.
    pub(crate) fn executed(&self, times: ComputeTimes, answered: &[Answered]) {
        if let Some(latencies) = &self.latencies {
            latencies.note(|observer| note(observer, times, answered));
        }
        let mut totals = self.totals.lock();
        let mut rows = 0;
        for request in answered {
            rows += request.rows;
            match request.ended {
                Ended::Failure(reason) => {
                    totals.infer.fail.add(1, request.total);
                    totals.failures[reason as usize] += 1;
                    continue;
                }
                Ended::Success => totals.infer.success.add(1, request.total),
                Ended::Open => {}
            }
            totals.infer.queue.add(1, request.queue);
            totals.infer.compute_input.add(1, times.input);
            totals.infer.compute_infer.add(1, times.infer);
            totals.infer.compute_output.add(1, times.output);
            totals.inference_count += request.rows;
        }
        if answered.iter().any(|request| !matches!(request.ended, Ended::Failure(_))) {
            totals.execution_count += 1;
            totals.last_inference_ms = now_ms();
            let batch = totals.batches.entry(rows).or_default();
            batch.batch_size = rows;
            batch.compute_input.add(1, times.input);
            batch.compute_infer.add(1, times.infer);
            batch.compute_output.add(1, times.output);
        }
    }

    /// Counts a request that the response cache answered: a success that waited and did not execute.
    pub(crate) fn cache_hit(&self, total: Duration, queue: Duration, lookup: Duration) {
        if let Some(latencies) = &self.latencies {
            latencies.note(|observer| {
                observer.took(Part::Request, total);
                observer.took(Part::Queue, queue);
                observer.took(Part::CacheHit, lookup);
                observer.first_response(total);
            });
        }
        let mut totals = self.totals.lock();
        totals.infer.success.add(1, total);
        totals.infer.queue.add(1, queue);
        totals.infer.cache_hit.add(1, lookup);
    }

    /// Counts a request that the response cache had no answer for, with the time of the lookup and of keeping the
    /// answer. What else became of the request is counted elsewhere.
    pub(crate) fn cache_miss(&self, time: Duration) {
        if let Some(latencies) = &self.latencies {
            latencies.note(|observer| observer.took(Part::CacheMiss, time));
        }
        self.totals.lock().infer.cache_miss.add(1, time);
    }

    /// Counts a request whose last response is sent some time after its execution.
    pub(crate) fn completed(&self, total: Duration) {
        if let Some(latencies) = &self.latencies {
            latencies.note(|observer| observer.took(Part::Request, total));
        }
        self.totals.lock().infer.success.add(1, total);
    }

    /// Counts a request that failed outside of an execution.
    pub(crate) fn failed(&self, reason: FailureReason, total: Duration) {
        let mut totals = self.totals.lock();
        totals.infer.fail.add(1, total);
        totals.failures[reason as usize] += 1;
    }

    /// Counts a request that does not fit the model: in the metrics, but not among the model's own failures, as with
    /// Triton.
    pub(crate) fn refused(&self) {
        self.totals.lock().failures[FailureReason::Other as usize] += 1;
    }

    /// Counts the `index`-th response of a decoupled request. `infer` runs from the start of the execution or the
    /// response before.
    pub(crate) fn responded(&self, index: u32, sent: Sent, infer: Duration) {
        let mut totals = self.totals.lock();
        let response = totals.responses.entry(index).or_default();
        match sent {
            Sent::Response => {
                response.compute_infer.add(1, infer);
                response.compute_output.add(1, Duration::ZERO);
                response.success.add(1, infer);
            }
            Sent::Error => {
                response.compute_infer.add(1, infer);
                response.fail.add(1, infer);
            }
            Sent::Cancelled => response.cancel.add(1, infer),
            Sent::Empty => response.empty_response.add(1, infer),
        }
    }

    /// Notes the first response of a decoupled request, with the time since the request came.
    pub(crate) fn first_response(&self, time: Duration) {
        if let Some(latencies) = &self.latencies {
            latencies.note(|observer| observer.first_response(time));
        }
    }

    pub(crate) fn latencies(&self) -> Option<&Latencies> {
        self.latencies.as_ref()
    }

    pub(crate) fn totals(&self) -> Totals {
        self.totals.lock().clone()
    }
}

/// Notes the requests of an execution that did not fail.
fn note(observer: &mut Observer<'_>, times: ComputeTimes, answered: &[Answered]) {
    for request in answered {
        match request.ended {
            Ended::Failure(_) => continue,
            Ended::Success => {
                observer.took(Part::Request, request.total);
                observer.first_response(request.total);
            }
            Ended::Open => {}
        }
        observer.took(Part::Queue, request.queue);
        observer.took(Part::ComputeInput, times.input);
        observer.took(Part::ComputeInfer, times.infer);
        observer.took(Part::ComputeOutput, times.output);
    }
}

impl Totals {
    pub(crate) fn into_statistics(
        self,
        name: &str,
        version: i64,
        memory: Vec<MemoryUsage>,
    ) -> ModelStatistics {
        ModelStatistics {
            name: name.to_owned(),
            version,
            last_inference_ms: self.last_inference_ms,
            inference_count: self.inference_count,
            execution_count: self.execution_count,
            inference_stats: self.infer,
            response_stats: self
                .responses
                .into_iter()
                .map(|(index, stats)| (index.to_string(), stats))
                .collect(),
            batch_stats: self.batches.into_values().collect(),
            memory_usage: memory,
        }
    }
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_request_is_no_inference() {
        let statistics = Statistics::default();
        let times = ComputeTimes {
            input: Duration::from_nanos(1),
            infer: Duration::from_nanos(2),
            output: Duration::ZERO,
        };
        let answered = |ended, rows| Answered {
            ended,
            total: Duration::from_nanos(10),
            queue: Duration::from_nanos(3),
            rows,
        };
        statistics.executed(times, &[answered(Ended::Success, 4)]);
        let failure = FailureReason::of(&Error::internal("broken"));
        statistics.executed(times, &[answered(Ended::Failure(failure), 2)]);
        statistics.failed(FailureReason::Canceled, Duration::from_nanos(5));
        let totals = statistics.totals();
        assert_eq!((totals.inference_count, totals.execution_count), (4, 1));
        assert_eq!(totals.infer.success, DurationCount { count: 1, ns: 10 });
        assert_eq!(totals.infer.fail, DurationCount { count: 2, ns: 15 });
        assert_eq!(totals.failures, [0, 1, 1, 0]);
        let shown = totals.into_statistics("m", 1, Vec::new());
        assert_eq!(shown.batch_stats.len(), 1);
        assert_eq!(shown.batch_stats[0].batch_size, 4);
    }

    #[test]
    fn a_request_that_goes_on_is_counted_when_it_ends() {
        let statistics = Statistics::default();
        let open = Answered {
            ended: Ended::Open,
            total: Duration::from_nanos(10),
            queue: Duration::from_nanos(3),
            rows: 1,
        };
        statistics.executed(ComputeTimes::default(), &[open]);
        let totals = statistics.totals();
        assert_eq!((totals.inference_count, totals.execution_count, totals.infer.success.count), (1, 1, 0));
        statistics.responded(0, Sent::Response, Duration::from_nanos(1));
        statistics.responded(1, Sent::Cancelled, Duration::from_nanos(2));
        statistics.failed(FailureReason::of(&Error::new(Code::Cancelled, "gone")), Duration::from_nanos(20));
        statistics.completed(Duration::from_nanos(30));
        let shown = statistics.totals().into_statistics("m", 1, Vec::new());
        assert_eq!(shown.inference_stats.success, DurationCount { count: 1, ns: 30 });
        assert_eq!(shown.inference_stats.fail, DurationCount { count: 1, ns: 20 });
        assert_eq!(shown.response_stats["0"].success.count, 1);
        assert_eq!(shown.response_stats["1"].cancel, DurationCount { count: 1, ns: 2 });
        assert_eq!(statistics.totals().failures, [0, 1, 0, 0]);
    }
}
