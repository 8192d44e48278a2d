//! Clients that go away while their requests wait: the requests leave the queue at once and never run.

use super::http2::{connect, framed, send};
use super::*;

/// A request that keeps the only instance of `slow` at work, once it is there.
async fn occupy(
    harness: &Harness,
) -> tokio::task::JoinHandle<Result<tonic::Response<pb::ModelInferResponse>, Status>> {
    let mut client = harness.client().await;
    let first = tokio::runtime::Handle::current()
        .spawn(async move { client.model_infer(request("slow", "first", &[1.0])).await });
    until(harness, "in flight", |harness| harness.in_flight() == 1).await;
    first
}

impl Harness {
    fn in_flight(&self) -> usize {
        self.server.model("slow", None).expect("a model").in_flight()
    }

    /// The value of a line of the metrics about `slow`.
    fn metric(&self, family: &str, labels: &str) -> u64 {
        let page = self.server.metrics_text();
        let start = format!("{family}{{model=\"slow\",version=\"1\"{labels}}} ");
        let line = page.lines().find_map(|line| line.strip_prefix(&start)).expect(&start);
        line.parse().expect("a number")
    }

    fn waiting(&self) -> u64 {
        self.metric("nv_inference_pending_request_count", "")
    }
}

async fn until(harness: &Harness, what: &str, holds: impl Fn(&Harness) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !holds(harness) {
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// What holds after `count` requests have left the queue behind a first one.
async fn left(harness: &Harness, count: u64) {
    until(harness, "the queue is empty", |harness| harness.waiting() == 0).await;
    assert_eq!(harness.in_flight(), 1, "the first request was over before the others had left");
    assert_eq!(harness.metric("nv_inference_request_failure", ",reason=\"CANCELED\""), count);
}

async fn only_the_first_ran(harness: &Harness) {
    harness.idle().await;
    assert_eq!(harness.metric("nv_inference_request_success", ""), 1);
    assert_eq!(harness.metric("nv_inference_exec_count", ""), 1);
    harness.stop().await;
}

#[tokio::test]
async fn a_cancelled_call_leaves_the_queue() {
    let harness = Harness::start();
    let first = occupy(&harness).await;
    let mut client = harness.client().await;
    let waiting = tokio::runtime::Handle::current()
        .spawn(async move { client.model_infer(request("slow", "second", &[1.0])).await });
    until(&harness, "waits", |harness| harness.waiting() == 1).await;
    waiting.abort();
    left(&harness, 1).await;
    first.await.expect("no panic").expect("a response");
    only_the_first_ran(&harness).await;
}

#[tokio::test]
async fn a_call_whose_deadline_passes_leaves_the_queue() {
    let harness = Harness::start();
    let first = occupy(&harness).await;
    let mut call = Request::new(request("slow", "second", &[1.0]));
    call.set_timeout(Duration::from_millis(20));
    let status = harness.client().await.model_infer(call).await.expect_err("a status");
    assert!(matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled), "{status}");
    left(&harness, 1).await;
    first.await.expect("no panic").expect("a response");
    only_the_first_ran(&harness).await;
}

#[tokio::test]
async fn a_closed_stream_takes_its_requests_along() {
    let harness = Harness::start();
    let first = occupy(&harness).await;
    let requests = ["a", "b", "c"].map(|id| request("slow", id, &[1.0]));
    let mut client = harness.client().await;
    let stream = client.model_stream_infer(tokio_stream::iter(requests)).await.expect("a stream");
    until(&harness, "waits", |harness| harness.waiting() == 3).await;
    drop(stream);
    left(&harness, 3).await;
    first.await.expect("no panic").expect("a response");
    only_the_first_ran(&harness).await;
}

#[tokio::test]
async fn a_deadline_that_has_passed_on_arrival_keeps_a_request_out() {
    let harness = Harness::start();
    let mut sender = connect(&harness).await;
    for path in ["ModelInfer", "ModelStreamInfer"] {
        for timeout in ["0n", "0S"] {
            let path = format!("/inference.GRPCInferenceService/{path}");
            let headers = [("content-type", "application/grpc"), ("grpc-timeout", timeout)];
            let answer = send(&mut sender, &path, &headers, framed(&request("slow", "late", &[1.0]))).await;
            assert_eq!(answer.status(), "4", "{path} {timeout}");
        }
    }
    harness.idle().await;
    for reason in ["REJECTED", "CANCELED", "BACKEND", "OTHER"] {
        let count = harness.metric("nv_inference_request_failure", &format!(",reason=\"{reason}\""));
        assert_eq!(count, 0, "{reason}: the model has seen the request");
    }
    assert_eq!(harness.metric("nv_inference_request_success", ""), 0);
    harness.stop().await;
}
