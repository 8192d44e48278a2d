//! Signals, and the way a server ends: accept nothing new, answer what is inside, say what was dropped.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use parking_lot::Mutex;
use tokio::signal::unix::{Signal, SignalKind, signal};
use trireme_core::Server;
use trireme_frontend::shutdown::Shutdown;

use super::Outcome;

/// SIGINT and SIGTERM. Further ones during a stop change nothing.
pub(super) struct Signals(Mutex<[(&'static str, i32, Signal); 2]>);

impl Signals {
    /// Takes the signals from now on. Must be called inside a runtime.
    pub(super) fn listen() -> Result<Self> {
        let take = |kind| signal(kind).context("cannot listen for signals");
        let interrupt = ("SIGINT", SignalKind::interrupt().as_raw_value(), take(SignalKind::interrupt())?);
        let terminate = ("SIGTERM", SignalKind::terminate().as_raw_value(), take(SignalKind::terminate())?);
        Ok(Self(Mutex::new([interrupt, terminate])))
    }

    /// Ready when one of the signals has come.
    pub(super) async fn wait(&self) {
        std::future::poll_fn(|cx| {
            let mut signals = self.0.lock();
            let came = signals.iter_mut().find_map(|(name, number, signal)| {
                signal.poll_recv(cx).is_ready().then_some((*name, *number))
            });
            match came {
                Some((name, number)) => {
                    tracing::info!("Signal ({number}) received: {name}, stopping");
                    std::task::Poll::Ready(())
                }
                None => std::task::Poll::Pending,
            }
        })
        .await;
    }
}

/// Ends a server within `timeout`.
pub(super) async fn stop(server: &Arc<Server>, shutdown: &Shutdown, timeout: Duration) -> Outcome {
    let started = Instant::now();
    shutdown.begin();
    // Dropping a connection ends its requests, so that they are counted before.
    let all_ended = shutdown.ended_within(timeout).await;
    let dropped = if all_ended { 0 } else { server.wait_idle(Duration::ZERO) };
    let connections = shutdown.wait(Duration::ZERO).await;
    server.begin_stop();
    let left = timeout.saturating_sub(started.elapsed());
    let left_inside = {
        let server = Arc::clone(server);
        tokio::task::spawn_blocking(move || server.wait_idle(left)).await.unwrap_or_default()
    };
    let inside = left_inside.max(dropped);
    if connections > 0 || inside > 0 {
        tracing::error!(
            "Exit timeout expired. Exiting immediately. Dropped: {inside} requests in models, {connections} connections; \
             --exit-timeout-secs gives them longer than {} s",
            timeout.as_secs()
        );
        return Outcome::TimedOut;
    }
    server.unload_all();
    Outcome::Stopped
}
