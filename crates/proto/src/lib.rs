//! The wire contract: KServe v2 and Triton's extensions as protocol buffers, and the gRPC health protocol.
//!
//! The `.proto` files in `proto/` are the source. `cargo xtask codegen` turns them into the committed files
//! in `src/generated/`, and `cargo xtask codegen --check` fails when the two differ, so nobody needs
//! `protoc` to build. Field numbers and names are a public contract that is compared with Triton's own
//! client by `tests/python/descriptors.py`.
//!
//! Invariants:
//! - A `bytes` field is a [`bytes::Bytes`] that shares the buffer the message arrived in.
//! - A map is a `BTreeMap`: the same message always prints and encodes to the same bytes.
//! - Without the features `server` and `client` this crate knows no HTTP and no async runtime.

mod descriptor;
mod tensor_contents;

pub use descriptor::{FILE_DESCRIPTOR_SET, descriptor_pool};

/// Package `inference`: the service `GRPCInferenceService`, its messages, and the model configuration.
#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    missing_debug_implementations,
    elided_lifetimes_in_paths,
    rustdoc::all,
    reason = "generated code"
)]
pub mod inference {
    pub use crate::tensor_contents::InferTensorContents;

    include!("generated/inference.rs");
}

/// Package `grpc.health.v1`: the standard gRPC health service.
#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    missing_debug_implementations,
    elided_lifetimes_in_paths,
    rustdoc::all,
    reason = "generated code"
)]
pub mod health {
    include!("generated/grpc_health_v1.rs");
}
