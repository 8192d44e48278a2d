//! Accepting connections and serving HTTP/1 on them, until the shutdown begins.
//!
//! An idle connection ends at once when it does, also one with half a request head; a busy one after the answer that
//! is on its way. A client that closes its connection ends the request that it waits for: the service's future is
//! dropped.

mod activity;

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::net::TcpListener as StdListener;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use trireme_types::{Error, Result};

pub(super) use self::activity::RequestGuard;
use self::activity::{Activity, Watched};
use super::reply::Pieces;
use crate::shutdown::Shutdown;

/// Rest after an accept that failed, as when the process has no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves a listener until the shutdown begins. Connections run as tasks of `shutdown`.
///
/// # Errors
/// The listener cannot be used by the runtime.
pub(crate) async fn serve<S, F>(listener: StdListener, service: S, shutdown: Shutdown) -> Result<()>
where
    S: Fn(Request<Incoming>) -> F + Clone + Send + 'static,
    F: Future<Output = Response<Pieces>> + Send + 'static,
{
    let listener = TcpListener::from_std(listener)
        .map_err(|error| Error::internal(format!("cannot serve the HTTP listener: {error}")))?;
    let mut begun = pin!(shutdown.begun());
    loop {
        let accepted = poll_fn(|cx| {
            if begun.as_mut().poll(cx).is_ready() {
                return Poll::Ready(None);
            }
            listener.poll_accept(cx).map(Some)
        });
        match accepted.await {
            None => return Ok(()),
            Some(Ok((stream, _))) => {
                shutdown.spawn(connection(stream, service.clone(), shutdown.clone()));
            }
            Some(Err(error)) => {
                // The peer may have gone before it was accepted, which is nothing to report.
                tracing::debug!("failed to accept an HTTP connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn connection<S, F>(stream: TcpStream, service: S, shutdown: Shutdown)
where
    S: Fn(Request<Incoming>) -> F + Send,
    F: Future<Output = Response<Pieces>> + Send,
{
    // Fails only if the peer has gone, which the first read finds out.
    let _ = stream.set_nodelay(true);
    let activity = Arc::new(Activity::default());
    let watched = Watched::new(TokioIo::new(stream), Arc::clone(&activity));
    let requests = Arc::clone(&activity);
    let service = service_fn(move |request| {
        let guard = requests.enter();
        let reply = service(request);
        async move {
            let mut reply = reply.await;
            reply.body_mut().hold(guard);
            Ok::<_, Infallible>(reply)
        }
    });
    let connection = http1::Builder::new()
        .title_case_headers(true)
        .auto_date_header(false)
        .serve_connection(watched, service);
    let mut connection = pin!(connection);
    let mut begun = pin!(shutdown.begun());
    let mut draining = false;
    let ended = poll_fn(|cx| {
        if !draining && begun.as_mut().poll(cx).is_ready() {
            draining = true;
            connection.as_mut().graceful_shutdown();
        }
        match connection.as_mut().poll(cx) {
            Poll::Pending if draining && activity.is_idle() => Poll::Ready(Ok(())),
            other => other,
        }
    });
    if let Err(error) = ended.await {
        tracing::debug!("an HTTP connection ended: {error}");
    }
}

#[cfg(test)]
mod tests;
