//! `--metrics-config`: which latencies the metrics show, and in which form.

use anyhow::{Result, bail};
use trireme_core::LatencyOptions;

use super::value;
use crate::flags::Flags;

/// Latencies in the metrics.
pub(super) struct Kept {
    pub(super) counters: bool,
    pub(super) latencies: LatencyOptions,
}

/// Reads every `--metrics-config`, the last of a key counts. Without the metrics port nothing but counters is kept,
/// since nobody could read it.
///
/// # Errors
/// A text that is not KEY=VALUE, a key that is unknown, or a value that cannot be one of the key.
pub(super) fn kept(flags: &Flags, served: bool) -> Result<Kept> {
    let mut kept = Kept { counters: true, latencies: LatencyOptions::default() };
    for text in flags.all("metrics-config") {
        let Some((key, value)) = text.split_once('=') else {
            bail!("--metrics-config expects KEY=VALUE, got '{text}'");
        };
        let switch = match key {
            "counter_latencies" => &mut kept.counters,
            "histogram_latencies" => &mut kept.latencies.histograms,
            "summary_latencies" => &mut kept.latencies.summaries,
            "summary_quantiles" => {
                kept.latencies.quantiles = quantiles(value)?;
                continue;
            }
            _ => bail!(
                "--metrics-config knows counter_latencies, histogram_latencies, summary_latencies and \
                 summary_quantiles, got '{key}'"
            ),
        };
        let Some(on) = value::parse_boolean(value) else {
            bail!("--metrics-config {key} expects true or false, got '{value}'");
        };
        *switch = on;
    }
    if !served {
        (kept.latencies.histograms, kept.latencies.summaries) = (false, false);
    }
    Ok(kept)
}

/// `0.5:0.05,0.9:0.01`: quantiles, each with the error that is allowed. The server's are always closer than any that is
/// worth allowing, so that the errors are checked and set aside.
fn quantiles(text: &str) -> Result<Vec<f64>> {
    let number = |text: &str| text.trim().parse::<f64>().ok().filter(|number| (0.0..=1.0).contains(number));
    let mut quantiles = Vec::new();
    for pair in text.split(',') {
        let read =
            pair.split_once(':').and_then(|(quantile, error)| Some((number(quantile)?, number(error)?)));
        let Some((quantile, _error)) = read else {
            bail!(
                "--metrics-config summary_quantiles expects QUANTILE:ERROR[,QUANTILE:ERROR...] with numbers from 0 to 1, \
                 as 0.5:0.05,0.99:0.001, got '{text}'"
            );
        };
        if !quantiles.contains(&quantile) {
            quantiles.push(quantile);
        }
    }
    Ok(quantiles)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_quantiles() {
        assert_eq!(quantiles("0.5:0.05, 0.99:0.001,0.5:0.1").expect("two"), [0.5, 0.99]);
        for bad in ["", "0.5", "0.5:", "1.1:0.1", "0.5:-1", "a:b", "0.5:0.1,", "nan:0.1"] {
            let error = quantiles(bad).expect_err(bad);
            assert!(error.to_string().contains("QUANTILE:ERROR"), "{error}");
        }
    }
}
