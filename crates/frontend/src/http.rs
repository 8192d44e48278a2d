//! The HTTP/1.1 frontend: the KServe v2 protocol and Triton's extensions to it.
//!
//! A request is routed, let through or refused, received, and turned into the words of the core; nothing of HTTP goes
//! beyond this module. Every refusal is JSON, `{"error": "..."}`, with a status from the table in [`crate::status`];
//! what is the client's fault is never 500.
//!
//! `--http-max-input-size` limits what the server has to read or write anew: the JSON of a request, each tensor
//! written in JSON, a raw request and a decompressed body. Binary tensors behind the JSON are not limited by it, up
//! to 2 GiB - 1 for the whole body as in Triton; memory is taken only as their bytes arrive. The head of a request may
//! have 100 headers and about 400 KiB; beyond that the answer is 431.

mod body;
mod compression;
pub(crate) mod connection;
mod control;
pub(crate) mod generate;
pub mod infer;
mod load_request;
mod log_settings;
pub(crate) mod reply;
mod route;
mod shared_memory;

use std::net::TcpListener;
use std::num::NonZero;
use std::sync::Arc;

use bytes::Bytes;
use http::header::EXPECT;
use http::request::Parts;
use http::{Method, Request};
use http_body::Body;
use hyper::body::Incoming;
use tokio::sync::Semaphore;
use trireme_core::Server;
use trireme_types::Result;

use self::body::BodyLimit;
use self::reply::{Refusal, Reply};
use self::route::{MemoryAction, ModelAction, Route, route};
use crate::forward::HeaderForward;
use crate::restricted::Restrictions;
use crate::shutdown::Shutdown;

/// Settings of the HTTP frontend.
#[derive(Clone, Debug)]
pub struct HttpOptions {
    /// `--http-max-input-size`, bytes.
    pub max_input_size: usize,
    /// `--http-header-forward-pattern`.
    pub header_forward: HeaderForward,
    /// `--http-restricted-api`.
    pub restricted: Restrictions,
}

impl Default for HttpOptions {
    fn default() -> Self {
        Self {
            max_input_size: 64 << 20,
            header_forward: HeaderForward::default(),
            restricted: Restrictions::default(),
        }
    }
}

/// What every request needs.
#[derive(Debug)]
pub(crate) struct Frontend {
    server: Arc<Server>,
    options: HttpOptions,
    /// Leave to work on a large body: all cores but one, so that small requests and models always have one.
    heavy: Semaphore,
}

impl Frontend {
    fn new(server: Arc<Server>, options: HttpOptions) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        Self { server, options, heavy: Semaphore::new(cores.saturating_sub(1).max(1)) }
    }

    /// Counts an inference request that was refused before it reached its model, if its client is to blame.
    fn count_refused(&self, refusal: &Refusal) {
        if refusal.status.is_client_error() {
            self.server.record_refused_request();
        }
    }

    /// Runs work on a large body apart from the async workers, when it is its turn.
    async fn heavy<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        // The semaphore is never closed.
        let _turn = self.heavy.acquire().await;
        blocking(work).await
    }
}

/// Runs work that takes long on a thread that may block.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Refusal> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Refusal::internal(format!("the request failed: {error}")))
}

/// Serves HTTP until the shutdown begins. Connections run on as tasks of `shutdown`, until their requests are
/// answered.
///
/// # Errors
/// The listener cannot be used by the runtime.
pub async fn serve_http(
    listener: TcpListener,
    server: Arc<Server>,
    options: HttpOptions,
    shutdown: Shutdown,
) -> Result<()> {
    let frontend = Arc::new(Frontend::new(server, options));
    let service = move |request| answer(Arc::clone(&frontend), request);
    connection::serve(listener, service, shutdown).await
}

async fn answer(frontend: Arc<Frontend>, request: Request<Incoming>) -> Reply {
    let (parts, mut body) = request.into_parts();
    match dispatch(&frontend, &parts, &mut body).await {
        Ok(reply) => reply,
        Err(mut refusal) => {
            // The client may be sending still. It reads the answer when it is done; one that waits for leave to send
            // (`Expect: 100-continue`) gets the answer in its place.
            if !refusal.close && !body.is_end_stream() {
                refusal.close = parts.headers.contains_key(EXPECT) || !body::discard(&mut body).await;
            }
            refusal.into_reply()
        }
    }
}

async fn dispatch(frontend: &Frontend, parts: &Parts, body: &mut Incoming) -> Result<Reply, Refusal> {
    let Some(route) = route(parts.uri.path())? else { return Err(Refusal::not_found()) };
    if let Err(header) = frontend.options.restricted.check(route.category(), &parts.headers) {
        return Err(Refusal::restricted(header));
    }
    if !route.allows(&parts.method) {
        return Err(Refusal::method_not_allowed());
    }
    let server = &frontend.server;
    match route {
        Route::Model { name, version, action: ModelAction::Infer } => {
            infer::infer(frontend, &name, version, parts, body).await
        }
        Route::Live => control::live(server),
        Route::Ready => control::ready(server),
        Route::ServerMetadata => Ok(control::server_metadata(server)),
        Route::AllStatistics => control::statistics(server, "", ""),
        Route::Model { name, version, action } => match action {
            ModelAction::Ready => control::model_ready(server, &name, version),
            ModelAction::Config => control::model_config(server, &name, version),
            ModelAction::Statistics => control::statistics(server, &name, version),
            ModelAction::TraceSetting => Err(Refusal::not_available("the trace extension")),
            ModelAction::Generate => generate::generate(frontend, &name, version, parts, body).await,
            ModelAction::GenerateStream => {
                generate::generate_stream(frontend, &name, version, parts, body).await
            }
            ModelAction::Metadata | ModelAction::Infer => control::model_metadata(server, &name, version),
        },
        Route::Index => control::index(Arc::clone(server), small_body(frontend, body).await?).await,
        Route::Load(name) => {
            control::load(Arc::clone(server), name.into_owned(), small_body(frontend, body).await?).await
        }
        Route::Unload(name) => {
            control::unload(Arc::clone(server), name.into_owned(), small_body(frontend, body).await?).await
        }
        Route::NamedRepository => Err(Refusal::from(trireme_types::Error::unsupported(
            "'repository_name' specification is not supported",
        ))),
        Route::SharedMemory { kind, region, action } => {
            let region = region.as_deref();
            match (action, region) {
                (MemoryAction::Status, _) => shared_memory::status(server, kind, region),
                (MemoryAction::Unregister, _) => shared_memory::unregister(server, kind, region),
                (MemoryAction::Register, region) => {
                    let region = region.unwrap_or_default().to_owned();
                    let body = small_body(frontend, body).await?;
                    shared_memory::register(Arc::clone(server), kind, region, body).await
                }
            }
        }
        Route::TraceSetting => Err(Refusal::not_available("the trace extension")),
        Route::Logging => {
            let body =
                if parts.method == Method::GET { Bytes::new() } else { small_body(frontend, body).await? };
            log_settings::answer(server, &body)
        }
    }
}

/// The body of a request that is JSON only.
async fn small_body(frontend: &Frontend, body: &mut Incoming) -> Result<Bytes, Refusal> {
    let limit = BodyLimit { bytes: frontend.options.max_input_size, message: body::json_too_large };
    body::receive(body, 0, Some(limit)).await
}

#[cfg(test)]
mod tests;
