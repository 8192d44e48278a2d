//! The wire messages of the inference protocol: generated from `proto/`, never edited by hand.
//!
//! `bytes` fields are [`bytes::Bytes`], so tensors stay slices of the message they arrived in.

use std::sync::OnceLock;

use prost_reflect::DescriptorPool;

/// Messages and services of package `inference`.
#[allow(clippy::all, unreachable_pub, missing_debug_implementations, elided_lifetimes_in_paths, unused_lifetimes, clippy::unwrap_used, reason = "generated code")]
pub mod inference {
    include!("generated/inference.rs");
}

/// The standard health service, package `grpc.health.v1`.
#[allow(clippy::all, unreachable_pub, missing_debug_implementations, elided_lifetimes_in_paths, unused_lifetimes, clippy::unwrap_used, reason = "generated code")]
pub mod health {
    include!("generated/grpc.health.v1.rs");
}

/// The encoded `FileDescriptorSet` of every `.proto` file, for reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("generated/descriptor.bin");

/// Descriptors of every message, for text format and JSON.
pub fn descriptor_pool() -> &'static DescriptorPool {
    static POOL: OnceLock<DescriptorPool> = OnceLock::new();
    #[expect(clippy::expect_used, reason = "the descriptors are part of the binary and tested")]
    POOL.get_or_init(|| DescriptorPool::decode(FILE_DESCRIPTOR_SET).expect("the built-in descriptors are valid"))
}
