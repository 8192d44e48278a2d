"""A full queue: what a client is told over each protocol, and that a client who leaves makes room at once."""

import http.client
import json
import threading
import time

import fixtures
import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from server import Server
from tritonclient.grpc import service_pb2, service_pb2_grpc

EXECUTE_MS = 1500
BODY = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}).encode()


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """One request runs, one waits, the third is refused."""
    folder = tmp_path_factory.mktemp("overload")
    delay = f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{EXECUTE_MS}" }} }}\n'
    one = "instance_group [ { kind: KIND_CPU count: 1 } ]\n"
    queue = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }\n"
    fixtures.echo(folder, "slow", "FP32", batch=1, dims="[ 1 ]", more=delay + one + queue)
    with Server(repository=folder) as running:
        yield running


def waiting(server: Server) -> int:
    (line,) = [line for line in server.metrics_page().splitlines() if line.startswith("nv_inference_pending_request_count{")]
    return int(line.rpartition(" ")[2])


def until(count: int, server: Server) -> None:
    end = time.monotonic() + 10
    while waiting(server) != count:
        assert time.monotonic() < end, f"there are never {count} requests waiting"
        time.sleep(0.005)


def inputs() -> list:
    made = grpcclient.InferInput("INPUT0", [1, 1], "FP32")
    made.set_data_from_numpy(np.ones((1, 1), np.float32))
    return [made]


class Full:
    """Inside the block one request runs and one waits, the latter by a gRPC call that can be cancelled."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.statuses: list[int] = []

    def ask(self) -> None:
        self.statuses.append(self.server.request("POST", "/v2/models/slow/infer", BODY)[0])

    def __enter__(self) -> "Full":
        until(0, self.server)
        self.first = threading.Thread(target=self.ask)
        self.first.start()
        time.sleep(0.2)
        self.client = grpcclient.InferenceServerClient(self.server.grpc)
        self.second_ended = threading.Event()
        self.second = self.client.async_infer("slow", inputs(), lambda result, error: self.second_ended.set())
        until(1, self.server)
        return self

    def __exit__(self, *_: object) -> None:
        self.second.cancel()
        assert self.second_ended.wait(10)
        self.client.close()
        self.first.join(30)
        assert self.statuses[0] == 200


def post(server: Server, path: str, body: bytes) -> tuple[int, dict, bytes]:
    connection = http.client.HTTPConnection(server.http, timeout=10)
    try:
        connection.request("POST", path, body)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("action", ["infer", "generate", "generate_stream"])
def test_a_refusal_over_http_says_when_to_come_again(slow, action):
    body = BODY if action == "infer" else json.dumps({"INPUT0": 1}).encode()
    with Full(slow):
        begin = time.monotonic()
        status, headers, answer = post(slow, f"/v2/models/slow/{action}", body)
        assert time.monotonic() - begin < EXECUTE_MS / 1000 / 2, "it waited"
    assert status == 503, answer
    assert b"Exceeds maximum queue size" in answer
    assert int(headers["Retry-After"]) >= 1


def test_a_refusal_over_grpc_says_when_to_come_again(slow):
    request = service_pb2.ModelInferRequest(model_name="slow", raw_input_contents=[np.float32(1).tobytes()])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 1])
    with Full(slow), grpc.insecure_channel(slow.grpc) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=10)
    error = refused.value
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "Exceeds maximum queue size" in error.details()
    assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) >= 1


def test_a_client_that_leaves_makes_room_at_once(slow):
    with Full(slow) as full:
        full.second.cancel()
        until(0, slow)
        # The first still runs, so that this one waits; before, it would have been refused.
        third = threading.Thread(target=full.ask)
        third.start()
        until(1, slow)
        assert not full.statuses
        third.join(30)
    assert full.statuses == [200, 200]
