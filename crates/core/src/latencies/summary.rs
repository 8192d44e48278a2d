//! A summary as Prometheus wants it: quantiles of the last minute, count and sum over the whole life of the model.
//!
//! The minute is kept in five ages of twelve seconds; the oldest is forgotten as a new one begins, so that a quantile
//! looks back 48 to 60 seconds, as in Triton. Within that window no observation is left out; what a quantile gives is
//! within 1 % of an observed value.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

const AGES: usize = 5;
const AGE: Duration = Duration::from_secs(12);
/// Two decimal digits of every value are kept: errors stay below 1 %.
const DIGITS: u8 = 2;

/// Values in nanoseconds.
#[derive(Debug)]
pub(super) struct Summary {
    /// Empty until something is observed.
    ages: [Option<Histogram<u32>>; AGES],
    current: usize,
    /// When the current age began.
    since: Instant,
    count: u64,
    sum: Duration,
}

impl Summary {
    pub(super) fn new(now: Instant) -> Self {
        Self { ages: [const { None }; AGES], current: 0, since: now, count: 0, sum: Duration::ZERO }
    }

    pub(super) fn observe(&mut self, now: Instant, time: Duration) {
        self.turn(now);
        self.count += 1;
        self.sum = self.sum.saturating_add(time);
        let Some(age) = self.ages.get_mut(self.current) else { return };
        if age.is_none() {
            // Fails only for a number of digits that the library does not know.
            *age = Histogram::new(DIGITS).ok();
        }
        if let Some(age) = age {
            // It grows with its largest value, up to what 64 bits hold.
            let _ = age.record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).min(MAX_NS));
        }
    }

    /// Forgets the ages that are over.
    fn turn(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.since).as_nanos() / AGE.as_nanos();
        let passed = u32::try_from(passed).unwrap_or(u32::MAX);
        if passed == 0 {
            return;
        }
        for _ in (0..passed).take(AGES) {
            self.current = (self.current + 1) % AGES;
            if let Some(Some(age)) = self.ages.get_mut(self.current) {
                age.reset();
            }
        }
        self.since =
            self.since.checked_add(AGE.saturating_mul(passed)).filter(|since| *since <= now).unwrap_or(now);
    }

    pub(super) fn view(&mut self, now: Instant, quantiles: &[f64]) -> SummaryView {
        self.turn(now);
        let mut window: Option<Histogram<u32>> = None;
        for age in self.ages.iter().flatten().filter(|age| !age.is_empty()) {
            match &mut window {
                None => window = Some(age.clone()),
                // It grows to hold the larger values of the other.
                Some(window) => _ = window.add(age),
            }
        }
        let value = |quantile: &f64| {
            let ns = window.as_ref().map(|window| window.value_at_quantile(*quantile).min(window.max()));
            (*quantile, ns.map_or(f64::NAN, |ns| ns as f64 / 1000.0))
        };
        SummaryView { quantiles: quantiles.iter().map(value).collect(), count: self.count, sum: self.sum }
    }
}

/// Longest time that is told apart from longer ones: an hour.
const MAX_NS: u64 = 3_600_000_000_000;

/// What is printed of a summary.
pub(super) struct SummaryView {
    /// Each with its value in microseconds; not a number if nothing was observed.
    quantiles: Vec<(f64, f64)>,
    count: u64,
    sum: Duration,
}

impl SummaryView {
    pub(super) fn write(&self, page: &mut String, name: &str, labels: &str) {
        let (count, sum) = (self.count, self.sum.as_nanos() as f64 / 1000.0);
        let _infallible = write!(page, "{name}_count{{{labels}}} {count}\n{name}_sum{{{labels}}} {sum}\n");
        for (quantile, value) in &self.quantiles {
            let _infallible = writeln!(page, "{name}{{{labels},quantile=\"{quantile}\"}} {value}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUANTILES: [f64; 3] = [0.0, 0.5, 0.99];

    fn values(summary: &mut Summary, now: Instant) -> Vec<f64> {
        summary.view(now, &QUANTILES).quantiles.into_iter().map(|(_, value)| value).collect()
    }

    #[test]
    fn quantiles_are_within_a_hundredth() {
        let begin = Instant::now();
        let mut summary = Summary::new(begin);
        assert!(values(&mut summary, begin).iter().all(|value| value.is_nan()));
        for us in 1..=10_000 {
            // Spread over the ages of the window.
            summary.observe(begin + Duration::from_millis(us * 5), Duration::from_micros(us));
        }
        let found = values(&mut summary, begin + Duration::from_secs(55));
        for (value, expected) in found.into_iter().zip([1.0, 5000.0, 9900.0]) {
            assert!((value - expected).abs() <= expected * 0.01, "{value} for {expected}");
        }
        let mut page = String::new();
        summary.view(begin, &[0.999]).write(&mut page, "s", "m=\"x\"");
        assert!(
            page.starts_with(
                "s_count{m=\"x\"} 10000\ns_sum{m=\"x\"} 50005000\ns{m=\"x\",quantile=\"0.999\"} "
            ),
            "{page}"
        );
    }

    #[test]
    fn what_is_older_than_a_minute_is_forgotten() {
        let begin = Instant::now();
        let mut summary = Summary::new(begin);
        summary.observe(begin, Duration::from_millis(500));
        summary.observe(begin + Duration::from_secs(30), Duration::from_millis(1));
        let later = |seconds| begin + Duration::from_secs(seconds);
        assert!(values(&mut summary, later(59))[2] > 490_000.0);
        assert!(values(&mut summary, later(60))[2] < 1_010.0, "the first is gone");
        assert!(values(&mut summary, later(100))[2].is_nan());
        summary.observe(later(10_000_000), Duration::ZERO);
        assert_eq!(values(&mut summary, later(10_000_000))[2], 0.0);
        assert_eq!(summary.count, 3, "count and sum are never forgotten");
    }
}
