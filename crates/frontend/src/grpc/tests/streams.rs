//! `ModelStreamInfer`.

use tokio_stream::StreamExt as _;
use tonic::Streaming;
use trireme_proto::inference::{ModelInferResponse, ModelStreamInferResponse};

use super::*;

async fn call(client: &mut Client, requests: Vec<ModelInferRequest>) -> Streaming<ModelStreamInferResponse> {
    client.model_stream_infer(tokio_stream::iter(requests)).await.expect("a stream").into_inner()
}

async fn all(client: &mut Client, requests: Vec<ModelInferRequest>) -> Vec<ModelStreamInferResponse> {
    let mut stream = call(client, requests).await;
    let mut messages = Vec::new();
    while let Some(message) = stream.next().await {
        messages.push(message.expect("no status"));
    }
    messages
}

fn inner(message: &ModelStreamInferResponse) -> &ModelInferResponse {
    assert_eq!(message.error_message, "");
    message.infer_response.as_ref().expect("a response")
}

fn is_final(response: &ModelInferResponse) -> bool {
    match response.parameters.get("triton_final_response").map(|parameter| &parameter.parameter_choice) {
        Some(Some(ParameterChoice::BoolParam(last))) => *last,
        other => panic!("expected triton_final_response, got {other:?}"),
    }
}

#[tokio::test]
async fn responses_come_in_order_and_errors_in_their_place() {
    let harness = Harness::start();
    let mut client = harness.client().await;
    let requests = vec![
        request("slow", "s1", &[1.0]),
        request("identity", "s2", &[2.0]),
        request("nope", "s3", &[3.0]),
        ModelInferRequest { raw_input_contents: vec![vec![0].into()], ..request("identity", "s4", &[4.0]) },
        request("identity", "s5", &[5.0]),
    ];
    let messages = all(&mut client, requests).await;
    let ids: Vec<_> =
        messages.iter().map(|m| m.infer_response.as_ref().expect("a response").id.as_str()).collect();
    assert_eq!(ids, ["s1", "s2", "s3", "s4", "s5"]);
    for (index, value) in [(0, 1.0_f32), (1, 2.0), (4, 5.0)] {
        let response = inner(&messages[index]);
        assert!(is_final(response));
        assert_eq!(&*response.raw_output_contents[0], value.to_le_bytes());
    }
    for (index, text) in [
        (2, "Request for unknown model: 'nope' is not found"),
        (3, "[request id: s4] input byte size mismatch for input 'INPUT0' for model 'identity'"),
    ] {
        assert!(messages[index].error_message.starts_with(text), "{}", messages[index].error_message);
        let response = messages[index].infer_response.as_ref().expect("a response");
        assert_eq!((response.model_name.as_str(), response.parameters.len()), ("", 0));
    }
    harness.stop().await;
}

#[tokio::test]
async fn decoupled_models_answer_as_they_produce() {
    let harness = Harness::start();
    let mut client = harness.client().await;
    for delay in [0, 5] {
        let messages = all(&mut client, vec![repeat("d1", &[7, 8, 9], delay)]).await;
        let values: Vec<_> =
            messages.iter().map(|message| inner(message).raw_output_contents[0].to_vec()).collect();
        assert_eq!(values, [7, 8, 9].map(|value: i32| value.to_le_bytes().to_vec()));
        assert!(
            messages.iter().all(|message| inner(message).id == "d1" && inner(message).model_version == "1")
        );
    }
    // A quick request on the same stream does not wait for a slow decoupled one.
    let messages =
        all(&mut client, vec![repeat("slow", &[1], 100), request("identity", "quick", &[1.0])]).await;
    assert_eq!([&*inner(&messages[0]).id, &*inner(&messages[1]).id], ["quick", "slow"]);
    harness.stop().await;
}

#[tokio::test]
async fn the_empty_final_response_is_sent_on_request() {
    let harness = Harness::start();
    let mut client = harness.client().await;
    for (values, responses) in [(&[7, 8][..], 2), (&[], 0)] {
        let mut sent = repeat("d2", values, 0);
        let silent = all(&mut client, vec![sent.clone()]).await;
        assert_eq!(silent.len(), responses);
        let choice = parameter(ParameterChoice::BoolParam(true));
        sent.parameters = [("triton_enable_empty_final_response".to_owned(), choice)].into();
        let messages = all(&mut client, vec![sent]).await;
        assert_eq!(messages.len(), responses + 1);
        let (last, before) = messages.split_last().expect("a message");
        assert!(before.iter().all(|message| !is_final(inner(message))));
        let last = inner(last);
        assert!(is_final(last));
        assert_eq!(
            (last.id.as_str(), last.model_name.as_str(), last.model_version.as_str()),
            ("d2", "repeat", "")
        );
        assert!(last.outputs.is_empty() && last.raw_output_contents.is_empty());
    }
    harness.stop().await;
}

#[tokio::test]
async fn grpc_errors_end_the_stream_with_their_status() {
    let harness = Harness::start();
    let mut client = harness.client().await;
    let requests = vec![
        request("identity", "a", &[1.0]),
        request("nope", "b", &[1.0]),
        request("identity", "c", &[1.0]),
    ];
    let mut call = Request::new(tokio_stream::iter(requests));
    call.metadata_mut().insert("triton_grpc_error", "true".parse().expect("a value"));
    let mut stream = client.model_stream_infer(call).await.expect("a stream").into_inner();
    assert_eq!(inner(&stream.next().await.expect("a message").expect("no status")).id, "a");
    let status = stream.next().await.expect("an end").expect_err("a status");
    assert_eq!(
        (status.code(), status.message()),
        (Code::NotFound, "Request for unknown model: 'nope' is not found")
    );
    harness.stop().await;
}

#[tokio::test]
async fn a_cancelled_stream_drops_its_requests() {
    let harness = Harness::start();
    let mut client = harness.client().await;
    let started = Instant::now();
    let mut stream = call(&mut client, vec![repeat("d", &[1; 100], 1000)]).await;
    let _ = tokio::time::timeout(Duration::from_millis(50), stream.next()).await;
    drop(stream);
    harness.idle().await;
    assert!(started.elapsed() < Duration::from_secs(5), "the model was not told");
    harness.stop().await;
}

#[tokio::test]
async fn an_open_stream_ends_when_the_server_stops() {
    let harness = Harness::start();
    let mut client = harness.client().await;
    let (sender, receiver) = tokio::sync::mpsc::channel(4);
    sender.send(request("slow", "s1", &[1.0])).await.expect("room");
    let requests = futures_util::stream::unfold(receiver, |mut receiver| async {
        Some((receiver.recv().await?, receiver))
    });
    let mut stream = client.model_stream_infer(requests).await.expect("a stream").into_inner();
    tokio::time::sleep(Duration::from_millis(50)).await;
    let took = harness.stop().await;
    assert!(took < Duration::from_secs(5), "took {took:?}");
    assert_eq!(inner(&stream.next().await.expect("a message").expect("no status")).id, "s1");
    let status = stream.next().await.expect("an end").expect_err("a status");
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    drop(sender);
}

#[tokio::test]
async fn streams_have_deadlines_too() {
    let harness = Harness::start();
    let mut client = harness.client().await;
    let mut call = Request::new(tokio_stream::iter(vec![repeat("d", &[1; 100], 1000)]));
    call.set_timeout(Duration::from_millis(50));
    let started = Instant::now();
    let status = match client.model_stream_infer(call).await {
        Ok(stream) => stream.into_inner().next().await.expect("an end").expect_err("a status"),
        Err(status) => status,
    };
    assert!(matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled), "{status}");
    assert!(started.elapsed() < Duration::from_secs(1));
    harness.idle().await;
    harness.stop().await;
}

#[tokio::test]
async fn many_requests_before_any_response_is_read() {
    let harness = Harness::start();
    let mut client = harness.client().await;
    let requests: Vec<_> = (0..3000).map(|i| request("identity", &i.to_string(), &[1.0])).collect();
    let messages = all(&mut client, requests).await;
    assert_eq!(messages.len(), 3000);
    assert!(messages.iter().enumerate().all(|(i, message)| inner(message).id == i.to_string()));
    harness.stop().await;
}
