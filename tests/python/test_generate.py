"""The generate extension: flat JSON in and out, and answers of decoupled models as server-sent events."""

import http.client
import json
import time

import fixtures
import pytest
from server import Server

REPEAT = """
backend: "repeat"
max_batch_size: 0
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] },
        { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] },
        { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] } ]
model_transaction_policy { decoupled: True }
"""


@pytest.fixture(scope="module")
def generating(tmp_path_factory):
    repository = tmp_path_factory.mktemp("generating")
    fixtures.echo(repository, "text", "STRING", batch=8, dims="[ 1 ]")
    fixtures.echo(repository, "sixteen", "INT32", batch=8, dims="[ 4, 4 ]")
    (repository / "repeat" / "1").mkdir(parents=True)
    fixtures.configure(repository / "repeat", REPEAT)
    with Server(repository=repository) as server:
        yield server


def ask(server: Server, path: str, body: object, headers: dict | None = None) -> tuple[int, str, str]:
    """Status, content type and body."""
    connection = http.client.HTTPConnection(server.http, timeout=30)
    try:
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", f"/v2/models/{path}", text, headers or {})
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type"), response.read().decode()
    finally:
        connection.close()


def events(text: str) -> list[dict]:
    assert text.endswith("\n\n") or not text
    return [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part]


def test_one_answer(generating):
    status, kind, body = ask(generating, "text/generate", {"INPUT0": "hello", "id": "7", "temperature": 0.5})
    assert (status, kind) == (200, "application/json")
    assert json.loads(body) == {"OUTPUT0": "hello", "id": "7", "model_name": "text", "model_version": "1"}
    status, _, body = ask(generating, "sixteen/versions/1/generate", {"INPUT0": list(range(32))})
    assert json.loads(body)["OUTPUT0"] == list(range(32)) and status == 200


def test_parameters_may_be_nested_once(generating):
    status, _, body = ask(generating, "text/generate", {"parameters": {"INPUT0": "inside", "stream": False}})
    assert (status, json.loads(body)["OUTPUT0"]) == (200, "inside")
    status, _, body = ask(generating, "text/generate", {"INPUT0": "x", "parameters": {"deeper": {"a": 1}}})
    assert status == 400 and "parameter 'deeper' has invalid type" in body


def test_events_come_as_they_are_made(generating):
    """Three answers 300 ms apart: the first is here before the last is made."""
    connection = http.client.HTTPConnection(generating.http, timeout=30)
    begin = time.monotonic()
    body = json.dumps({"IN": [4, 5, 6], "DELAY": [300, 300, 300], "WAIT": 0})
    connection.request("POST", "/v2/models/repeat/generate_stream", body)
    response = connection.getresponse()
    assert response.status == 200
    assert response.getheader("Content-Type") == "text/event-stream; charset=utf-8"
    first = response.readline()
    arrived = time.monotonic() - begin
    rest = response.read()
    took = time.monotonic() - begin
    connection.close()
    got = events((first + rest).decode())
    assert [(event["IDX"], event["OUT"]) for event in got] == [(0, 4), (1, 5), (2, 6)]
    assert took - arrived > 0.4, (arrived, took)


def test_no_answer_is_an_empty_stream(generating):
    status, _, body = ask(generating, "repeat/generate_stream", {"IN": [], "DELAY": [], "WAIT": 0})
    assert (status, body) == (200, "")


def test_generate_needs_exactly_one_answer(generating):
    for numbers in ([], [1, 2]):
        body = {"IN": numbers, "DELAY": [0] * len(numbers), "WAIT": 0}
        status, _, text = ask(generating, "repeat/generate", body)
        assert status == 400 and "generate expects model to produce exactly 1 response" in text
    status, _, text = ask(generating, "repeat/generate", {"IN": [9], "DELAY": [0], "WAIT": 0})
    assert (status, json.loads(text)["OUT"]) == (200, 9)


@pytest.mark.parametrize(
    "path, body, expected, says",
    [
        ("text/generate", b"[1]", 400, "must be a JSON object"),
        ("text/generate", b"{", 400, ""),
        ("text/generate", {"INPUT0": ["a", ["b"]]}, 400, "can not convert input 'INPUT0' to tensor with proper shape"),
        ("sixteen/generate", {"INPUT0": [1, 2, 3]}, 400, "can not convert input 'INPUT0' to tensor with proper shape"),
        ("text/generate", {"INPUT0": 5}, 400, "non-string as string"),
        ("text/generate", {"INPUT0": "a", "other": None}, 400, "parameter 'other' has invalid type"),
        ("text/generate", {}, 400, "expected 1 inputs but got 0"),
        ("nothing/generate", {}, 404, "unknown model"),
        ("nothing/generate_stream", {}, 404, "unknown model"),
    ],
)
def test_bad_requests_are_refused(generating, path, body, expected, says):
    status, kind, text = ask(generating, path, body)
    assert status == expected and says in text, text
    assert kind == "application/json" and "error" in json.loads(text)


def test_an_error_is_the_first_event(generating):
    """The status of a stream is that of its first event."""
    status, kind, text = ask(generating, "text/generate_stream", {})
    assert (status, kind) == (400, "text/event-stream; charset=utf-8")
    assert "expected 1 inputs but got 0" in events(text)[0]["error"]


def test_compressed_bodies_are_refused(generating):
    status, _, text = ask(generating, "text/generate", {"INPUT0": "a"}, {"Content-Encoding": "gzip"})
    assert status == 400 and "only 'identity' is supported" in text


def test_a_client_that_leaves_ends_its_request(generating):
    """A stream of 100 seconds ends when nobody reads it any more."""
    connection = http.client.HTTPConnection(generating.http, timeout=30)
    body = json.dumps({"IN": list(range(1000)), "DELAY": [100] * 1000, "WAIT": 0})
    connection.request("POST", "/v2/models/repeat/generate_stream", body)
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    response.close()
    connection.close()
    line = 'nv_inference_request_failure{model="repeat",version="1",reason="CANCELED"} 1'
    deadline = time.monotonic() + 10
    while line not in generating.metrics_page() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert line in generating.metrics_page()
