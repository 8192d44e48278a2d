"""The HTTP cases of public bug reports, one test a case, named by the case."""

import concurrent.futures
import gzip
import http.client
import json
import socket
import struct
import time
import zlib

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as tritonhttp
import wire
from prometheus_client.parser import text_string_to_metric_families
from wire import binary, infer, refused, split, statuses, talk, tensor, values

X3 = {"inputs": [tensor("X", "FP32", [3], [1, 2.5, -3])]}
TEXT = json.dumps(X3).encode()
POST = b"POST /v2/models/id_fp32/infer HTTP/1.1\r\nHost: x\r\n"


def metric(server, name: str) -> float:
    """The sum over all series of one metric."""
    connection = http.client.HTTPConnection(server.metrics, timeout=10)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    return sum(s.value for family in text_string_to_metric_families(page) for s in family.samples if s.name == name)


def test_http_01_outputs_of_nan_and_infinity(server):
    """HTTP-01"""
    body = {"inputs": [tensor("A", "FP32", [3], [0, 1, -1]), tensor("B", "FP32", [3], [0, 0, 0])]}
    status, answer = infer(server, "divide", body)
    assert status == 200
    np.testing.assert_array_equal(values(answer), [np.nan, np.inf, -np.inf])


def test_http_02_inputs_of_nan_and_infinity(server):
    """HTTP-02"""
    body = b'{"inputs":[{"name":"X","datatype":"FP32","shape":[3],"data":[NaN,Infinity,-Infinity]}]}'
    status, answer = infer(server, "id_fp32", body)
    assert status == 200, answer
    np.testing.assert_array_equal(values(answer), [np.nan, np.inf, -np.inf])


def test_http_04_bf16_everywhere(server):
    """HTTP-04"""
    array = np.array([1.0, 3.14], ml_dtypes.bfloat16)
    for module, address in ((tritonhttp, server.http), (grpc, server.grpc)):
        with module.InferenceServerClient(address) as client:
            made = module.InferInput("X", [2], "BF16")
            made.set_data_from_numpy(array)
            got = client.infer("id_bf16", [made]).as_numpy("Y")
            assert got.dtype == ml_dtypes.bfloat16 and got.tobytes() == array.tobytes()
    head = {"inputs": [tensor("X", "BF16", [2], [1.0, 3.14])], "parameters": {"binary_data_output": True}}
    status, answer = server.request("POST", "/v2/models/id_bf16/infer", json.dumps(head).encode())
    assert status == 200 and answer.endswith(array.tobytes())


def test_http_05_integers_of_64_bits_are_exact(server):
    """HTTP-05"""
    big = [18446744073709551615, 9007199254740993]
    status, answer = infer(server, "id_uint64", {"inputs": [tensor("X", "UINT64", [2], big)]})
    assert status == 200 and values(answer) == big
    small = [-9223372036854775808, 9223372036854775807]
    status, answer = infer(server, "id_int64", {"inputs": [tensor("X", "INT64", [2], small)]})
    assert status == 200 and values(answer) == small


@pytest.mark.parametrize(
    "model, datatype, value, says",
    [
        ("id_int8", "INT8", "300", "127"),
        ("id_uint8", "UINT8", "-1", "255"),
        ("id_int32", "INT32", "2147483648", "2147483647"),
        ("id_uint64", "UINT64", "18446744073709551616", "18446744073709551615"),
        ("id_int32", "INT32", "1.5", "integer"),
        ("id_int32", "INT32", "1.0", "integer"),
        ("id_fp32", "FP32", '"1"', "number"),
        ("id_fp32", "FP32", "1e400", "3.4028235e38"),
        ("id_fp16", "FP16", "1e6", "65504"),
        ("id_bool", "BOOL", "1", "boolean"),
        ("id_str", "BYTES", "1", "string"),
    ],
)
def test_http_06_numbers_out_of_range_or_of_the_wrong_kind(server, model, datatype, value, says):
    """HTTP-06: the message names the input, the element and the limit. 1.0 is no INT32, as in Triton."""
    good = '"a"' if datatype == "BYTES" else "true" if datatype == "BOOL" else "0"
    body = f'{{"inputs":[{{"name":"X","datatype":"{datatype}","shape":[2],"data":[{good},{value}]}}]}}'.encode()
    message = refused(server, model, body)
    assert "X" in message and "data[1]" in message and says in message, message


def test_http_09_deep_nesting_does_not_end_the_server(server):
    """HTTP-09"""
    deep = b"[" * 250_000 + b"1" + b"]" * 250_000
    body = b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1],"data":' + deep + b"}]}"
    assert "depth" in refused(server, "id_fp32", body)
    for path in ("/v2/repository/models/id_fp32/load", "/v2/models/id_fp32/generate", "/v2/repository/index"):
        status, _ = server.request("POST", path, b'{"a":' + deep + b"}")
        assert 400 <= status < 600 and status != 200, path
    assert server.get("/v2/health/live")[0] == 200


@pytest.mark.parametrize(
    "body, says",
    [
        ({"inputs": [{"name": "X", "shape": "-1", "datatype": "STRING", "data": [{"b64": "aGk="}]}]}, "shape"),
        ({"inputs": {"name": "X"}}, "inputs"),
        ({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": None}]}, "data"),
        ({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1.0], "data": [1]}]}, "shape"),
        ({"inputs": [{"name": "X", "datatype": "FP32", "data": [1]}]}, "shape"),
        ({"inputs": [{"name": "X", "shape": [1], "data": [1]}]}, "datatype"),
        ({"inputs": [{"datatype": "FP32", "shape": [1], "data": [1]}]}, "name"),
        ({"inputs": [{"name": 7, "datatype": "FP32", "shape": [1], "data": [1]}]}, "name"),
        ({"inputs": ["X"]}, "'data'"),
        ({"outputs": 1, "inputs": []}, "outputs"),
        ({}, "inputs"),
        ([1], "object"),
    ],
)
def test_http_10_json_of_the_wrong_structure(server, body, says):
    """HTTP-10"""
    assert says in refused(server, "id_fp32", body)


def test_http_11_an_empty_or_garbage_body_is_refused_and_counted(server):
    """HTTP-11"""
    before = metric(server, "trireme_refused_requests_total")
    assert refused(server, "id_fp32", b"")
    assert "0" in refused(server, "id_fp32", b"abc")
    assert str(len(TEXT) + 1) in refused(server, "id_fp32", TEXT + b" junk")
    after = metric(server, "trireme_refused_requests_total")
    assert after == before + 3


def test_http_12_the_same_tensor_twice(server):
    """HTTP-12: an input listed twice is refused before anything runs; an output listed twice comes once."""
    x = tensor("X", "FP32", [1], [1])
    before = metric(server, "nv_inference_exec_count")
    assert "'X'" in refused(server, "id_fp32", {"inputs": [x, x]})
    assert metric(server, "nv_inference_exec_count") == before
    status, answer = infer(server, "id_fp32", {"inputs": [x], "outputs": [{"name": "Y"}, {"name": "Y"}]})
    assert (status, len(answer.get("outputs", []))) == (200, 1) or (status, "Y" in answer["error"]) == (400, True)
    text = json.dumps(x)
    repeated = f'{{"inputs":[{text}],"inputs":[{text}]}}'.encode()
    first = infer(server, "id_fp32", repeated)
    assert all(infer(server, "id_fp32", repeated) == first for _ in range(3)) and first[0] in (200, 400)


def test_http_16_content_of_strings(server):
    """HTTP-16"""
    elements = ["", "a\0b", "\u00e9\u6a21\U0001f600", "x" * 1_000_000]
    body = {"inputs": [tensor("X", "BYTES", [4], elements)]}
    status, answer = infer(server, "id_str", body)
    assert status == 200 and values(answer) == elements
    raw = wire.strings(*(element.encode() for element in elements))
    head = {"inputs": [binary("X", "BYTES", [4], len(raw))], "parameters": {"binary_data_output": True}}
    status, answer = server.request("POST", "/v2/models/id_str/infer", *split(head, raw))
    assert status == 200 and answer.endswith(raw)
    status, answer = infer(server, "id_str", {"inputs": [tensor("X", "BYTES", [0], [])]})
    assert status == 200 and values(answer) == []


@pytest.mark.parametrize(
    "raw, shape",
    [
        (b"\xff\xff\xff\x7fabcd", [1]),
        (wire.strings(b"ab") + b"abc", [1]),
        (b"\x01\x00", [1]),
        (b"", [1]),
        (wire.strings(b"a", b"b"), [1]),
        (wire.strings(b"a"), [2]),
    ],
)
def test_http_17_malformed_length_prefixes(server, raw, shape):
    """HTTP-17"""
    body, headers = split({"inputs": [binary("X", "BYTES", shape, len(raw))]}, raw)
    message = refused(server, "id_str", body, headers)
    assert "X" in message, message


def test_http_20_a_raw_binary_request(server):
    """HTTP-20: the shape follows from the size; a string model takes all bytes as one element."""
    headers = {"Inference-Header-Content-Length": "0", "Content-Type": "application/octet-stream"}
    raw = struct.pack("<4f", 1, 2, 3, 4)
    status, answer = server.request("POST", "/v2/models/id_fp32/infer", raw, headers)
    assert status == 200 and answer.endswith(raw), answer
    text = b"\x00any bytes\xff"
    status, answer = server.request("POST", "/v2/models/id_str/infer", text, headers)
    assert status == 200 and answer.endswith(wire.strings(text)), answer
    message = refused(server, "addsub", raw, headers)
    assert "1" in message and "input" in message, message


@pytest.mark.parametrize("length", ["999999", "-1", "abc", "2147483648", "1e2", "", "99999999999999999999"])
def test_http_21_a_bad_header_length(server, length):
    """HTTP-21"""
    body, _ = split({"inputs": [binary("X", "FP32", [1], 4)]}, struct.pack("<f", 1))
    assert refused(server, "id_fp32", body, {"Inference-Header-Content-Length": length})


def test_http_21_a_missing_header_length_is_explained(server):
    """HTTP-21"""
    body, _ = split({"inputs": [binary("X", "FP32", [1], 4)]}, struct.pack("<f", 1))
    assert "nference-Header-Content-Length" in refused(server, "id_fp32", body)


@pytest.mark.parametrize(
    "declared, present, shape",
    [(16, 12, [4]), (12, 16, [3]), (12, 12, [4]), (16, 16, [3]), (2**62, 12, [3]), (0, 4, [1])],
)
def test_http_22_a_wrong_size_of_binary_data(server, declared, present, shape):
    """HTTP-22"""
    body, headers = split({"inputs": [binary("X", "FP32", shape, declared)]}, b"\0" * present)
    assert refused(server, "id_fp32", body, headers)


def test_http_22_data_and_binary_data_at_once(server):
    """HTTP-22"""
    both = binary("X", "FP32", [1], 4) | {"data": [1]}
    body, headers = split({"inputs": [both]}, b"\0" * 4)
    message = refused(server, "id_fp32", body, headers)
    assert "binary_data_size" in message and "data" in message, message


def test_http_23_compressed_bodies(server):
    """HTTP-23"""
    for encoding, packed in (("gzip", gzip.compress(TEXT)), ("deflate", zlib.compress(TEXT))):
        status, answer = infer(server, "id_fp32", packed, {"Content-Encoding": encoding})
        assert status == 200 and values(answer) == [1, 2.5, -3]
    raw = struct.pack("<3f", 1, 2, 3)
    body, headers = split({"inputs": [binary("X", "FP32", [3], 12)]}, raw)
    status, answer = infer(server, "id_fp32", gzip.compress(body), headers | {"Content-Encoding": "gzip"})
    assert status == 200 and values(answer) == [1, 2, 3]


def test_http_23_bodies_that_cannot_be_decompressed(server):
    """HTTP-23: an unknown encoding names those that are known, a bomb stops at the limit."""
    connection = http.client.HTTPConnection(server.http, timeout=10)
    connection.request("POST", "/v2/models/id_fp32/infer", TEXT, {"Content-Encoding": "br"})
    response = connection.getresponse()
    response.read()
    assert response.status == 415 and {"gzip", "deflate"} <= set(response.getheader("Accept-Encoding").split(", "))
    connection.close()
    packed = gzip.compress(TEXT)
    for corrupt in (packed[:-8], packed[:20], b"abc", packed[:15] + b"\xff" * 10 + packed[25:]):
        assert refused(server, "id_fp32", corrupt, {"Content-Encoding": "gzip"})
    bomb = gzip.compress(b" " * 200_000_000, 9)
    message = refused(server, "id_fp32", bomb, {"Content-Encoding": "gzip"}, status=413)
    assert "--http-max-input-size" in message


def test_http_25_chunked_bodies(server):
    """HTTP-25"""
    chunked = POST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    plain = b"%x\r\n%b\r\n0\r\n\r\n" % (len(TEXT), TEXT)
    bytewise = b"".join(b"1\r\n%c\r\n" % byte for byte in TEXT) + b"0\r\n\r\n"
    extended = b"%x;name=value\r\n%b\r\n0\r\nX-Trailer: yes\r\n\r\n" % (len(TEXT), TEXT)
    for body in (plain, bytewise, extended):
        received = talk(server, chunked, body)
        assert statuses(received) == [200] and b"2.5" in received, received
    flood = b"".join(b"1\r\n \r\n" for _ in range(100_000)) + plain
    received = talk(server, chunked, flood)
    assert statuses(received) in ([200], [400], [413]) or received == b"<reset>", received[:200]


def test_http_25_bad_framing(server):
    """HTTP-25: truncated or contradictory framing is never served, and never hangs."""
    cut = talk(server, POST + b"Transfer-Encoding: chunked\r\n\r\n40\r\n{", finish=True)
    assert statuses(cut) in ([], [400]), cut
    size = b"Content-Length: %d\r\n" % len(TEXT)
    both = talk(server, POST + size + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n", TEXT, finish=True)
    assert 200 not in statuses(both), both
    two = talk(server, POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", finish=True)
    assert statuses(two) in ([], [400]), two
    nothing = talk(server, POST + b"Connection: close\r\n\r\n")
    assert statuses(nothing) in ([400], [411]), nothing


def test_http_27_keep_alive_and_pipelining(server):
    """HTTP-27"""
    request = POST + b"Content-Length: %d\r\n\r\n%b" % (len(TEXT), TEXT)
    last = POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(TEXT), TEXT)
    received = talk(server, request * 20 + last)
    assert statuses(received) == [200] * 21 and received.endswith(b"<closed>")
    half = talk(server, request, finish=True)
    assert statuses(half) == [200], half
    connection = http.client.HTTPConnection(server.http, timeout=10)
    for _ in range(300):
        connection.request("POST", "/v2/models/id_fp32/infer", TEXT)
        response = connection.getresponse()
        assert response.status == 200 and json.loads(response.read())
    connection.sock.shutdown(socket.SHUT_WR)
    connection.close()


def test_http_27_answers_of_pipelined_requests_keep_their_order(server):
    """HTTP-27"""
    slow = json.dumps({"inputs": [tensor("INPUT0", "FP32", [1], [1])]}).encode()
    first = b"POST /v2/models/sleepy/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(slow), slow)
    last = POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(TEXT), TEXT)
    received = talk(server, first + last)
    assert statuses(received) == [200, 200]
    assert received.index(b'"sleepy"') < received.index(b'"id_fp32"')


def test_http_28_clients_of_http_1_0(server):
    """HTTP-28"""
    old = b"POST /v2/models/id_fp32/infer HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(TEXT), TEXT)
    received = talk(server, old)
    head = received.split(b"\r\n\r\n")[0].lower()
    assert statuses(received) == [200] and received.endswith(b"<closed>")
    assert b"content-length:" in head and b"transfer-encoding" not in head
    probe = talk(server, b"GET /v2/health/live HTTP/1.0\r\n\r\n")
    assert statuses(probe) == [200] and probe.endswith(b"<closed>")
    closing = talk(server, b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert statuses(closing) == [200] and closing.endswith(b"<closed>")


def test_http_30_header_names_and_content_types(server):
    """HTTP-30"""
    raw = struct.pack("<3f", 1, 2, 3)
    body, headers = split({"inputs": [binary("X", "FP32", [3], 12)]}, raw)
    length = headers["Inference-Header-Content-Length"]
    for name in ("inference-header-content-length", "INFERENCE-HEADER-CONTENT-LENGTH"):
        status, answer = infer(server, "id_fp32", body, {name: length})
        assert status == 200 and values(answer) == [1, 2, 3]
    status, answer = infer(server, "id_fp32", gzip.compress(TEXT), {"CONTENT-ENCODING": "GZIP"})
    assert status == 200, answer
    for kind in ("Application/JSON; charset=utf-8", "text/plain", "application/x-www-form-urlencoded"):
        status, _ = infer(server, "id_fp32", X3, {"Content-Type": kind})
        assert status == 200, kind


@pytest.mark.parametrize("size", [4_000, 12_000, 64_000, 1_000_000])
def test_http_31_large_headers(server, size):
    """HTTP-31: up to a limit they are taken, beyond it the answer is 431 and the server goes on."""
    request = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: " + b"a" * size
    received = talk(server, request + b"\r\n\r\n")
    allowed = [[200]] if size <= 12_000 else [[200], [431]] if size <= 64_000 else [[431], []]
    assert statuses(received) in allowed, received[:200]
    assert server.get("/v2/health/live")[0] == 200


def test_http_32_bodies_over_the_limit(server):
    """HTTP-32: 64 MiB unless --http-max-input-size says otherwise; the message names flag and value.

    As in Triton the limit is for JSON and for raw requests; tensors behind the JSON may be larger.
    """
    for body, headers in (
        (b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1],"data":[1' + b" " * 70_000_000 + b"]}]}", {}),
        (bytes(70_000_000), {"Inference-Header-Content-Length": "0"}),
    ):
        status, answer = server.request("POST", "/v2/models/id_fp32/infer", body, headers)
        assert status in (400, 413), status
        message = json.loads(answer)["error"]
        assert "--http-max-input-size" in message and "67108864" in message, message
    head = {"inputs": [binary("X", "FP32", [17_500_000], 70_000_000)], "parameters": {"binary_data_output": True}}
    status, answer = server.request("POST", "/v2/models/id_fp32/infer", *split(head, bytes(70_000_000)))
    assert status == 200 and len(answer) > 70_000_000
    for shape in ([2**40], [2**32, 2**32], [9223372036854775807]):
        assert refused(server, "id_fp32", {"inputs": [tensor("X", "FP32", shape, [1])]})
        assert refused(server, "id_fp32", *split({"inputs": [binary("X", "FP32", shape, 4)]}, b"\0" * 4))


def test_http_34_large_answers_under_concurrency_are_complete(server):
    """HTTP-34"""
    array = np.random.default_rng(1).standard_normal(1_000_000, np.float32)
    head = {"inputs": [binary("X", "FP32", [len(array)], array.nbytes)], "parameters": {"binary_data_output": True}}
    body, headers = split(head, array.tobytes())

    def ask(slow: bool) -> bool:
        connection = http.client.HTTPConnection(server.http, timeout=120)
        connection.request("POST", "/v2/models/id_fp32/infer", body, headers)
        response = connection.getresponse()
        announced, got = int(response.getheader("Content-Length")), b""
        while part := response.read(200_000):
            got += part
            time.sleep(0.01 if slow else 0)
        connection.close()
        return response.status == 200 and len(got) == announced and got.endswith(array.tobytes())

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, [index % 4 == 0 for index in range(32)]))
    status, answer = infer(server, "id_fp32", *split({"inputs": [head["inputs"][0]]}, array.tobytes()))
    assert status == 200 and np.array_equal(np.array(values(answer), np.float32), array)


@pytest.mark.parametrize("name", ["my model", "模型", "a+b", "a.b-c_d"])
def test_http_36_model_names_that_a_url_encodes(server, name):
    """HTTP-36"""
    for module, address in ((tritonhttp, server.http), (grpc, server.grpc)):
        with module.InferenceServerClient(address) as client:
            assert client.is_model_ready(name)
            metadata = client.get_model_metadata(name)
            assert (metadata["name"] if module is tritonhttp else metadata.name) == name
            made = module.InferInput("INPUT0", [2], "FP32")
            made.set_data_from_numpy(np.array([1, 2], np.float32))
            assert client.infer(name, [made]).as_numpy("OUTPUT0").tolist() == [1, 2]


@pytest.mark.parametrize("name", ["%2e%2e", "%2F", "..%2F..%2Fetc", "id_fp32%2F1", "id%255Ffp32", "%00", "%zz", "%ff"])
def test_http_36_names_that_would_leave_the_repository(server, name):
    """HTTP-36"""
    for method, path in (("GET", f"/v2/models/{name}"), ("POST", f"/v2/models/{name}/infer")):
        status, _ = server.request(method, path, TEXT if method == "POST" else None)
        assert status in (400, 404), (path, status)


def test_http_37_labels_of_a_batch(server):
    """HTTP-37: carriage returns are not part of a label; past the last label there is none."""
    body = {
        "inputs": [tensor("X", "FP32", [2, 4], [[0, 3, 2, 1], [1, 0, 2, 9]])],
        "outputs": [{"name": "Y", "parameters": {"classification": 2}}],
    }
    status, answer = infer(server, "classes", body)
    assert status == 200, answer
    assert answer["outputs"][0]["shape"] == [2, 2]
    entries = [entry.split(":") for entry in values(answer)]
    assert [entry[1:] for entry in entries] == [["1", "banana"], ["2", "cherry"], ["3"], ["2", "cherry"]]
    assert [float(entry[0]) for entry in entries] == [3, 2, 9, 2]


def test_http_37_more_classes_than_there_are(server):
    """HTTP-37"""
    body = {
        "inputs": [tensor("X", "FP32", [1, 2], [1, 2])],
        "outputs": [{"name": "Y", "parameters": {"classification": 9}}],
    }
    status, answer = infer(server, "classes", body)
    assert status == 200 and [entry.split(":")[1] for entry in values(answer)] == ["1", "0"]


def test_http_37_a_two_dimensional_output(server):
    """HTTP-37: the classes are all elements of an item, counted through."""
    body = {
        "inputs": [tensor("X", "FP32", [1, 2, 3], [[[0, 1, 2], [5, 4, 3]]])],
        "outputs": [{"name": "Y", "parameters": {"classification": 2}}],
    }
    status, answer = infer(server, "classes_2d", body)
    assert status == 200, answer
    assert [entry.split(":")[1] for entry in values(answer)] == ["3", "4"]


def test_http_37_strings_have_no_classes(server):
    """HTTP-37: ended the process of Triton."""
    body = {
        "inputs": [tensor("X", "BYTES", [1, 2], ["a", "b"])],
        "outputs": [{"name": "Y", "parameters": {"classification": 1}}],
    }
    assert "BYTES" in refused(server, "idb_str", body)
