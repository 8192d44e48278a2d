//! Everything but inference: health, metadata, the repository, closed groups, framing, the metrics page, stopping.

use super::*;
use crate::restricted::RestrictionFlag;

#[test]
fn health_is_a_status() {
    let harness = Harness::start();
    for path in [
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/id_fp32/ready",
        "/v2/models/id_fp32/versions/1/ready",
    ] {
        let answer = harness.get(path);
        assert_eq!((answer.status, answer.text().as_str()), (200, ""), "{path}");
    }
    for path in ["/v2/models/nope/ready", "/v2/models/id_fp32/versions/9/ready"] {
        let answer = harness.get(path);
        assert_eq!((answer.status, answer.text().as_str()), (400, r#"{"error":"Model version not ready"}"#));
    }
    harness.server.begin_stop();
    let answer = harness.get("/v2/health/ready");
    assert_eq!((answer.status, answer.text().as_str()), (503, r#"{"error":"Server exiting"}"#));
    assert_eq!(harness.infer("id_fp32", request("FP32", "1", "[1]")).status, 503);
}

#[test]
fn metadata_and_statistics_have_tritons_form() {
    let harness = Harness::start();
    let server = harness.get("/v2").text();
    assert!(server.starts_with(r#"{"name":"triton","version":""#), "{server}");
    assert!(server.contains(r#""extensions":["classification","sequence","#), "{server}");
    assert_eq!(
        harness.get("/v2/models/batched").text(),
        r#"{"name":"batched","versions":["1"],"platform":"identity","inputs":[{"name":"INPUT0","datatype":"FP32","shape":[-1,-1]}],"outputs":[{"name":"OUTPUT0","datatype":"FP32","shape":[-1,-1]}]}"#
    );
    let config = harness.get("/v2/models/batched/config").text();
    assert!(config.starts_with(r#"{"name":"batched","platform":"","backend":"identity""#), "{config}");

    assert_eq!(harness.infer("batched", request("FP32", "2,1", "[1,2]")).status, 200);
    let statistics = harness.get("/v2/models/batched/stats").text();
    assert!(
        statistics.starts_with(r#"{"model_stats":[{"name":"batched","version":"1","last_inference":"#),
        "{statistics}"
    );
    assert!(statistics.contains(r#""inference_count":2,"execution_count":1"#), "{statistics}");
    assert!(statistics.contains(r#""batch_stats":[{"batch_size":2,"#), "{statistics}");
    assert!(harness.get("/v2/models/stats").text().contains(r#""name":"id_fp32""#));
    let unknown = harness.get("/v2/models/nope/stats");
    assert_eq!(
        (unknown.status, unknown.text().as_str()),
        (400, r#"{"error":"requested model 'nope' is not available"}"#)
    );
}

#[test]
fn every_route_answers_and_others_do_not() {
    let harness = Harness::start();
    for (method, path, status) in [
        ("GET", "/", 404),
        ("GET", "/v2/", 404),
        ("GET", "/v2/models/id_fp32/versions/abc", 404),
        ("POST", "/v2/health/live", 405),
        ("GET", "/v2/models/id_fp32/infer", 405),
        ("DELETE", "/v2/models/id_fp32/infer", 405),
        ("GET", "/v2/repository/index", 405),
        ("OPTIONS", "/v2/health/live", 405),
        ("POST", "/v2/models/id_fp32/generate", 400),
        ("POST", "/v2/models/id_fp32/generate_stream", 400),
        ("GET", "/v2/trace/setting", 501),
        ("POST", "/v2/models/id_fp32/trace/setting", 501),
        ("GET", "/v2/logging", 501),
        ("POST", "/v2/logging", 501),
        ("POST", "/v2/systemsharedmemory/region/r/register", 400),
        ("POST", "/v2/cudasharedmemory/region/r/register", 400),
        ("POST", "/v2/repository/r/models/id_fp32/load", 501),
        ("GET", "/v2/systemsharedmemory/status", 200),
        ("GET", "/v2/cudasharedmemory/status", 200),
        ("GET", "/v2/systemsharedmemory/region/r/status", 404),
        ("POST", "/v2/systemsharedmemory/region/r/unregister", 501),
        ("POST", "/v2/cudasharedmemory/unregister", 501),
        ("GET", "/v2/health/live?x=1", 200),
    ] {
        let answer = harness.send(method, path, "", b"");
        assert_eq!(answer.status, status, "{method} {path}: {}", answer.text());
        assert_eq!(status >= 400, answer.text().starts_with("{\"error\":\""), "{method} {path}");
    }
    assert_eq!(harness.send("HEAD", "/v2/health/live", "", b"").status, 405);
}

#[test]
fn models_come_and_go() {
    let harness = Harness::start();
    let index = harness.post("/v2/repository/index", "").text();
    assert!(
        index.starts_with("[{\"name\":")
            && index.contains(r#"{"name":"id_fp32","version":"1","state":"READY"}"#)
    );
    let unloaded = harness.post("/v2/repository/models/id_fp32/unload", "");
    assert_eq!((unloaded.status, unloaded.header("Content-Type")), (200, Some("application/json")));
    assert_eq!(harness.get("/v2/models/id_fp32/ready").status, 400);
    let ready = harness.post("/v2/repository/index", r#"{"ready":true}"#).text();
    assert!(!ready.contains(r#""name":"id_fp32","#), "{ready}");
    assert_eq!(harness.post("/v2/repository/models/my%20model/load", "{}").status, 200);
    assert_eq!(harness.post("/v2/repository/models/id_fp32/load", "").status, 200);
    assert_eq!(harness.infer("id_fp32", request("FP32", "1", "[1]")).data(), "[1.0]");
    for (body, status) in
        [("{", 400), (r#"{"parameters":{"foo":"x"}}"#, 400), (r#"{"parameters":{"config":1}}"#, 400)]
    {
        assert_eq!(harness.post("/v2/repository/models/id_fp32/load", body).status, status, "{body}");
    }
    assert_eq!(harness.post("/v2/repository/models/%2e%2e/load", "").status, 400);
    assert_eq!(harness.post("/v2/repository/models/nope/unload", "").status, 200);
}

#[test]
fn closed_groups_want_their_header() {
    let restricted = Restrictions::parse(&RestrictionFlag::HTTP, ["model-repository,metadata:X-Key=secret"])
        .expect("a group");
    let harness = Harness::with(HttpOptions { restricted, ..HttpOptions::default() });
    let refused = harness.get("/v2");
    assert_eq!(
        (refused.status, refused.text().as_str()),
        (403, r#"{"error":"This API is restricted, expecting header 'X-Key'"}"#)
    );
    assert_eq!(harness.send("GET", "/v2", "x-key: secret\r\n", b"").status, 200);
    assert_eq!(harness.post("/v2/repository/index", "").status, 403);
    assert_eq!(harness.get("/v2/health/live").status, 200);
}

#[test]
fn old_and_careful_clients_are_served() {
    let harness = Harness::start();
    let reply = harness.exchange(harness.address, b"GET /v2/health/live HTTP/1.0\r\n\r\n");
    assert!(reply.starts_with(b"HTTP/1.0 200"), "{}", String::from_utf8_lossy(&reply));
    let body = request("FP32", "1", "[1]");
    let expect = format!(
        "POST /v2/models/id_fp32/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: 100-continue\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let reply = String::from_utf8(harness.exchange(harness.address, expect.as_bytes())).expect("text");
    assert!(reply.starts_with("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200"), "{reply}");
    // One that waits for leave to send gets its refusal instead.
    let waiting = "POST /v2/models/nope/infer HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 100\r\n\r\n";
    let reply = String::from_utf8(harness.exchange(harness.address, waiting.as_bytes())).expect("text");
    assert!(reply.starts_with("HTTP/1.1 404") && reply.contains("Connection: close"), "{reply}");

    for (kilobytes, status) in [(4, 200), (12, 200), (64, 200), (1024, 431)] {
        let header = format!("Authorization: {}\r\n", "a".repeat(kilobytes << 10));
        assert_eq!(harness.send("GET", "/v2/health/live", &header, b"").status, status, "{kilobytes}");
    }
}

#[test]
fn a_large_body_for_nobody_is_read_so_that_the_answer_arrives() {
    let harness = Harness::start();
    let body = vec![b' '; 20 << 20];
    let mut stream = TcpStream::connect(harness.address).expect("a connection");
    let head =
        format!("POST /v2/models/nope/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).expect("a head");
    stream.write_all(&body).expect("the server takes the whole body");
    let mut start = [0; 12];
    stream.read_exact(&mut start).expect("an answer");
    assert_eq!(&start, b"HTTP/1.1 404");
}

#[test]
fn the_metrics_page_has_one_path() {
    let harness = Harness::start();
    for path in ["/metrics", "/metrics/"] {
        let page = harness.send_to(harness.metrics, "GET", path, "", b"");
        assert_eq!((page.status, page.header("Content-Type")), (200, Some("text/plain; charset=utf-8")));
        assert!(page.text().contains("nv_inference_request_success"), "{}", page.text());
    }
    assert_eq!(harness.send_to(harness.metrics, "GET", "/", "", b"").status, 404);
    assert_eq!(harness.send_to(harness.metrics, "POST", "/metrics", "", b"").status, 405);
}

#[test]
fn an_idle_server_stops_at_once() {
    let harness = Harness::start();
    let idle: Vec<TcpStream> =
        (0..20).map(|_| TcpStream::connect(harness.address).expect("a connection")).collect();
    assert_eq!(harness.get("/v2/health/live").status, 200);
    harness.server.begin_stop();
    harness.shutdown.begin();
    assert_eq!(harness.runtime.block_on(harness.shutdown.wait(Duration::from_secs(10))), 0);
    for mut stream in idle {
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.is_empty());
    }
}
