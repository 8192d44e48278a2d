"""Every datatype in every encoding: what goes in comes out, bit for bit."""

import json

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
import wire

EXTREMES = {
    "BOOL": np.array([True, False, True]),
    "UINT8": np.array([0, 1, 255], np.uint8),
    "UINT16": np.array([0, 1, 65535], np.uint16),
    "UINT32": np.array([0, 1, 2**32 - 1], np.uint32),
    "UINT64": np.array([0, 2**53 + 1, 2**64 - 1], np.uint64),
    "INT8": np.array([-128, 0, 127], np.int8),
    "INT16": np.array([-(2**15), 0, 2**15 - 1], np.int16),
    "INT32": np.array([-(2**31), 0, 2**31 - 1], np.int32),
    "INT64": np.array([-(2**63), 2**53 + 1, 2**63 - 1], np.int64),
    "FP16": np.array([0.1, -65504, 6e-8, -0.0], np.float16),
    "BF16": np.array([0.1, -3e38, 1e-40, -0.0], ml_dtypes.bfloat16),
    "FP32": np.array([0.1, -3.4028235e38, 1e-45, -0.0, 16777217], np.float32),
    "FP64": np.array([0.1, -1.7976931348623157e308, 5e-324, -0.0, 2**53 + 1], np.float64),
    "BYTES": np.array([b"", b"abc", "w\u00f6rld \u6a21 \U0001f600".encode(), b'"\\\n\t\x01'], np.object_),
}


def model(datatype: str, batched: bool) -> str:
    return f"id{'b' if batched else ''}_{'str' if datatype == 'BYTES' else datatype.lower()}"


def same(left: np.ndarray, right: np.ndarray) -> None:
    assert left.dtype == right.dtype and left.shape == right.shape
    if left.dtype == np.object_:
        assert left.tolist() == right.tolist()
    else:
        assert left.tobytes() == right.tobytes(), (left, right)


def ask(module, address: str, name: str, datatype: str, array: np.ndarray, out: str = "Y", into: str = "X", **kinds):
    with module.InferenceServerClient(address) as client:
        tensor = module.InferInput(into, list(array.shape), datatype)
        wanted = None
        if module is http:
            tensor.set_data_from_numpy(array, binary_data=kinds["binary_in"])
            wanted = [http.InferRequestedOutput(out, binary_data=kinds["binary_out"])]
        else:
            tensor.set_data_from_numpy(array)
        return client.infer(name, [tensor], outputs=wanted).as_numpy(out)


# The client reads no FP16 or BF16 out of JSON, and writes no BF16 into it.
JSON_OUT = [datatype for datatype in EXTREMES if datatype not in ("FP16", "BF16")]


@pytest.mark.parametrize("batched", [False, True], ids=["plain", "batched"])
@pytest.mark.parametrize("datatype", EXTREMES)
def test_http_binary(server, datatype, batched):
    array = EXTREMES[datatype]
    array = np.stack([array, array[::-1]]) if batched else array
    same(ask(http, server.http, model(datatype, batched), datatype, array, binary_in=True, binary_out=True), array)


@pytest.mark.parametrize("datatype", JSON_OUT)
@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_http_json(server, datatype, binary_in, binary_out):
    array = EXTREMES[datatype]
    got = ask(http, server.http, model(datatype, False), datatype, array, binary_in=binary_in, binary_out=binary_out)
    if datatype == "BYTES" and not binary_out:
        # Out of JSON the client makes text, not bytes.
        got = np.array([text.encode() for text in got], np.object_)
    same(got, array)


@pytest.mark.parametrize("batched", [False, True], ids=["plain", "batched"])
@pytest.mark.parametrize("datatype", EXTREMES)
def test_grpc(server, datatype, batched):
    array = EXTREMES[datatype]
    array = np.stack([array, array[::-1]]) if batched else array
    same(ask(grpc, server.grpc, model(datatype, batched), datatype, array), array)


def test_bytes_that_are_no_text(server):
    array = np.array([b"\xff\xfe\x00", b"\x00", b"a\x00b"], np.object_)
    same(ask(http, server.http, "id_str", "BYTES", array, binary_in=True, binary_out=True), array)
    same(ask(grpc, server.grpc, "id_str", "BYTES", array), array)


def test_fp16_json_in(server):
    """The client writes FP16 as plain numbers into JSON; they are rounded to the nearest FP16."""
    array = EXTREMES["FP16"]
    same(ask(http, server.http, "id_fp16", "FP16", array, binary_in=False, binary_out=True), array)


@pytest.mark.parametrize("datatype, text", [("FP32", "fp32"), ("FP64", "fp64")])
def test_nan_and_infinity_as_the_client_writes_them(server, datatype, text):
    kind = np.float32 if datatype == "FP32" else np.float64
    array = np.array([np.nan, np.inf, -np.inf, 1.5], kind)
    got = ask(http, server.http, f"id_{text}", datatype, array, binary_in=False, binary_out=False)
    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("datatype", ["FP32", "INT32", "BYTES"])
def test_empty_tensors(server, datatype):
    array = EXTREMES[datatype][:0]
    for binary in (True, False):
        same(ask(http, server.http, model(datatype, False), datatype, array, binary_in=binary, binary_out=binary), array)
    same(ask(grpc, server.grpc, model(datatype, False), datatype, array), array)


def test_zero_in_one_of_two_dimensions(server):
    array = np.zeros((0, 3), np.float32)
    got = ask(http, server.http, "id_2d", "FP32", array, binary_in=True, binary_out=True)
    assert got.shape == (0, 3)


def test_scalar_model(server):
    """A scalar has the shape [1] on the wire."""
    array = np.array([2.5], np.float32)
    same(ask(http, server.http, "id_scalar", "FP32", array, binary_in=True, binary_out=True), array)


def test_fixed_leading_one_is_no_batch(server):
    array = np.array([[1, 2, 3, 4]], np.float32)
    same(ask(grpc, server.grpc, "id_fixed1", "FP32", array), array)


def test_json_numbers_are_shortest_and_read_back_exactly(server):
    random = np.random.default_rng(3)
    array = random.integers(0, 2**32, 4096, dtype=np.uint32).view(np.float32)
    array = array[np.isfinite(array)]
    same(ask(http, server.http, "id_fp32", "FP32", array, binary_in=False, binary_out=False), array)
    double = random.integers(0, 2**63, 4096, dtype=np.uint64).view(np.float64)
    double = double[np.isfinite(double)]
    same(ask(http, server.http, "id_fp64", "FP64", double, binary_in=False, binary_out=False), double)


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "STRING"])
def test_identity_backend_copies(server, datatype):
    wired = "BYTES" if datatype == "STRING" else datatype
    array = EXTREMES[wired]
    name = f"echo_{datatype.lower()}"
    same(ask(grpc, server.grpc, name, wired, array, out="OUTPUT0", into="INPUT0"), array)


def test_grpc_typed_contents(server):
    """What clients without raw_input_contents send, one field a datatype."""
    from tritonclient.grpc import service_pb2

    fields = {
        "BOOL": "bool_contents",
        **dict.fromkeys(["INT8", "INT16", "INT32"], "int_contents"),
        "INT64": "int64_contents",
        **dict.fromkeys(["UINT8", "UINT16", "UINT32"], "uint_contents"),
        "UINT64": "uint64_contents",
        "FP32": "fp32_contents",
        "FP64": "fp64_contents",
        "BYTES": "bytes_contents",
    }
    with grpc.InferenceServerClient(server.grpc) as client:
        for datatype, field in fields.items():
            array = EXTREMES[datatype]
            request = service_pb2.ModelInferRequest(model_name=model(datatype, False))
            tensor = request.inputs.add(name="X", datatype=datatype, shape=array.shape)
            getattr(tensor.contents, field).extend(array.tolist())
            response = client._client_stub.ModelInfer(request)
            same(grpc.InferResult(response).as_numpy("Y"), array)


def test_classification_scores(server):
    rows = [[0.1, 0.9, 0.2, 0.4], [5, 1, 7, 6]]
    body = {
        "inputs": [wire.tensor("X", "FP32", [2, 4], rows)],
        "outputs": [{"name": "Y", "parameters": {"classification": 2}}],
    }
    status, answer = wire.infer(server, "classes", body)
    assert status == 200, answer
    (output,) = answer["outputs"]
    assert output["datatype"] == "BYTES" and output["shape"] == [2, 2]
    entries = [entry.split(":") for entry in output["data"]]
    assert [(float(score), *rest) for score, *rest in entries] == [
        (pytest.approx(0.9), "1", "banana"),
        (pytest.approx(0.4), "3"),
        (7.0, "2", "cherry"),
        (6.0, "3"),
    ]
    assert json.dumps(answer)
