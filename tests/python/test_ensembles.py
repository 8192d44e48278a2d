"""Ensembles from outside: data flow, batches, streams, errors, limits, loading and unloading."""

import json
import queue
import subprocess
import threading
import time
from pathlib import Path

import fixtures
import numpy as np
import pytest
import tritonclient.grpc as tritongrpc
import tritonclient.http as tritonhttp
import wire
from onnx import TensorProto, helper
from server import Server, binary
from tritonclient.utils import InferenceServerException

FLOAT = TensorProto.FLOAT
REPEAT = (
    'backend: "repeat"\nmodel_transaction_policy { decoupled: true }\n'
    'input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } ]\n'
    'output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] } ]\n'
)


def step(model: str, inputs: dict[str, str], outputs: dict[str, str], version: int = -1) -> str:
    maps = [f'input_map {{ key: "{name}" value: "{tensor}" }}' for name, tensor in inputs.items()]
    maps += [f'output_map {{ key: "{name}" value: "{tensor}" }}' for name, tensor in outputs.items()]
    return f'step {{ model_name: "{model}" model_version: {version} {" ".join(maps)} }}\n'


def ensemble(repository: Path, name: str, inputs: str, outputs: str, *steps: str, batch: int = 0, more: str = "", limit: int = 0) -> Path:
    """`inputs` and `outputs` as "A:FP32:[-1] B:FP32:[2]?", the question mark for an optional one."""
    folder = repository / name
    (folder / "1").mkdir(parents=True, exist_ok=True)
    lines = ['platform: "ensemble"', f"max_batch_size: {batch}", more]
    for side, tensors in (("input", inputs), ("output", outputs)):
        for tensor in tensors.split():
            tensor, optional = tensor.rstrip("?"), tensor.endswith("?")
            tensor_name, kind, dims = tensor.split(":")
            lines.append(f'{side} {{ name: "{tensor_name}" data_type: TYPE_{kind} dims: {dims} {"optional: true" if optional else ""} }}')
    bound = f"max_inflight_requests: {limit}" if limit else ""
    lines.append(f"ensemble_scheduling {{\n{''.join(steps)}{bound}\n}}")
    fixtures.configure(folder, "\n".join(lines))
    return folder


def arithmetic(repository: Path, name: str, operation: str, amount: float, **arguments) -> Path:
    """Y is X and a number by an operation; batches of up to 8 of [2]."""
    nodes = [helper.make_node(operation, ["X", "C"], ["Y"])]
    io = [("X", FLOAT, ["N", 2])], [("Y", FLOAT, ["N", 2])]
    return fixtures.save(repository, name, nodes, *io, weights={"C": np.array([amount], np.float32)}, **arguments)


def in_out(name: str, values, kind: str = "FP32", module=tritonhttp):
    array = np.array(values, dtype={"FP32": np.float32, "INT32": np.int32}[kind])
    made = module.InferInput(name, list(array.shape), kind)
    made.set_data_from_numpy(array)
    return made


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ensembles")
    fixtures.echo(folder, "id_fp32", "FP32")
    fixtures.echo(folder, "id_pair", "FP32", batch=0, dims="[ 2 ]")
    fixtures.echo(folder, "slow", "FP32", more='parameters { key: "execute_delay_ms" value { string_value: "150" } }\n')
    fixtures.echo(folder, "id_int", "INT32", dims="[ 1 ]")
    optional = 'input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] optional: true }, { name: "INPUT1" data_type: TYPE_FP32 dims: [ -1 ] } ]\n'
    outputs = 'output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ -1 ] } ]\n'
    (folder / "opt" / "1").mkdir(parents=True)
    fixtures.configure(folder / "opt", f'backend: "identity"\n{optional}{outputs}')
    (folder / "repeat" / "1").mkdir(parents=True)
    fixtures.configure(folder / "repeat", REPEAT)
    batching = "max_batch_size: 8 dynamic_batching { }\n"
    for name, operation, amount in (("plus", "Add", 1), ("times", "Mul", 10)):
        fixtures.configure(arithmetic(folder, name, operation, amount), f'name: "{name}" {batching}')
    arithmetic(folder, "two", "Add", 1, version="1")
    fixtures.configure(arithmetic(folder, "two", "Add", 2, version="2"), 'version_policy { all { } } max_batch_size: 8\n')

    x, y = "INPUT0", "OUTPUT0"
    one = "A:FP32:[-1]"
    ensemble(
        folder, "fork", one, "P:FP32:[-1] Q:FP32:[-1]",
        step("id_fp32", {x: "A"}, {y: "F"}), step("id_fp32", {x: "F"}, {y: "P"}), step("id_fp32", {x: "F"}, {y: "Q"}),
    )
    pair = "A:FP32:[2]"
    ensemble(
        folder, "mixed", pair, "B:FP32:[2]",
        step("plus", {"X": "A"}, {"Y": "s"}), step("id_pair", {x: "s"}, {y: "t"}), step("times", {"X": "t"}, {"Y": "B"}),
        batch=8,
    )
    ensemble(folder, "old", pair, "B:FP32:[2]", step("two", {"X": "A"}, {"Y": "B"}, version=1), batch=8)
    ensemble(folder, "new", pair, "B:FP32:[2]", step("two", {"X": "A"}, {"Y": "B"}), batch=8)
    ensemble(
        folder, "side_by_side", one, "P:FP32:[-1] Q:FP32:[-1]",
        step("slow", {x: "A"}, {y: "P"}), step("slow2", {x: "A"}, {y: "Q"}),
    )
    fixtures.echo(folder, "slow2", "FP32", more='parameters { key: "execute_delay_ms" value { string_value: "150" } }\n')
    ensemble(
        folder, "chain", one, "B:FP32:[-1]",
        step("id_fp32", {x: "A"}, {y: "s"}), step("slow", {x: "s"}, {y: "t"}), step("id_fp32", {x: "t"}, {y: "B"}),
    )
    ensemble(folder, "nested", one, "B:FP32:[-1]", step("fork", {"A": "A"}, {"P": "B"}))
    ensemble(
        folder, "optional", "A:FP32:[-1]? B:FP32:[-1]", "P:FP32:[-1] Q:FP32:[-1]",
        step("opt", {"INPUT0": "A", "INPUT1": "B"}, {"OUTPUT0": "P", "OUTPUT1": "Q"}),
    )
    skip = 'parameters { key: "TRIREME_STEPS_WITHOUT_INPUT" value { string_value: "skip" } }'
    branches = (step("id_fp32", {x: "A"}, {y: "s"}), step("id_fp32", {x: "s"}, {y: "P"}), step("id_fp32", {x: "B"}, {y: "Q"}))
    ensemble(folder, "skips", "A:FP32:[-1]? B:FP32:[-1]", "P:FP32:[-1] Q:FP32:[-1]", *branches, more=skip)
    ensemble(folder, "skips_not", "A:FP32:[-1]? B:FP32:[-1]", "P:FP32:[-1] Q:FP32:[-1]", *branches)
    ensemble(
        folder, "stream", "A:INT32:[-1]", "B:INT32:[1]",
        step("repeat", {"IN": "A"}, {"OUT": "t"}), step("id_int", {x: "t"}, {y: "B"}),
    )
    return folder


@pytest.fixture(scope="module")
def running(repository):
    with Server(repository=repository) as server:
        yield server


def floats(answer, name: str) -> list:
    return answer.as_numpy(name).tolist()


@pytest.mark.parametrize("module", [tritonhttp, tritongrpc], ids=["http", "grpc"])
def test_ens_01_one_tensor_feeds_two_steps(running, module):
    """ENS-01"""
    with module.InferenceServerClient(running.http if module is tritonhttp else running.grpc) as client:
        answer = client.infer("fork", [in_out("A", [1, 2, 3], module=module)], request_id="7")
        assert floats(answer, "P") == floats(answer, "Q") == [1, 2, 3]
        only = client.infer("fork", [in_out("A", [4], module=module)], outputs=[module.InferRequestedOutput("Q")])
        assert floats(only, "Q") == [4] and only.as_numpy("P") is None
        metadata = client.get_model_metadata("fork")
        assert (metadata["platform"] if module is tritonhttp else metadata.platform) == "ensemble"


def test_a_response_as_triton_writes_it(running):
    status, answer = wire.infer(running, "fork", {"id": "7", "inputs": [wire.tensor("A", "FP32", [1], [1])]})
    assert status == 200 and answer["id"] == "7" and answer["model_version"] == "1"
    assert answer["parameters"] == {"sequence_id": 0, "sequence_start": False, "sequence_end": False}


def test_batching_and_not_take_turns(running):
    """A batch dimension of 1 is taken away before a model without one, and put back behind it."""
    with tritonhttp.InferenceServerClient(running.http) as client:
        assert floats(client.infer("mixed", [in_out("A", [[1, 2]])]), "B") == [[20, 30]]
        with pytest.raises(InferenceServerException) as caught:
            client.infer("mixed", [in_out("A", [[1, 2], [3, 4]])])
        text = str(caught.value)
        assert "in ensemble 'mixed', " in text and "(step 1, model 'id_pair')" in text, text


def test_versions_of_steps(running):
    with tritonhttp.InferenceServerClient(running.http) as client:
        assert floats(client.infer("old", [in_out("A", [[1, 1]])]), "B") == [[2, 2]]
        assert floats(client.infer("new", [in_out("A", [[1, 1]])]), "B") == [[3, 3]]


def test_steps_side_by_side_and_nested(running):
    with tritonhttp.InferenceServerClient(running.http) as client:
        begin = time.monotonic()
        answer = client.infer("side_by_side", [in_out("A", [5])])
        took = time.monotonic() - begin
        assert floats(answer, "P") == floats(answer, "Q") == [5]
        assert 0.14 < took < 0.28, f"two steps of 150 ms took {took:.3f} s"
        assert floats(client.infer("nested", [in_out("A", [6])]), "B") == [6]


def test_statistics_of_an_ensemble_and_of_its_steps(running):
    with tritonhttp.InferenceServerClient(running.http) as client:

        def counts() -> dict:
            found = client.get_inference_statistics()["model_stats"]
            return {entry["name"]: entry["inference_stats"]["success"]["count"] for entry in found}

        before = counts()
        client.infer("fork", [in_out("A", [1])])
        after = counts()
        assert after["fork"] - before["fork"] == 1
        assert after["id_fp32"] - before["id_fp32"] == 3
        with pytest.raises(InferenceServerException):
            client.infer("mixed", [in_out("A", [[1, 2], [3, 4]])])
    page = running.metrics_page()
    labels = 'model="mixed"', 'reason="OTHER"'
    failed = [line for line in page.splitlines() if "request_failure{" in line and all(label in line for label in labels)]
    assert len(failed) == 1 and not failed[0].endswith(" 0"), failed


def test_ens_04_optional_inputs(running):
    """ENS-04: the member is called without it; with the parameter its branch is left out."""
    with tritonhttp.InferenceServerClient(running.http) as client:
        both = client.infer("optional", [in_out("A", [1]), in_out("B", [2])])
        assert (floats(both, "P"), floats(both, "Q")) == ([1], [2])
        only = client.infer("optional", [in_out("B", [2])], outputs=[tritonhttp.InferRequestedOutput("Q")])
        assert floats(only, "Q") == [2]
        with pytest.raises(InferenceServerException, match="unexpected deadlock, at least one output is not set"):
            client.infer("optional", [in_out("B", [2])])
        skipped = client.infer("skips", [in_out("B", [3])])
        assert floats(skipped, "Q") == [3] and skipped.as_numpy("P") is None
        whole = client.infer("skips", [in_out("A", [4]), in_out("B", [3])])
        assert (floats(whole, "P"), floats(whole, "Q")) == ([4], [3])
        with pytest.raises(InferenceServerException, match=r"in ensemble 'skips_not', .*\(step 0, model 'id_fp32'\)"):
            client.infer("skips_not", [in_out("B", [3])])


def stream(server: Server, model: str, values: list[int], results: queue.Queue, **fields) -> tritongrpc.InferenceServerClient:
    client = tritongrpc.InferenceServerClient(server.grpc)
    client.start_stream(callback=lambda result, error: results.put((result, error)))
    client.async_stream_infer(model, [in_out("A", values, "INT32", tritongrpc)], **fields)
    return client


def test_a_decoupled_step_makes_the_ensemble_decoupled(running):
    results: queue.Queue = queue.Queue()
    with stream(running, "stream", [7, 8, 9], results, request_id="5", enable_empty_final_response=True):
        messages = [results.get(timeout=20) for _ in range(4)]
    assert all(error is None for _, error in messages), messages
    answers = [result.get_response() for result, _ in messages]
    assert [answer.parameters["triton_final_response"].bool_param for answer in answers] == [False] * 3 + [True]
    assert sorted(result.as_numpy("B")[0] for result, _ in messages[:3]) == [7, 8, 9]
    assert not answers[3].outputs and {answer.id for answer in answers} == {"5"}
    status, answer = wire.infer(running, "stream", {"inputs": [wire.tensor("A", "INT32", [1], [1])]})
    assert status in (400, 501) and "decoupled" in answer["error"]
    assert json.loads(running.get("/v2/models/stream/config")[1])["model_transaction_policy"] == {"decoupled": True}


def test_a_client_that_leaves_starts_no_further_step(running):
    with tritonhttp.InferenceServerClient(running.http) as client:

        def done(model: str) -> int:
            found = client.get_inference_statistics(model)["model_stats"][0]
            return found["inference_stats"]["success"]["count"] + found["inference_stats"]["fail"]["count"]

        before = done("id_fp32")
        with tritongrpc.InferenceServerClient(running.grpc) as leaving:
            handle = leaving.async_infer("chain", [in_out("A", [1], module=tritongrpc)], callback=lambda result, error: None)
            time.sleep(0.05)
            handle.cancel()
            time.sleep(0.4)
        assert done("id_fp32") - before == 1, "the step behind the slow one did not run"


def test_met_04_requests_wait_at_the_slow_step(running):
    """MET-04: the gauge of waiting requests sits on the slow step."""
    gauges: dict[str, list] = {"id_fp32": [], "slow": [], "chain": []}

    def send():
        with tritonhttp.InferenceServerClient(running.http, network_timeout=60) as client:
            client.infer("chain", [in_out("A", [1])])

    threads = [threading.Thread(target=send) for _ in range(12)]
    for each in threads:
        each.start()
    while any(each.is_alive() for each in threads):
        for line in running.metrics_page().splitlines():
            for model, seen in gauges.items():
                if line.startswith("nv_inference_pending_request_count") and f'model="{model}"' in line:
                    seen.append(int(line.rsplit(" ", 1)[1]))
        time.sleep(0.05)
    assert max(gauges["slow"]) >= 6, gauges
    assert max(gauges["id_fp32"]) <= 3 and max(gauges["chain"]) == 0, gauges


def test_ens_05_work_inside_is_bounded(tmp_path):
    """ENS-05: over all requests, new ones wait before the first step, and a fast step does not run away."""
    fixtures.echo(tmp_path, "slow", "INT32", dims="[ 1 ]", more='parameters { key: "execute_delay_ms" value { string_value: "4" } }\n')
    (tmp_path / "repeat" / "1").mkdir(parents=True)
    fixtures.configure(tmp_path / "repeat", REPEAT)
    ensemble(
        tmp_path, "expand", "A:INT32:[-1]", "B:INT32:[1]",
        step("repeat", {"IN": "A"}, {"OUT": "t"}), step("slow", {"INPUT0": "t"}, {"OUTPUT0": "B"}),
        limit=4,
    )
    requests, responses = 20, 25
    with Server("--metrics-config=histogram_latencies=true", repository=tmp_path) as server:
        results: queue.Queue = queue.Queue()
        clients = [stream(server, "expand", list(range(responses)), results, request_id=str(i)) for i in range(requests)]
        waiting, seen = 0, 0
        got: list = []
        while len(got) < requests * responses:
            for line in server.metrics_page().splitlines():
                if line.startswith("nv_inference_pending_request_count"):
                    count = int(line.rsplit(" ", 1)[1])
                    waiting = max(waiting, count if '"slow"' in line else 0)
                    seen = max(seen, count if '"expand"' in line else 0)
            while True:
                try:
                    got.append(results.get(timeout=0.05))
                except queue.Empty:
                    break
        for client in clients:
            client.close()
        first = [line for line in server.metrics_page().splitlines() if line.startswith("nv_inference_first_response_histogram_ms_count")]
        assert [line for line in first if '"expand"' in line][0].endswith(f" {requests}"), first
    assert all(error is None for _, error in got), got[:3]
    by_request: dict[str, list] = {}
    for result, _ in got:
        by_request.setdefault(result.get_response().id, []).append(int(result.as_numpy("B")[0]))
    assert {tuple(sorted(values)) for values in by_request.values()} == {tuple(range(responses))}
    assert waiting <= 4, f"{waiting} responses waited at the slow step"
    assert seen >= 4, f"only {seen} requests were seen waiting before the first step"


@pytest.fixture
def explicit(tmp_path):
    for name in ("a", "b", "spare"):
        fixtures.echo(tmp_path, name, "FP32")
    x, y = "INPUT0", "OUTPUT0"
    ensemble(tmp_path, "e", "A:FP32:[-1]", "B:FP32:[-1]", step("a", {x: "A"}, {y: "t"}), step("b", {x: "t"}, {y: "B"}))
    ensemble(tmp_path, "outer", "A:FP32:[-1]", "B:FP32:[-1]", step("e", {"A": "A"}, {"B": "B"}))
    with Server("--model-control-mode=explicit", repository=tmp_path) as server:
        with tritonhttp.InferenceServerClient(server.http) as client:
            yield server, client, tmp_path


def states(client) -> dict[str, str]:
    return {entry["name"]: entry.get("state", "") for entry in client.get_model_repository_index()}


def test_loading_an_ensemble_loads_its_steps_and_unloading_may_take_them_along(explicit):
    _, client, _ = explicit
    client.load_model("b")
    client.load_model("outer")
    assert states(client) == {"a": "READY", "b": "READY", "e": "READY", "outer": "READY", "spare": ""}
    assert floats(client.infer("outer", [in_out("A", [1])]), "B") == [1]
    client.unload_model("outer", unload_dependents=True)
    # b was loaded by its own name and stays.
    assert states(client) == {"a": "UNAVAILABLE", "b": "READY", "e": "UNAVAILABLE", "outer": "UNAVAILABLE", "spare": ""}
    client.load_model("e")
    client.unload_model("e")
    assert states(client)["a"] == "READY", "without the parameter the steps stay"


def test_an_ensemble_follows_the_models_of_its_steps(explicit):
    server, client, folder = explicit
    client.load_model("outer")
    client.unload_model("b")
    assert states(client) | {"spare": ""} == {"a": "READY", "b": "UNAVAILABLE", "e": "UNAVAILABLE", "outer": "UNAVAILABLE", "spare": ""}
    assert not client.is_model_ready("e")
    with pytest.raises(InferenceServerException, match="'outer' has no available versions"):
        client.infer("outer", [in_out("A", [1])])
    client.load_model("b")
    assert client.is_model_ready("outer") and floats(client.infer("outer", [in_out("A", [2])]), "B") == [2]
    # A model that no longer fits takes its ensembles out of service until it fits again.
    fixtures.configure(folder / "b", (folder / "b" / "config.pbtxt").read_text().replace("FP32", "INT32"))
    client.load_model("b")
    assert states(client)["e"] == "UNAVAILABLE" and "inconsistent data type" in server.log()
    fixtures.configure(folder / "b", (folder / "b" / "config.pbtxt").read_text().replace("INT32", "FP32"))
    client.load_model("b")
    assert floats(client.infer("outer", [in_out("A", [3])]), "B") == [3]


def test_a_request_ends_with_the_models_it_began_with(tmp_path):
    """Its steps are unloaded, or loaded anew, while it is at the first of them."""
    for name in ("slow", "b"):
        more = 'parameters { key: "execute_delay_ms" value { string_value: "400" } }\n' if name == "slow" else ""
        fixtures.echo(tmp_path, name, "FP32", more=more)
    steps = step("slow", {"INPUT0": "A"}, {"OUTPUT0": "t"}), step("b", {"INPUT0": "t"}, {"OUTPUT0": "B"})
    ensemble(tmp_path, "e", "A:FP32:[-1]", "B:FP32:[-1]", *steps)
    with Server("--model-control-mode=explicit", "--load-model=e", repository=tmp_path) as server:
        with tritonhttp.InferenceServerClient(server.http, concurrency=2) as client:
            for change in (lambda: client.load_model("b"), lambda: client.unload_model("e", unload_dependents=True)):
                running = client.async_infer("e", [in_out("A", [1])])
                time.sleep(0.1)
                change()
                assert floats(running.get_result(), "B") == [1]
            with pytest.raises(InferenceServerException):
                client.infer("e", [in_out("A", [1])])


def test_what_is_said_of_ensembles_that_cannot_be_loaded(explicit):
    _, client, folder = explicit
    x, y = "INPUT0", "OUTPUT0"
    io = "A:FP32:[-1]", "B:FP32:[-1]"
    ensemble(folder, "lacks", *io, step("gone", {x: "A"}, {y: "B"}))
    ensemble(folder, "old", *io, step("a", {x: "A"}, {y: "B"}, version=3))
    ensemble(folder, "round", *io, step("about", {"A": "A"}, {"B": "B"}))
    ensemble(folder, "about", *io, step("round", {"A": "A"}, {"B": "B"}))
    fixtures.configure(folder / "spare", 'backend: "nope"')
    ensemble(folder, "broken", *io, step("spare", {x: "A"}, {y: "B"}))
    for name, text in (
        ("lacks", "ensemble lacks contains models that are not available or ambiguous: gone"),
        ("old", "ensemble 'old' depends on 'a' whose required version 3 is not loaded."),
        ("round", "circular dependency between ensembles: round -> about -> round"),
        ("broken", "ensemble 'broken' depends on 'spare' which has no loaded version. Model 'spare' loading failed with error: "),
    ):
        with pytest.raises(InferenceServerException) as caught:
            client.load_model(name)
        assert text in str(caught.value), caught.value


def test_a_start_loads_steps_before_ensembles(tmp_path):
    """In every mode, and the models of its steps come along when an ensemble is named."""
    for name in ("z", "y"):
        fixtures.echo(tmp_path, name, "FP32")
    ensemble(tmp_path, "a", "A:FP32:[-1]", "B:FP32:[-1]", step("m", {"A": "A"}, {"B": "B"}))
    ensemble(tmp_path, "m", "A:FP32:[-1]", "B:FP32:[-1]", step("z", {"INPUT0": "A"}, {"OUTPUT0": "B"}))
    for flags, loaded in (((), {"a", "m", "y", "z"}), (("--model-control-mode=explicit", "--load-model=a"), {"a", "m", "z"})):
        with Server(*flags, repository=tmp_path) as server:
            with tritonhttp.InferenceServerClient(server.http) as client:
                assert {name for name, state in states(client).items() if state == "READY"} == loaded
                assert floats(client.infer("a", [in_out("A", [1])]), "B") == [1]


def test_check_says_which_step_is_wrong_and_where(tmp_path):
    for name in ("one", "other"):
        fixtures.echo(tmp_path, name, "FP32")
    fixtures.echo(tmp_path, "wide", "FP32", dims="[ 3 ]")
    x, y = "INPUT0", "OUTPUT0"
    io = "A:FP32:[2]", "B:FP32:[2]"
    first = step("one", {x: "A"}, {y: "t"})
    for name, second, said, line in (
        ("lacks", step("gone", {x: "t"}, {y: "B"}), "contains models that are not available or ambiguous: gone", None),
        ("shape", step("wide", {x: "t"}, {y: "B"}), "inconsistent shape: [2] is inferred from model shape while [3] is inferred from model wide (step 1)", 8),
        ("input", step("other", {"X": "t"}, {y: "B"}), "is mapping to non-existing input X in model other (step 1)", 8),
    ):
        ensemble(tmp_path, name, *io, first, second)
        done = subprocess.run([binary(), "check", tmp_path, "--load-model", name, "--format=json"], capture_output=True, text=True)
        assert done.returncode == 1, (done.stdout, done.stderr)
        (model,) = json.loads(done.stdout)["models"]
        found = [error for error in model["errors"] if said in error["message"]]
        assert found and found[0]["line"] == line, model["errors"]
        assert "(step 1)" in json.dumps(found[0]), found
