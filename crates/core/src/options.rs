//! What a server is asked to be, after the command line has been understood.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use trireme_backend::BackendSettings;

use crate::cache::CacheSettings;
use crate::host_policy::HostPolicy;
use crate::latencies::LatencyOptions;
use crate::log_settings::LogControl;
use crate::rate_limiter::RateLimitResource;
use crate::shm::SharedMemorySettings;

/// When models are loaded and unloaded (`--model-control-mode`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ModelControlMode {
    /// All models at start; none later.
    #[default]
    None,
    /// All models at start; the repository is looked at again and again.
    Poll,
    /// Only models asked for, at start or over the repository extension.
    Explicit,
}

impl ModelControlMode {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "MODE_NONE",
            Self::Poll => "MODE_POLL",
            Self::Explicit => "MODE_EXPLICIT",
        }
    }
}

/// A model file served without a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SingleModel {
    pub name: String,
    pub path: PathBuf,
}

/// One `--backend-config`; without a backend it is for all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendSetting {
    pub backend: Option<String>,
    pub key: String,
    pub value: String,
}

/// Everything that shapes a [`Server`](crate::Server).
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Name in the server metadata.
    pub id: String,
    pub repositories: Vec<PathBuf>,
    pub single_models: Vec<SingleModel>,
    pub control_mode: ModelControlMode,
    /// Time between looks at the repositories in poll mode.
    pub poll_interval: Duration,
    /// Models to load at start in explicit mode; `*` alone is all of them.
    pub load_models: Vec<String>,
    /// Name of the configuration file in `configs/` to prefer over `config.pbtxt`.
    pub model_config_name: Option<String>,
    /// No auto-completion: the configuration file must be complete.
    pub strict_config: bool,
    /// The server is ready only when every model is.
    pub strict_readiness: bool,
    /// Models loaded at the same time.
    pub load_threads: usize,
    /// How often a failed load is tried again.
    pub load_retries: usize,
    pub backend_settings: Vec<BackendSetting>,
    /// The response cache, for models that ask for one (`--cache-config`).
    pub cache: Option<CacheSettings>,
    /// Memory that clients may share with the server.
    pub shared_memory: SharedMemorySettings,
    /// Whether the latency counters are in the metrics (`--metrics-config counter_latencies`).
    pub counter_latencies: bool,
    /// Distributions of latencies in the metrics.
    pub latencies: LatencyOptions,
    /// Whether `nv_cpu_*` are in the metrics.
    pub allow_cpu_metrics: bool,
    /// Instance groups on GPUs that are not there run on the CPU instead of failing.
    pub cpu_fallback: bool,
    /// Limits on what instances use together (`--rate-limit`); `None` is no limits. What is not listed is deduced from
    /// the models.
    pub rate_limit: Option<Vec<RateLimitResource>>,
    pub host_policies: Vec<HostPolicy>,
    /// The log that the logging extension controls.
    pub log: Option<Arc<dyn LogControl>>,
    /// Cores to use; `None` is what affinity and cgroup allow.
    pub cores: Option<usize>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            id: "triton".into(),
            repositories: Vec::new(),
            single_models: Vec::new(),
            control_mode: ModelControlMode::None,
            poll_interval: Duration::from_secs(15),
            load_models: Vec::new(),
            model_config_name: None,
            strict_config: false,
            strict_readiness: true,
            load_threads: 4,
            load_retries: 0,
            backend_settings: Vec::new(),
            cache: None,
            shared_memory: SharedMemorySettings::default(),
            counter_latencies: true,
            latencies: LatencyOptions::default(),
            allow_cpu_metrics: true,
            cpu_fallback: false,
            rate_limit: None,
            host_policies: Vec::new(),
            log: None,
            cores: None,
        }
    }
}

impl ServerOptions {
    /// Settings that a backend sees: those for all backends, then its own.
    pub fn settings_for(&self, backend: &str) -> BackendSettings {
        let global = self.backend_settings.iter().filter(|setting| setting.backend.is_none());
        let own = self.backend_settings.iter().filter(|setting| setting.backend.as_deref() == Some(backend));
        BackendSettings::new(global.chain(own).map(|s| (s.key.clone(), s.value.clone())).collect())
    }

    /// `default-max-batch-size` of a backend: what auto-completion writes for models that can batch; 4 if not set.
    pub fn default_max_batch_size(&self, backend: &str) -> i32 {
        self.settings_for(backend)
            .get("default-max-batch-size")
            .and_then(|text| text.parse().ok())
            .unwrap_or(4)
    }
}
