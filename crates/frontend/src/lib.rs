//! The protocols: HTTP, gRPC and the metrics endpoint in front of one [`trireme_core::Server`].
//!
//! Wire forms end here. Each protocol turns a request into an [`trireme_types::InferRequest`], hands it to the server
//! and turns the answer back; nothing a client sends ends the process, and every task ends with the
//! [`shutdown::Shutdown`] that it belongs to.

#![forbid(unsafe_code)]

pub mod classification;
pub mod forward;
pub mod grpc;
pub mod http;
mod json;
pub mod listen;
pub mod metrics;
pub mod restricted;
pub mod shutdown;
mod single;
pub mod status;
