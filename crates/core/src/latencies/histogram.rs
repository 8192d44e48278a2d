//! A histogram as Prometheus wants it: cumulative counts up to fixed bounds, over the whole life of the model.

use std::fmt::Write as _;
use std::time::Duration;

/// Bounds in milliseconds.
#[derive(Clone, Debug)]
pub(super) struct Histogram {
    /// Upper bounds, ascending, and the observations up to each that are above the one before.
    buckets: Vec<(f64, u64)>,
    /// Observations above every bound.
    above: u64,
    sum: Duration,
}

impl Histogram {
    /// The bounds ascend, which the rules for configurations see to.
    pub(super) fn new(bounds: &[f64]) -> Self {
        let buckets = bounds.iter().map(|bound| (*bound, 0)).collect();
        Self { buckets, above: 0, sum: Duration::ZERO }
    }

    pub(super) fn observe(&mut self, time: Duration) {
        let ms = time.as_nanos() as f64 / 1e6;
        match self.buckets.iter_mut().find(|(bound, _)| ms <= *bound) {
            Some((_, count)) => *count += 1,
            None => self.above += 1,
        }
        self.sum = self.sum.saturating_add(time);
    }

    pub(super) fn write(&self, page: &mut String, name: &str, labels: &str) {
        let mut count = 0;
        for (bound, more) in &self.buckets {
            count += more;
            let _infallible = writeln!(page, "{name}_bucket{{{labels},le=\"{bound}\"}} {count}");
        }
        count += self.above;
        let sum = self.sum.as_nanos() as f64 / 1e6;
        let _infallible = write!(
            page,
            "{name}_bucket{{{labels},le=\"+Inf\"}} {count}\n{name}_sum{{{labels}}} {sum}\n{name}_count{{{labels}}} {count}\n"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_cumulative_and_bounds_belong_to_their_bucket() {
        let mut histogram = Histogram::new(&[1.0, 10.0]);
        for us in [500, 1000, 1001, 10_000, 10_001] {
            histogram.observe(Duration::from_micros(us));
        }
        let mut page = String::new();
        histogram.write(&mut page, "h", "m=\"x\"");
        let expected = "h_bucket{m=\"x\",le=\"1\"} 2\nh_bucket{m=\"x\",le=\"10\"} 4\nh_bucket{m=\"x\",le=\"+Inf\"} 5\n\
                        h_sum{m=\"x\"} 22.502\nh_count{m=\"x\"} 5\n";
        assert_eq!(page, expected);
    }
}
