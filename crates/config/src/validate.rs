//! Triton's rules for a configuration, after completion and defaults. All of them are checked, in Triton's order,
//! so that the first error is the one Triton stops at.
//!
//! Source: `ValidateModelConfig`, `ValidateModelIOConfig`, `ValidateInstanceGroup` in Triton's
//! `model_config_utils.cc`. Rules of our own bound counts that would exhaust the machine.

mod ensemble;
mod instance_group;
mod scheduling;
mod sequence_advice;
mod tensor;
mod warmup;
mod warnings;

use trireme_proto::inference::model_metrics::metric_control::MetricOptions;
use trireme_proto::inference::{ModelConfig, ModelMetrics};

use crate::error::{ConfigError, ConfigErrors, Note};
use crate::normalize::MachineFacts;

pub(crate) const TENSORRT_PLATFORM: &str = "tensorrt_plan";

/// Checks a configuration that is complete and has its defaults. Returns what is valid but does not do what it
/// seems to ask for.
///
/// # Errors
/// Every rule that is broken, with the path of the member.
pub fn validate(config: &ModelConfig, facts: &MachineFacts) -> Result<Vec<Note>, ConfigErrors> {
    let mut checker = Checker { config, errors: Vec::new() };
    checker.identity();
    scheduling::check(&mut checker);
    ensemble::check(&mut checker);
    checker.transaction_policy();
    if let Some(metrics) = &config.model_metrics {
        checker.metrics(metrics);
    }
    tensor::check(&mut checker);
    instance_group::check(&mut checker, facts);
    warmup::check(&mut checker);
    let mut errors = checker.errors;
    crate::schema::name_subjects(&crate::schema::dynamic(config), &mut errors);
    ConfigErrors::check(errors, warnings::of(config, facts))
}

/// The errors found so far.
pub(crate) struct Checker<'a> {
    pub(crate) config: &'a ModelConfig,
    errors: Vec<ConfigError>,
}

/// Errors that one configuration can have; more of them help nobody.
const MAX_ERRORS: usize = 100;

impl Checker<'_> {
    fn push(&mut self, error: ConfigError) {
        if self.errors.len() < MAX_ERRORS {
            self.errors.push(error);
        }
    }

    pub(crate) fn fail(&mut self, path: impl Into<String>, reason: impl Into<String>) {
        self.push(ConfigError::new(reason).at_path(path));
    }

    pub(crate) fn fail_with_hint(
        &mut self,
        path: impl Into<String>,
        reason: impl Into<String>,
        hint: impl Into<String>,
    ) {
        self.push(ConfigError::new(reason).at_path(path).with_hint(hint));
    }

    /// Name, backend and platform, batch size, version policy.
    fn identity(&mut self) {
        let config = self.config;
        let name = &config.name;
        if name.is_empty() {
            self.fail("name", "model configuration must specify 'name'");
        }
        if config.backend.is_empty() {
            if config.platform != "ensemble" {
                let hint = "write `backend: \"...\"`";
                self.fail_with_hint(
                    "backend",
                    format!("unexpected platform type '{}' for {name}", config.platform),
                    hint,
                );
            }
        } else if config.platform == "ensemble" {
            let reason =
                format!("Ensemble model '{name}' must have platform type 'ensemble' and empty backend type");
            self.fail_with_hint("backend", reason, "remove `backend`");
        } else if let Some(platforms) = platforms_of(&config.backend)
            && !platforms.contains(&config.platform.as_str())
        {
            let reason = format!(
                "unexpected 'platform' and 'backend' pair, got:{}, {}",
                config.platform, config.backend
            );
            let hint = format!("remove `platform`, or write `platform: \"{}\"`", platforms.join("\" or \""));
            self.fail_with_hint("platform", reason, hint);
        }
        if config.max_batch_size < 0 {
            let reason = format!("'max_batch_size' must be non-negative value for {name}");
            self.fail_with_hint("max_batch_size", reason, "0 stands for a model without a batch dimension");
        }
        if config.version_policy.as_ref().is_none_or(|policy| policy.policy_choice.is_none()) {
            let reason = format!("must specify 'version policy' for {name}");
            let hint = "write `version_policy { latest { num_versions: 1 } }`, or leave it out";
            self.fail_with_hint("version_policy", reason, hint);
        }
    }

    fn transaction_policy(&mut self) {
        let config = self.config;
        let decoupled = config.model_transaction_policy.as_ref().is_some_and(|policy| policy.decoupled);
        if decoupled && self.response_cache() {
            let reason = format!(
                "Response Cache does not currently support model {} with 'decoupled' transaction policy. Please disable \
                 the response cache.",
                config.name
            );
            self.fail("response_cache", reason);
        }
    }

    pub(crate) fn response_cache(&self) -> bool {
        self.config.response_cache.as_ref().is_some_and(|cache| cache.enable)
    }

    fn metrics(&mut self, metrics: &ModelMetrics) {
        for (i, control) in metrics.metric_control.iter().enumerate() {
            let path = format!("model_metrics.metric_control[{i}]");
            match &control.metric_identifier {
                None => self.fail(path.clone(), "metric control must specify 'metric_identifier'"),
                Some(identifier) if identifier.family.is_empty() => {
                    self.fail(
                        format!("{path}.metric_identifier"),
                        "metric identifier must specify non-empty 'family'",
                    );
                }
                Some(_) => {}
            }
            match &control.metric_options {
                None => self.fail(path, "metric control must specify 'histogram_options'"),
                Some(MetricOptions::HistogramOptions(histogram)) if histogram.buckets.is_empty() => {
                    self.fail(
                        format!("{path}.histogram_options"),
                        "histogram options must specify non-empty 'buckets'",
                    );
                }
                Some(MetricOptions::HistogramOptions(histogram)) => {
                    let ascend = histogram.buckets.is_sorted_by(|one, next| one < next);
                    if !ascend || histogram.buckets.iter().any(|bound| bound.is_nan()) {
                        let given = &histogram.buckets;
                        self.fail_with_hint(
                            format!("{path}.histogram_options.buckets"),
                            format!("bucket boundaries must be strictly sorted, got {given:?}"),
                            "write each upper bound once, the smallest first",
                        );
                    }
                }
            }
        }
    }
}

/// Platforms of a backend that Triton knows; `None` for backends that may have any.
fn platforms_of(backend: &str) -> Option<&'static [&'static str]> {
    Some(match backend {
        "tensorflow" => &["tensorflow_savedmodel", "tensorflow_graphdef"],
        "tensorrt" => &["tensorrt_plan"],
        "onnxruntime" => &["onnxruntime_onnx"],
        "pytorch" => &["pytorch_libtorch", "torch_aoti"],
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
