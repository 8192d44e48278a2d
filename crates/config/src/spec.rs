//! [`ModelSpec`]: a validated configuration as the server uses it, with enums in place of oneofs and numbers, and
//! no field that may be absent by accident.

mod rate_limiter;
mod warmup;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use trireme_proto::inference::model_config::SchedulingChoice;
use trireme_proto::inference::model_version_policy::PolicyChoice;
use trireme_proto::inference::{
    self, ModelConfig, ModelDynamicBatching, ModelEnsembling, ModelQueuePolicy, ModelSequenceBatching,
    model_input, model_instance_group, model_optimization_policy, model_queue_policy,
};
use trireme_types::{DataType, Shape, TensorFormat, TensorSpec};

pub use self::rate_limiter::{RateLimiterSpec, ResourceNeed};
pub use self::warmup::{WarmupData, WarmupInput, WarmupSample};
use crate::error::{ConfigError, ConfigErrors};

/// What the server needs to know of a model to schedule and check requests.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    pub name: Arc<str>,
    /// Name of the engine; empty for ensembles.
    pub backend: String,
    /// Legacy selector, as `onnxruntime_onnx`; may be empty.
    pub platform: String,
    /// `runtime`: another library or Python environment for the backend; may be empty.
    pub runtime: String,
    /// 0: no batch dimension. Otherwise every tensor has one in front of its `dims`.
    pub max_batch_size: usize,
    pub inputs: Vec<TensorSpec>,
    pub outputs: Vec<TensorSpec>,
    pub version_policy: VersionPolicy,
    pub scheduling: Scheduling,
    pub instance_groups: Vec<InstanceGroup>,
    /// `parameters`, the `string_value` of each.
    pub parameters: BTreeMap<String, String>,
    /// Model file in the version directory; empty if the backend's default is meant.
    pub default_model_filename: String,
    /// File for a GPU compute capability, as `8.0`.
    pub cc_model_filenames: BTreeMap<String, String>,
    /// `model_transaction_policy.decoupled`: a request may have any number of responses.
    pub decoupled: bool,
    /// `response_cache.enable`
    pub response_cache: bool,
    /// `optimization.graph.level`, if given.
    pub graph_level: Option<i32>,
    /// `optimization.priority`
    pub priority: ModelPriority,
    pub input_pinned_memory: bool,
    pub output_pinned_memory: bool,
    /// Libraries with custom operators.
    pub op_libraries: Vec<String>,
    /// Batches that every instance runs before the version is ready.
    pub warmup: Vec<WarmupSample>,
    /// Labels that every metric of the model gets.
    pub metric_tags: BTreeMap<String, String>,
    /// Histogram buckets by metric family.
    pub metric_buckets: Vec<(String, Vec<f64>)>,
    /// Tensors that the server computes from a ragged batch.
    pub batch_inputs: Vec<inference::BatchInput>,
    pub batch_outputs: Vec<inference::BatchOutput>,
}

/// Which versions of a model are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VersionPolicy {
    /// The so many highest.
    Latest(usize),
    All,
    /// These.
    Specific(Vec<i64>),
}

/// How requests reach the instances.
#[derive(Clone, Debug, PartialEq)]
pub enum Scheduling {
    /// Each request on its own.
    Default,
    /// Requests are joined to batches.
    Dynamic(DynamicBatching),
    Sequence(ModelSequenceBatching),
    Ensemble(ModelEnsembling),
}

/// `dynamic_batching`
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DynamicBatching {
    /// Ascending, without repeats, each 1 to `max_batch_size`.
    pub preferred_batch_sizes: Vec<usize>,
    /// How long a request may wait for a batch to fill.
    pub max_queue_delay: Duration,
    pub preserve_ordering: bool,
    /// Number of levels; 0 if priorities are not used. Level 1 comes first.
    pub priority_levels: u64,
    /// Level of requests that name none.
    pub default_priority_level: u64,
    pub default_queue_policy: QueuePolicy,
    /// Policies of single levels.
    pub priority_queue_policies: BTreeMap<u64, QueuePolicy>,
}

/// What happens to requests that wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueuePolicy {
    pub timeout_action: TimeoutAction,
    /// Longest wait; `None` is no limit.
    pub default_timeout: Option<Duration>,
    /// A request may ask for a shorter wait.
    pub allow_timeout_override: bool,
    /// Requests that may wait; `None` is no limit.
    pub max_queue_size: Option<usize>,
}

/// What happens to a request that has waited too long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TimeoutAction {
    /// It fails.
    #[default]
    Reject,
    /// It goes behind the requests that have not waited too long.
    Delay,
}

/// A group of equal instances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceGroup {
    pub name: String,
    pub kind: InstanceKind,
    /// Instances, for each GPU in `gpus` if the kind is GPU; at least 1.
    pub count: usize,
    pub gpus: Vec<i32>,
    /// TensorRT optimisation profiles.
    pub profiles: Vec<String>,
    /// Instances that get no requests from the scheduler.
    pub passive: bool,
    /// Name of the `--host-policy` that the instances run under; empty is that of the kind.
    pub host_policy: String,
    pub rate_limiter: RateLimiterSpec,
}

/// Where the instances of a group run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceKind {
    /// Not decided yet; [`crate::normalize`] decides.
    Auto,
    Gpu,
    Cpu,
    /// The model places itself.
    Model,
}

/// `optimization.priority`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ModelPriority {
    #[default]
    Default,
    Max,
    Min,
}

impl ModelSpec {
    /// Takes over a configuration that [`crate::validate`] has passed.
    ///
    /// # Errors
    /// A tensor without a data type or a negative size: the configuration was not validated.
    pub fn from_config(config: &ModelConfig) -> Result<Self, ConfigErrors> {
        let optimization = config.optimization.as_ref();
        let pinned =
            |buffer: Option<&model_optimization_policy::PinnedMemoryBuffer>| buffer.is_none_or(|b| b.enable);
        let max_batch_size = usize::try_from(config.max_batch_size).map_err(|_| {
            let reason = format!("'max_batch_size' must be non-negative value for {}", config.name);
            ConfigErrors::from(ConfigError::new(reason).at_path("max_batch_size"))
        })?;
        Ok(Self {
            name: Arc::from(config.name.as_str()),
            backend: config.backend.clone(),
            platform: config.platform.clone(),
            runtime: config.runtime.clone(),
            max_batch_size,
            inputs: config
                .input
                .iter()
                .enumerate()
                .map(|(i, io)| input_spec(io, i))
                .collect::<Result<_, _>>()?,
            outputs: config
                .output
                .iter()
                .enumerate()
                .map(|(i, io)| output_spec(io, i))
                .collect::<Result<_, _>>()?,
            version_policy: VersionPolicy::of(config),
            scheduling: Scheduling::of(config),
            instance_groups: config.instance_group.iter().map(InstanceGroup::of).collect(),
            parameters: config.parameters.iter().map(|(k, v)| (k.clone(), v.string_value.clone())).collect(),
            default_model_filename: config.default_model_filename.clone(),
            cc_model_filenames: config.cc_model_filenames.clone().into_iter().collect(),
            decoupled: config.model_transaction_policy.as_ref().is_some_and(|policy| policy.decoupled),
            response_cache: config.response_cache.as_ref().is_some_and(|cache| cache.enable),
            graph_level: optimization.and_then(|o| o.graph.as_ref()).map(|graph| graph.level),
            priority: optimization.map_or(ModelPriority::Default, |o| ModelPriority::of(o.priority())),
            input_pinned_memory: pinned(optimization.and_then(|o| o.input_pinned_memory.as_ref())),
            output_pinned_memory: pinned(optimization.and_then(|o| o.output_pinned_memory.as_ref())),
            op_libraries: config
                .model_operations
                .iter()
                .flat_map(|o| o.op_library_filename.clone())
                .collect(),
            warmup: config
                .model_warmup
                .iter()
                .enumerate()
                .map(|(i, sample)| WarmupSample::of(sample, i))
                .collect::<Result<_, _>>()?,
            metric_tags: config.metric_tags.clone().into_iter().collect(),
            metric_buckets: metric_buckets(config),
            batch_inputs: config.batch_input.clone(),
            batch_outputs: config.batch_output.clone(),
        })
    }
}

impl ModelSpec {
    /// Instances that get requests: those of groups that are not passive, for each GPU of a GPU group.
    pub fn instance_count(&self) -> usize {
        let working = self.instance_groups.iter().filter(|group| !group.passive);
        let instances = working.map(|group| {
            let devices = if group.kind == InstanceKind::Gpu { group.gpus.len().max(1) } else { 1 };
            group.count.saturating_mul(devices)
        });
        instances.fold(0, usize::saturating_add)
    }
}

impl VersionPolicy {
    /// The policy of a configuration; without one, the highest version.
    pub fn of(config: &ModelConfig) -> Self {
        match config.version_policy.as_ref().and_then(|policy| policy.policy_choice.as_ref()) {
            Some(PolicyChoice::All(_)) => Self::All,
            Some(PolicyChoice::Specific(specific)) => Self::Specific(specific.versions.clone()),
            Some(PolicyChoice::Latest(latest)) => {
                Self::Latest(usize::try_from(latest.num_versions).unwrap_or(usize::MAX))
            }
            None => Self::Latest(1),
        }
    }
}

impl Scheduling {
    /// The scheduling choice of a configuration.
    pub fn of(config: &ModelConfig) -> Self {
        match &config.scheduling_choice {
            None => Self::Default,
            Some(SchedulingChoice::DynamicBatching(batching)) => Self::Dynamic(DynamicBatching::of(batching)),
            Some(SchedulingChoice::SequenceBatching(batching)) => Self::Sequence(batching.clone()),
            Some(SchedulingChoice::EnsembleScheduling(ensemble)) => Self::Ensemble(ensemble.clone()),
        }
    }
}

impl DynamicBatching {
    fn of(batching: &ModelDynamicBatching) -> Self {
        let mut sizes: Vec<usize> =
            batching.preferred_batch_size.iter().filter_map(|&size| usize::try_from(size).ok()).collect();
        sizes.sort_unstable();
        sizes.dedup();
        Self {
            preferred_batch_sizes: sizes,
            max_queue_delay: Duration::from_micros(batching.max_queue_delay_microseconds),
            preserve_ordering: batching.preserve_ordering,
            priority_levels: batching.priority_levels,
            default_priority_level: batching.default_priority_level,
            default_queue_policy: batching
                .default_queue_policy
                .as_ref()
                .map(QueuePolicy::of)
                .unwrap_or_default(),
            priority_queue_policies: batching
                .priority_queue_policy
                .iter()
                .map(|(level, policy)| (*level, QueuePolicy::of(policy)))
                .collect(),
        }
    }

    /// Policy of a priority level.
    pub fn queue_policy(&self, level: u64) -> QueuePolicy {
        self.priority_queue_policies.get(&level).copied().unwrap_or(self.default_queue_policy)
    }
}

impl QueuePolicy {
    fn of(policy: &ModelQueuePolicy) -> Self {
        let timeout = policy.default_timeout_microseconds;
        let size = policy.max_queue_size;
        Self {
            timeout_action: match policy.timeout_action() {
                model_queue_policy::TimeoutAction::Reject => TimeoutAction::Reject,
                model_queue_policy::TimeoutAction::Delay => TimeoutAction::Delay,
            },
            default_timeout: (timeout > 0).then(|| Duration::from_micros(timeout)),
            allow_timeout_override: policy.allow_timeout_override,
            max_queue_size: (size > 0).then(|| usize::try_from(size).unwrap_or(usize::MAX)),
        }
    }
}

impl InstanceGroup {
    /// A group as it is written, its defaults filled in or not.
    pub fn of(group: &inference::ModelInstanceGroup) -> Self {
        Self {
            name: group.name.clone(),
            kind: match group.kind() {
                model_instance_group::Kind::Auto => InstanceKind::Auto,
                model_instance_group::Kind::Gpu => InstanceKind::Gpu,
                model_instance_group::Kind::Cpu => InstanceKind::Cpu,
                model_instance_group::Kind::Model => InstanceKind::Model,
            },
            count: usize::try_from(group.count).unwrap_or(0).max(1),
            gpus: group.gpus.clone(),
            profiles: group.profile.clone(),
            passive: group.passive,
            host_policy: group.host_policy.clone(),
            rate_limiter: group.rate_limiter.as_ref().map(RateLimiterSpec::of).unwrap_or_default(),
        }
    }
}

impl ModelPriority {
    fn of(priority: model_optimization_policy::ModelPriority) -> Self {
        match priority {
            model_optimization_policy::ModelPriority::PriorityDefault => Self::Default,
            model_optimization_policy::ModelPriority::PriorityMax => Self::Max,
            model_optimization_policy::ModelPriority::PriorityMin => Self::Min,
        }
    }
}

fn input_spec(io: &inference::ModelInput, index: usize) -> Result<TensorSpec, ConfigErrors> {
    Ok(TensorSpec {
        name: Arc::from(io.name.as_str()),
        data_type: data_type(io.data_type, "input", &io.name, index)?,
        dims: Shape::new(&io.dims),
        reshape: io.reshape.as_ref().map(|reshape| Shape::new(&reshape.shape)),
        format: match io.format() {
            model_input::Format::None => TensorFormat::None,
            model_input::Format::Nhwc => TensorFormat::Nhwc,
            model_input::Format::Nchw => TensorFormat::Nchw,
        },
        optional: io.optional,
        ragged: io.allow_ragged_batch,
        shape_tensor: io.is_shape_tensor,
        label_filename: None,
    })
}

fn output_spec(io: &inference::ModelOutput, index: usize) -> Result<TensorSpec, ConfigErrors> {
    Ok(TensorSpec {
        name: Arc::from(io.name.as_str()),
        data_type: data_type(io.data_type, "output", &io.name, index)?,
        dims: Shape::new(&io.dims),
        reshape: io.reshape.as_ref().map(|reshape| Shape::new(&reshape.shape)),
        format: TensorFormat::None,
        optional: false,
        ragged: false,
        shape_tensor: io.is_shape_tensor,
        label_filename: Some(io.label_filename.clone()).filter(|file| !file.is_empty()),
    })
}

fn data_type(number: i32, side: &str, name: &str, index: usize) -> Result<DataType, ConfigErrors> {
    DataType::from_config_number(number).ok_or_else(|| {
        let error = ConfigError::new(format!("model {side} '{name}' must specify 'data_type'"));
        error.at_path(format!("{side}[{index}].data_type")).into()
    })
}

fn metric_buckets(config: &ModelConfig) -> Vec<(String, Vec<f64>)> {
    use trireme_proto::inference::model_metrics::metric_control::MetricOptions;
    let controls = config.model_metrics.iter().flat_map(|metrics| &metrics.metric_control);
    controls
        .filter_map(|control| {
            let MetricOptions::HistogramOptions(histogram) = control.metric_options.as_ref()?;
            Some((control.metric_identifier.as_ref()?.family.clone(), histogram.buckets.clone()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse_pbtxt;

    #[test]
    fn takes_over_what_the_scheduler_needs() {
        let text = "name: 'm' backend: 'b' max_batch_size: 8
            input { name: 'X' data_type: TYPE_FP16 dims: [ 1 ] reshape { } format: FORMAT_NCHW allow_ragged_batch: true }
            output { name: 'Y' data_type: TYPE_STRING dims: [ -1 ] label_filename: 'labels.txt' }
            version_policy { specific { versions: [ 3, 1 ] } }
            dynamic_batching { preferred_batch_size: [ 8, 4, 8 ] max_queue_delay_microseconds: 100 priority_levels: 2
              default_priority_level: 1 default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5 }
              priority_queue_policy { key: 2 value { max_queue_size: 3 } } }
            instance_group { name: 'g' kind: KIND_CPU count: 2 rate_limiter { resources { name: 'R' count: 3 } } }
            model_warmup { name: 'w' batch_size: 2 inputs { key: 'X' value { data_type: TYPE_FP16 dims: 1 zero_data: true } } }
            parameters { key: 'k' value { string_value: 'v' } } optimization { graph { level: -1 } }
            response_cache { enable: true } model_transaction_policy { decoupled: true }";
        let spec = ModelSpec::from_config(&parse_pbtxt(text.as_bytes(), "c").unwrap().config).unwrap();
        assert_eq!(spec.inputs[0].reshape, Some(Shape::new(&[])));
        assert_eq!(
            (spec.inputs[0].data_type, spec.inputs[0].format, spec.inputs[0].ragged),
            (DataType::Fp16, TensorFormat::Nchw, true)
        );
        assert_eq!(spec.outputs[0].label_filename.as_deref(), Some("labels.txt"));
        assert_eq!(spec.version_policy, VersionPolicy::Specific(vec![3, 1]));
        let Scheduling::Dynamic(batching) = &spec.scheduling else { panic!("{:?}", spec.scheduling) };
        assert_eq!(batching.preferred_batch_sizes, [4, 8]);
        assert_eq!(batching.max_queue_delay, Duration::from_micros(100));
        assert_eq!(batching.queue_policy(1).timeout_action, TimeoutAction::Delay);
        assert_eq!(batching.queue_policy(2).max_queue_size, Some(3));
        assert_eq!(batching.queue_policy(2).default_timeout, None);
        assert_eq!(spec.instance_groups[0].count, 2);
        let limiter = &spec.instance_groups[0].rate_limiter;
        assert_eq!((limiter.resources[0].count, limiter.priority), (3, 1));
        assert_eq!((spec.warmup[0].batch_size, spec.warmup[0].count), (2, 1));
        assert_eq!(spec.warmup[0].inputs[0].data, WarmupData::Zero);
        assert_eq!(spec.graph_level, Some(-1));
        assert!(spec.decoupled && spec.response_cache && spec.input_pinned_memory);
        assert_eq!(spec.parameters["k"], "v");
    }

    #[test]
    fn a_tensor_without_a_type_is_refused() {
        let config = parse_pbtxt(b"name: 'm' output { name: 'Y' }", "c").unwrap().config;
        let errors = ModelSpec::from_config(&config).unwrap_err();
        assert_eq!(errors.first().path(), Some("output[0].data_type"));
    }
}
