"""Requests of different lengths in one batch: ragged inputs with the server's batch inputs, and padding."""

import json
import shutil

import fixtures
import numpy as np
import onnx
import pytest
import tritonclient.grpc as grpcclient
from onnx import helper
from server import ROOT, Server
from test_batching import at_once, batch_sizes, batching, one_instance
from wire import infer, refused, tensor

FLOAT, INT32, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32, onnx.TensorProto.INT64
# All requests of a test wait for one another, however quick the model is.
WAIT = batching(delay_us=400_000) + 'parameters { key: "TRIREME_QUEUE_DELAY" value { string_value: "fixed" } }\n'


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def flat(repository, name: str = "flat", config: str | None = None) -> None:
    """Y is the flat X, PEERS the sum of the batch in a row for each request, ENDS the batch input."""
    ax = np.array([1], np.int64)
    nodes = [
        helper.make_node("Identity", ["X"], ["Y"]),
        helper.make_node("Identity", ["lengths"], ["ENDS"]),
        helper.make_node("ReduceSum", ["X"], ["total"], keepdims=0),
        helper.make_node("Shape", ["lengths"], ["rows"]),
        helper.make_node("Expand", ["total", "rows"], ["spread"]),
        helper.make_node("Unsqueeze", ["spread", "ax"], ["PEERS"]),
    ]
    folder = fixtures.save(
        repository,
        name,
        nodes,
        [("X", FLOAT, ["total"]), ("lengths", FLOAT, ["requests"])],
        [("Y", FLOAT, ["total"]), ("ENDS", FLOAT, ["requests"]), ("PEERS", FLOAT, ["requests", 1])],
        weights={"ax": ax},
    )
    fixtures.configure(folder, config if config is not None else FLAT)


FLAT = f"""
backend: "onnxruntime"
max_batch_size: 8
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }} ]
output [
  {{ name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }},
  {{ name: "ENDS" data_type: TYPE_FP32 dims: [ 1 ] reshape {{ }} }},
  {{ name: "PEERS" data_type: TYPE_FP32 dims: [ 1 ] }}
]
batch_input [ {{
  kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "lengths" data_type: TYPE_FP32 source_input: "X"
}} ]
batch_output [ {{ target_name: "Y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "X" }} ]
{one_instance()}{WAIT}
"""


def outputs(answer: dict) -> dict[str, tuple[list[int], list]]:
    return {output["name"]: (output["shape"], output["data"]) for output in answer["outputs"]}


def test_bat_09_ragged_requests_run_as_one(tmp_path):
    """BAT-09: lengths 2, 5 and 3 are one run of ten values; the ends are running sums, and each gets its own back."""
    flat(tmp_path)
    lengths = [2, 5, 3]

    def work(index: int):
        sent = [float(10 * index + i) for i in range(lengths[index])]
        status, answer = infer(server, "flat", {"inputs": [tensor("X", "FP32", [1, len(sent)], sent)]})
        assert status == 200, answer
        return sent, outputs(answer)

    with Server(repository=tmp_path) as server:
        results = at_once(3, work)
        assert batch_sizes(server, "flat") == {3: 1}
        total = sum(sum(sent) for sent, _ in results)
        ends = {}
        for sent, got in results:
            assert got["Y"] == ([1, len(sent)], sent)
            assert got["PEERS"] == ([1, 1], [total])
            assert got["ENDS"][0] == [1, 1]
            ends[got["ENDS"][1][0]] = len(sent)
        # Whatever the order of arrival, each end is the one before it and the request's own length.
        assert max(ends) == 10
        before = 0
        for end in sorted(ends):
            assert end == before + ends[end], ends
            before = end


def test_bat_09_a_shape_that_the_model_cannot_take_fails_the_load(tmp_path):
    """BAT-09: who exports the model with rows is told at load which shape it should have."""
    folder = fixtures.copy(tmp_path, "rows", FLOAT, ["N", "a"], batching=True)
    fixtures.configure(
        folder,
        'backend: "onnxruntime"\nmax_batch_size: 8\n'
        'input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]\n'
        'output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]\n',
    )
    flat(tmp_path, "kind", FLAT.replace("BATCH_ACCUMULATED_ELEMENT_COUNT", "BATCH_ITEM_SHAPE"))
    with Server("--exit-on-error=false", repository=tmp_path, wait="live") as server:
        status, body = server.request("POST", "/v2/repository/index")
        assert status == 200
        reasons = {row["name"]: row["reason"] for row in json.loads(body) if row["state"] == "UNAVAILABLE"}
    assert "configuration expects model provides input with shape [-1] for ragged input 'X'" in reasons["rows"]
    assert "batch input 'lengths' has the shape [-1,-1], a row for each item of the batch" in reasons["kind"], reasons


def lay_tokens(repository, name: str, more: str) -> None:
    """OUT is IDS + 1 token by token, COUNT the sum of the mask, WIDTH the length that the model saw."""
    nodes = [
        helper.make_node("Add", ["IDS", "one"], ["OUT"]),
        helper.make_node("ReduceSum", ["MASK", "ax"], ["COUNT"], keepdims=1),
        helper.make_node("Mul", ["IDS", "zero"], ["Z"]),
        helper.make_node("Add", ["Z", "one"], ["O"]),
        helper.make_node("ReduceSum", ["O", "ax"], ["WIDTH"], keepdims=1),
    ]
    shape = ["N", "tokens"]
    folder = fixtures.save(
        repository,
        name,
        nodes,
        [("IDS", INT64, shape), ("MASK", INT64, shape)],
        [("OUT", INT64, shape), ("COUNT", INT64, ["N", 1]), ("WIDTH", INT64, ["N", 1])],
        weights={"one": np.array(1, np.int64), "zero": np.array(0, np.int64), "ax": np.array([1], np.int64)},
    )
    text = 'backend: "onnxruntime"\nmax_batch_size: 8\n' + one_instance() + WAIT
    text += parameter("padding.inputs", "IDS") + parameter("padding.mask", "MASK") + more
    fixtures.configure(folder, text)


def ask(server: Server, model: str, rows: int, length: int, first: int = 0, mask: list | None = None):
    ids = list(range(first, first + rows * length))
    inputs = [tensor("IDS", "INT64", [rows, length], ids)]
    if mask is not None:
        inputs.append(tensor("MASK", "INT64", [rows, length], mask))
    status, answer = infer(server, model, {"inputs": inputs})
    assert status == 200, answer
    got = outputs(answer)
    assert got["OUT"] == ([rows, length], [each + 1 for each in ids])
    assert got["COUNT"] == ([rows, 1], [length] * rows if mask is None else [sum(mask)])
    return got["WIDTH"][1][0]


def test_padding_makes_one_batch_of_many_lengths(tmp_path):
    """The model sees the longest length; each client gets its own back, and the mask tells the model which are real."""
    lay_tokens(tmp_path, "tokens", parameter("padding.value", "7"))
    lengths = [3, 1, 6, 2, 4]
    with Server(repository=tmp_path) as server:
        widths = at_once(5, lambda i: ask(server, "tokens", 1 + i % 2, lengths[i], first=100 * i))
        assert widths == [6] * 5
        assert batch_sizes(server, "tokens") == {7: 1}
        # Alone, nothing is padded; a client's own mask is kept.
        assert ask(server, "tokens", 1, 3, mask=[1, 0, 1]) == 3


def test_a_transformer_answers_as_without_company(tmp_path, examples):
    """The example's sentence model, padded in one batch, against each sentence alone on a server that pads nothing."""
    shutil.copytree(ROOT / "examples" / "repository" / "text_embedding", tmp_path / "text_embedding")
    text = 'backend: "onnxruntime"\nmax_batch_size: 8\n' + one_instance() + WAIT
    text += parameter("padding.inputs", "input_ids, token_type_ids") + parameter("padding.mask", "attention_mask")
    fixtures.configure(tmp_path / "text_embedding", text)
    sentences = [[101, 7592, 102], [101, 1037, 13919, 9587, 2007, 2093, 5085, 102], [101, 2273, 5222, 102]]

    def vectors(server: Server, ids: list[int], *names: str) -> np.ndarray:
        rows = {"input_ids": ids, "token_type_ids": [0] * len(ids), "attention_mask": [1] * len(ids)}
        inputs = [tensor(name, "INT64", [1, len(ids)], rows[name]) for name in names]
        status, answer = infer(server, "text_embedding", {"inputs": inputs})
        assert status == 200, answer
        (output,) = answer["outputs"]
        return np.array(output["data"], np.float32).reshape(output["shape"])

    with Server(repository=tmp_path) as server:
        padded = at_once(3, lambda i: vectors(server, sentences[i], "input_ids", "token_type_ids"))
        assert batch_sizes(server, "text_embedding") == {3: 1}
    for ids, got in zip(sentences, padded):
        alone = vectors(examples, ids, "input_ids", "token_type_ids", "attention_mask")
        assert got.shape == (1, len(ids), 384)
        np.testing.assert_allclose(got, alone, atol=1e-4)


def test_buckets_keep_the_models_shapes_few(tmp_path):
    """Lengths of one bucket share a batch; one beyond the last bucket runs at its own length."""
    lay_tokens(tmp_path, "tokens", parameter("padding.buckets", "4, 8"))
    lengths = [3, 4, 5, 8, 1, 9]
    with Server(repository=tmp_path) as server:
        widths = at_once(6, lambda i: ask(server, "tokens", 1, lengths[i], first=100 * i))
        assert widths == [4, 4, 8, 8, 4, 9]
        sizes = batch_sizes(server, "tokens")
        assert sum(size * count for size, count in sizes.items()) == 6 and max(sizes) <= 3, sizes


def test_lengths_that_do_not_belong_together_are_refused(tmp_path):
    lay_tokens(tmp_path, "tokens", "")
    with Server(repository=tmp_path) as server:
        inputs = [tensor("IDS", "INT64", [1, 3], [1, 2, 3]), tensor("MASK", "INT64", [1, 2], [1, 1])]
        message = refused(server, "tokens", {"inputs": inputs})
        assert "'IDS' has 3, and 'MASK' of shape [1,2] has 2" in message
        with grpcclient.InferenceServerClient(server.grpc) as client:
            given = grpcclient.InferInput("IDS", [1, 2], "INT64")
            given.set_data_from_numpy(np.array([[5, 6]], np.int64))
            answer = client.infer("tokens", [given])
            assert answer.as_numpy("OUT").tolist() == [[6, 7]] and answer.as_numpy("COUNT").tolist() == [[2]]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (parameter("padding.bucket", "8"), "parameter 'padding.bucket' is none of those for padding"),
        (parameter("padding.buckets", "8, 4"), "'4' is not a length above the one before it"),
        (parameter("padding.value", "many"), "padding.value is 'many', which is no element of input 'IDS' of TYPE_INT64"),
        (parameter("padding.outputs", "COUNT"), "'COUNT' means no open dimension of output 'COUNT'"),
    ],
)
def test_parameters_that_do_not_fit_fail_the_load(tmp_path, more, told):
    lay_tokens(tmp_path, "tokens", more)
    with Server("--exit-on-error=false", repository=tmp_path, wait="live") as server:
        status, body = server.request("POST", "/v2/repository/index")
        (row,) = json.loads(body)
        assert status == 200 and row["state"] == "UNAVAILABLE" and told in row["reason"], row
