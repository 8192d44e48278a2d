//! Distributions of latencies for the metrics page: how long until the first response (histogram), and the quantiles of
//! the last minute (summaries). Both are off unless `--metrics-config` asks for them; then each observation is one short
//! lock for an execution and a few additions for a request.
//!
//! *Invariant:* the counts are those of the requests that the counters of [`crate::stats`] count as successes.

mod histogram;
mod summary;

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use self::histogram::Histogram;
use self::summary::{Summary, SummaryView};

const FIRST_RESPONSE: &str = "nv_inference_first_response_histogram_ms";

/// What the metrics keep beside counters (`--metrics-config`).
#[derive(Clone, Debug, PartialEq)]
pub struct LatencyOptions {
    /// `histogram_latencies`
    pub histograms: bool,
    /// `summary_latencies`
    pub summaries: bool,
    /// `summary_quantiles`, each from 0 to 1.
    pub quantiles: Vec<f64>,
}

impl Default for LatencyOptions {
    fn default() -> Self {
        Self { histograms: false, summaries: false, quantiles: vec![0.5, 0.9, 0.95, 0.99, 0.999] }
    }
}

/// A latency of which a summary tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Request,
    Queue,
    ComputeInput,
    ComputeInfer,
    ComputeOutput,
    CacheHit,
    CacheMiss,
}

impl Part {
    const ALL: [Self; 7] = [
        Self::Request,
        Self::Queue,
        Self::ComputeInput,
        Self::ComputeInfer,
        Self::ComputeOutput,
        Self::CacheHit,
        Self::CacheMiss,
    ];

    const fn is_of_cache(self) -> bool {
        matches!(self, Self::CacheHit | Self::CacheMiss)
    }

    /// Name and help text of the family.
    const fn family(self) -> (&'static str, &'static str) {
        match self {
            Self::Request => (
                "nv_inference_request_summary_us",
                "Summary of inference request duration in microseconds (includes cached requests)",
            ),
            Self::Queue => (
                "nv_inference_queue_summary_us",
                "Summary of inference queuing duration in microseconds (includes cached requests)",
            ),
            Self::ComputeInput => (
                "nv_inference_compute_input_summary_us",
                "Summary of compute input duration in microseconds (does not include cached requests)",
            ),
            Self::ComputeInfer => (
                "nv_inference_compute_infer_summary_us",
                "Summary of compute inference duration in microseconds (does not include cached requests)",
            ),
            Self::ComputeOutput => (
                "nv_inference_compute_output_summary_us",
                "Summary of inference compute output duration in microseconds (does not include cached requests)",
            ),
            Self::CacheHit => {
                ("nv_cache_hit_summary_per_model", "Summary of cache hit duration per model, in microseconds")
            }
            Self::CacheMiss => (
                "nv_cache_miss_summary_per_model",
                "Summary of cache miss duration per model, in microseconds",
            ),
        }
    }
}

/// The distributions of one model version.
#[derive(Debug)]
pub(crate) struct Latencies {
    state: Mutex<Collected>,
    quantiles: Vec<f64>,
}

#[derive(Debug)]
struct Collected {
    first_response: Option<Histogram>,
    /// In the order of [`Part::ALL`].
    summaries: Option<[Summary; 7]>,
}

impl Latencies {
    /// `None` if nothing is asked for. `buckets` are those of the model's configuration, by family.
    pub(crate) fn new(options: &LatencyOptions, buckets: &[(String, Vec<f64>)]) -> Option<Self> {
        if !options.histograms && !options.summaries {
            return None;
        }
        let own = buckets.iter().find(|(family, _)| family == FIRST_RESPONSE).map(|(_, bounds)| &**bounds);
        let first_response =
            options.histograms.then(|| Histogram::new(own.unwrap_or(&[100.0, 500.0, 2000.0, 5000.0])));
        let now = Instant::now();
        let summaries = options.summaries.then(|| Part::ALL.map(|_| Summary::new(now)));
        let quantiles = options.quantiles.clone();
        Some(Self { state: Mutex::new(Collected { first_response, summaries }), quantiles })
    }

    /// Notes what `observe` tells.
    pub(crate) fn note(&self, observe: impl FnOnce(&mut Observer<'_>)) {
        observe(&mut Observer { collected: &mut self.state.lock(), now: Instant::now() });
    }

    fn view(&self) -> View {
        let mut state = self.state.lock();
        let now = Instant::now();
        View {
            first_response: state.first_response.clone(),
            summaries: state
                .summaries
                .as_mut()
                .map(|summaries| summaries.each_mut().map(|summary| summary.view(now, &self.quantiles))),
        }
    }
}

/// Takes observations under the lock.
pub(crate) struct Observer<'a> {
    collected: &'a mut Collected,
    now: Instant,
}

impl Observer<'_> {
    /// A part of a request's way that took so long.
    pub(crate) fn took(&mut self, part: Part, time: Duration) {
        if let Some(summaries) = &mut self.collected.summaries
            && let Some(summary) = summaries.get_mut(part as usize)
        {
            summary.observe(self.now, time);
        }
    }

    /// The first response of a request, with the time since the request came.
    pub(crate) fn first_response(&mut self, time: Duration) {
        if let Some(histogram) = &mut self.collected.first_response {
            histogram.observe(time);
        }
    }
}

/// A copy of the distributions, to be printed without the lock.
struct View {
    first_response: Option<Histogram>,
    summaries: Option<[SummaryView; 7]>,
}

/// A model on the page.
pub(crate) struct Row<'a> {
    pub(crate) labels: &'a str,
    /// It uses the response cache.
    pub(crate) cached: bool,
    pub(crate) latencies: &'a Latencies,
}

/// The families of those models that have distributions; nothing if none has.
pub(crate) fn write<'a>(page: &mut String, rows: impl Iterator<Item = Row<'a>>) {
    let rows: Vec<(Row<'_>, View)> = rows
        .map(|row| {
            let view = row.latencies.view();
            (row, view)
        })
        .collect();
    let mut histograms =
        rows.iter().filter_map(|(row, view)| Some((row.labels, view.first_response.as_ref()?))).peekable();
    if histograms.peek().is_some() {
        head(page, FIRST_RESPONSE, "Duration from request to first response in milliseconds", "histogram");
    }
    for (labels, histogram) in histograms {
        histogram.write(page, FIRST_RESPONSE, labels);
    }
    for (at, part) in Part::ALL.into_iter().enumerate() {
        let mut summaries = rows
            .iter()
            .filter(|(row, _)| row.cached || !part.is_of_cache())
            .filter_map(|(row, view)| Some((row.labels, view.summaries.as_ref()?.get(at)?)))
            .peekable();
        let (name, help) = part.family();
        if summaries.peek().is_some() {
            head(page, name, help, "summary");
        }
        for (labels, summary) in summaries {
            summary.write(page, name, labels);
        }
    }
}

fn head(page: &mut String, name: &str, help: &str, kind: &str) {
    let _infallible = write!(page, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: LatencyOptions = LatencyOptions { histograms: true, summaries: true, quantiles: Vec::new() };

    fn page(latencies: &Latencies, cached: bool) -> String {
        let mut page = String::new();
        write(&mut page, [Row { labels: "model=\"m\"", cached, latencies }].into_iter());
        page
    }

    #[test]
    fn what_is_not_asked_for_is_not_kept() {
        assert!(Latencies::new(&LatencyOptions::default(), &[]).is_none());
        let histograms = LatencyOptions { histograms: true, ..LatencyOptions::default() };
        let only = Latencies::new(&histograms, &[]).expect("on");
        only.note(|observer| {
            observer.took(Part::Request, Duration::from_secs(1));
            observer.first_response(Duration::from_secs(1));
        });
        let text = page(&only, true);
        assert!(!text.contains("summary"), "{text}");
        assert!(
            text.contains("nv_inference_first_response_histogram_ms_bucket{model=\"m\",le=\"2000\"} 1\n"),
            "{text}"
        );
    }

    #[test]
    fn families_are_tritons() {
        let latencies = Latencies::new(&ALL, &[]).expect("on");
        latencies.note(|observer| observer.took(Part::Queue, Duration::from_micros(1500)));
        let text = page(&latencies, false);
        assert!(text.contains("# TYPE nv_inference_queue_summary_us summary\n"), "{text}");
        assert!(text.contains("nv_inference_queue_summary_us_sum{model=\"m\"} 1500\n"), "{text}");
        assert!(text.contains("nv_inference_request_summary_us_count{model=\"m\"} 0\n"), "{text}");
        assert!(!text.contains("nv_cache_"), "the model has no cache");
        assert_eq!(page(&latencies, true).matches("# TYPE").count(), 8);
    }

    #[test]
    fn buckets_of_the_configuration_count() {
        let own = [(FIRST_RESPONSE.to_owned(), vec![1.0, 2.5])];
        let latencies = Latencies::new(&ALL, &own).expect("on");
        let text = page(&latencies, false);
        for bound in ["1", "2.5", "+Inf"] {
            assert!(text.contains(&format!("le=\"{bound}\"}} 0\n")), "{text}");
        }
        assert!(!text.contains("le=\"100\""));
    }
}
