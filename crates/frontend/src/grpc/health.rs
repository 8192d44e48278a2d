//! The standard health service, for load balancers and Kubernetes. The service name is ignored, as Triton does: the
//! answer is whether the server is ready.

use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Interval, MissedTickBehavior};
use tonic::Status;
use trireme_core::Server;
use trireme_proto::health::HealthCheckResponse;
use trireme_proto::health::health_check_response::ServingStatus;

use super::body::Source;
use super::message::Framed;
use super::{shutting_down, status};
use crate::shutdown::{Begun, Shutdown};

/// How often `Watch` looks whether the answer has changed.
const WATCH_PERIOD: Duration = Duration::from_millis(500);

pub(super) fn check(server: &Server) -> HealthCheckResponse {
    let status = if server.is_ready() { ServingStatus::Serving } else { ServingStatus::NotServing };
    HealthCheckResponse { status: status.into() }
}

/// `Watch`: the status now and whenever it changes.
pub(super) struct Watch {
    server: Arc<Server>,
    sent: Option<HealthCheckResponse>,
    interval: Interval,
    begun: Begun,
}

impl Watch {
    pub(super) fn new(server: Arc<Server>, shutdown: &Shutdown) -> Self {
        let mut interval = tokio::time::interval(WATCH_PERIOD);
        interval.set_missed_tick_behavior(MissedTickBehavior::Skip);
        Self { server, sent: None, interval, begun: shutdown.begun() }
    }
}

impl Source for Watch {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Framed, Status>> {
        loop {
            if std::pin::Pin::new(&mut self.begun).poll(cx).is_ready() {
                return Poll::Ready(Err(shutting_down()));
            }
            ready!(self.interval.poll_tick(cx));
            let now = check(&self.server);
            if self.sent.as_ref() != Some(&now) {
                self.sent = Some(now);
                return Poll::Ready(Framed::of(&now).map_err(status));
            }
        }
    }
}
