//! Backends without a model file: what Triton ships as its `identity`, `repeat`, `sequence` and `square` samples.
//!
//! They let protocol, batching and streaming behaviour be seen without an engine. Nothing here reads a file, and
//! tensors are passed on, never copied. A delay that a configuration or a request asks for ends early when nobody
//! waits for the answer any more.

#![forbid(unsafe_code)]

mod identity;
mod parameter;
mod pause;
mod repeat;
mod sequence;
mod square;
mod stream;

use std::sync::Arc;

pub use identity::IdentityBackend;
pub use repeat::RepeatBackend;
pub use sequence::SequenceBackend;
pub use square::SquareBackend;
use trireme_backend::Backend;

/// Every backend of this crate.
pub fn backends() -> Vec<Arc<dyn Backend>> {
    vec![
        Arc::new(IdentityBackend),
        Arc::new(RepeatBackend),
        Arc::new(SequenceBackend),
        Arc::new(SquareBackend),
    ]
}

#[cfg(test)]
mod harness;
