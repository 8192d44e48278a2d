"""Cases of public bug reports about batches, threads and security whose features are built."""

import json
import os
import re
import struct
import time

import fixtures
import grpc
import onnx
import pytest
from server import Server
from tritonclient.grpc import service_pb2, service_pb2_grpc
from wire import binary, infer, refused, split, tensor, values


def test_bat_01_a_batch_over_the_limit(server):
    """BAT-01: the message has both numbers and is a refusal of the client's fault."""
    message = refused(server, "idb_fp32", {"inputs": [tensor("X", "FP32", [16, 2], [0] * 32)]})
    assert "8" in message and "batch" in message, message


@pytest.mark.parametrize("model, datatype, value", [("idb_fp32", "FP32", 1), ("idb_str", "BYTES", "a")])
def test_bat_02_the_batch_axis_forgotten(server, model, datatype, value):
    """BAT-02: the message shows both shapes."""
    message = refused(server, model, {"inputs": [tensor("X", datatype, [1], [value])]})
    assert "[-1,-1]" in message and "[1]" in message, message


def test_bat_06_a_batch_of_nothing(server):
    """BAT-06: refused or answered empty; the next request is untouched."""
    status, answer = infer(server, "idb_fp32", {"inputs": [tensor("X", "FP32", [0, 4], [])]})
    assert status == 400 or (status, values(answer)) == (200, [])
    status, answer = infer(server, "idb_fp32", {"inputs": [tensor("X", "FP32", [1, 1], [5])]})
    assert status == 200 and values(answer) == [5]


@pytest.mark.parametrize("shape", [[-1, 4], [4611686018427387904, 4], [4611686018427387904], [-4, -1]])
def test_bat_07_negative_and_overflowing_shapes(server, shape):
    """BAT-07"""
    raw = struct.pack("<4f", 1, 2, 3, 4)
    for model in ("id_2d", "idb_fp32", "id_fp32"):
        assert refused(server, model, {"inputs": [tensor("X", "FP32", shape, [1, 2, 3, 4])]})
        assert refused(server, model, *split({"inputs": [binary("X", "FP32", shape, 16)]}, raw))
        message = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[raw])
        message.inputs.add(name="X", datatype="FP32", shape=shape)
        with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=20)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_cpu_01_threads_follow_the_processors_the_server_may_use(tmp_path):
    """CPU-01 (by affinity; a quota of a cgroup needs one that the test may write): printed once at the start."""
    fixtures.copy(tmp_path, "copy", onnx.TensorProto.FLOAT, ["a"])
    one = {min(os.sched_getaffinity(0))}
    with Server(repository=tmp_path, popen={"preexec_fn": lambda: os.sched_setaffinity(0, one)}) as server:
        lines = [line for line in server.log().splitlines() if re.search(r"(?i)thread", line)]
        assert len([line for line in lines if re.search(r"\b1 (core|CPU|processor|thread)", line)]) >= 1, server.log()
        threads = len(os.listdir(f"/proc/{server.process.pid}/task"))
        assert threads < 32


def test_sec_02_health_under_restriction(tmp_path):
    """SEC-02: without the key the answer is 403, which a probe can tell from 'not ready'."""
    fixtures.echo(tmp_path, "echo", "FP32")
    with Server("--http-restricted-api=health:probe=word", repository=tmp_path, wait="") as server:
        for _ in range(200):
            try:
                if server.request("GET", "/v2/health/ready", headers={"probe": "word"})[0] == 200:
                    break
            except OSError:
                time.sleep(0.05)
        assert server.request("GET", "/v2/health/live", headers={"probe": "word"})[0] == 200
        for headers in ({}, {"probe": "other"}):
            assert server.request("GET", "/v2/health/live", headers=headers)[0] == 403
        assert server.get("/v2")[0] == 200


def test_sec_03_no_files_over_the_network_by_default(tmp_path):
    """SEC-03: with default flags a load with files changes nothing."""
    fixtures.echo(tmp_path, "echo", "FP32")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with Server(repository=tmp_path) as server:
        body = {"parameters": {"config": json.dumps({"backend": "python"}), "file:1/model.py": "aW1wb3J0IG9z"}}
        for model in ("echo", "new"):
            status, answer = server.request("POST", f"/v2/repository/models/{model}/load", json.dumps(body).encode())
            assert status in (400, 501, 503), (status, answer)
        assert server.get("/v2/models/new/ready")[0] != 200
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
