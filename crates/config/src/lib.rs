//! The model configuration: from `config.pbtxt` or JSON to the validated form that the server runs on.
//!
//! A configuration goes through these steps, and none of them does I/O:
//! 1. [`parse_pbtxt`] or [`from_json`]: text to a `ModelConfig` message;
//! 2. [`check_directory_name`] and [`deduce`]: name, backend, platform and model file name from the model's directory;
//! 3. [`complete`]: tensors and batch size from what the backend read in the model file;
//! 4. [`normalize`]: the defaults that Triton writes into a configuration;
//! 5. [`validate`]: Triton's rules, and [`check_report`]: whether the model file fits; for an ensemble
//!    [`check_ensemble`]: whether the models of its steps do;
//! 6. [`ModelSpec::from_config`]: the form without optional fields.
//!
//! [`to_json`] and [`print_pbtxt`] go the other way. Every error says what is wrong, where, and what to do.

#![forbid(unsafe_code)]

mod complete;
mod composing;
mod deduce;
mod error;
mod json;
mod nearest;
mod normalize;
mod number;
pub mod pbtxt;
mod report;
mod schema;
mod span;
mod spec;
#[cfg(test)]
mod testing;
mod validate;

pub use complete::complete;
pub use composing::{ComposingModel, EnsembleFlow, check_ensemble};
pub use deduce::{check_directory_name, deduce};
pub use error::{ConfigError, ConfigErrors, Note, NoteLevel, Related, Snippet};
pub use json::{from_json, to_json};
pub use normalize::{MachineFacts, fall_back_to_cpu, normalize};
pub use pbtxt::{MAX_PBTXT_BYTES, Parsed, parse_pbtxt, print_pbtxt};
pub use report::check_report;
pub use span::{Span, SpanMap};
pub use spec::{
    DynamicBatching, InstanceGroup, InstanceKind, ModelPriority, ModelSpec, QueuePolicy, RateLimiterSpec,
    ResourceNeed, Scheduling, TimeoutAction, VersionPolicy, WarmupData, WarmupInput, WarmupSample,
};
pub use validate::validate;
