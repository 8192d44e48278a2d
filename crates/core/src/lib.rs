//! The server without its protocols: repository, life cycle, schedulers, statistics and metrics behind one façade,
//! [`Server`].
//!
//! Invariants: no HTTP or gRPC type and no engine's name appears here; the request path takes no lock that a load,
//! an unload or a metrics page can hold for long; every request that enters is answered exactly once.

#![forbid(unsafe_code)]

mod batch_kind;
mod cache;
mod caller;
mod check;
mod control;
mod ensemble;
mod executor;
mod host_policy;
mod infer;
mod latencies;
mod load;
mod log_settings;
mod metrics;
mod model;
mod options;
mod rate_limiter;
mod repository;
mod scheduler;
mod server;
mod shm;
mod stats;
mod table;
mod threads;
mod warmup;

pub use cache::{CacheSettings, RedisSettings, RedisTls};
pub use check::{Finding, ModelCheck};
pub use host_policy::{HostPolicy, HostPolicySetting, parse_cores};
pub use infer::RAW_INPUT_NAME;
pub use latencies::LatencyOptions;
pub use load::LoadOverrides;
pub use log_settings::{LogControl, LogFormat, LogSettings, LogValue};
pub use model::{Labels, ModelVersion, parse_version};
pub use options::{BackendSetting, ModelControlMode, ServerOptions, SingleModel};
pub use rate_limiter::RateLimitResource;
pub use server::{IndexEntry, LoadRow, Server, ServerMetadata};
pub use shm::{MemoryKind, Placements, RegionPlace, RegionStatus, SharedMemory, SharedMemorySettings};
pub use stats::{
    BatchStatistics, DurationCount, FailureReason, InferStatistics, ModelStatistics, ResponseStatistics,
};
pub use table::ModelState;
pub use threads::ThreadBudget;
