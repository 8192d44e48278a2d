//! Calls that a gRPC library would not make, by a bare HTTP/2 client, and the services of tonic.

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message as _;
use trireme_proto::health::health_check_response::ServingStatus;
use trireme_proto::health::health_client::HealthClient;
use trireme_proto::health::{HealthCheckRequest, HealthCheckResponse};

use super::super::message::{Framed, prefix};
use super::*;

const INFER: &str = "/inference.GRPCInferenceService/ModelInfer";

pub(super) async fn connect(harness: &Harness) -> SendRequest<Full<Bytes>> {
    let stream = tokio::net::TcpStream::connect(harness.address).await.expect("connects");
    let (sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .expect("HTTP/2");
    tokio::runtime::Handle::current().spawn(connection);
    sender
}

pub(super) struct Answer {
    head: http::response::Parts,
    body: Bytes,
    trailers: Option<http::HeaderMap>,
}

impl Answer {
    /// The status, wherever it is.
    pub(super) fn status(&self) -> &str {
        let trailers = self.trailers.as_ref().unwrap_or(&self.head.headers);
        trailers.get("grpc-status").map_or("", |value| value.to_str().expect("text"))
    }
}

pub(super) async fn send(
    sender: &mut SendRequest<Full<Bytes>>,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> Answer {
    let mut request = http::Request::post(format!("http://server{path}"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::new(body.into())).expect("a request");
    let (head, body) = sender.send_request(request).await.expect("a response").into_parts();
    let body = body.collect().await.expect("a body");
    let trailers = body.trailers().cloned();
    Answer { head, body: body.to_bytes(), trailers }
}

pub(super) fn framed(message: &impl prost::Message) -> Bytes {
    Framed::of(message).expect("fits").into_pieces().concat().into()
}

const GRPC: (&str, &str) = ("content-type", "application/grpc");

#[tokio::test]
async fn a_missing_te_header_is_forgiven() {
    let harness = Harness::start();
    let mut sender = connect(&harness).await;
    let body = framed(&request("identity", "", &[1.0]));
    for headers in [
        &[GRPC][..],
        &[GRPC, ("te", "trailers")],
        &[],
        &[("content-type", "application/grpc+proto"), ("grpc-timeout", "99999999H")],
    ] {
        let answer = send(&mut sender, INFER, headers, body.clone()).await;
        assert_eq!(answer.head.status, 200);
        assert_eq!(answer.head.headers["content-type"], "application/grpc");
        assert_eq!(answer.status(), "0", "{headers:?}");
        assert!(!answer.body.is_empty());
    }
    harness.stop().await;
}

#[tokio::test]
async fn what_is_not_grpc_is_refused_by_http() {
    let harness = Harness::start();
    let mut sender = connect(&harness).await;
    for content_type in ["application/json", "application/grpc-web", "application/grpc-web+proto"] {
        let answer = send(&mut sender, INFER, &[("content-type", content_type)], "").await;
        assert_eq!(answer.head.status, 415, "{content_type}");
    }
    let get = http::Request::get("http://server/").body(Full::default()).expect("a request");
    assert_eq!(sender.send_request(get).await.expect("a response").status(), 405);
    let answer = send(&mut sender, "/no.such.Service/Call", &[GRPC], "").await;
    assert_eq!((answer.head.status.as_u16(), answer.status()), (200, "12"));
    harness.stop().await;
}

#[tokio::test]
async fn broken_messages_end_in_a_status() {
    let harness = Harness::start();
    let mut sender = connect(&harness).await;
    let claims = |len: usize, bytes: &[u8]| [&prefix(false, len)[..], bytes].concat();
    let table = [
        (claims(2, b"\xff\xff"), "3"),
        (claims(2, b"\x2a\x7f"), "3"),
        (claims(i32::MAX as usize, b"x"), "13"),
        (claims(i32::MAX as usize + 1, b"x"), "8"),
        (b"\0\0".to_vec(), "13"),
        (b"\x01\0\0\0\x01x".to_vec(), "13"),
        (Vec::new(), "3"),
        ([claims(0, b""), claims(0, b"")].concat(), "3"),
    ];
    for (body, status) in table {
        for path in [INFER, "/inference.GRPCInferenceService/RepositoryIndex"] {
            if path != INFER && body.len() == 7 {
                continue;
            }
            let answer = send(&mut sender, path, &[GRPC], body.clone()).await;
            assert_eq!(answer.status(), status, "{body:x?} to {path}");
        }
    }
    let answer = send(&mut sender, INFER, &[GRPC, ("grpc-encoding", "snappy")], "").await;
    assert_eq!(answer.status(), "12");
    assert_eq!(answer.head.headers["grpc-accept-encoding"], "identity,gzip,deflate");
    assert!(harness.server.is_ready());
    harness.stop().await;
}

#[tokio::test]
async fn messages_are_compressed_as_agreed() {
    let options = GrpcOptions { compression_level: CompressionLevel::High, ..GrpcOptions::default() };
    let harness = Harness::with(options);
    let mut sender = connect(&harness).await;
    for len in [1000, 300_000] {
        let sent = request("identity", "", &vec![0.0; len]);
        for (encoding, parsed) in
            [("gzip", compression::Encoding::Gzip), ("deflate", compression::Encoding::Deflate)]
        {
            let message = Framed::of(&sent)
                .expect("fits")
                .compressed(parsed, CompressionLevel::Low)
                .expect("compresses");
            let headers = [GRPC, ("grpc-encoding", encoding), ("grpc-accept-encoding", encoding)];
            let answer = send(&mut sender, INFER, &headers, message.into_pieces().concat()).await;
            assert_eq!(
                (answer.status(), &answer.head.headers["grpc-encoding"]),
                ("0", &http::HeaderValue::from_str(encoding).expect("text"))
            );
            let (prefix, compressed) = answer.body.split_at(5);
            assert_eq!(prefix[0], 1);
            assert!(compressed.len() < 4 * len);
            let message =
                compression::decompress(parsed, Bytes::copy_from_slice(compressed), usize::MAX - 1).await;
            let reply = pb::ModelInferResponse::decode(message.expect("decompresses")).expect("a response");
            assert_eq!(reply.raw_output_contents, sent.raw_input_contents);
        }
        let answer = send(&mut sender, INFER, &[GRPC], framed(&sent)).await;
        assert_eq!(answer.body[0], 0, "the client did not ask for compression");
    }
    let path = "/inference.GRPCInferenceService/ServerMetadata";
    let answer =
        send(&mut sender, path, &[GRPC, ("grpc-accept-encoding", "gzip")], prefix(false, 0).to_vec()).await;
    assert_eq!((answer.status(), answer.body[0]), ("0", 0), "only inference responses are compressed");
    harness.stop().await;
}

#[tokio::test]
async fn an_old_connection_is_asked_to_end_and_then_cut_off() {
    let options = GrpcOptions {
        max_connection_age: Some(Duration::from_millis(50)),
        max_connection_age_grace: Some(Duration::from_millis(50)),
        ..GrpcOptions::default()
    };
    let harness = Harness::with(options);
    let mut sender = connect(&harness).await;
    let answer = send(&mut sender, INFER, &[GRPC], framed(&request("identity", "", &[1.0]))).await;
    assert_eq!(answer.status(), "0");
    tokio::time::sleep(Duration::from_millis(90)).await;
    assert!(sender.is_closed(), "the idle connection is over its age");

    let mut sender = connect(&harness).await;
    let slow = http::Request::post(format!("http://server{INFER}"))
        .body(Full::new(framed(&request("slow", "", &[1.0]))))
        .expect("a request");
    let started = Instant::now();
    assert!(sender.send_request(slow).await.is_err(), "the call outlives the grace time");
    assert!(started.elapsed() < Duration::from_millis(250));
    harness.idle().await;
    harness.stop().await;
}

#[tokio::test]
async fn a_client_that_does_not_answer_cannot_hold_up_a_stop() {
    let harness = Harness::start();
    let stream = tokio::net::TcpStream::connect(harness.address).await.expect("connects");
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .expect("HTTP/2");
    let mut connection = std::pin::pin!(connection);
    let body = framed(&request("identity", "", &[1.0]));
    tokio::select! {
        answer = send(&mut sender, INFER, &[GRPC], body) => assert_eq!(answer.status(), "0"),
        _ = &mut connection => panic!("the connection ended"),
    }
    // From here on nobody drives the client's connection.
    let took = harness.stop().await;
    assert!(took < Duration::from_secs(3), "took {took:?}");
}

#[tokio::test]
async fn health_is_served_and_watched() {
    let harness = Harness::start();
    let channel = Channel::from_shared(format!("http://{}", harness.address)).expect("an address");
    let mut client = HealthClient::new(channel.connect().await.expect("connects"));
    let serving = HealthCheckResponse { status: ServingStatus::Serving.into() };
    for service in ["", "inference.GRPCInferenceService", "any"] {
        let asked = HealthCheckRequest { service: service.into() };
        assert_eq!(client.check(asked).await.expect("answers").into_inner(), serving);
    }
    let mut watch = client.watch(HealthCheckRequest::default()).await.expect("answers").into_inner();
    assert_eq!(watch.message().await.expect("no status"), Some(serving));
    harness.server.begin_stop();
    let stopped = HealthCheckResponse { status: ServingStatus::NotServing.into() };
    assert_eq!(watch.message().await.expect("no status"), Some(stopped));
    let took = harness.stop().await;
    assert!(took < Duration::from_secs(2), "took {took:?}");
    assert_eq!(watch.message().await.expect_err("an end").code(), Code::Unavailable);
}

#[tokio::test]
async fn reflection_lists_the_services() {
    let harness = Harness::start();
    let mut sender = connect(&harness).await;
    // ServerReflectionRequest { list_services: "" }
    let body = [&prefix(false, 2)[..], &[0x3a, 0]].concat();
    for version in ["v1", "v1alpha"] {
        let path = format!("/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo");
        let answer = send(&mut sender, &path, &[GRPC, ("te", "trailers")], body.clone()).await;
        assert_eq!(answer.status(), "0");
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        for service in ["inference.GRPCInferenceService", "grpc.health.v1.Health"] {
            assert!(text.contains(service), "{version}: {text}");
        }
    }
    harness.stop().await;
}
