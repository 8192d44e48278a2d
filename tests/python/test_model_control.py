"""Loading, replacing and watching models, with the official clients."""

import base64
import concurrent.futures
import json
import os
import shutil
import threading
import time
from pathlib import Path

import fixtures
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from onnx import TensorProto, helper
from server import Server
from tritonclient.utils import InferenceServerException
from wire import infer, tensor

EXPLICIT = "--model-control-mode=explicit"
POLL = ("--model-control-mode=poll", "--repository-poll-secs=1")
DELAY = 'parameters {{ key: "execute_delay_ms" value {{ string_value: "{}" }} }}\n'
ALL = "version_policy: { all { } }\n"


def adder(repository: Path, number: float, version: str = "1", name: str = "add", size: int = 1) -> Path:
    """Y = X + number. `size` makes the file larger."""
    weights = {"N": np.full([1], number, np.float32), "P": np.zeros([size], np.float32)}
    nodes = [helper.make_node("Add", ["X", "N"], ["Y"]), helper.make_node("ReduceSum", ["P"], ["Z"], keepdims=0)]
    tensors = [("X", TensorProto.FLOAT, ["a"])], [("Y", TensorProto.FLOAT, ["a"]), ("Z", TensorProto.FLOAT, [])]
    folder = fixtures.save(repository, name, nodes, *tensors, weights=weights, version=version)
    config = 'backend: "onnxruntime"\nmax_batch_size: 0\ninput [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]\n'
    fixtures.configure(folder, config + 'output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]\n' + ALL)
    return folder


def model_file(tmp_path: Path, number: float) -> bytes:
    return (adder(tmp_path / f"elsewhere{number}", number) / "1" / "model.onnx").read_bytes()


def asked(server: Server, version: str = "", model: str = "add") -> float:
    path = f"{model}/versions/{version}" if version else model
    status, answer = infer(server, path, {"inputs": [tensor("X", "FP32", [1], [0])], "outputs": [{"name": "Y"}]})
    assert status == 200, answer
    return answer["outputs"][0]["data"][0]


def count(server: Server, version: str = "1", model: str = "add") -> int:
    """Inferences that a version has done since it was loaded."""
    status, body = server.get(f"/v2/models/{model}/versions/{version}/stats")
    assert status == 200, body
    return json.loads(body)["model_stats"][0]["inference_count"]


def index(server: Server) -> dict:
    status, body = server.request("POST", "/v2/repository/index")
    assert status == 200
    return {(line["name"], line.get("version")): (line.get("state"), line.get("reason") or "") for line in json.loads(body)}


def eventually(what, seconds: float = 20):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it has not happened in time"
        time.sleep(0.05)
    return found


def post(server: Server, model: str, what: str, parameters: dict | None = None) -> tuple[int, bytes]:
    body = json.dumps({"parameters": parameters}).encode() if parameters is not None else b""
    return server.request("POST", f"/v2/repository/models/{model}/{what}", body)


@pytest.fixture(params=["http", "grpc"])
def client(request):
    """Makes a client of either protocol for a server."""
    made = []

    def make(server: Server):
        http = request.param == "http"
        module = triton_http if http else triton_grpc
        made.append(module.InferenceServerClient(server.http if http else server.grpc))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_load_of_what_has_not_changed_does_nothing(tmp_path, client):
    folder = adder(tmp_path, 1)
    with Server(EXPLICIT, "--load-model=add", repository=tmp_path) as server:
        asked(server)
        os.utime(folder / "1" / "model.onnx")
        os.utime(folder / "config.pbtxt")
        client(server).load_model("add")
        assert count(server) == 1, "the statistics go on"
        adder(tmp_path, 2)
        client(server).load_model("add")
        assert (count(server), asked(server)) == (0, 2)


def test_life_02_a_slow_load_delays_nobody(tmp_path):
    """LIFE-02: a load of seconds runs while another model answers as before."""
    adder(tmp_path, 1)
    warm = 'model_warmup [ { name: "w" batch_size: 1 inputs { key: "INPUT0" value { data_type: TYPE_FP32 dims: [ 1 ] '
    fixtures.echo(tmp_path, "slow", "FP32", more=DELAY.format(2000) + warm + "zero_data: true } } } ]\n")
    with Server(EXPLICIT, "--load-model=add", repository=tmp_path) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        loading = [pool.submit(post, server, "slow", "load") for _ in range(3)]
        eventually(lambda: index(server).get(("slow", "1")) == ("LOADING", ""))
        answered = 0
        while not loading[0].done():
            begin = time.monotonic()
            asked(server)
            assert time.monotonic() - begin < 1, "the load takes two seconds"
            answered += 1
        assert answered > 5
        assert [one.result()[0] for one in loading] == [200] * 3
        assert index(server)["slow", "1"][0] == "READY"


def test_life_03_a_new_version_leaves_the_others_alone(tmp_path, client):
    """LIFE-03"""
    adder(tmp_path, 1)
    with Server(EXPLICIT, "--load-model=add", repository=tmp_path) as server:
        asked(server)
        adder(tmp_path, 2, version="2")
        client(server).load_model("add")
        assert (count(server, "1"), asked(server, "2"), asked(server)) == (1, 2, 2)
        shutil.rmtree(tmp_path / "add" / "2")
        client(server).load_model("add")
        assert (count(server, "1"), asked(server)) == (1, 1)
        assert index(server)["add", "2"] == ("UNAVAILABLE", "unloaded")


def test_life_05_unload_and_load_at_once(tmp_path, client):
    """LIFE-05"""
    adder(tmp_path, 1)
    with Server(EXPLICIT, repository=tmp_path) as server:
        one = client(server)
        for _ in range(40):
            one.load_model("add")
            assert asked(server) == 1
            one.unload_model("add")
            assert server.get("/v2/models/add/ready")[0] == 400


def test_life_06_loads_and_unloads_of_one_model_at_once(tmp_path):
    """LIFE-06: each caller has success, and the end is what a last load says."""
    adder(tmp_path, 1)
    with Server(EXPLICIT, repository=tmp_path) as server, concurrent.futures.ThreadPoolExecutor(20) as pool:
        calls = [pool.submit(post, server, "add", ["load", "unload"][i % 2]) for i in range(20)]
        assert [call.result()[0] for call in calls] == [200] * 20
        assert post(server, "add", "load")[0] == 200
        assert asked(server) == 1


def storm(server: Server, reload, rounds: int, clients: int = 4) -> tuple[list, list, list]:
    """Clients without a pause while `reload(i)` runs `rounds` times: faults, latencies, and memory after each round."""
    done, faults, latencies, memory = threading.Event(), [], [], []

    def work():
        one = triton_http.InferenceServerClient(server.http)
        value = triton_http.InferInput("X", [1], "FP32").set_data_from_numpy(np.zeros(1, np.float32))
        while not done.is_set():
            begin = time.monotonic()
            try:
                one.infer("add", [value])
            except Exception as error:
                faults.append(str(error))
            latencies.append(time.monotonic() - begin)
        one.close()

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        for i in range(rounds):
            reload(i)
            status = Path(f"/proc/{server.process.pid}/status").read_text()
            memory.append(int(status.split("VmRSS:")[1].split()[0]))
    finally:
        done.set()
        for thread in threads:
            thread.join()
    return faults, latencies, memory


def test_life_07_reloads_under_load_lose_nothing(tmp_path):
    """LIFE-07: $TRIREME_RELOADS reloads with the file swapped; no request fails, memory and threads stay."""
    adder(tmp_path, 1)
    rounds = int(os.environ.get("TRIREME_RELOADS", "40"))
    with Server(EXPLICIT, "--load-model=add", repository=tmp_path) as server:

        def reload(i: int) -> None:
            staged = adder(tmp_path.parent / f"{tmp_path.name}-staged", i) / "1" / "model.onnx"
            os.replace(staged, tmp_path / "add" / "1" / "model.onnx")
            status, body = post(server, "add", "load")
            assert status == 200, body

        faults, latencies, memory = storm(server, reload, rounds)
        assert not faults, faults[:3]
        assert len(latencies) > rounds
        assert asked(server) == rounds - 1
        settled = memory[min(50, rounds // 2)]
        assert memory[-1] < settled * 1.15 + 4096, memory
        assert len(os.listdir(f"/proc/{server.process.pid}/task")) < 60


@pytest.mark.parametrize("broken", ["model", "config"])
def test_life_08_a_failed_reload_keeps_the_old_model(tmp_path, client, broken):
    """LIFE-08"""
    folder = adder(tmp_path, 1)
    with Server(EXPLICIT, "--load-model=add", repository=tmp_path) as server:
        asked(server)
        path = folder / {"model": "1/model.onnx", "config": "config.pbtxt"}[broken]
        path.write_bytes(b"no such { thing")
        for _ in range(2):
            with pytest.raises(InferenceServerException, match="add"):
                client(server).load_model("add")
            assert asked(server) == 1
            state, reason = index(server)["add", "1"]
            assert state == "READY" and reason.startswith("the last load failed"), reason
        assert count(server) == 3
        adder(tmp_path, 5)
        client(server).load_model("add")
        assert (asked(server), index(server)["add", "1"]) == (5, ("READY", ""))


def test_life_09_a_configuration_in_the_request(tmp_path, client):
    """LIFE-09: it holds until the next plain load; what it leaves out comes from the model file."""
    adder(tmp_path, 1)
    adder(tmp_path, 2, version="2")
    with Server(EXPLICIT, "--load-model=add", repository=tmp_path) as server:
        one = client(server)
        right = {"parameters": {"PATH": {"string_value": "x"}}, "version_policy": {"specific": {"versions": [1]}}}
        one.load_model("add", config=json.dumps(right))
        assert asked(server) == 1
        config = json.loads(server.get("/v2/models/add/config")[1])
        assert config["parameters"]["PATH"] == {"string_value": "x"} and config["input"][0]["name"] == "X"
        mistake = {"parameters": {"key": "PATH", "value": {"string_value": "x"}}}
        with pytest.raises(InferenceServerException, match="(?i)config override") as caught:
            one.load_model("add", config=json.dumps(mistake))
        assert '"parameters": {"NAME": {"string_value": "..."}}' in str(caught.value)
        assert asked(server) == 1, "what served serves on"
        one.load_model("add")
        assert asked(server) == 2
        assert "PATH" not in json.loads(server.get("/v2/models/add/config")[1]).get("parameters", {})


def uploads(server: Server) -> list:
    folder = Path(f"/proc/{server.process.pid}/environ").read_bytes().split(b"TMPDIR=")[1].split(b"\0")[0].decode()
    return list(Path(folder).glob("trireme-model-*"))


def test_life_10_files_in_the_request(tmp_path, client):
    """LIFE-10: the model is served from the request, the repository is untouched, nothing is left behind."""
    repository, temporary = tmp_path / "models", tmp_path / "tmp"
    temporary.mkdir()
    adder(repository, 1)
    before = (repository / "add" / "1" / "model.onnx").read_bytes()
    new = model_file(tmp_path, 7)
    environment = dict(os.environ, TMPDIR=str(temporary))
    with Server(EXPLICIT, "--load-model=add", repository=repository, environment=environment) as server:
        one = client(server)
        for model in ("add", "fresh"):
            one.load_model(model, config='{"backend": "onnxruntime"}', files={"file:1/model.onnx": new})
            assert asked(server, model=model) == 7
        assert len(uploads(server)) == 2
        with pytest.raises(InferenceServerException, match="config"):
            one.load_model("add", files={"file:1/model.onnx": new})
        for path in ("../../x", "/etc/x", "1/../../x"):
            with pytest.raises(InferenceServerException, match="inside the model directory"):
                one.load_model("add", config="{}", files={f"file:{path}": new})
        with pytest.raises(InferenceServerException):
            one.load_model("add", config='{"backend": "onnxruntime"}', files={"file:1/model.onnx": b"garbage"})
        assert asked(server) == 7, "what served serves on"
        assert post(server, "add", "load", {"config": "{}", "file:1/model.onnx": "%%%"})[0] == 400
        one.load_model("add")
        assert asked(server) == 1
        one.unload_model("fresh")
        assert not uploads(server)
        one.load_model("add", config='{"backend": "onnxruntime"}', files={"file:1/model.onnx": new})
    assert not list(temporary.glob("trireme-model-*")), "a stop leaves nothing"
    assert (repository / "add" / "1" / "model.onnx").read_bytes() == before
    assert base64.b64encode(before) != base64.b64encode(new)


def test_an_unload_answers_what_is_inside(tmp_path, client):
    fixtures.echo(tmp_path, "slow", "FP32", more=DELAY.format(1500))
    with Server(EXPLICIT, "--load-model=slow", repository=tmp_path) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        call = pool.submit(infer, server, "slow", {"inputs": [tensor("INPUT0", "FP32", [1], [4])]})
        time.sleep(0.5)
        client(server).unload_model("slow")
        assert index(server)["slow", "1"][0] == "UNLOADING"
        assert call.result()[0] == 200
        eventually(lambda: index(server)["slow", "1"] == ("UNAVAILABLE", "unloaded"))
        assert server.get("/v2/health/ready")[0] == 200


def test_life_12_a_stop_answers_what_a_replaced_version_has_inside(tmp_path):
    """LIFE-12: also after a reload and during one; the end is 0."""
    folder = fixtures.echo(tmp_path, "slow", "FP32", more=DELAY.format(1500))
    with Server(EXPLICIT, "--load-model=slow", repository=tmp_path) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        call = pool.submit(infer, server, "slow", {"inputs": [tensor("INPUT0", "FP32", [1], [4])]})
        time.sleep(0.5)
        with (folder / "config.pbtxt").open("a") as config:
            config.write('parameters { key: "x" value { string_value: "y" } }\n')
        assert post(server, "slow", "load")[0] == 200
        server.stop()
        assert call.result()[0] == 200
        assert server.process.returncode == 0


def test_loads_are_tried_again(tmp_path):
    adder(tmp_path, 1)
    good = (tmp_path / "add" / "1" / "model.onnx").read_bytes()
    (tmp_path / "add" / "1" / "model.onnx").write_bytes(b"garbage")
    with Server(EXPLICIT, "--model-load-retry-count=20", repository=tmp_path) as server:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            call = pool.submit(post, server, "add", "load")
            eventually(lambda: "try 1 of 20" in server.log())
            (tmp_path / "add" / "1" / "model.onnx").write_bytes(good)
            assert call.result()[0] == 200
        assert asked(server) == 1


def test_poll_follows_what_comes_changes_and_goes(tmp_path):
    adder(tmp_path, 1)
    with Server(*POLL, repository=tmp_path) as server:
        assert post(server, "add", "load")[0] == 503
        adder(tmp_path, 3, name="more")
        eventually(lambda: server.get("/v2/models/more/ready")[0] == 200)
        adder(tmp_path, 2)
        eventually(lambda: asked(server) == 2)
        adder(tmp_path, 9, version="2")
        eventually(lambda: asked(server) == 9)
        assert count(server, "1") > 0, "version 1 is not loaded anew"
        shutil.rmtree(tmp_path / "more")
        eventually(lambda: server.get("/v2/models/more/ready")[0] == 400)
        assert index(server)["more", "1"] == ("UNAVAILABLE", "unloaded")


def test_repo_10_a_model_that_is_being_copied(tmp_path):
    """REPO-10: it is not looked at before it is whole; version 1 serves meanwhile."""
    adder(tmp_path, 1)
    whole = (adder(tmp_path.parent / f"{tmp_path.name}-large", 2, size=40_000) / "1" / "model.onnx").read_bytes()
    with Server(*POLL, repository=tmp_path) as server:
        (tmp_path / "add" / "2").mkdir()
        with (tmp_path / "add" / "2" / "model.onnx").open("wb", buffering=0) as file:
            for start in range(0, len(whole), 8000):
                file.write(whole[start : start + 8000])
                assert asked(server) == 1
                time.sleep(0.2)
        eventually(lambda: asked(server) == 2)
        assert "failed to load" not in server.log(), server.log()


def test_repo_12_nothing_is_loaded_anew_without_a_change(tmp_path):
    """REPO-12: touched, copied over with the same bytes, other permissions, read."""
    folder = adder(tmp_path, 1)
    with Server(*POLL, repository=tmp_path) as server:
        asked(server)
        file = folder / "1" / "model.onnx"
        content = file.read_bytes()
        for change in (lambda: os.utime(file), lambda: file.write_bytes(content), lambda: file.chmod(0o644)):
            change()
            (folder / "model").mkdir(exist_ok=True)
            (folder / "model" / "x").write_text(str(time.monotonic()))
            time.sleep(2.5)
        assert count(server) == 1
        assert server.log().count("loading: add") == 1


def test_repo_13_labels_that_change(tmp_path):
    """REPO-13: also without a change of the model file, in poll mode and by an explicit load."""
    for mode in (POLL, (EXPLICIT, "--load-model=classes")):
        repository = tmp_path / mode[0].rsplit("=")[-1]
        fixtures.lay_classes(repository)
        with Server(*mode, repository=repository) as server:

            def label() -> str:
                body = {"inputs": [tensor("X", "FP32", [1, 2], [0, 1])]}
                body["outputs"] = [{"name": "Y", "parameters": {"classification": 1}}]
                return infer(server, "classes", body)[1]["outputs"][0]["data"][0].split(":")[-1]

            assert label() == "banana"
            (repository / "classes" / "labels.txt").write_text("apple\nplum\n")
            if mode is not POLL:
                assert post(server, "classes", "load")[0] == 200
            eventually(lambda: label() == "plum")
