//! The metric families of the response cache, with Triton's names and help texts.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

use super::local::Usage;
use super::redis::Counters;
use crate::stats::InferStatistics;

type Family = (&'static str, &'static str, fn(&InferStatistics) -> u64);

const MODEL_FAMILIES: [Family; 4] = [
    ("nv_cache_num_hits_per_model", "Number of cache hits per model", |s| s.cache_hit.count),
    ("nv_cache_num_misses_per_model", "Number of cache misses per model", |s| s.cache_miss.count),
    ("nv_cache_hit_duration_per_model", "Total cache hit duration per model, in microseconds", |s| {
        s.cache_hit.ns / 1000
    }),
    ("nv_cache_miss_duration_per_model", "Total cache miss duration per model, in microseconds", |s| {
        s.cache_miss.ns / 1000
    }),
];

/// The families of models that use the cache; `models` gives the labels and the statistics of each.
pub(crate) fn write_models<'a>(
    page: &mut String,
    models: impl Iterator<Item = (&'a str, &'a InferStatistics)> + Clone,
) {
    if models.clone().next().is_none() {
        return;
    }
    for (name, help, value) in MODEL_FAMILIES {
        let _infallible = write!(page, "# HELP {name} {help}\n# TYPE {name} counter\n");
        for (labels, statistics) in models.clone() {
            let _infallible = writeln!(page, "{name}{{{labels}}} {}", value(statistics));
        }
    }
}

/// The gauges of the local cache.
pub(super) fn write_local(page: &mut String, usage: &Usage) {
    let mut gauge = |name: &str, help: &str, value: &dyn std::fmt::Display| {
        let _infallible = write!(page, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}\n");
    };
    let used = if usage.limit == 0 { 0.0 } else { usage.bytes as f64 / usage.limit as f64 };
    gauge("nv_cache_util", "Cache utilization [0.0 - 1.0]", &used);
    gauge("nv_cache_num_entries", "Number of responses stored in response cache", &usage.entries);
    gauge("nv_cache_num_lookups", "Number of cache lookups in response cache", &usage.lookups);
    gauge("nv_cache_num_hits", "Number of cache hits in response cache", &usage.hits);
    gauge("nv_cache_num_misses", "Number of cache misses in response cache", &(usage.lookups - usage.hits));
    gauge("nv_cache_num_evictions", "Number of cache evictions in response cache", &usage.evictions);
    gauge(
        "nv_cache_lookup_duration",
        "Total cache lookup duration (hit and miss), in microseconds",
        &(usage.lookup_ns / 1000),
    );
    gauge(
        "nv_cache_insertion_duration",
        "Total cache insertion duration, in microseconds",
        &(usage.insertion_ns / 1000),
    );
}

/// The families of the Redis cache, which Triton does not have.
pub(super) fn write_redis(page: &mut String, is_down: bool, counters: &Counters) {
    let mut family = |name: &str, kind: &str, help: &str, value: u64| {
        let _infallible = write!(page, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n");
    };
    let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    family("trireme_redis_cache_up", "gauge", "Whether the Redis cache answers", u64::from(!is_down));
    family(
        "trireme_redis_cache_failures_total",
        "counter",
        "Number of times that the Redis cache ceased to answer",
        of(&counters.failures),
    );
    family(
        "trireme_redis_cache_skipped_total",
        "counter",
        "Number of lookups that were misses because the Redis cache did not answer or was too busy",
        of(&counters.skipped),
    );
    family(
        "trireme_redis_cache_stored_total",
        "counter",
        "Number of responses stored in the Redis cache",
        of(&counters.stored),
    );
}
