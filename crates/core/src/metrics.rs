//! The Prometheus page: Triton's families, with its names, labels and help texts.
//!
//! A page is written from copies of the totals; nothing on the request path knows of metrics.

use std::fmt::Write as _;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::latencies::{self, Row};
use crate::model::ModelVersion;
use crate::stats::{FailureReason, InferStatistics, Totals};

/// What the page needs beside the models.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    cpu: Mutex<Option<CpuTimes>>,
    pub(crate) refused: std::sync::atomic::AtomicU64,
}

/// Switches of the page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Families {
    pub(crate) counter_latencies: bool,
    pub(crate) cpu: bool,
}

struct Series {
    labels: String,
    totals: Totals,
    pending: usize,
    load_seconds: f64,
    cached: bool,
}

impl Metrics {
    /// The text of `/metrics`.
    pub(crate) fn page(&self, models: &[Arc<ModelVersion>], families: Families) -> String {
        let series: Vec<Series> = models.iter().map(Series::of).collect();
        let mut page = String::with_capacity(1024 + series.len() * 1400);
        let counter = "counter";
        write_family(
            &mut page,
            "nv_inference_request_success",
            counter,
            "Number of successful inference requests, all batch sizes",
            &series,
            |s| s.totals.infer.success.count,
        );
        head(
            &mut page,
            "nv_inference_request_failure",
            counter,
            "Number of failed inference requests, all batch sizes",
        );
        for one in &series {
            for reason in FailureReason::ALL {
                let (value, label) = (one.totals.failures[reason as usize], reason.label());
                let _infallible = writeln!(
                    page,
                    "nv_inference_request_failure{{{},reason=\"{label}\"}} {value}",
                    one.labels
                );
            }
        }
        write_family(
            &mut page,
            "nv_inference_count",
            counter,
            "Number of inferences performed (does not include cached requests)",
            &series,
            |s| s.totals.inference_count,
        );
        write_family(
            &mut page,
            "nv_inference_exec_count",
            counter,
            "Number of model executions performed (does not include cached requests)",
            &series,
            |s| s.totals.execution_count,
        );
        if families.counter_latencies {
            for (name, help, of) in LATENCIES {
                write_family(&mut page, name, counter, help, &series, |s| of(&s.totals.infer) / 1000);
            }
            let cached = series.iter().filter(|one| one.cached);
            crate::cache::write_models(&mut page, cached.map(|one| (one.labels.as_str(), &one.totals.infer)));
        }
        let with_latencies = models.iter().zip(&series).filter_map(|(model, one)| {
            let latencies = model.statistics.latencies()?;
            Some(Row { labels: &one.labels, cached: one.cached, latencies })
        });
        latencies::write(&mut page, with_latencies);
        write_family(
            &mut page,
            "nv_inference_pending_request_count",
            "gauge",
            "Instantaneous number of pending requests awaiting execution per-model.",
            &series,
            |s| s.pending as u64,
        );
        head(&mut page, "nv_model_load_duration_secs", "gauge", "Model load time in seconds");
        for one in &series {
            let _infallible =
                writeln!(page, "nv_model_load_duration_secs{{{}}} {}", one.labels, one.load_seconds);
        }
        head(
            &mut page,
            "trireme_refused_requests_total",
            counter,
            "Number of inference requests that were refused before they reached a model: malformed, unknown model",
        );
        let refused = self.refused.load(std::sync::atomic::Ordering::Relaxed);
        let _infallible = writeln!(page, "trireme_refused_requests_total {refused}");
        if families.cpu {
            self.write_cpu(&mut page);
        }
        page
    }

    fn write_cpu(&self, page: &mut String) {
        if let Some(now) = CpuTimes::read() {
            let before = self.cpu.lock().replace(now).unwrap_or_default();
            head(page, "nv_cpu_utilization", "gauge", "CPU utilization rate [0.0 - 1.0]");
            let _infallible = writeln!(page, "nv_cpu_utilization {}", now.utilization_since(before));
        }
        if let Some((total, used)) = memory() {
            head(page, "nv_cpu_memory_total_bytes", "gauge", "CPU total memory (RAM), in bytes");
            let _infallible = writeln!(page, "nv_cpu_memory_total_bytes {total}");
            head(page, "nv_cpu_memory_used_bytes", "gauge", "CPU used memory (RAM), in bytes");
            let _infallible = writeln!(page, "nv_cpu_memory_used_bytes {used}");
        }
    }
}

type Latency = (&'static str, &'static str, fn(&InferStatistics) -> u64);

const LATENCIES: [Latency; 5] = [
    (
        "nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        |s| s.success.ns,
    ),
    (
        "nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        |s| s.queue.ns,
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        |s| s.compute_input.ns,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        |s| s.compute_infer.ns,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        |s| s.compute_output.ns,
    ),
];

impl Series {
    fn of(model: &Arc<ModelVersion>) -> Self {
        let mut labels = format!("model=\"{}\",version=\"{}\"", escaped(model.name()), model.version());
        for (tag, value) in &model.config().metric_tags {
            let _infallible = write!(labels, ",_{tag}=\"{}\"", escaped(value));
        }
        Self {
            labels,
            totals: model.statistics.totals(),
            pending: model.pending(),
            load_seconds: model.load_duration.as_secs_f64(),
            cached: model.cache().is_used(),
        }
    }
}

fn head(page: &mut String, name: &str, kind: &str, help: &str) {
    let _infallible = write!(page, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
}

fn write_family(
    page: &mut String,
    name: &str,
    kind: &str,
    help: &str,
    series: &[Series],
    value: impl Fn(&Series) -> u64,
) {
    head(page, name, kind, help);
    for one in series {
        let _infallible = writeln!(page, "{name}{{{}}} {}", one.labels, value(one));
    }
}

/// A label value: backslash, quote and newline escaped (Prometheus text format).
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Busy and total clock ticks of all cores since boot, from `/proc/stat`.
#[derive(Clone, Copy, Debug, Default)]
struct CpuTimes {
    busy: u64,
    total: u64,
}

impl CpuTimes {
    fn read() -> Option<Self> {
        let text = fs_err::read_to_string("/proc/stat").ok()?;
        let ticks: Vec<u64> = text
            .lines()
            .next()?
            .split_ascii_whitespace()
            .skip(1)
            .map_while(|n| n.parse().ok())
            .take(8)
            .collect();
        let idle = ticks.get(3)? + ticks.get(4)?;
        let total = ticks.iter().sum();
        Some(Self { busy: total - idle, total })
    }

    fn utilization_since(self, before: Self) -> f64 {
        let total = self.total.saturating_sub(before.total);
        if total == 0 { 0.0 } else { self.busy.saturating_sub(before.busy) as f64 / total as f64 }
    }
}

/// Total and used memory of the machine in bytes, from `/proc/meminfo`.
fn memory() -> Option<(u64, u64)> {
    let text = fs_err::read_to_string("/proc/meminfo").ok()?;
    let field = |name: &str| -> Option<u64> {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
    };
    let total = field("MemTotal:")?;
    Some((total, total.saturating_sub(field("MemAvailable:")?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_without_models_is_well_formed() {
        let page = Metrics::default().page(&[], Families { counter_latencies: true, cpu: true });
        assert!(page.contains("# TYPE nv_inference_request_success counter\n"));
        assert!(page.contains("\nnv_cpu_memory_total_bytes "));
        assert!(page.lines().all(|line| line.starts_with('#') || line.split(' ').count() == 2));
    }

    #[test]
    fn label_values_are_escaped() {
        assert_eq!(escaped("a\"b\\c\nd"), "a\\\"b\\\\c\\nd");
    }
}
