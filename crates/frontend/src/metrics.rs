//! The metrics endpoint, on a port of its own.
//!
//! `/metrics` and `/metrics/` answer the page. Other paths answer 404, where Triton answers 200 with nothing: a
//! scraper with a wrong path should find out.

use std::net::TcpListener;
use std::sync::Arc;

use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, Request, Response};
use hyper::body::Incoming;
use trireme_core::Server;
use trireme_types::Result;

use crate::http::connection::serve;
use crate::http::reply::{Pieces, Refusal, Reply};
use crate::shutdown::Shutdown;

/// Serves the metrics page until the shutdown begins.
///
/// # Errors
/// The listener cannot be used by the runtime.
pub async fn serve_metrics(listener: TcpListener, server: Arc<Server>, shutdown: Shutdown) -> Result<()> {
    serve(listener, move |request| answer(request, Arc::clone(&server)), shutdown).await
}

async fn answer(request: Request<Incoming>, server: Arc<Server>) -> Reply {
    if !matches!(request.uri().path(), "/metrics" | "/metrics/") {
        return Refusal::not_found().into_reply();
    }
    if request.method() != Method::GET {
        return Refusal::method_not_allowed().into_reply();
    }
    // The page of many models takes a while.
    match tokio::task::spawn_blocking(move || server.metrics_text()).await {
        Ok(text) => {
            let mut reply = Response::new(Pieces::from(bytes::Bytes::from(text)));
            let text = HeaderValue::from_static("text/plain; charset=utf-8");
            reply.headers_mut().insert(CONTENT_TYPE, text);
            reply
        }
        Err(error) => Refusal::internal(format!("the metrics page could not be made: {error}")).into_reply(),
    }
}
