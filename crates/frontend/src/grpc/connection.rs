//! Accepting connections and keeping each of them: HTTP/2 settings, age, and the end of the server.

use std::net::TcpListener;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hyper::server::conn::http2;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::time::Sleep;
use trireme_types::{Error, Result};

use super::service::Service;
use super::{Frontend, GrpcOptions};

/// Data that a client may send on one call, and on all of a connection, before it must wait for the server.
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
/// Largest frame that clients may send; larger ones arrive with fewer copies.
const MAX_FRAME_LEN: u32 = 1 << 20;
/// Calls on one connection at the same time. Triton has no limit; this one keeps a connection's books small.
const MAX_CALLS: u32 = 8192;
/// Bytes of one call's response that wait for the socket.
const MAX_SEND_BUFFER: usize = 1 << 20;
const MAX_HEADER_LIST_LEN: u32 = 64 << 10;
/// Calls that a client may cancel before they were looked at, as clients with short deadlines do.
const MAX_RESET_CALLS: usize = 1024;
/// Pause after a failed accept, as when the process has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Pings more often than this would be a load of their own.
const MIN_KEEPALIVE: Duration = Duration::from_millis(100);
/// Times from here on are taken for "never"; clocks cannot count much further.
const NEVER: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);
/// Once the server stops, a connection without calls over two looks this far apart is closed on a client that does
/// not answer. Clients that do answer are gone long before.
const IDLE_LOOK: Duration = Duration::from_millis(300);

/// Accepts connections until the server stops; connections go on as tasks of the shutdown tracker.
pub(super) async fn accept(listener: TcpListener, frontend: Arc<Frontend>) -> Result<()> {
    let failed = |error| Error::unavailable(format!("cannot accept gRPC connections: {error}"));
    listener.set_nonblocking(true).map_err(failed)?;
    let listener = tokio::net::TcpListener::from_std(listener).map_err(failed)?;
    let mut begun = std::pin::pin!(frontend.shutdown.begun());
    loop {
        let accepted = tokio::select! {
            biased;
            () = &mut begun => return Ok(()),
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!("gRPC connection from {peer}: {error}");
                    continue;
                }
                frontend.shutdown.spawn(serve(stream, Arc::clone(&frontend)));
            }
            Err(error) => {
                tracing::warn!("cannot accept a gRPC connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Runs the calls of one connection as tasks and counts them.
#[derive(Clone, Debug)]
struct Calls {
    runtime: Handle,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    begun: AtomicUsize,
    ended: AtomicUsize,
}

impl Calls {
    fn begun(&self) -> usize {
        self.counts.begun.load(Ordering::Acquire)
    }

    fn active(&self) -> usize {
        self.begun().saturating_sub(self.counts.ended.load(Ordering::Acquire))
    }
}

impl<F> hyper::rt::Executor<F> for Calls
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, call: F) {
        self.counts.begun.fetch_add(1, Ordering::AcqRel);
        let ended = Ended(Arc::clone(&self.counts));
        self.runtime.spawn(async move {
            let _ended = ended;
            call.await;
        });
    }
}

struct Ended(Arc<Counts>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::AcqRel);
    }
}

fn builder(options: &GrpcOptions, calls: Calls) -> http2::Builder<Calls> {
    let mut builder = http2::Builder::new(calls);
    builder
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(MAX_FRAME_LEN)
        .max_concurrent_streams(MAX_CALLS)
        .max_send_buf_size(MAX_SEND_BUFFER)
        .max_header_list_size(MAX_HEADER_LIST_LEN)
        .max_pending_accept_reset_streams(MAX_RESET_CALLS)
        .keep_alive_interval(
            options.keepalive_time.filter(|time| *time < NEVER).map(|time| time.max(MIN_KEEPALIVE)),
        )
        .keep_alive_timeout(options.keepalive_timeout.min(NEVER))
        .auto_date_header(false);
    builder
}

async fn serve(stream: TcpStream, frontend: Arc<Frontend>) {
    let calls = Calls { runtime: Handle::current(), counts: Arc::default() };
    let age = frontend.options.max_connection_age;
    let grace = frontend.options.max_connection_age_grace;
    let begun = frontend.shutdown.begun();
    let connection =
        builder(&frontend.options, calls.clone()).serve_connection(TokioIo::new(stream), Service(frontend));
    let mut connection = std::pin::pin!(connection);
    let mut begun = std::pin::pin!(begun);
    let mut stopping = false;
    // First the time until the connection is asked to end, then the time until it is cut off.
    let mut timer = age.and_then(sleep);
    let mut old = false;
    loop {
        tokio::select! {
            biased;
            ended = &mut connection => {
                if let Err(error) = ended {
                    tracing::debug!("gRPC connection ended: {error}");
                }
                return;
            }
            () = &mut begun, if !stopping => {
                if calls.begun() == 0 {
                    return;
                }
                stopping = true;
                connection.as_mut().graceful_shutdown();
            }
            () = without_calls(&calls), if stopping => {
                tracing::debug!("gRPC connection closed: the server stops and the client does not answer");
                return;
            }
            () = elapsed(&mut timer) => {
                if old {
                    tracing::debug!("gRPC connection cut off: it outlived its age and the grace time");
                    return;
                }
                old = true;
                timer = grace.and_then(sleep);
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

/// Waits until two looks in a row have found no call, and none between them.
async fn without_calls(calls: &Calls) {
    let mut idle_since = None;
    loop {
        let begun = calls.begun();
        let idle = calls.active() == 0;
        if idle && idle_since == Some(begun) {
            return;
        }
        idle_since = idle.then_some(begun);
        tokio::time::sleep(IDLE_LOOK).await;
    }
}

fn sleep(duration: Duration) -> Option<Pin<Box<Sleep>>> {
    (duration < NEVER).then(|| Box::pin(tokio::time::sleep(duration)))
}

async fn elapsed(timer: &mut Option<Pin<Box<Sleep>>>) {
    match timer {
        Some(timer) => timer.await,
        None => std::future::pending().await,
    }
}
