//! The gRPC frontend: all RPCs of the inference protocol, health and reflection.
//!
//! HTTP/2 is hyper's; the few rules that gRPC adds to it (prefixes, trailers, deadlines, compression) are here,
//! since they decide how often a tensor is copied: not at all on the way in when it comes in one frame, and not at
//! all on the way out when it is large. Memory for a message is taken as its bytes arrive, never on a client's word.
//!
//! Invariants: every call ends with a status; a cancelled or expired call drops its request; wire types are turned
//! into the server's in [`convert`] only.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use tonic::Status;
use tonic::metadata::MetadataMap;
use trireme_core::Server;
use trireme_types::{Error, Result};

use crate::forward::HeaderForward;
use crate::restricted::Restrictions;
use crate::shutdown::Shutdown;
use crate::status::{RETRY_PUSHBACK, grpc_code};

mod admin;
mod body;
mod compression;
mod connection;
pub mod convert;
mod deadline;
mod health;
mod infer;
mod log_settings;
mod message;
mod outbox;
mod reflection;
mod service;
mod shared_memory;
mod stream;
mod wire;

pub use self::compression::Level as CompressionLevel;

/// Settings of the gRPC frontend, as the `--grpc-*` flags give them.
///
/// HTTP/2 pings of clients are always answered, so that the flags that limit them have nothing to set:
/// `--grpc-keepalive-permit-without-calls`, `--grpc-http2-max-pings-without-data`,
/// `--grpc-http2-min-recv-ping-interval-without-data`, `--grpc-http2-max-ping-strikes`.
#[derive(Clone, Debug)]
pub struct GrpcOptions {
    /// Inference responses only (`--grpc-infer-response-compression-level`).
    pub compression_level: CompressionLevel,
    /// Silence after which a connection is pinged; `None` never pings (`--grpc-keepalive-time`).
    pub keepalive_time: Option<Duration>,
    /// Silence after a ping until the connection is closed (`--grpc-keepalive-timeout`).
    pub keepalive_timeout: Duration,
    /// Age at which a connection takes no more calls (`--grpc-max-connection-age`).
    pub max_connection_age: Option<Duration>,
    /// Time that calls on such a connection have to finish; `None` is all they need
    /// (`--grpc-max-connection-age-grace`).
    pub max_connection_age_grace: Option<Duration>,
    /// `--grpc-restricted-protocol`
    pub restricted: Restrictions,
    /// `--grpc-header-forward-pattern`
    pub header_forward: HeaderForward,
    /// Responses of one stream that wait for a slow client before the model has to wait too
    /// (`--grpc-max-response-pool-size`).
    pub max_response_pool_size: usize,
}

impl Default for GrpcOptions {
    fn default() -> Self {
        Self {
            compression_level: CompressionLevel::None,
            keepalive_time: Some(Duration::from_secs(7200)),
            keepalive_timeout: Duration::from_secs(20),
            max_connection_age: None,
            max_connection_age_grace: None,
            restricted: Restrictions::default(),
            header_forward: HeaderForward::default(),
            max_response_pool_size: i32::MAX as usize,
        }
    }
}

/// What all connections share.
#[derive(Debug)]
struct Frontend {
    server: Arc<Server>,
    options: GrpcOptions,
    shutdown: Shutdown,
    reflection: reflection::Reflection,
}

impl Frontend {
    fn is_stopping(&self) -> bool {
        self.shutdown.is_begun() || self.server.is_stopping()
    }
}

/// Serves gRPC on a listener and returns when the shutdown begins. Connections are tasks of the shutdown tracker:
/// they take no new calls then, finish those under way, and close.
///
/// # Errors
/// `UNAVAILABLE` if the listener cannot be used.
pub async fn serve_grpc(
    listener: TcpListener,
    server: Arc<Server>,
    options: GrpcOptions,
    shutdown: Shutdown,
) -> Result<()> {
    let reflection = reflection::Reflection::new()?;
    let frontend = Arc::new(Frontend { server, options, shutdown, reflection });
    connection::accept(listener, frontend).await
}

/// Longest status message, as it is encoded: clients refuse trailers above 8 KiB, and the error with them.
const MAX_STATUS_LEN: usize = 6 << 10;

fn status(error: Error) -> Status {
    let code = grpc_code(error.code());
    let message = shortened(error.message());
    let Some(hint) = error.retry_hint() else { return Status::new(code, message) };
    let mut trailers = http::HeaderMap::with_capacity(1);
    let ms = u64::try_from(hint.as_millis()).unwrap_or(u64::MAX);
    trailers.insert(RETRY_PUSHBACK, http::HeaderValue::from(ms));
    Status::with_metadata(code, message, MetadataMap::from_headers(trailers))
}

/// The start of a message that fits a trailer, in which all but printable ASCII takes three bytes.
fn shortened(message: &str) -> std::borrow::Cow<'_, str> {
    let mut len = 0;
    for (at, character) in message.char_indices() {
        len += if matches!(character, ' '..='~') && character != '%' { 1 } else { 3 * character.len_utf8() };
        if len > MAX_STATUS_LEN {
            let kept = message.get(..at).unwrap_or_default();
            return format!("{kept}... ({} more bytes)", message.len() - at).into();
        }
    }
    message.into()
}

/// Headers of the request that become parameters; those of gRPC itself an application does not see.
fn forwarded(frontend: &Frontend, headers: &http::HeaderMap) -> Result<Vec<(String, String)>, Status> {
    let is_transport = |name: &str| {
        matches!(name, "te" | "content-type" | "content-length")
            || name.starts_with("grpc-")
            || name.ends_with("-bin")
    };
    frontend.options.header_forward.forwarded(headers, is_transport).map_err(status)
}

fn shutting_down() -> Status {
    Status::unavailable("GRPC server is shutting down and has stopped accepting new requests.")
}

#[cfg(test)]
mod tests;
