"""Sequences with the official client: the sequence batcher and implicit state."""

import json
import queue
import re
import threading
import time
from pathlib import Path

import fixtures
import numpy as np
import onnx
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from onnx import helper
from server import Server
from tritonclient.utils import InferenceServerException
from wire import refused, tensor

CONTROLS = {
    "START": "kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ]",
    "END": "kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ]",
    "READY": "kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ]",
}


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def adder(repository: Path, name: str, batching: str = "", *, corrid: str = "TYPE_UINT64", more: str = "") -> None:
    """A model that adds up its sequences; ACTIVE is the number of sums that it keeps."""
    controls = CONTROLS | {"CORRID": f"kind: CONTROL_SEQUENCE_CORRID data_type: {corrid}"}
    inputs = ", ".join(f'{{ name: "{tensor}" control [ {{ {control} }} ] }}' for tensor, control in controls.items())
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    fixtures.configure(
        folder,
        'backend: "sequence"\nmax_batch_size: 4\n'
        f"sequence_batching {{ {batching} control_input [ {inputs} ] }}\n"
        'input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'
        'output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }, '
        '{ name: "ACTIVE" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'
        "instance_group [ { kind: KIND_CPU count: 1 } ]\n" + more,
    )


@pytest.fixture(scope="module")
def sequences(tmp_path_factory):
    """A server over adders of every kind."""
    repository = tmp_path_factory.mktemp("sequences")
    adder(repository, "direct", "direct { }")
    adder(repository, "oldest", "oldest { max_candidate_sequences: 8 }")
    adder(repository, "named", "oldest { }", corrid="TYPE_STRING")
    adder(repository, "one", "oldest { max_candidate_sequences: 1 }")
    adder(repository, "iterative", "iterative_sequence: true oldest { }", more=parameter("reschedule_count", "4"))
    slow = parameter("execute_delay_ms", "40")
    for idle in (10_000, 10_000_000):
        adder(repository, f"slow_{idle}", f"max_sequence_idle_microseconds: {idle}", more=slow)
    told = parameter("TRIREME_ABANDONED_SEQUENCE", "end")
    adder(repository, "told", "max_sequence_idle_microseconds: 200000 oldest { }", more=told)
    fixtures.echo(repository, "plain", "INT32", batch=4, dims="[ 1 ]")
    with Server(repository=repository) as server:
        yield server


def given(client_module, value: int, name: str = "INPUT"):
    """An input with one number."""
    made = client_module.InferInput(name, [1, 1], "INT32")
    made.set_data_from_numpy(np.array([[value]], np.int32))
    return [made]


class Caller:
    """Sends steps of sequences by HTTP or gRPC and gives the sums."""

    def __init__(self, server: Server, protocol: str, model: str) -> None:
        self.module = httpclient if protocol == "http" else grpcclient
        self.client = self.module.InferenceServerClient(server.http if protocol == "http" else server.grpc)
        self.model = model

    def __call__(self, value: int, sequence: int | str, flags: str = "", output: str = "OUTPUT") -> int:
        answer = self.client.infer(
            self.model,
            given(self.module, value),
            sequence_id=sequence,
            sequence_start="S" in flags,
            sequence_end="E" in flags,
        )
        return int(answer.as_numpy(output)[0, 0])


both = pytest.mark.parametrize("protocol", ["http", "grpc"])


@both
@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_sequences_are_added_up_apart(sequences, protocol, model):
    call = Caller(sequences, protocol, model)
    assert [call(1, 7, "S"), call(100, 8, "S"), call(2, 7), call(200, 8, "E"), call(3, 7, "E")] == [1, 100, 3, 300, 6]
    with pytest.raises(InferenceServerException, match="sequence 7 to model .* must specify the START flag on the first"):
        call(1, 7)
    assert call(5, 2**64 - 1 if protocol == "http" else 2**63 - 1, "SE") == 5


@both
def test_ids_may_be_strings(sequences, protocol):
    call = Caller(sequences, protocol, "named")
    assert [call(1, "a", "S"), call(10, "a-b", "S"), call(2, "a", "E"), call(20, "a-b", "E")] == [1, 10, 3, 30]
    with pytest.raises(InferenceServerException, match="correlation ID in request is not an unsigned int"):
        Caller(sequences, protocol, "direct")(1, "a", "SE")
    with pytest.raises(InferenceServerException, match="correlation ID in request is not an unsigned int"):
        plain = Caller(sequences, protocol, "plain")
        plain.client.infer("plain", given(plain.module, 1, "INPUT0"), sequence_id="a")


def test_seq_02_no_id_is_no_sequence(sequences):
    """SEQ-02: 0, nothing and "" are refused by a model with sequences, and mean nothing to others."""
    no_id = "must specify a non-zero or non-empty correlation ID"
    inputs = [tensor("INPUT", "INT32", [1, 1], [1])]
    for parameters in ({}, {"sequence_id": 0, "sequence_start": True}, {"sequence_id": "", "sequence_start": True}):
        for model in ("direct", "named"):
            message = refused(sequences, model, {"inputs": inputs, "parameters": parameters})
            assert message == f"inference request to model '{model}' {no_id}"
        plain = {"inputs": [tensor("INPUT0", "INT32", [1, 1], [1])], "parameters": parameters}
        status, _ = sequences.request("POST", "/v2/models/plain/infer", json.dumps(plain).encode())
        assert status == 200
    client = grpcclient.InferenceServerClient(sequences.grpc)
    for sequence in (0, ""):
        with pytest.raises(InferenceServerException, match=no_id) as caught:
            client.infer("direct", given(grpcclient, 1), sequence_id=sequence, sequence_start=True)
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        client.infer("plain", given(grpcclient, 1, "INPUT0"), sequence_id=sequence, sequence_start=True)


def streamed(server: Server, model: str, steps: list[tuple], pause: float = 0) -> list[int]:
    """Sums of steps (value, id, flags) that are written to one stream without waiting for answers."""
    answers: queue.Queue = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for number, (value, sequence, flags) in enumerate(steps):
            client.async_stream_infer(
                model,
                given(grpcclient, value),
                request_id=str(number),
                sequence_id=sequence,
                sequence_start="S" in flags,
                sequence_end="E" in flags,
            )
            time.sleep(pause)
        results = [answers.get(timeout=30) for _ in steps]
    assert not [result for result in results if isinstance(result, Exception)], results
    by_step = {int(result.get_response().id): int(result.as_numpy("OUTPUT")[0, 0]) for result in results}
    return [by_step[number] for number in range(len(steps))]


def one_sequence(sequence: int | str, count: int) -> tuple[list[tuple], list[int]]:
    """Steps of the values 1 to `count`, and their sums."""
    flags = {1: "S", count: "E"}
    steps = [(value, sequence, flags.get(value, "")) for value in range(1, count + 1)]
    return steps, [value * (value + 1) // 2 for value in range(1, count + 1)]


@pytest.mark.parametrize("model", ["direct", "oldest", "named"])
def test_seq_04_order_in_a_sequence(sequences, model):
    """SEQ-04: fifty steps written at once to one stream, and fifty calls one after the other, run in order."""
    steps, sums = one_sequence("many" if model == "named" else 50, 50)
    for _ in range(3):
        assert streamed(sequences, model, steps) == sums
    call = Caller(sequences, "grpc", model)
    assert [call(*step) for step in steps] == sums


def test_sequences_share_a_stream(sequences):
    """Steps of three sequences in turn, on one stream, over a model with one slot: the others wait for its END."""
    parts = [one_sequence(sequence, 10) for sequence in (1, 2, 3)]
    mixed = [step for turn in zip(*(steps for steps, _ in parts)) for step in turn]
    expected = [total for turn in zip(*(sums for _, sums in parts)) for total in turn]
    for model in ("oldest", "direct", "one"):
        assert streamed(sequences, model, mixed) == expected


def wait_for(condition, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def test_seq_06_an_abandoned_sequence_is_told(sequences):
    """SEQ-06: the client goes away in the middle; after the idle time the model gets an END and frees its memory."""
    with grpcclient.InferenceServerClient(sequences.grpc) as client:
        results: queue.Queue = queue.Queue()
        client.start_stream(lambda result, error: results.put(error or result))
        client.async_stream_infer("told", given(grpcclient, 1), sequence_id=1, sequence_start=True)
        assert int(results.get(timeout=30).as_numpy("ACTIVE")[0, 0]) == 1
    watch = Caller(sequences, "http", "told")
    assert watch(1, 2, "S", "ACTIVE") == 2, "the first is remembered for now"

    def is_alone() -> bool:
        return watch(1, 2, "", "ACTIVE") == 1

    wait_for(is_alone, 5)
    with pytest.raises(InferenceServerException, match="START"):
        watch(1, 1)
    watch(1, 2, "E")


@pytest.mark.parametrize("idle", [10_000, 10_000_000])
def test_seq_07_end_behind_steps_that_wait(sequences, idle):
    """SEQ-07: steps come faster than they run, then END; all run, whatever the idle limit."""
    steps, sums = one_sequence(7, 50)
    assert streamed(sequences, f"slow_{idle}", steps, pause=0.02) == sums


def test_an_idle_sequence_makes_room(tmp_path):
    adder(tmp_path, "small", "max_sequence_idle_microseconds: 300000 oldest { max_candidate_sequences: 1 }")
    with Server(repository=tmp_path) as server:
        call = Caller(server, "http", "small")
        assert call(1, 1, "S") == 1
        begin = time.monotonic()
        assert call(2, 2, "SE") == 2
        assert 0.2 < time.monotonic() - begin < 5, "it waited until the first had been idle for too long"
        with pytest.raises(InferenceServerException, match="START"):
            call(1, 1)


def test_a_limit_on_the_wait_for_a_slot(sequences):
    call = Caller(sequences, "http", "one")
    assert call(1, 1, "S") == 1
    with pytest.raises(InferenceServerException, match="timeout of the corresponding sequence has been expired"):
        call.client.infer("one", given(httpclient, 1), sequence_id=2, sequence_start=True, timeout=100_000)
    assert call(1, 1, "E") == 2


def test_a_start_in_the_middle_begins_anew_and_is_told(sequences):
    call = Caller(sequences, "http", "direct")
    assert [call(1, 77, "S"), call(5, 77, "S"), call(1, 77, "E")] == [1, 5, 6]
    assert "sequence 77 for model 'direct' has a conflict" in sequences.log()


def test_iterative_sequences_need_no_id(sequences):
    client = httpclient.InferenceServerClient(sequences.http)
    results: dict[int, int] = {}

    def ask(value: int) -> None:
        with httpclient.InferenceServerClient(sequences.http) as mine:
            results[value] = int(mine.infer("iterative", given(httpclient, value)).as_numpy("OUTPUT")[0, 0])

    threads = [threading.Thread(target=ask, args=(value,)) for value in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {value: 4 * value for value in range(1, 9)}
    statistics = client.get_inference_statistics("iterative")["model_stats"][0]
    assert statistics["inference_stats"]["success"]["count"] == 8


def test_controls_are_not_for_clients(sequences):
    client = httpclient.InferenceServerClient(sequences.http)
    with pytest.raises(InferenceServerException, match="expected 1 inputs but got 2"):
        client.infer("direct", given(httpclient, 1) + given(httpclient, 1, "START"), sequence_id=1, sequence_start=True)


# ---- implicit state


def stateful(repository: Path, name: str, nodes: list, dims: str, batching: str = "", more: str = "", **model) -> Path:
    """An ONNX model with input X, state S -> T and output Y, all INT32."""
    number, batch = onnx.TensorProto.INT32, ["N", 1]
    state = ["N", *model.pop("state", [1])]
    folder = fixtures.save(
        repository,
        name,
        nodes,
        [("X", number, batch), ("S", number, state)],
        [("Y", number, model.pop("result", batch)), ("T", number, model.pop("next_state", state))],
        **model,
    )
    fixtures.configure(
        folder,
        'backend: "onnxruntime"\nmax_batch_size: 4\n'
        f"sequence_batching {{ {batching} state [ {{ input_name: \"S\" output_name: \"T\" data_type: TYPE_INT32 dims: {dims} {more} }} ] }}\n"
        "instance_group [ { kind: KIND_CPU count: 1 } ]\n",
    )
    return folder


def running_sum() -> list:
    return [helper.make_node("Add", ["X", "S"], ["Y"]), helper.make_node("Identity", ["Y"], ["T"])]


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    repository = tmp_path_factory.mktemp("states")
    stateful(repository, "sum", running_sum(), "[ 1 ]")
    stateful(repository, "sum_oldest", running_sum(), "[ 1 ]", "oldest { max_candidate_sequences: 8 }")
    shown = stateful(repository, "shown", running_sum(), "[ 1 ]")
    text = (shown / "config.pbtxt").read_text()
    fixtures.configure(
        shown, text + 'output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "T" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'
    )
    initial = 'initial_state { name: "start" data_type: TYPE_INT32 dims: [ 1 ] data_file: "hundred" }'
    started = stateful(repository, "started", running_sum(), "[ 1 ]", more=initial)
    (started / "initial_state").mkdir()
    (started / "initial_state" / "hundred").write_bytes(np.array([100], np.int32).tobytes())
    history = [helper.make_node("Concat", ["S", "X"], ["T"], axis=1), helper.make_node("Identity", ["T"], ["Y"])]
    grows = {"state": ["k"], "next_state": ["N", "l"], "result": ["N", "l"]}
    # A state with an open dimension begins with one element.
    for name, batching in (("history", ""), ("history_oldest", "oldest { max_candidate_sequences: 8 }")):
        growing = "use_same_buffer_for_input_output: true use_growable_memory: true"
        stateful(repository, name, history, "[ -1 ]", batching, growing, **dict(grows))
    empty = 'initial_state { name: "empty" data_type: TYPE_INT32 dims: [ 0 ] zero_data: true }'
    stateful(repository, "empty", history, "[ -1 ]", "", empty, **dict(grows))
    with Server(repository=repository) as server:
        yield server


class StateCaller(Caller):
    def __call__(self, value: int, sequence: int, flags: str = "", output: str = "Y") -> list[int]:
        answer = self.client.infer(
            self.model,
            given(self.module, value, "X"),
            sequence_id=sequence,
            sequence_start="S" in flags,
            sequence_end="E" in flags,
        )
        return answer.as_numpy(output)[0].tolist()


@both
@pytest.mark.parametrize("model", ["sum", "sum_oldest"])
def test_the_server_keeps_the_state(states, protocol, model):
    call = StateCaller(states, protocol, model)
    assert [call(1, 1, "S"), call(10, 2, "S"), call(2, 1), call(20, 2, "E"), call(3, 1, "E")] == [[1], [10], [3], [30], [6]]
    assert [call(1, 1, "S"), call(5, 1, "S"), call(1, 1, "E")] == [[1], [5], [6]], "START forgets the state"


def test_a_state_is_no_output_unless_it_is_listed(states):
    client = httpclient.InferenceServerClient(states.http)
    assert [output["name"] for output in client.get_model_metadata("sum")["outputs"]] == ["Y"]
    assert [input["name"] for input in client.get_model_metadata("sum")["inputs"]] == ["X"]
    with pytest.raises(InferenceServerException, match="unexpected inference output 'T'"):
        wanted = [httpclient.InferRequestedOutput("T")]
        client.infer("sum", given(httpclient, 1, "X"), outputs=wanted, sequence_id=1, sequence_start=True)
    call = StateCaller(states, "http", "shown")
    assert call(4, 1, "S", "T") == [4]
    wanted = [httpclient.InferRequestedOutput("Y")]
    answer = client.infer("shown", given(httpclient, 1, "X"), outputs=wanted, sequence_id=1)
    assert [output["name"] for output in answer.get_response()["outputs"]] == ["Y"]
    assert call(1, 1, "E", "T") == [6], "the state was kept although nobody asked for it"


def test_a_state_begins_as_its_file_says(states):
    call = StateCaller(states, "http", "started")
    assert [call(1, 1, "S"), call(1, 1), call(1, 2, "SE"), call(1, 1, "E")] == [[101], [102], [101], [103]]


@pytest.mark.parametrize("model", ["history", "history_oldest"])
def test_a_state_may_grow(states, model):
    call = StateCaller(states, "grpc", model)
    assert call(1, 1, "S") == [0, 1]
    assert call(7, 2, "S") == [0, 7]
    assert call(2, 1) == [0, 1, 2]
    assert call(3, 1) == [0, 1, 2, 3]
    assert call(8, 2, "E") == [0, 7, 8]
    assert call(4, 1, "E") == [0, 1, 2, 3, 4]


def test_a_state_may_begin_as_nothing(states):
    call = StateCaller(states, "grpc", "empty")
    assert [call(1, 1, "S"), call(2, 1), call(9, 2, "SE"), call(3, 1, "E")] == [[1], [1, 2], [9], [1, 2, 3]]


@pytest.mark.parametrize("model", ["sum", "sum_oldest", "history", "history_oldest"])
def test_many_sequences_with_states(states, model):
    """Eight clients at once, in batches, with states of different sizes: each sees its own."""
    failures = []

    def work(client: int) -> None:
        call = StateCaller(states, "grpc", model)
        expected = [0]
        try:
            for step in range(12):
                value = client * 1000 + step
                expected.append(value)
                got = call(value, client, {0: "S", 11: "E"}.get(step, ""))
                want = [sum(expected)] if model.startswith("sum") else expected
                if got != want:
                    failures.append((client, step, got, want))
        except Exception as error:  # shown below
            failures.append((client, repr(error)))

    threads = [threading.Thread(target=work, args=(client,)) for client in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_what_is_wrong_with_a_state_is_told(tmp_path):
    stateful(tmp_path, "typed", running_sum(), "[ 1 ]", more='initial_state { name: "i" data_type: TYPE_FP32 dims: 1 zero_data: true }')
    stateful(tmp_path, "nowhere", running_sum(), "[ 1 ]", more='initial_state { name: "i" data_type: TYPE_INT32 dims: 1 data_file: "no" }')
    folder = stateful(tmp_path, "misnamed", running_sum(), "[ 1 ]")
    text = (folder / "config.pbtxt").read_text()
    fixtures.configure(folder, text.replace('output_name: "T"', 'output_name: "U"'))
    with Server("--exit-on-error=false", repository=tmp_path, wait="live") as server:
        status, body = server.request("POST", "/v2/repository/index")
        reasons = {model["name"]: model["reason"] for model in json.loads(body)}
        assert status == 200
        assert "'initial_state' field of state 'S' does not match the state data type" in reasons["typed"]
        assert re.search("cannot read the initial value of state input 'S'.*initial_state/no", reasons["nowhere"])
        assert "unexpected inference output 'U', allowed outputs are: Y, T" in reasons["misnamed"]
