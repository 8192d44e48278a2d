//! Unary calls.

use super::*;
use crate::restricted::RestrictionFlag;

#[tokio::test]
async fn an_inference_comes_back() {
    let harness = Harness::start();
    let mut client = harness.client().await;
    let sent = request("identity", "r1", &[1.5, -2.0]);
    let reply = client.model_infer(sent.clone()).await.expect("succeeds").into_inner();
    assert_eq!(
        (reply.model_name.as_str(), reply.model_version.as_str(), reply.id.as_str()),
        ("identity", "1", "r1")
    );
    assert_eq!(reply.raw_output_contents, sent.raw_input_contents);
    assert_eq!(reply.outputs.len(), 1);
    let output = &reply.outputs[0];
    assert_eq!(
        (output.name.as_str(), output.datatype.as_str(), &*output.shape),
        ("OUTPUT0", "FP32", &[2][..])
    );
    assert_eq!(output.contents, None);

    let large: Vec<f32> = (0..3_000_000_u32).map(f32::from_bits).collect();
    let sent = request("identity", "", &large);
    let reply = client.model_infer(sent.clone()).await.expect("succeeds").into_inner();
    assert_eq!(reply.raw_output_contents, sent.raw_input_contents);
    harness.stop().await;
}

#[tokio::test]
async fn outputs_are_classified_on_request() {
    let harness = Harness::start();
    let mut client = harness.client().await;
    let mut sent = request("batching", "", &[0.25, 2.0, 1.0]);
    sent.outputs = vec![InferRequestedOutputTensor {
        name: "OUTPUT0".into(),
        parameters: [("classification".to_owned(), parameter(ParameterChoice::Int64Param(2)))].into(),
    }];
    let reply = client.model_infer(sent).await.expect("succeeds").into_inner();
    assert_eq!((reply.outputs[0].datatype.as_str(), &*reply.outputs[0].shape), ("BYTES", &[1, 2][..]));
    assert_eq!(&*reply.raw_output_contents[0], b"\x0e\0\0\x002.000000:1:dog\x0a\0\0\x001.000000:2");
    harness.stop().await;
}

#[tokio::test]
async fn errors_have_their_code_and_text() {
    let harness = Harness::start();
    let mut client = harness.client().await;
    let version = ModelInferRequest { model_version: "abc".into(), ..request("identity", "", &[1.0]) };
    let short =
        ModelInferRequest { raw_input_contents: vec![vec![0; 3].into()], ..request("identity", "7", &[1.0]) };
    let decoupled = repeat("", &[1], 0);
    let table = [
        (request("nope", "", &[1.0]), Code::NotFound, "Request for unknown model: 'nope' is not found"),
        (version, Code::InvalidArgument, "failed to get model version from specified version string 'abc'"),
        (
            short,
            Code::InvalidArgument,
            "[request id: 7] input byte size mismatch for input 'INPUT0' for model 'identity'",
        ),
        (
            decoupled,
            Code::Unimplemented,
            "ModelInfer RPC doesn't support models with decoupled transaction policy; use ModelStreamInfer",
        ),
    ];
    for (sent, code, text) in table {
        let status = client.model_infer(sent).await.expect_err(text);
        assert_eq!(status.code(), code, "{status}");
        assert!(status.message().starts_with(text), "{status}");
    }
    harness.stop().await;
}

#[tokio::test]
async fn long_messages_are_cut_to_what_clients_take() {
    let harness = Harness::start();
    let mut client = harness.client().await;
    for name in ["a", "%", "\u{e4}", "\u{1f600}"] {
        let status =
            client.model_infer(request(&name.repeat(10_000), "", &[1.0])).await.expect_err("unknown");
        assert_eq!(status.code(), Code::NotFound);
        assert!(status.message().starts_with(&format!("Request for unknown model: '{name}{name}")));
        assert!(status.message().ends_with(" more bytes)"));
    }
    harness.stop().await;
}

#[tokio::test]
async fn keepalive_and_age_may_be_any_duration() {
    for duration in [Duration::ZERO, Duration::from_millis(u64::MAX)] {
        let options = GrpcOptions {
            keepalive_time: Some(duration),
            keepalive_timeout: duration.max(Duration::from_secs(1)),
            max_connection_age: Some(duration.max(Duration::from_secs(1))),
            max_connection_age_grace: Some(duration),
            ..GrpcOptions::default()
        };
        let harness = Harness::with(options);
        let mut client = harness.client().await;
        client.model_infer(request("slow", "", &[1.0])).await.expect("succeeds");
        harness.stop().await;
    }
}

#[tokio::test]
async fn every_rpc_answers() {
    let harness = Harness::start();
    let mut client = harness.client().await;
    let named = || "identity".to_owned();

    assert!(client.server_live(pb::ServerLiveRequest {}).await.expect("answers").into_inner().live);
    assert!(client.server_ready(pb::ServerReadyRequest {}).await.expect("answers").into_inner().ready);
    let ready = |name: &str| pb::ModelReadyRequest { name: name.to_owned(), version: String::new() };
    assert!(client.model_ready(ready("identity")).await.expect("answers").into_inner().ready);
    assert_eq!(client.model_ready(ready("nope")).await.expect_err("unknown").code(), Code::NotFound);

    let metadata = client.server_metadata(pb::ServerMetadataRequest {}).await.expect("answers").into_inner();
    assert_eq!(metadata.name, "triton");
    assert!(metadata.extensions.iter().any(|extension| extension == "classification"));

    let asked = pb::ModelMetadataRequest { name: "batching".into(), version: String::new() };
    let metadata = client.model_metadata(asked).await.expect("answers").into_inner();
    assert_eq!((metadata.name.as_str(), metadata.versions.as_slice()), ("batching", &["1".to_owned()][..]));
    assert_eq!(metadata.inputs[0].shape, [-1, -1]);

    let asked = pb::ModelConfigRequest { name: named(), version: "1".into() };
    let config = client.model_config(asked).await.expect("answers").into_inner().config.expect("a config");
    assert_eq!((config.name.as_str(), config.backend.as_str()), ("identity", "identity"));

    client.model_infer(request("identity", "", &[1.0])).await.expect("succeeds");
    let asked = pb::ModelStatisticsRequest { name: named(), version: String::new() };
    let statistics = client.model_statistics(asked).await.expect("answers").into_inner().model_stats;
    assert_eq!((statistics.len(), statistics[0].inference_count), (1, 1));
    let asked = pb::ModelStatisticsRequest { name: "nope".into(), version: String::new() };
    let status = client.model_statistics(asked).await.expect_err("unknown");
    assert_eq!(
        (status.code(), status.message()),
        (Code::InvalidArgument, "requested model 'nope' is not available")
    );

    let index =
        client.repository_index(pb::RepositoryIndexRequest::default()).await.expect("answers").into_inner();
    assert_eq!(index.models.len(), MODELS.len());
    assert_eq!((index.models[0].name.as_str(), index.models[0].state.as_str()), ("batching", "READY"));
    let asked = pb::RepositoryIndexRequest { repository_name: "x".into(), ready: false };
    assert_eq!(client.repository_index(asked).await.expect_err("refused").code(), Code::Unimplemented);

    let asked = pb::RepositoryModelUnloadRequest { model_name: named(), ..Default::default() };
    client.repository_model_unload(asked).await.expect("answers");
    assert_eq!(client.model_ready(ready("identity")).await.map(|reply| reply.into_inner().ready).ok(), None);
    let asked = pb::RepositoryModelLoadRequest { model_name: named(), ..Default::default() };
    client.repository_model_load(asked.clone()).await.expect("answers");
    assert!(client.model_ready(ready("identity")).await.expect("answers").into_inner().ready);
    let unknown = [("x".to_owned(), pb::ModelRepositoryParameter::default())].into();
    let status = client
        .repository_model_load(pb::RepositoryModelLoadRequest { parameters: unknown, ..asked })
        .await
        .expect_err("refused");
    assert_eq!(
        (status.code(), status.message()),
        (Code::InvalidArgument, "unrecognized load parameter 'x'.")
    );
    harness.stop().await;
}

#[tokio::test]
async fn features_of_later_versions_say_so() {
    let harness = Harness::start();
    let mut client = harness.client().await;
    let name = |name: &str| name.to_owned();
    let status = client.system_shared_memory_status(pb::SystemSharedMemoryStatusRequest::default()).await;
    assert!(status.expect("answers").into_inner().regions.is_empty());
    let asked = pb::SystemSharedMemoryStatusRequest { name: name("nope") };
    let status = client.system_shared_memory_status(asked).await.expect_err("unknown");
    assert_eq!(
        (status.code(), status.message()),
        (Code::NotFound, "Unable to find system shared memory region: 'nope'")
    );
    let status = client.cuda_shared_memory_status(pb::CudaSharedMemoryStatusRequest::default()).await;
    assert!(status.expect("answers").into_inner().regions.is_empty());
    let memory =
        "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable.";
    let refusals = [
        client.system_shared_memory_register(pb::SystemSharedMemoryRegisterRequest::default()).await.err(),
        client
            .cuda_shared_memory_register(pb::CudaSharedMemoryRegisterRequest {
                raw_handle: vec![0; 64].into(),
                ..Default::default()
            })
            .await
            .err(),
        client
            .system_shared_memory_unregister(pb::SystemSharedMemoryUnregisterRequest { name: name("r") })
            .await
            .err(),
        client.cuda_shared_memory_unregister(pb::CudaSharedMemoryUnregisterRequest::default()).await.err(),
        client.trace_setting(pb::TraceSettingRequest::default()).await.err(),
        client.log_settings(pb::LogSettingsRequest::default()).await.err(),
    ];
    for (refusal, feature) in refusals.into_iter().zip([memory, memory, memory, memory, "trace", "logging"]) {
        let status = refusal.expect("refused");
        assert_eq!(status.code(), Code::Unimplemented, "{status}");
        assert!(status.message().contains(feature), "{status}");
    }
    harness.stop().await;
}

#[tokio::test]
async fn a_passed_deadline_drops_the_request() {
    let harness = Harness::start();
    let mut client = harness.client().await;
    let mut call = Request::new(request("slow", "", &[1.0]));
    call.set_timeout(Duration::from_millis(20));
    let status = client.model_infer(call).await.expect_err("too late");
    // The client's own clock and the server's answer race; both are right.
    assert!(matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled), "{status}");
    harness.idle().await;
    harness.stop().await;
}

#[tokio::test]
async fn restricted_protocols_need_their_header() {
    let restricted = Restrictions::parse(&RestrictionFlag::GRPC, ["inference:key=secret"]).expect("valid");
    let options = GrpcOptions { restricted, ..GrpcOptions::default() };
    let harness = Harness::with(options);
    let mut client = harness.client().await;
    assert!(client.server_live(pb::ServerLiveRequest {}).await.is_ok());
    let status = client.model_infer(request("identity", "", &[1.0])).await.expect_err("restricted");
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(status.message(), "This protocol is restricted, expecting header 'triton-grpc-protocol-key'");
    let mut call = Request::new(request("identity", "", &[1.0]));
    call.metadata_mut().insert("triton-grpc-protocol-key", "secret".parse().expect("a value"));
    assert!(client.model_infer(call).await.is_ok());
    harness.stop().await;
}

#[tokio::test]
async fn a_stop_finishes_what_is_under_way_and_nothing_else() {
    let harness = Harness::start();
    let mut idle = harness.client().await;
    idle.server_live(pb::ServerLiveRequest {}).await.expect("answers");
    let mut busy = harness.client().await;
    let call =
        tokio::task::JoinSet::from_iter([async move { busy.model_infer(request("slow", "", &[1.0])).await }]);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let took = harness.stop().await;
    assert!(took < Duration::from_secs(5), "took {took:?}");
    for reply in call.join_all().await {
        reply.expect("the request under way is answered");
    }
    let status = idle.model_infer(request("identity", "", &[1.0])).await.expect_err("stopped");
    assert_eq!(status.code(), Code::Unavailable, "{status}");
}

#[tokio::test]
async fn idle_connections_do_not_delay_a_stop() {
    let harness = Harness::start();
    let mut client = harness.client().await;
    client.server_live(pb::ServerLiveRequest {}).await.expect("answers");
    let silent = tokio::net::TcpStream::connect(harness.address).await.expect("connects");
    tokio::time::sleep(Duration::from_millis(20)).await;
    let took = harness.stop().await;
    assert!(took < Duration::from_millis(500), "took {took:?}");
    drop(silent);
}
