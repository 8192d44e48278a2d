"""The response cache over the wire: who gets an answer from it, and what the statistics and metrics say of it."""

import concurrent.futures
import re
import subprocess
import time
import urllib.request

import fixtures
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from server import Server, binary
from wire import infer, tensor

ENABLED = "response_cache { enable: true }\n"


def lay(repository):
    """addsub and classes with the cache and a batcher, echoes of the identity backend with and without the cache."""
    fixtures.lay_sums(repository)
    fixtures.lay_classes(repository)
    for name in ("addsub", "classes"):
        with (repository / name / "config.pbtxt").open("a") as config:
            config.write(ENABLED + "dynamic_batching { max_queue_delay_microseconds: 200 }\n")
    fixtures.echo(repository, "echo", "FP32", more=ENABLED)
    fixtures.echo(repository, "text", "STRING", more=ENABLED)
    fixtures.echo(repository, "plain", "FP32")
    delay = 'parameters { key: "execute_delay_ms" value: { string_value: "300" } }\n'
    fixtures.echo(repository, "slow", "FP32", more=ENABLED + delay)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("cached")
    lay(repository)
    with Server("--cache-config", "local,size=16777216", repository=repository) as running:
        yield running


def statistics(server, model):
    with httpclient.InferenceServerClient(server.http) as client:
        return client.get_inference_statistics(model)["model_stats"][0]


def counts(server, model):
    """Hits, misses, successes, executions."""
    one = statistics(server, model)
    stats = one["inference_stats"]
    return np.array(
        [
            stats["cache_hit"].get("count", 0),
            stats["cache_miss"].get("count", 0),
            stats["success"].get("count", 0),
            one["execution_count"],
        ]
    )


def metric(server, line):
    page = server_metrics(server)
    found = re.search(rf"^{re.escape(line)} (\S+)$", page, re.MULTILINE)
    assert found, f"{line} is missing in\n{page}"
    return float(found[1])


def server_metrics(server):
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=20) as page:
        return page.read().decode()


def inputs_of(client_module, a, b):
    found = []
    for name, value in (("A", a), ("B", b)):
        one = client_module.InferInput(name, list(value.shape), "FP32")
        one.set_data_from_numpy(value)
        found.append(one)
    return found


@pytest.mark.parametrize("client_module", [httpclient, grpcclient])
def test_cac_01_correct_outputs_for_every_request(server, client_module):
    """CAC-01: the same input ten times at once, each with its own choice of outputs, under a batcher."""
    url = server.http if client_module is httpclient else server.grpc
    before = counts(server, "addsub")
    seed = 1 if client_module is httpclient else 2
    a = np.arange(8, dtype=np.float32).reshape(2, 4) * seed
    b = np.full((2, 4), 3, np.float32)
    wanted = [None, ["SUM"], ["DIFF"], ["SUM", "DIFF"], ["DIFF", "SUM"]] * 2

    def ask(names):
        with client_module.InferenceServerClient(url) as client:
            outputs = names and [client_module.InferRequestedOutput(name) for name in names]
            return client.infer("addsub", inputs_of(client_module, a, b), outputs=outputs, request_id=f"of {names}")

    for _ in range(3):
        with concurrent.futures.ThreadPoolExecutor(10) as pool:
            answers = list(pool.map(ask, wanted))
        for names, answer in zip(wanted, answers):
            response = answer.get_response()
            response = response if client_module is httpclient else {
                "id": response.id, "outputs": [{"name": output.name} for output in response.outputs]
            }
            assert response["id"] == f"of {names}"
            assert {output["name"] for output in response["outputs"]} == set(names or ["SUM", "DIFF"])
            for name, value in (("SUM", a + b), ("DIFF", a - b)):
                if name in (names or [name]):
                    assert np.array_equal(answer.as_numpy(name), value)
    hits, misses, success, _ = counts(server, "addsub") - before
    assert success == 30 and hits + misses == 30
    assert hits >= 20, "the second and third round were all answered before"


def test_cac_01_decoupled_models_are_refused(tmp_path):
    """CAC-01: a decoupled model has no one answer that could be kept."""
    config = ENABLED + "model_transaction_policy { decoupled: true }\n"
    fixtures.echo(tmp_path, "decoupled", "FP32", more=config)
    fixtures.echo(tmp_path, "good", "FP32", more=ENABLED)
    with Server("--cache-config=local,size=1048576", "--exit-on-error=false", repository=tmp_path, wait="live") as server:
        assert infer(server, "good", {"inputs": [tensor("INPUT0", "FP32", [1], [1])]})[0] == 200
        assert infer(server, "decoupled", {"inputs": [tensor("INPUT0", "FP32", [1], [1])]})[0] in (400, 404)
        assert "Response Cache does not currently support model decoupled with 'decoupled'" in server.log()


def test_a_hit_counts_as_a_success_and_not_as_an_inference(server):
    request = {"inputs": [tensor("INPUT0", "FP32", [3], [1.5, 2, 3])]}
    labels = '{model="echo",version="1"}'
    before = counts(server, "echo")
    executed = statistics(server, "echo")["inference_count"]
    first, *others = [infer(server, "echo", {**request, "id": str(n)}) for n in range(4)]
    for n, (status, answer) in enumerate([first, *others]):
        assert status == 200 and answer["id"] == str(n)
        assert answer["outputs"] == first[1]["outputs"]
    assert (counts(server, "echo") - before).tolist() == [3, 1, 4, 1]
    after = statistics(server, "echo")
    stats = after["inference_stats"]
    assert after["inference_count"] == executed + 1
    assert stats["queue"]["count"] == stats["success"]["count"]
    assert stats["compute_infer"]["count"] == stats["success"]["count"] - stats["cache_hit"]["count"]
    assert 0 < stats["cache_hit"]["ns"] < stats["success"]["ns"]
    assert metric(server, "nv_cache_num_hits_per_model" + labels) == stats["cache_hit"]["count"]
    assert metric(server, "nv_cache_num_misses_per_model" + labels) == stats["cache_miss"]["count"]
    assert metric(server, "nv_cache_hit_duration_per_model" + labels) == stats["cache_hit"]["ns"] // 1000
    assert metric(server, "nv_cache_miss_duration_per_model" + labels) == stats["cache_miss"]["ns"] // 1000
    assert metric(server, "nv_inference_count" + labels) == after["inference_count"]
    assert metric(server, "nv_inference_request_success" + labels) == stats["success"]["count"]
    assert 'nv_cache_num_hits_per_model{model="plain"' not in server_metrics(server)


def test_the_protocol_does_not_matter(server):
    """An answer to HTTP with JSON serves HTTP with binary data, gRPC and a gRPC stream."""
    value = np.array([7, 8, 9], np.float32)
    assert infer(server, "echo", {"inputs": [tensor("INPUT0", "FP32", [3], [7, 8, 9])]})[0] == 200
    before = counts(server, "echo")
    with httpclient.InferenceServerClient(server.http) as client:
        one = httpclient.InferInput("INPUT0", [3], "FP32")
        one.set_data_from_numpy(value, binary_data=True)
        assert np.array_equal(client.infer("echo", [one]).as_numpy("OUTPUT0"), value)
    with grpcclient.InferenceServerClient(server.grpc) as client:
        one = grpcclient.InferInput("INPUT0", [3], "FP32")
        one.set_data_from_numpy(value)
        assert np.array_equal(client.infer("echo", [one]).as_numpy("OUTPUT0"), value)
        answers = []
        client.start_stream(lambda result, error: answers.append((result, error)))
        for _ in range(5):
            client.async_stream_infer("echo", [one])
        client.stop_stream()
    assert len(answers) == 5
    for result, error in answers:
        assert error is None and np.array_equal(result.as_numpy("OUTPUT0"), value)
    assert (counts(server, "echo") - before).tolist() == [7, 0, 7, 0]


def test_shapes_of_the_same_bytes_are_different_requests(server):
    """Triton's key has neither shapes nor data types, so that its second answer here is the first one's."""
    with httpclient.InferenceServerClient(server.http) as client:
        for shape in ([1, 4], [2, 4], [4, 4]):
            a, b = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
            for _ in range(2):
                assert client.infer("addsub", inputs_of(httpclient, a, b)).as_numpy("SUM").shape == tuple(shape)
    for elements in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b""], [b"", b""]):
        with httpclient.InferenceServerClient(server.http) as client:
            one = httpclient.InferInput("INPUT0", [len(elements)], "BYTES")
            one.set_data_from_numpy(np.array(elements, dtype=np.object_))
            for _ in range(2):
                assert client.infer("text", [one]).as_numpy("OUTPUT0").tolist() == elements


def test_classification_is_made_of_the_kept_tensor(server):
    scores = np.array([[0.1, 0.7, 0.2]], np.float32)
    before = counts(server, "classes")
    with httpclient.InferenceServerClient(server.http) as client:
        one = httpclient.InferInput("X", [1, 3], "FP32")
        one.set_data_from_numpy(scores)
        for classes, want in ((1, [b"0.700000:1:banana"]), (2, [b"0.700000:1:banana", b"0.200000:2:cherry"]), (0, scores)):
            output = httpclient.InferRequestedOutput("Y", class_count=classes)
            got = client.infer("classes", [one], outputs=[output]).as_numpy("Y")
            assert np.array_equal(got.reshape(-1), np.array(want).reshape(-1))
    assert (counts(server, "classes") - before).tolist() == [2, 1, 3, 1]


def test_a_hit_does_not_wait_for_the_model(server):
    """A hit passes requests that queue for the only instance."""
    request = {"inputs": [tensor("INPUT0", "FP32", [1], [1])]}
    assert infer(server, "slow", request)[0] == 200
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        others = [
            pool.submit(infer, server, "slow", {"inputs": [tensor("INPUT0", "FP32", [1], [n])]}) for n in (2, 3, 4)
        ]
        for _ in range(10):
            assert infer(server, "slow", request)[0] == 200
        assert not all(other.done() for other in others), "the hits were answered before the queue was served"
        assert all(other.result()[0] == 200 for other in others)


def test_failures_are_asked_again(server):
    bad = {"inputs": [tensor("INPUT0", "FP32", [2], [1, 2])], "outputs": [{"name": "NOPE"}]}
    before = counts(server, "echo")
    assert infer(server, "echo", bad)[0] == 400
    assert infer(server, "echo", bad)[0] == 400
    assert (counts(server, "echo") - before).tolist() == [0, 0, 0, 0], "a request that is refused is not looked up"


def memory(server):
    status = open(f"/proc/{server.process.pid}/status").read()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


def test_the_size_is_a_limit(tmp_path):
    fixtures.echo(tmp_path, "echo", "FP32", more=ENABLED)
    size = 4 << 20
    with Server(f"--cache-config=local,size={size}", repository=tmp_path) as server:
        with httpclient.InferenceServerClient(server.http) as client:

            def ask(n, length):
                value = np.full(length, n, np.float32)
                one = httpclient.InferInput("INPUT0", [length], "FP32")
                one.set_data_from_numpy(value)
                assert np.array_equal(client.infer("echo", [one]).as_numpy("OUTPUT0"), value)

            for n in range(20):
                ask(n, 16384)
            at_start = memory(server)
            for n in range(20, 400):
                ask(n, 16384)
            util = metric(server, "nv_cache_util")
            assert 0.9 < util <= 1
            assert metric(server, "nv_cache_num_evictions") > 300
            assert memory(server) - at_start < 3 * size, "25 MB of answers went through 4 MB"
            ask(399, 16384)
            ask(0, 16384)
            assert metric(server, "nv_cache_num_hits") == 1, "the newest is there, the oldest is not"
            ask(1, 2 * size // 4)
            ask(1, 2 * size // 4)
            assert metric(server, "nv_cache_num_hits") == 1, "an answer larger than the cache is not kept"
            assert metric(server, "nv_cache_num_entries") > 50, "and puts nothing out"


def test_a_reload_serves_no_old_answer(tmp_path):
    def lay(add):
        folder = tmp_path / "model"
        node = fixtures.helper.make_node("Add", ["X", "C"], ["Y"])
        vector = (fixtures.TensorProto.FLOAT, ["n"])
        fixtures.save(
            tmp_path, "model", [node], [("X", *vector)], [("Y", *vector)], weights={"C": np.array([add], np.float32)}
        )
        fixtures.configure(folder, fixtures.whole_shapes(inputs={"X": vector}, outputs={"Y": vector}) + ENABLED)

    def ask(server):
        status, answer = infer(server, "model", {"inputs": [tensor("X", "FP32", [1], [1])]})
        assert status == 200
        return answer["outputs"][0]["data"][0]

    lay(1)
    flags = ["--model-control-mode=explicit", "--load-model=model", "--cache-config=local,size=1048576"]
    with Server(*flags, repository=tmp_path) as server:
        assert [ask(server), ask(server)] == [2, 2]
        lay(10)
        with httpclient.InferenceServerClient(server.http) as client:
            client.load_model("model")
        assert [ask(server), ask(server)] == [11, 11]
        end = time.monotonic() + 10
        while metric(server, "nv_cache_num_entries") != 1:
            assert time.monotonic() < end, "the old answer is forgotten"
            time.sleep(0.01)


def test_without_a_cache_a_model_that_asks_for_one_serves_with_a_warning(tmp_path):
    fixtures.echo(tmp_path, "echo", "FP32", more=ENABLED)
    with Server(repository=tmp_path) as server:
        request = {"inputs": [tensor("INPUT0", "FP32", [1], [1])]}
        assert [infer(server, "echo", request)[0] for _ in range(2)] == [200, 200]
        assert counts(server, "echo").tolist() == [0, 0, 2, 2]
        assert "response_cache is enabled and does nothing" in server.log()
        assert re.search(r"cache_enabled\s+\| 0", server.log())
    done = subprocess.run([binary(), "check", tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "response_cache is enabled and does nothing" in done.stdout, done
    done = subprocess.run(
        [binary(), "check", tmp_path, "--cache-config=local,size=4096"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "response_cache" not in done.stdout, done


def test_the_old_flag_means_a_local_cache(tmp_path):
    fixtures.echo(tmp_path, "echo", "FP32", more=ENABLED)
    with Server("--response-cache-byte-size=1048576", repository=tmp_path) as server:
        request = {"inputs": [tensor("INPUT0", "FP32", [1], [1])]}
        assert [infer(server, "echo", request)[0] for _ in range(2)] == [200, 200]
        assert counts(server, "echo").tolist() == [1, 1, 2, 1]
        assert "--response-cache-byte-size is deprecated" in server.log()
        assert re.search(r"cache_enabled\s+\| 1", server.log())
