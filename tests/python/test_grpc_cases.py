"""The gRPC cases of public bug reports, and those of streams, one test a case."""

import queue
import socket
import struct

import fixtures
import grpc
import numpy as np
import pytest
import tritonclient.grpc as tritongrpc
import wire
from server import Server
from tritonclient.grpc import service_pb2, service_pb2_grpc

FOUR = struct.pack("<4f", 1, 2, 3, 4)


@pytest.fixture
def stub(server):
    channel = grpc.insecure_channel(server.grpc, options=[("grpc.max_receive_message_length", -1)])
    yield service_pb2_grpc.GRPCInferenceServiceStub(channel)
    channel.close()


def request(model: str, inputs: list[tuple], raw: list[bytes] = (), **fields) -> service_pb2.ModelInferRequest:
    """`inputs` are (name, datatype, shape, typed contents)."""
    made = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=raw, **fields)
    for name, datatype, shape, contents in inputs:
        one = made.inputs.add(name=name, datatype=datatype, shape=shape)
        for field, elements in (contents or {}).items():
            getattr(one.contents, field).extend(elements)
    return made


def refusal(stub, message) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(message, timeout=20)
    return caught.value


A = ("A", "FP32", [1, 4], None)
B = ("B", "FP32", [1, 4], None)


@pytest.mark.parametrize(
    "message",
    [
        request("addsub", [A, ("B", "FP32", [1, 4], {"fp32_contents": [1, 2, 3, 4]})], [FOUR]),
        request("addsub", [A, B], [FOUR]),
        request("addsub", [A, B], [FOUR, FOUR, FOUR]),
        request("addsub", [A, B], [FOUR, FOUR[:12]]),
        request("addsub", [A, B]),
        request("addsub", [A, ("B", "FP32", [1, 4], {"int_contents": [1, 2, 3, 4]})]),
        request("id_fp32", [("X", "FP32", [4], {"int_contents": [1, 2, 3, 4]})]),
        request("id_fp32", [("X", "FP32", [4], {"fp32_contents": [1, 2]})]),
        request("id_fp32", [("X", "FP32", [4], {"fp32_contents": [1, 2, 3, 4, 5]})]),
        request("id_int8", [("X", "INT8", [1], {"int_contents": [300]})]),
        request("id_fp32", [("X", "FP32", [-1], None)], [FOUR]),
        request("id_fp32", [("X", "FP32", [2**62, 4], None)], [FOUR]),
        request("id_fp32", [("X", "FP32", [2**62], None)], [FOUR]),
        request("id_fp32", [("X", "FP32", [4], None), ("X", "FP32", [4], None)], [FOUR, FOUR]),
        request("id_str", [("X", "BYTES", [1], None)], [b"\xff\xff\xff\x7fabcd"]),
        request("id_str", [("X", "BYTES", [1], None)], [b"\x01"]),
    ],
    ids=lambda message: f"{message.model_name}-{len(message.inputs)}-{len(message.raw_input_contents)}",
)
def test_grpc_01_raw_and_typed_contents_that_do_not_fit(server, stub, message):
    """GRPC-01"""
    error = refusal(stub, message)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
    assert error.details()


def test_grpc_01_empty_contents(server, stub):
    """GRPC-01"""
    for message in (
        request("id_fp32", [("X", "FP32", [0], None)], [b""]),
        request("id_fp32", [("X", "FP32", [0], {"fp32_contents": []})]),
        request("id_str", [("X", "BYTES", [0], None)], [b""]),
    ):
        answer = stub.ModelInfer(message, timeout=20)
        assert list(answer.outputs[0].shape) == [0] and list(answer.raw_output_contents) == [b""]
    answer = stub.ModelInfer(request("id_str", [("X", "BYTES", [2], {"bytes_contents": [b"", b"a"]})]), timeout=20)
    assert answer.raw_output_contents[0] == wire.strings(b"", b"a")


@pytest.fixture(scope="module")
def repeating(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoupled")
    fixtures.repeat(folder)
    fixtures.echo(folder, "echo", "FP32")
    with Server(repository=folder) as server:
        yield server


def repeat(count: int, identity: str, **parameters) -> tuple[list, dict]:
    array = np.arange(count, dtype=np.int32)
    made = tritongrpc.InferInput("IN", [count], "INT32")
    made.set_data_from_numpy(array)
    return [made], {"request_id": identity, **parameters}


def test_grpc_04_a_unary_call_of_a_decoupled_model(repeating):
    """GRPC-04: the message says what to call instead."""
    channel = grpc.insecure_channel(repeating.grpc)
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    error = refusal(stub, request("repeat", [("IN", "INT32", [2], None)], [struct.pack("<2i", 1, 2)]))
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED and "ModelStreamInfer" in error.details()
    channel.close()
    status, answer = wire.infer(repeating, "repeat", {"inputs": [wire.tensor("IN", "INT32", [2], [1, 2])]})
    assert status in (400, 501) and "decoupled" in answer["error"], (status, answer)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("wants_final", [False, True])
def test_str_01_when_a_decoupled_request_has_ended(repeating, count, wants_final):
    """STR-01: with the parameter, exactly one message a request says that it was the last."""
    results: queue.Queue = queue.Queue()
    with tritongrpc.InferenceServerClient(repeating.grpc) as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        inputs, fields = repeat(count, "7", enable_empty_final_response=wants_final)
        client.async_stream_infer("repeat", inputs, **fields)
        messages = [results.get(timeout=20) for _ in range(count + wants_final)]
        client.stop_stream()
    assert [error for _, error in messages if error] == []
    responses = [result.get_response() for result, _ in messages]
    assert {response.id for response in responses} <= {"7"}
    outputs = [int(result.as_numpy("OUT")[0]) for result, _ in messages if result.as_numpy("OUT") is not None]
    assert outputs == list(range(count))
    last = [response.parameters["triton_final_response"].bool_param for response in responses]
    assert last == [False] * count + [True] * wants_final


def test_str_02_one_bad_request_on_a_stream(server):
    """STR-02: the error comes as a message and the stream goes on."""
    results: queue.Queue = queue.Queue()
    with tritongrpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        for model, size, identity in (("id_fp32", 3, "1"), ("idb_rank1", 9, "2"), ("nope", 3, "3"), ("id_fp32", 2, "4")):
            made = tritongrpc.InferInput("X", [size], "FP32")
            made.set_data_from_numpy(np.ones(size, np.float32))
            client.async_stream_infer(model, [made], request_id=identity)
        messages = [results.get(timeout=20) for _ in range(4)]
        client.stop_stream()
    assert sorted(result.get_response().id for result, error in messages if error is None) == ["1", "4"]
    assert len([error for _, error in messages if error is not None]) == 2


# ---- HTTP/2 by hand: frames of RFC 9113, headers without compression (RFC 7541, 6.2.2)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call_without_te(server: Server, path: bytes, message: bytes) -> bytes:
    """The DATA bytes of the answer to a call whose headers lack `te: trailers`."""
    headers = header(b":method", b"POST") + header(b":scheme", b"http") + header(b":path", path)
    headers += header(b":authority", b"x") + header(b"content-type", b"application/grpc")
    body = b"\0" + struct.pack(">I", len(message)) + message
    with socket.create_connection(("127.0.0.1", server.grpc_port), timeout=10) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
        connection.sendall(frame(1, 4, 1, headers) + frame(0, 1, 1, body))
        received, data = b"", b""
        while True:
            while len(received) < 9 or len(received) < 9 + int.from_bytes(received[:3], "big"):
                part = connection.recv(65536)
                assert part, "the server closed the connection"
                received += part
            length = int.from_bytes(received[:3], "big")
            kind, flags, payload = received[3], received[4], received[9 : 9 + length]
            received = received[9 + length :]
            assert kind not in (3, 7), f"the server ended the stream: frame {kind} {payload!r}"
            if kind == 4 and not flags & 1:
                connection.sendall(frame(4, 1, 0, b""))
            if kind == 0:
                data += payload
            if kind in (0, 1) and flags & 1:
                return data


def test_grpc_05_requests_without_te(server):
    """GRPC-05: proxies that translate grpc-web drop the header `te`."""
    data = call_without_te(server, b"/inference.GRPCInferenceService/ServerLive", b"")
    assert service_pb2.ServerLiveResponse.FromString(data[5:]).live
    message = request("id_fp32", [("X", "FP32", [4], None)], [FOUR]).SerializeToString()
    data = call_without_te(server, b"/inference.GRPCInferenceService/ModelInfer", message)
    assert service_pb2.ModelInferResponse.FromString(data[5:]).raw_output_contents[0] == FOUR


def test_messages_far_over_four_megabytes(server, stub):
    array = np.arange(8_000_000, dtype=np.float32)
    answer = stub.ModelInfer(request("id_fp32", [("X", "FP32", [len(array)], None)], [array.tobytes()]), timeout=60)
    assert answer.raw_output_contents[0] == array.tobytes()
