"""Clients that go away: what waits is never run, what runs ends early, and both are counted."""

import asyncio
import json
import queue
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import fixtures
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aioclient
import tritonclient.http as httpclient
from prometheus_client.parser import text_string_to_metric_families
from server import Server
from tritonclient.utils import InferenceServerException

# Long enough that a request of the test certainly waits behind another, for as long as the test looks at it.
EXECUTE_MS = 1500


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """`slow` runs one request at a time and takes its time; `endless` takes a minute for each."""
    folder = tmp_path_factory.mktemp("slow")
    for name, milliseconds in (("slow", EXECUTE_MS), ("endless", 60_000)):
        delay = f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{milliseconds}" }} }}\n'
        fixtures.echo(folder, name, "FP32", dims="[ 1 ]", more="instance_group [ { kind: KIND_CPU count: 1 } ]\n" + delay)
    fixtures.repeat(folder)
    with Server(repository=folder) as running:
        yield running


def inputs(module=grpcclient) -> list:
    made = module.InferInput("INPUT0", [1], "FP32")
    made.set_data_from_numpy(np.ones(1, np.float32))
    return [made]


class Counts:
    """What the server has counted for a model since this was made."""

    def __init__(self, server: Server, model: str = "slow") -> None:
        self.server, self.model = server, model
        self.begin = self.now()

    def now(self) -> dict[str, float]:
        families = text_string_to_metric_families(self.server.metrics_page())
        samples = [sample for family in families for sample in family.samples if sample.labels.get("model") == self.model]
        return {sample.name.removesuffix("_total") + sample.labels.get("reason", ""): sample.value for sample in samples}

    def since(self) -> dict[str, int]:
        now = self.now()
        names = {
            "success": "nv_inference_request_success",
            "executions": "nv_inference_exec_count",
            "inferences": "nv_inference_count",
            "canceled": "nv_inference_request_failureCANCELED",
            "other": "nv_inference_request_failureOTHER",
            "backend": "nv_inference_request_failureBACKEND",
            "rejected": "nv_inference_request_failureREJECTED",
        }
        counts = {key: int(now[name] - self.begin[name]) for key, name in names.items()}
        return {key: count for key, count in counts.items() if count}

    def waiting(self) -> int:
        return int(self.now()["nv_inference_pending_request_count"])


def until(what: str, holds, seconds: float = 10) -> float:
    """Waits and says how long it took."""
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < seconds, f"never: {what}"
        time.sleep(0.005)
    return time.monotonic() - begin


class Busy:
    """Keeps the one instance of `slow` at work inside the block, and waits for its answer at the end."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def __enter__(self) -> "Busy":
        self.pool = ThreadPoolExecutor(1)
        self.first = self.pool.submit(self.run)
        # A running request is not counted until it ends; this is time enough for it to arrive.
        time.sleep(0.2)
        return self

    def run(self):
        with httpclient.InferenceServerClient(self.server.http, network_timeout=60) as client:
            return client.infer("slow", inputs(httpclient)).as_numpy("OUTPUT0")

    def still_runs(self) -> bool:
        return not self.first.done()

    def __exit__(self, *_: object) -> None:
        self.first.result(timeout=30)
        self.pool.shutdown()


def test_can_02_a_cancelled_call_that_waits_never_runs(slow):
    """CAN-02: queued work of a cancelled call is removed at once, never executed, and counted."""
    counts = Counts(slow)
    results: queue.Queue = queue.Queue()
    with grpcclient.InferenceServerClient(slow.grpc) as client, Busy(slow) as first:
        context = client.async_infer("slow", inputs(), lambda result, error: results.put(error))
        until("it waits", lambda: counts.waiting() == 1)
        context.cancel()
        error = results.get(timeout=5)
        assert isinstance(error, InferenceServerException) and "CANCELLED" in error.status(), error
        until("its place is free", lambda: counts.waiting() == 0)
        assert first.still_runs()
    assert counts.since() == {"success": 1, "executions": 1, "inferences": 1, "canceled": 1}


def test_can_02_a_deadline_that_passes_while_a_call_waits(slow):
    """CAN-02: a deadline of 50 ms ends as DEADLINE_EXCEEDED, and the call never runs."""
    counts = Counts(slow)
    with grpcclient.InferenceServerClient(slow.grpc) as client, Busy(slow) as first:
        with pytest.raises(InferenceServerException) as refused:
            client.infer("slow", inputs(), client_timeout=0.05)
        assert "DEADLINE_EXCEEDED" in refused.value.status()
        until("its place is free", lambda: counts.waiting() == 0)
        assert first.still_runs()
    assert counts.since() == {"success": 1, "executions": 1, "inferences": 1, "canceled": 1}


def test_can_02_a_cancelled_coroutine_that_waits_never_runs(slow):
    """CAN-02: the asyncio client, whose cancelling cancels the call."""
    counts = Counts(slow)

    async def cancelled() -> None:
        async with aioclient.InferenceServerClient(slow.grpc) as client:
            calls = [asyncio.ensure_future(client.infer("slow", inputs(aioclient))) for _ in range(3)]
            while counts.waiting() < 3:
                await asyncio.sleep(0.005)
            for call in calls:
                call.cancel()
            ended = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended
            while counts.waiting():
                await asyncio.sleep(0.005)

    with Busy(slow) as first:
        asyncio.run(asyncio.wait_for(cancelled(), 10))
        assert first.still_runs()
    assert counts.since() == {"success": 1, "executions": 1, "inferences": 1, "canceled": 3}


def test_can_02_a_cancelled_call_that_runs_ends_early(slow):
    """CAN-02: an execution nobody waits for ends, and its instance is free again."""
    counts = Counts(slow, "endless")
    results: queue.Queue = queue.Queue()
    with grpcclient.InferenceServerClient(slow.grpc) as client:
        for _ in range(3):
            context = client.async_infer("endless", inputs(), lambda result, error: results.put(error))
            time.sleep(0.2)
            context.cancel()
            assert "CANCELLED" in results.get(timeout=5).status()
    until("all are counted", lambda: counts.since().get("canceled") == 3, seconds=5)
    assert counts.since() == {"canceled": 3}


def test_can_02_a_stream_that_ends_takes_along_what_waits(slow):
    """CAN-02: requests of a stream that wait behind another when the stream is cancelled."""
    counts = Counts(slow)
    with grpcclient.InferenceServerClient(slow.grpc) as client, Busy(slow) as first:
        client.start_stream(callback=lambda result, error: None)
        for _ in range(4):
            client.async_stream_infer("slow", inputs())
        until("they wait", lambda: counts.waiting() == 4)
        client.stop_stream(cancel_requests=True)
        until("their places are free", lambda: counts.waiting() == 0)
        assert first.still_runs()
    assert counts.since() == {"success": 1, "executions": 1, "inferences": 1, "canceled": 4}


def http_request(model: str, body: bytes) -> bytes:
    return b"POST /v2/models/%s/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (model.encode(), len(body), body)


BODY = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1]}]}).encode()


@pytest.mark.parametrize("kind", ["closed", "reset", "kept alive", "half a body"])
def test_can_02_an_http_connection_that_is_cut(slow, kind):
    """CAN-02: over HTTP the connection is the call."""
    counts = Counts(slow)
    request = http_request("slow", BODY)
    with Busy(slow) as first:
        connection = socket.create_connection(("127.0.0.1", slow.http_port), timeout=10)
        if kind == "kept alive":
            for _ in range(2):
                connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
                assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        if kind == "half a body":
            connection.sendall(request[:-5])
            time.sleep(0.1)
            assert counts.waiting() == 0
        else:
            connection.sendall(request)
            until("it waits", lambda: counts.waiting() == 1)
        if kind == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
        until("its place is free", lambda: counts.waiting() == 0)
        assert first.still_runs()
    assert counts.since().get("canceled", 0) == (kind != "half a body")
    assert counts.since()["executions"] == 1


def test_str_05_a_decoupled_request_is_cancelled_between_responses(slow):
    """STR-05: the model stops within 100 ms, and the request is counted as cancelled."""
    counts = Counts(slow, "repeat")
    results: queue.Queue = queue.Queue()
    made = [grpcclient.InferInput(name, [4], kind) for name, kind in (("IN", "INT32"), ("DELAY", "UINT32"))]
    made[0].set_data_from_numpy(np.arange(4, dtype=np.int32))
    made[1].set_data_from_numpy(np.array([1, 30_000, 30_000, 30_000], np.uint32))
    with grpcclient.InferenceServerClient(slow.grpc) as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        client.async_stream_infer("repeat", made)
        result, error = results.get(timeout=10)
        assert error is None and int(result.as_numpy("OUT")[0]) == 0
        begin = time.monotonic()
        client.stop_stream(cancel_requests=True)
        assert time.monotonic() - begin < 5
        took = until("it is counted", lambda: counts.since().get("canceled") == 1)
        assert took < 0.1
    # It has run, with one response, and was no success.
    assert counts.since() == {"executions": 1, "inferences": 1, "canceled": 1}
    status, body = slow.get("/v2/models/repeat/stats")
    responses = json.loads(body)["model_stats"][0]["response_stats"]
    assert status == 200
    assert responses["0"]["success"]["count"] == 1
    assert responses["1"]["cancel"]["count"] == 1
