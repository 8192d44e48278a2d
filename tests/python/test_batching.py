"""Dynamic batching: which requests run together, seen in the statistics of the model."""

import json
import threading
import time

import fixtures
import numpy as np
import onnx
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from onnx import helper
from server import Server
from tritonclient.utils import InferenceServerException
from wire import infer, refused, tensor


def batching(more: str = "", delay_us: int = 0) -> str:
    return f"dynamic_batching {{ max_queue_delay_microseconds: {delay_us} {more} }}\n"


def one_instance(execute_ms: int = 0) -> str:
    delay = f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{execute_ms}" }} }}\n' if execute_ms else ""
    return "instance_group [ { kind: KIND_CPU count: 1 } ]\n" + delay


def statistics(server: Server, model: str) -> dict:
    status, body = server.get(f"/v2/models/{model}/stats")
    assert status == 200
    return json.loads(body)["model_stats"][0]


def batch_sizes(server: Server, model: str) -> dict[int, int]:
    """Number of executions by rows."""
    return {one["batch_size"]: one["compute_infer"]["count"] for one in statistics(server, model)["batch_stats"]}


def at_once(count: int, work) -> list:
    """Results of `work(0)` to `work(count - 1)`, each on a thread of its own."""
    results: list = [None] * count
    start = threading.Barrier(count)

    def run(index: int) -> None:
        start.wait()
        try:
            results[index] = work(index)
        except Exception as error:  # the test looks at it
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def ask(server: Server, model: str, shape: list[int], name: str = "INPUT0", output: str = "OUTPUT0", first: int = 0):
    """Asks with numbers from `first` on and gives what came back."""
    values = np.arange(first, first + int(np.prod(shape)), dtype=np.float32).reshape(shape)
    with httpclient.InferenceServerClient(server.http) as client:
        given = httpclient.InferInput(name, shape, "FP32")
        given.set_data_from_numpy(values)
        answer = client.infer(model, [given]).as_numpy(output)
    assert np.array_equal(answer, values), (model, shape, answer)
    return answer


def test_bat_12_a_large_batch_is_collected(tmp_path):
    """BAT-12: forty requests at once, and time to wait for them, are one execution."""
    fixtures.echo(tmp_path, "echo", "FP32", batch=400, dims="[ 1 ]", more=one_instance() + batching(delay_us=2_000_000)
                  + 'parameters { key: "TRIREME_QUEUE_DELAY" value { string_value: "fixed" } }')  # fmt: skip
    with Server(repository=tmp_path) as server:
        begin = time.monotonic()
        at_once(40, lambda index: ask(server, "echo", [1, 1], first=index))
        assert 1.9 < time.monotonic() - begin < 10
        assert batch_sizes(server, "echo") == {40: 1}


def test_bat_14_the_limit_counts_rows(tmp_path):
    """BAT-14: ten requests of three rows; no execution has more than eight."""
    fixtures.echo(tmp_path, "echo", "FP32", batch=8, dims="[ 1 ]", more=one_instance(20) + batching(delay_us=50_000))
    with Server(repository=tmp_path) as server:
        at_once(10, lambda index: ask(server, "echo", [3, 1], first=index))
        sizes = batch_sizes(server, "echo")
        assert max(sizes) == 6 and sum(size * count for size, count in sizes.items()) == 30, sizes
        assert statistics(server, "echo")["inference_count"] == 30


def test_bat_08_shapes_that_differ_do_not_mix(tmp_path):
    """BAT-08: two lengths together, fifty times: right answers, batches of one length each, nobody starves."""
    folder = fixtures.copy(tmp_path, "copy", onnx.TensorProto.FLOAT, ["N", "a"], batching=True)
    fixtures.configure(folder, 'backend: "onnxruntime"\nmax_batch_size: 8\n' + one_instance() + batching(delay_us=50_000))
    with Server(repository=tmp_path) as server:
        for _ in range(50):
            at_once(4, lambda index: ask(server, "copy", [1, 16 if index % 2 else 20], "X", "Y", first=index))
        shown = statistics(server, "copy")
        assert shown["inference_count"] == 200 and shown["inference_stats"]["fail"]["count"] == 0
        sizes = batch_sizes(server, "copy")
        assert max(sizes) == 2 and sizes[2] >= 50, sizes


def optional_sum(repository) -> None:
    """Y = X + Z, where Z is optional and 100 by default."""
    tensor_type = onnx.TensorProto.FLOAT
    nodes = [helper.make_node("Add", ["X", "Z"], ["Y"])]
    folder = fixtures.save(
        repository,
        "sum",
        nodes,
        [("X", tensor_type, ["N", 1]), ("Z", tensor_type, ["N", 1])],
        [("Y", tensor_type, ["N", 1])],
        weights={"Z": np.full((1, 1), 100, np.float32)},
    )
    fixtures.configure(
        folder,
        'backend: "onnxruntime"\nmax_batch_size: 8\n'
        'input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }, '
        '{ name: "Z" data_type: TYPE_FP32 dims: [ 1 ] optional: true } ]\n'
        'output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]\n' + one_instance() + batching(delay_us=400_000)
        + 'parameters { key: "TRIREME_QUEUE_DELAY" value { string_value: "fixed" } }',
    )


def test_bat_10_optional_inputs_do_not_mix(tmp_path):
    """BAT-10: requests with and without the input alternate; two batches, each of one kind, and right answers."""
    optional_sum(tmp_path)

    def work(index: int):
        inputs = [tensor("X", "FP32", [1, 1], [index])]
        if index % 2:
            inputs.append(tensor("Z", "FP32", [1, 1], [1000]))
        status, answer = infer(server, "sum", {"inputs": inputs})
        assert status == 200, answer
        return answer["outputs"][0]["data"]

    with Server(repository=tmp_path) as server:
        answers = at_once(8, work)
        assert answers == [[index + (1000 if index % 2 else 100)] for index in range(8)]
        assert batch_sizes(server, "sum") == {4: 2}


def test_a_lone_client_does_not_wait_for_company(tmp_path):
    """The delay is a limit: who is alone is served at once, unless the model asks for the fixed rule."""
    fixed = 'parameters { key: "TRIREME_QUEUE_DELAY" value { string_value: "fixed" } }'
    for name, more in (("adaptive", ""), ("fixed", fixed)):
        fixtures.echo(tmp_path, name, "FP32", batch=8, dims="[ 1 ]", more=one_instance() + batching(delay_us=100_000) + more)
    with Server(repository=tmp_path) as server, httpclient.InferenceServerClient(server.http) as client:
        given = httpclient.InferInput("INPUT0", [1, 1], "FP32")
        given.set_data_from_numpy(np.ones((1, 1), np.float32))
        for name, slow in (("adaptive", False), ("fixed", True)):
            for _ in range(8 if name == "adaptive" else 0):  # it learns that it is alone
                client.infer(name, [given])
            begin = time.monotonic()
            for _ in range(10):
                client.infer(name, [given])
            assert (time.monotonic() - begin > 0.5) == slow, name


def test_a_wrong_rule_is_refused_by_name(tmp_path):
    more = 'parameters { key: "TRIREME_QUEUE_DELAY" value { string_value: "sometimes" } }'
    fixtures.echo(tmp_path, "echo", "FP32", batch=8, dims="[ 1 ]", more=batching() + more)
    with Server("--exit-on-error=false", repository=tmp_path, wait="live") as server:
        deadline = time.monotonic() + 20
        while "sometimes" not in server.log() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "must be 'adaptive' or 'fixed', got 'sometimes'" in server.log()


def test_que_02_the_queue_limit_is_exact(tmp_path):
    """QUE-02: one runs, two wait, seven are refused at once with 503, again and again."""
    policy = "default_queue_policy { max_queue_size: 2 }"
    fixtures.echo(tmp_path, "echo", "FP32", batch=1, dims="[ 1 ]", more=one_instance(400) + batching(policy))
    with Server(repository=tmp_path) as server:

        def work(index: int):
            begin = time.monotonic()
            body = json.dumps({"inputs": [tensor("INPUT0", "FP32", [1, 1], [index])]}).encode()
            status, answer = server.request("POST", "/v2/models/echo/infer", body)
            return status, time.monotonic() - begin, answer

        for _ in range(5):
            results = at_once(10, work)
            accepted = [result for result in results if result[0] == 200]
            turned_away = [result for result in results if result[0] == 503]
            assert (len(accepted), len(turned_away)) == (3, 7), results
            assert all(seconds < 0.35 for _, seconds, _ in turned_away), turned_away
            assert all(b"Exceeds maximum queue size" in answer for _, _, answer in turned_away)
        page = server.metrics_page()
        assert 'nv_inference_request_failure{model="echo",version="1",reason="REJECTED"} 35' in page, page


def test_que_04_priority_jumps_the_queue(tmp_path):
    """QUE-04: level 1 is served before what waits on level 2; a level that does not exist is the default one."""
    levels = "priority_levels: 2 default_priority_level: 2 default_queue_policy { allow_timeout_override: true }"
    fixtures.echo(tmp_path, "echo", "FP32", batch=1, dims="[ 1 ]", more=one_instance(150) + batching(levels))
    done: list[tuple[int, int]] = []
    with Server(repository=tmp_path) as server:

        def work(order: int, priority: int) -> None:
            with httpclient.InferenceServerClient(server.http) as client:
                given = httpclient.InferInput("INPUT0", [1, 1], "FP32")
                given.set_data_from_numpy(np.full((1, 1), order, np.float32))
                client.infer("echo", [given], priority=priority)
            done.append((order, priority))

        threads = []
        for order, priority in enumerate([2, 2, 0, 7, 1]):
            threads.append(threading.Thread(target=work, args=(order, priority)))
            threads[-1].start()
            time.sleep(0.02)
        for thread in threads:
            thread.join()
        assert [order for order, _ in done] == [0, 4, 1, 2, 3], done


@pytest.mark.parametrize("timeout", [-1, "soon", 1.5, True, [1]])
def test_que_04_a_bad_timeout_is_refused(server, timeout):
    """QUE-04: types that are no number of microseconds."""
    body = {"parameters": {"timeout": timeout}, "inputs": [tensor("X", "FP32", [1, 1], [5])]}
    assert "timeout" in refused(server, "idb_fp32", body)


def test_que_04_timeouts_fire_on_time(tmp_path):
    """QUE-04: a request that has waited too long is refused when its time is over, not when its turn would be."""
    policy = (
        "default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 200000 "
        "allow_timeout_override: true }"
    )
    fixtures.echo(tmp_path, "echo", "FP32", batch=1, dims="[ 1 ]", more=one_instance(1500) + batching(policy))
    with Server(repository=tmp_path) as server, grpcclient.InferenceServerClient(server.grpc) as client:
        given = grpcclient.InferInput("INPUT0", [1, 1], "FP32")
        given.set_data_from_numpy(np.ones((1, 1), np.float32))
        first: list = []
        client.async_infer("echo", [given], callback=lambda result, error: first.append(error))
        time.sleep(0.1)
        for timeout, expected in ((None, 0.2), (50_000, 0.05), (900_000, 0.2)):
            begin = time.monotonic()
            with pytest.raises(InferenceServerException, match="Request timeout expired") as caught:
                client.infer("echo", [given], timeout=timeout)
            waited = time.monotonic() - begin
            assert expected <= waited < expected + 0.15, (timeout, waited)
            assert "UNAVAILABLE" in caught.value.status()
        deadline = time.monotonic() + 10
        while not first and time.monotonic() < deadline:
            time.sleep(0.02)
        assert first == [None]
        assert statistics(server, "echo")["execution_count"] == 1


def test_delay_serves_late_requests_last(tmp_path):
    """Under DELAY a request whose time is over is served behind those in time."""
    policy = "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 10000000 allow_timeout_override: true }"
    fixtures.echo(tmp_path, "echo", "FP32", batch=1, dims="[ 1 ]", more=one_instance(150) + batching(policy))
    done: list[int] = []
    with Server(repository=tmp_path) as server:

        def work(order: int, timeout: int) -> None:
            with httpclient.InferenceServerClient(server.http) as client:
                given = httpclient.InferInput("INPUT0", [1, 1], "FP32")
                given.set_data_from_numpy(np.full((1, 1), order, np.float32))
                client.infer("echo", [given], timeout=timeout)
            done.append(order)

        threads = []
        for order, timeout in enumerate([0, 20_000, 0, 0]):
            threads.append(threading.Thread(target=work, args=(order, timeout)))
            threads[-1].start()
            time.sleep(0.02)
        for thread in threads:
            thread.join()
    assert done == [0, 2, 3, 1]


def test_answers_keep_the_order_of_the_requests(tmp_path):
    """preserve_ordering, with four instances of which some are slow, over one stream."""
    more = "instance_group [ { kind: KIND_CPU count: 4 } ]\n" + batching("preserve_ordering: true")
    more += 'parameters { key: "execute_delay_ms" value { string_value: "3" } }\n'
    more += 'parameters { key: "instance_wise_delay_multiplier" value { string_value: "3" } }\n'
    fixtures.echo(tmp_path, "echo", "FP32", batch=2, dims="[ 1 ]", more=more)
    order: list[str] = []
    done = threading.Event()

    def callback(result, error) -> None:
        assert error is None
        order.append(result.get_response().id)
        if len(order) == 200:
            done.set()

    with Server(repository=tmp_path) as server, grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback)
        given = grpcclient.InferInput("INPUT0", [1, 1], "FP32")
        given.set_data_from_numpy(np.ones((1, 1), np.float32))
        for index in range(200):
            client.async_stream_infer("echo", [given], request_id=str(index))
        assert done.wait(30), len(order)
        client.stop_stream()
    assert order == [str(index) for index in range(200)]
