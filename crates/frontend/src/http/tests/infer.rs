//! Inference: data in every form, limits, and requests that must be refused.

use super::*;

#[test]
fn json_data_comes_back_as_it_was_sent() {
    let harness = Harness::start();
    for (data_type, data) in [
        ("BOOL", "[true,false]"),
        ("UINT8", "[0,255]"),
        ("UINT16", "[0,65535]"),
        ("UINT32", "[0,4294967295]"),
        ("UINT64", "[18446744073709551615,9007199254740993]"),
        ("INT8", "[-128,127]"),
        ("INT16", "[-32768,32767]"),
        ("INT32", "[-2147483648,2147483647]"),
        ("INT64", "[-9223372036854775808,9007199254740993]"),
        ("FP16", "[1.5,-65504.0]"),
        ("BF16", "[1.0,3.140625]"),
        ("FP32", "[0.1,-1e+38]"),
        ("FP32", "[NaN,-Infinity]"),
        ("FP64", "[0.1,1e+300]"),
        ("BYTES", r#"["","é模😀"]"#),
    ] {
        let model = format!("id_{}", data_type.to_lowercase());
        let answer = harness.infer(&model, request(data_type, "2", data));
        assert_eq!(answer.data(), data, "{data_type}");
        assert_eq!(answer.header("Content-Type"), Some("application/json"));
    }
    // BF16 rounds, escapes are taken apart, an embedded NUL stays.
    assert_eq!(harness.infer("id_bf16", request("BF16", "1", "[3.14]")).data(), "[3.140625]");
    let escaped = r#"["a\u0000b\ud83d\ude00"]"#;
    assert_eq!(harness.infer("id_bytes", request("BYTES", "1", escaped)).data(), r#"["a\u0000b😀"]"#);
    let long = format!("[\"{}\"]", "x".repeat(1 << 20));
    assert_eq!(harness.infer("id_bytes", request("BYTES", "1", &long)).data(), long);
    assert_eq!(harness.infer("id_bytes", request("BYTES", "0", "[]")).data(), "[]");
}

#[test]
fn values_that_do_not_fit_are_400_with_their_place() {
    let harness = Harness::start();
    for (data_type, data, says) in [
        (
            "INT8",
            "[300]",
            "300 is out of range for INT8, -128 to 127, at inputs[0].data[0] of input 'INPUT0'",
        ),
        ("UINT8", "[-1]", "-1 is out of range for UINT8, 0 to 255"),
        ("INT32", "[1.5]", "attempt to access JSON non-signed-integer as signed-integer, got 1.5"),
        ("INT32", "[1.0]", "attempt to access JSON non-signed-integer as signed-integer, got 1.0"),
        ("FP32", "[\"1\"]", "attempt to access JSON non-number as double"),
        ("FP32", "[1e400]", "out of range for FP32"),
        ("BYTES", r#"[{"b64":"aGk="}]"#, "attempt to access JSON non-string as string"),
    ] {
        let answer =
            harness.infer(&format!("id_{}", data_type.to_lowercase()), request(data_type, "1", data));
        assert_eq!(answer.status, 400, "{data}");
        let escaped = answer.text().replace("\\\"", "\"");
        assert!(escaped.contains(says), "{escaped}");
    }
}

#[test]
fn broken_bodies_are_400_and_counted() {
    let harness = Harness::start();
    let deep = request("FP32", "1", &format!("{}1{}", "[".repeat(250_000), "]".repeat(250_000)));
    let junk = format!("{} junk", request("FP32", "1", "[1]"));
    let bodies = ["", "abc", "{", "[]", r#"{"inputs":{}}"#, r#"{"inputs":[7]}"#, &junk, &deep];
    for body in bodies {
        let answer = harness.infer("id_fp32", body);
        assert_eq!(answer.status, 400, "{}", answer.text());
        assert_eq!(answer.header("Content-Type"), Some("application/json"));
        assert!(answer.text().starts_with("{\"error\":\""));
    }
    assert_eq!(harness.metric("trireme_refused_requests_total "), bodies.len() as u64);
    assert_eq!(harness.infer("id_fp32", request("FP32", "1", "[1]")).status, 200);
}

#[test]
fn listing_twice_is_refused_for_inputs_and_once_for_outputs() {
    let harness = Harness::start();
    let input = r#"{"name":"INPUT0","datatype":"FP32","shape":[1],"data":[1]}"#;
    let answer = harness.infer("id_fp32", format!(r#"{{"inputs":[{input},{input}]}}"#));
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("input 'INPUT0' already exists in request"), "{}", answer.text());
    let output = r#"{"name":"OUTPUT0"}"#;
    let answer = harness.infer("id_fp32", format!(r#"{{"inputs":[{input}],"outputs":[{output},{output}]}}"#));
    assert_eq!(answer.data(), "[1.0]");
    let answer = harness.infer("id_fp32", format!(r#"{{"inputs":[{input}],"inputs":[]}}"#));
    assert_eq!(answer.data(), "[1.0]");
}

#[test]
fn binary_data_goes_both_ways_in_any_mix() {
    let harness = Harness::start();
    let one = 1_f32.to_le_bytes();
    let input =
        |name: &str, more: &str| format!(r#"{{"name":"{name}","datatype":"FP32","shape":[1],{more}}}"#);
    let mixed = format!(
        r#"{{"id":"m","inputs":[{},{}],"outputs":[{{"name":"OUTPUT1","parameters":{{"binary_data":true}}}},{{"name":"OUTPUT0"}}]}}"#,
        input("INPUT0", r#""parameters":{"binary_data_size":4}"#),
        input("INPUT1", r#""data":[2]"#),
    );
    let answer = harness.infer_binary("two", &mixed, &one);
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.header("Content-Type"), Some("application/octet-stream"));
    let (json, binary) = answer.split();
    assert_eq!(binary, 2_f32.to_le_bytes());
    assert!(
        json.starts_with(r#"{"id":"m","model_name":"two","model_version":"1","outputs":[{"name":"OUTPUT0","#),
        "{json}"
    );
    assert!(json.contains(r#""data":[1.0]"#) && json.contains(r#""binary_data_size":4"#), "{json}");

    let all = r#"{"parameters":{"binary_data_output":true},"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1],"data":[1]}]}"#;
    assert_eq!(harness.infer("id_fp32", all).split().1, one);
    let lower = format!(
        "inference-header-content-length: {}\r\nCONTENT-TYPE: Text/Plain; charset=utf-8\r\n",
        all.len()
    );
    assert_eq!(harness.send("POST", "/v2/models/id_fp32/infer", &lower, all.as_bytes()).status, 200);
}

#[test]
fn wrong_binary_sizes_are_named() {
    let harness = Harness::start();
    let json = |size: &str| {
        format!(
            r#"{{"inputs":[{{"name":"INPUT0","datatype":"FP32","shape":[4],"parameters":{{"binary_data_size":{size}}}}}]}}"#
        )
    };
    for (size, data, says) in [
        (
            "16",
            &[0; 12][..],
            "unexpected size for input 'INPUT0', expecting 4 additional bytes for model 'id_fp32'",
        ),
        ("12", &[0; 16], "unexpected additional input data for model 'id_fp32'"),
        (
            "12",
            &[0; 12],
            "input byte size mismatch for input 'INPUT0' for model 'id_fp32'. Expected 16, got 12",
        ),
        ("18446744073709551615", &[0; 16], "unexpected size for input 'INPUT0'"),
        ("-4", &[0; 16], "attempt to access JSON non-unsigned-integer"),
    ] {
        let answer = harness.infer_binary("id_fp32", &json(size), data);
        assert_eq!(answer.status, 400);
        assert!(answer.text().contains(says), "{}", answer.text());
    }
    let strings = |size: usize, data: &[u8]| {
        let json = format!(
            r#"{{"inputs":[{{"name":"INPUT0","datatype":"BYTES","shape":[1],"parameters":{{"binary_data_size":{size}}}}}]}}"#
        );
        harness.infer_binary("id_bytes", &json, data)
    };
    let beyond = strings(8, b"\xff\xff\xff\x7fabcd");
    assert_eq!(beyond.status, 400);
    assert!(beyond.text().contains("element 0 declares 2147483647 bytes but 4 remain"), "{}", beyond.text());
    assert_eq!(strings(2, b"ab").status, 400);
    assert_eq!(strings(9, b"\x02\0\0\0hixyz").status, 400);
}

#[test]
fn the_length_header_is_checked() {
    let harness = Harness::start();
    let body = request("FP32", "1", "[1]");
    let with = |value: &str, body: &[u8]| {
        let header = format!("Inference-Header-Content-Length: {value}\r\n");
        harness.send("POST", "/v2/models/id_fp32/infer", &header, body)
    };
    for (value, says) in [
        ("100000", "inference header size should be in range"),
        ("-1", "inference header size should be in range"),
        ("abc", "Unable to parse Inference-Header-Content-Length, got: abc"),
        ("2147483648", "value is out of range"),
    ] {
        let answer = with(value, body.as_bytes());
        assert_eq!(answer.status, 400);
        assert!(answer.text().contains(says), "{}", answer.text());
    }
    let json =
        r#"{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}}]}"#;
    let answer = harness.infer("id_fp32", [json.as_bytes(), &[0; 4]].concat());
    let says = format!("the JSON ended at byte {} but 4 more follow", json.len());
    assert!(answer.status == 400 && answer.text().contains(&says), "{}", answer.text());
}

#[test]
fn a_raw_body_is_the_only_input() {
    let harness = Harness::start();
    let raw = |model: &str, body: &[u8]| {
        let headers = "Inference-Header-Content-Length: 0\r\nContent-Type: application/octet-stream\r\n";
        harness.send("POST", &format!("/v2/models/{model}/infer"), headers, body)
    };
    let floats: Vec<u8> = [1_f32, 2.0, 3.0, 4.0].iter().flat_map(|value| value.to_le_bytes()).collect();
    let answer = raw("id_fp32", &floats);
    let (json, binary) = answer.split();
    assert!(json.contains(r#""shape":[4]"#), "{json}");
    assert_eq!(binary, floats);
    let answer = raw("id_bytes", b"any \0 bytes");
    assert_eq!(answer.split().1, b"\x0b\0\0\0any \0 bytes");
    let answer = raw("two", &floats);
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("Raw request must only have 1 input"), "{}", answer.text());
}

fn gzip(body: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(body).expect("memory");
    encoder.finish().expect("memory")
}

#[test]
fn compressed_bodies_are_taken_and_sent() {
    let harness = Harness::start();
    let path = "/v2/models/id_fp32/infer";
    let body = request("FP32", "1", "[1]");
    let zlib = {
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(body.as_bytes()).expect("memory");
        encoder.finish().expect("memory")
    };
    assert_eq!(
        harness.send("POST", path, "Content-Encoding: gzip\r\n", &gzip(body.as_bytes())).data(),
        "[1.0]"
    );
    assert_eq!(harness.send("POST", path, "Content-Encoding: deflate\r\n", &zlib).data(), "[1.0]");
    assert_eq!(harness.send("POST", path, "Content-Encoding: identity\r\n", body.as_bytes()).data(), "[1.0]");

    let json =
        r#"{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}}]}"#;
    let head = format!("Content-Encoding: gzip\r\nInference-Header-Content-Length: {}\r\n", json.len());
    let both = gzip(&[json.as_bytes(), &1_f32.to_le_bytes()].concat());
    assert_eq!(harness.send("POST", path, &head, &both).data(), "[1.0]");

    let answer = harness.send("POST", path, "Content-Encoding: br\r\n", body.as_bytes());
    assert_eq!((answer.status, answer.header("Accept-Encoding")), (415, Some("gzip, deflate")));
    assert_eq!(harness.send("POST", path, "Content-Encoding: gzip\r\n", b"not gzip").status, 400);
    let bomb = harness.send("POST", path, "Content-Encoding: gzip\r\n", &gzip(&vec![b' '; 80 << 20]));
    assert_eq!(bomb.status, 413);
    assert!(bomb.text().contains("67108864 bytes. Use --http-max-input-size"), "{}", bomb.text());

    let plain = harness.infer("id_fp32", &body);
    let mut text = Vec::new();
    let answer =
        harness.send("POST", path, "Accept-Encoding: br, gzip;q=0.8, deflate;q=0.1\r\n", body.as_bytes());
    assert_eq!(answer.header("Content-Encoding"), Some("gzip"));
    GzDecoder::new(&answer.body[..]).read_to_end(&mut text).expect("gzip");
    assert_eq!(text, plain.body);
    text.clear();
    let answer = harness.send("POST", path, "Accept-Encoding: deflate\r\n", body.as_bytes());
    ZlibDecoder::new(&answer.body[..]).read_to_end(&mut text).expect("zlib");
    assert_eq!(text, plain.body);
}

#[test]
fn limits_name_the_flag_and_spare_binary_data() {
    let harness = Harness::with(HttpOptions { max_input_size: 1 << 20, ..HttpOptions::default() });
    let json = request("UINT8", "1", &format!("[{}1]", " ".repeat(2 << 20)));
    let large = harness.infer("id_uint8", json.as_bytes());
    assert_eq!(large.status, 413);
    assert!(
        large
            .text()
            .contains("exceeds the maximum allowed input size of 1048576 bytes. Use --http-max-input-size")
    );
    let chunked = format!(
        "POST /v2/models/id_uint8/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n\
         {:x}\r\n{json}\r\n0\r\n\r\n",
        json.len()
    );
    let reply = harness.exchange(harness.address, chunked.as_bytes());
    assert!(reply.starts_with(b"HTTP/1.1 413"), "{}", String::from_utf8_lossy(&reply));
    let raw = harness.infer_binary("id_uint8", "", &vec![0; 2 << 20]);
    assert!(raw.status == 413 && raw.text().contains("Raw input has a byte_size"), "{}", raw.text());

    let size = 3 << 20;
    let json = format!(
        r#"{{"parameters":{{"binary_data_output":true}},"inputs":[{{"name":"INPUT0","datatype":"UINT8","shape":[{size}],"parameters":{{"binary_data_size":{size}}}}}]}}"#
    );
    let data: Vec<u8> = (0..size).map(|i| u8::try_from(i % 251).expect("small")).collect();
    let answer = harness.infer_binary("id_uint8", &json, &data);
    assert!(answer.split().1 == data);

    let implied = harness.infer("id_fp64", request("FP64", "1099511627776", "[1]"));
    assert!(implied.status == 400 && implied.text().contains("Shape does not match"), "{}", implied.text());
}

#[test]
fn classification_ranks_rows_and_names_labels() {
    let harness = Harness::start();
    let ask = |model: &str, data_type: &str, dims: &str, data: &str| {
        let input = request(data_type, dims, data);
        let outputs = r#","outputs":[{"name":"OUTPUT0","parameters":{"classification":2}}]}"#;
        harness.infer(model, format!("{}{outputs}", input.trim_end_matches('}')))
    };
    let answer = ask("batched", "FP32", "2,3", "[0.5,0.1,0.9,3,2,1]");
    assert!(answer.text().contains(r#""datatype":"BYTES","shape":[2,2]"#), "{}", answer.text());
    assert_eq!(answer.data(), r#"["0.900000:2","0.500000:0:cat","3.000000:0:cat","2.000000:1:dog"]"#);
    let refused = ask("id_bytes", "BYTES", "1", r#"["a"]"#);
    assert_eq!(refused.status, 400);
    assert!(refused.text().contains("class result not available for output due to unsupported type 'BYTES'"));
}

#[test]
fn what_cannot_be_served_says_so() {
    let harness = Harness::start();
    let unknown = harness.infer("nope", "{}");
    assert_eq!(harness.metric("trireme_refused_requests_total "), 1);
    assert_eq!(
        (unknown.status, unknown.text().as_str()),
        (404, r#"{"error":"Request for unknown model: 'nope' is not found"}"#)
    );
    assert_eq!(harness.post("/v2/models/id_fp32/versions/9/infer", "{}").status, 404);
    assert_eq!(harness.post("/v2/models/id_fp32/versions/0/infer", "{}").status, 400);
    let decoupled = harness.infer("repeat", request("INT32", "1", "[1]"));
    assert_eq!(decoupled.status, 501);
    assert!(
        decoupled.text().contains("HTTP end point doesn't support models with decoupled transaction policy")
    );
    let region = r#"{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1],"parameters":{"shared_memory_region":"r","shared_memory_byte_size":4}}]}"#;
    let answer = harness.infer("id_fp32", region);
    assert_eq!(
        (answer.status, answer.text().as_str()),
        (404, r#"{"error":"Unable to find shared memory region: 'r'"}"#)
    );
}

#[test]
fn names_are_percent_decoded_once() {
    let harness = Harness::start();
    for name in ["my%20model", "%E6%A8%A1%E5%9E%8B", "a+b", "a%2Bb", "a.b-c_d"] {
        assert_eq!(harness.infer(name, request("FP32", "1", "[1]")).data(), "[1.0]", "{name}");
        assert_eq!(harness.get(&format!("/v2/models/{name}")).status, 200, "{name}");
    }
    for name in ["%2e%2e", "a%2Fb", "my%2520model"] {
        let status = harness.infer(name, request("FP32", "1", "[1]")).status;
        assert!(matches!(status, 400 | 404), "{name}: {status}");
    }
}

#[test]
fn headers_become_parameters_and_reserved_ones_are_refused() {
    let forward = HeaderForward::parse("--flag", "^x-|timeout").expect("a pattern");
    let harness = Harness::with(HttpOptions { header_forward: forward, ..HttpOptions::default() });
    let body = request("FP32", "1", "[1]");
    let path = "/v2/models/id_fp32/infer";
    assert_eq!(harness.send("POST", path, "X-Trace: 1\r\n", body.as_bytes()).status, 200);
    let refused = harness.send("POST", path, "Timeout: 5\r\n", body.as_bytes());
    assert_eq!(refused.status, 400);
    assert!(refused.text().contains("Header 'timeout' is reserved for Triton usage"), "{}", refused.text());
}

#[test]
fn clients_that_leave_end_their_requests() {
    let harness = Harness::start();
    let metric = |start: &str| {
        let page = harness.server.metrics_text();
        let line = page.lines().find_map(|line| line.strip_prefix(start)?.strip_prefix(' ')).expect(start);
        line.parse::<u64>().expect("a number")
    };
    let waiting = || metric("nv_inference_pending_request_count{model=\"slow\",version=\"1\"}");
    let canceled =
        || metric("nv_inference_request_failure{model=\"slow\",version=\"1\",reason=\"CANCELED\"}");
    let until = |what: &str, holds: &dyn Fn() -> bool| {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !holds() {
            assert!(Instant::now() < deadline, "never: {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let body = request("FP32", "1", "[1]");
    let head = |path: &str| {
        format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    };
    let connect = |text: &str| {
        let mut stream = TcpStream::connect(harness.address).expect("a connection");
        stream.write_all(text.as_bytes()).expect("a request");
        stream
    };
    let in_flight = || harness.server.model("slow", None).expect("a model").in_flight();
    let slow = head("/v2/models/slow/infer");
    let running = connect(&slow);
    until("runs", &|| in_flight() == 1);
    let queued = connect(&slow);
    // A connection that has served a request before, and half a body.
    let mut kept = connect(&head("/v2/models/id_fp32/infer"));
    assert!(kept.read(&mut [0; 4096]).expect("an answer") > 0);
    kept.write_all(slow.as_bytes()).expect("a request");
    let half = connect(slow.split_at(slow.len() - 1).0);
    until("waits", &|| waiting() == 2);
    drop((queued, kept, half));
    until("the queue is empty", &|| waiting() == 0);
    assert_eq!((in_flight(), canceled()), (1, 2));
    // The execution, which would take a minute, ends too.
    drop(running);
    until("the model is idle", &|| in_flight() == 0);
    until("the connections are closed", &|| harness.shutdown.tasks() <= 2);
    assert_eq!(metric("nv_inference_exec_count{model=\"slow\",version=\"1\"}"), 0);
}

#[test]
fn many_large_answers_at_once_are_complete() {
    let harness = Harness::start();
    let count = 200_000;
    let data = format!("[{}0.25]", "0.125,".repeat(count - 1));
    let body = request("FP32", &count.to_string(), &data);
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                let answer = harness.infer("id_fp32", &body);
                let length = answer.header("Content-Length").and_then(|length| length.parse().ok());
                assert_eq!(length, Some(answer.body.len()));
                assert!(answer.data() == data);
            });
        }
    });
}
