"""Warm-up: samples that every instance runs before its version is ready."""

import json
import struct
import subprocess
from pathlib import Path

import fixtures
import numpy as np
import onnx
import pytest
from onnx import helper
from server import Server, binary
from wire import infer, strings, tensor, values


def sample(*inputs: tuple[str, str], name: str = "w", batch_size: int = 1, count: int = 0) -> str:
    text = "".join(f'inputs {{ key: "{key}" value {{ {value} }} }} ' for key, value in inputs)
    return f'model_warmup [ {{ name: "{name}" batch_size: {batch_size} count: {count} {text} }} ]\n'


def delayed(milliseconds: int) -> str:
    return f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{milliseconds}" }} }}\n'


ONE = "instance_group [ { kind: KIND_CPU count: 1 } ]\n"
ZERO = "data_type: TYPE_FP32 dims: [ 4 ] zero_data: true"


def table(repository: Path, rows: int = 4) -> Path:
    """An ONNX model that looks rows of a table up: I[a] -> Y[a, 2]. An index beyond the table fails."""
    weights = {"T": np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)}
    nodes = [helper.make_node("Gather", ["T", "I"], ["Y"])]
    i, y = ("I", onnx.TensorProto.INT64, ["a"]), ("Y", onnx.TensorProto.FLOAT, ["a", 2])
    return fixtures.save(repository, "table", nodes, [i], [y], weights=weights)


TABLE = 'backend: "onnxruntime"\nmax_batch_size: 0\n' + ONE
TABLE += 'input [ { name: "I" data_type: TYPE_INT64 dims: [ -1 ] } ]\n'
TABLE += 'output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1, 2 ] } ]\n'


def check(repository: Path) -> tuple[int, str]:
    done = subprocess.run([binary(), "check", repository], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


def failure(repository: Path) -> str:
    """Why the only model of a repository cannot serve."""
    code, output = check(repository)
    assert code == 1, output
    return output


def test_every_repeat_runs_before_the_model_is_ready_and_none_is_counted(tmp_path):
    warm = sample(("INPUT0", ZERO), batch_size=2, count=3)
    fixtures.echo(tmp_path, "slow", "FP32", batch=4, dims="[ 4 ]", more=delayed(200) + ONE + warm)
    with Server(repository=tmp_path) as server:
        assert server.ready_after >= 0.6, "three executions of 200 ms each"
        status, body = server.get("/v2/models/slow/stats")
        (stats,) = json.loads(body)["model_stats"]
        assert (stats["inference_count"], stats["execution_count"], stats["batch_stats"]) == (0, 0, [])
        assert stats["inference_stats"]["success"]["count"] == 0
        status, answer = infer(server, "slow", {"inputs": [tensor("INPUT0", "FP32", [1, 4], [1, 2, 3, 4])]})
        assert status == 200 and values(answer) == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["zero_data: true", "random_data: true", 'input_data_file: "indices"'])
def test_onnx_models_are_warmed_with_every_kind_of_data(tmp_path, kind):
    # Random numbers are from 0 to 127, so the table has an entry for each.
    folder = table(tmp_path, rows=128)
    (folder / "warmup").mkdir()
    (folder / "warmup" / "indices").write_bytes(struct.pack("<3q", 1, 127, 0))
    warm = sample(("I", f"data_type: TYPE_INT64 dims: [ 3 ] {kind}"), count=2)
    fixtures.configure(folder, TABLE + warm)
    with Server(repository=tmp_path) as server:
        status, answer = infer(server, "table", {"inputs": [tensor("I", "INT64", [1], [3])]})
        assert status == 200 and values(answer) == [6, 7]


def test_a_sample_that_fails_fails_its_model_alone(tmp_path):
    folder = table(tmp_path, rows=4)
    (folder / "warmup").mkdir()
    (folder / "warmup" / "far").write_bytes(struct.pack("<q", 99))
    far = 'data_type: TYPE_INT64 dims: [ 1 ] input_data_file: "far"'
    fixtures.configure(folder, TABLE + sample(("I", far), name="too far"))
    fixtures.echo(tmp_path, "good", "FP32")
    with Server("--exit-on-error=false", repository=tmp_path, wait="live") as server:
        assert server.get("/v2/models/good/ready")[0] == 200
        assert server.get("/v2/models/table/ready")[0] != 200
        status, body = server.request("POST", "/v2/repository/index")
        (reason,) = [model["reason"] for model in json.loads(body) if model["name"] == "table"]
        assert "failed to run warmup sample 'too far'" in reason and "99" in reason, reason
        log = server.log()
    assert "Mend the sample that the message names" in log, log


def test_a_new_version_that_cannot_warm_up_leaves_the_old_one_serving(tmp_path):
    folder = table(tmp_path)
    fixtures.configure(folder, TABLE)
    with Server("--model-control-mode=explicit", "--load-model=table", repository=tmp_path) as server:
        (folder / "warmup").mkdir()
        (folder / "warmup" / "far").write_bytes(struct.pack("<q", 99))
        far = 'data_type: TYPE_INT64 dims: [ 1 ] input_data_file: "far"'
        fixtures.configure(folder, TABLE + sample(("I", far)))
        status, body = server.request("POST", "/v2/repository/models/table/load")
        assert status == 400 and "failed to run warmup sample 'w'" in json.loads(body)["error"], body
        status, answer = infer(server, "table", {"inputs": [tensor("I", "INT64", [1], [3])]})
        assert status == 200 and values(answer) == [6, 7]


def test_decoupled_models_are_warmed(tmp_path):
    folder = tmp_path / "repeat"
    (folder / "1").mkdir(parents=True)
    inputs = [("IN", "data_type: TYPE_INT32 dims: [ 2 ] zero_data: true")]
    inputs.append(("DELAY", 'data_type: TYPE_UINT32 dims: [ 2 ] input_data_file: "delays"'))
    inputs.append(("WAIT", "data_type: TYPE_UINT32 dims: [ 1 ] zero_data: true"))
    (folder / "warmup").mkdir()
    (folder / "warmup" / "delays").write_bytes(struct.pack("<2I", 200, 200))
    fixtures.configure(
        folder,
        'backend: "repeat"\nmax_batch_size: 0\nmodel_transaction_policy { decoupled: true }\n'
        'input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] },\n'
        '  { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] } ]\n'
        'output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] } ]\n'
        + sample(*inputs, count=2),
    )
    with Server(repository=tmp_path) as server:
        assert server.ready_after >= 0.8, "two streams of two answers, each 200 ms late"


def test_bat_16_names_that_are_wrong_are_told_with_the_right_ones(tmp_path):
    fixtures.echo(tmp_path, "m", "FP32", dims="[ 4 ]", more=sample(("NOPE", ZERO)))
    output = failure(tmp_path)
    assert "warmup sample 'w' names the input 'NOPE', which model m does not have; its inputs are 'INPUT0'" in output
    assert "warmup sample 'w' of model m lacks the required input(s) 'INPUT0'" in output
    assert "config.pbtxt:5:" in output, output


def test_bat_16_sizes_and_shapes_are_told_with_what_was_found(tmp_path):
    few = sample(("INPUT0", 'data_type: TYPE_FP32 dims: [ 4 ] input_data_file: "few"'))
    folder = fixtures.echo(tmp_path, "m", "FP32", dims="[ 4 ]", more=few)
    (folder / "warmup").mkdir()
    (folder / "warmup" / "few").write_bytes(bytes(12))
    output = failure(tmp_path)
    assert "warmup setting expects 16 bytes for input 'INPUT0'" in output and "only has 12 bytes" in output, output
    (folder / "warmup" / "few").unlink()
    assert "warmup/few" in failure(tmp_path)
    config = (folder / "config.pbtxt").read_text()
    for before, after, message in [
        ("dims: [ 4 ] input_data_file", "dims: [ 5 ] input_data_file", "its dims are [4], the sample has [5]"),
        ("TYPE_FP32 dims: [ 4 ] input_data_file", "TYPE_INT32 dims: [ 4 ] input_data_file", "expects TYPE_FP32"),
        ("dims: [ 4 ] input_data_file", "dims: [ -1 ] input_data_file", "all variable-size dimensions are specified"),
        ('"few"', '"../few"', "is no file in the model's warmup folder"),
        ('input_data_file: "few"', "", "to have input_data_type set"),
        ("batch_size: 1", "batch_size: 2", "has batch_size 2, but model m has no batch dimension"),
    ]:
        assert before in config
        fixtures.configure(folder, config.replace(before, after))
        assert message in failure(tmp_path)


@pytest.mark.parametrize(
    "content", [strings("größer".encode()), "größer".encode(), "größer\n".encode()], ids=["serialized", "text", "line"]
)
def test_bat_16_a_file_with_one_string_is_one_element(tmp_path, content):
    file = sample(("INPUT0", 'data_type: TYPE_STRING dims: [ 1 ] input_data_file: "text"'))
    folder = fixtures.echo(tmp_path, "m", "STRING", more=file)
    (folder / "warmup").mkdir()
    (folder / "warmup" / "text").write_bytes(content)
    code, output = check(tmp_path)
    assert code == 0, output
    (folder / "warmup" / "text").write_bytes(b"one\ntwo\n")
    assert "expects 1 strings for input 'INPUT0' of dims [1]" in (output := failure(tmp_path)), output
    assert "holds 2 lines of text" in output


def test_bat_16_a_model_without_batches_gets_no_axis_and_batch_size_0_is_skipped(tmp_path):
    # The ONNX model takes exactly three numbers: one axis more would fail.
    fixtures.copy(tmp_path, "m", onnx.TensorProto.FLOAT, [3])
    three = ("X", "data_type: TYPE_FP32 dims: [ 3 ] random_data: true")
    config = fixtures.whole_shapes(
        inputs={"X": (onnx.TensorProto.FLOAT, [3])}, outputs={"Y": (onnx.TensorProto.FLOAT, [3])}
    )
    fixtures.configure(tmp_path / "m", config + sample(three, batch_size=1))
    code, output = check(tmp_path)
    assert code == 0 and "0 warnings" in output, output
    fixtures.configure(tmp_path / "m", config + sample(batch_size=0))
    code, output = check(tmp_path)
    assert code == 0 and "warmup sample 'w' of model 'm' is skipped: its batch_size is 0" in output, output


def test_sequence_models_take_their_controls_from_the_sample(tmp_path):
    folder = tmp_path / "sums"
    (folder / "1").mkdir(parents=True)
    (folder / "warmup").mkdir()
    (folder / "warmup" / "one").write_bytes(struct.pack("<i", 1))
    on = 'data_type: TYPE_INT32 dims: [ 1 ] input_data_file: "one"'
    config = (
        'backend: "sequence"\nmax_batch_size: 4\n' + ONE + delayed(200) + "sequence_batching { oldest { }\n"
        'control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ] }\n'
        'input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'
        'output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'
    )
    fixtures.configure(folder, config + sample(("INPUT", on), ("START", on), batch_size=2, count=2))
    with Server(repository=tmp_path) as server:
        assert server.ready_after >= 0.4, "two executions of 200 ms"
        parameters = {"sequence_id": 7, "sequence_start": True}
        body = {"parameters": parameters, "inputs": [tensor("INPUT", "INT32", [1, 1], [5])]}
        status, answer = infer(server, "sums", body)
        assert status == 200 and values(answer) == [5], answer
    fixtures.configure(folder, config + sample(("INPUT", on), ("STAR", on)))
    assert "its inputs are 'INPUT', 'START'" in failure(tmp_path)
