"""Python models: the interface that they import, tensors, crashes, environments and what reaches the log."""

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
import venv
from pathlib import Path

import fixtures
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from server import Server, binary
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

# How often a worker is killed under load.
KILLS = int(os.environ.get("TRIREME_KILLS", "20"))
ENVIRONMENT = dict(os.environ) | {"TRIREME_PYTHON": sys.executable}

HEAD = "import triton_python_backend_utils as pb_utils, numpy as np, json, os, sys, time, threading, asyncio\n"


def tensors(**named: str) -> str:
    """`X="FP32 -1 3"` as list of tensors of a configuration."""
    parts = []
    for name, text in named.items():
        kind, *dims = text.split()
        parts.append(f'{{ name: "{name}" data_type: TYPE_{kind} dims: [ {", ".join(dims)} ] }}')
    return "[ " + ", ".join(parts) + " ]"


def lay(repository: Path, name: str, body: str, inputs: dict, outputs: dict, more: str = "") -> Path:
    """A python model whose class has `body`."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    text = 'backend: "python"\n'
    if inputs:
        text += f"input {tensors(**inputs)}\n"
    if outputs:
        text += f"output {tensors(**outputs)}\n"
    fixtures.configure(folder, text + "instance_group [ { kind: KIND_CPU count: 1 } ]\n" + more)
    code = HEAD + "class TritonPythonModel:\n" + textwrap.indent(textwrap.dedent(body), "    ")
    (folder / "1" / "model.py").write_text(code)
    return folder


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


DECOUPLED = "model_transaction_policy { decoupled: true }\n"
EACH = """
def execute(self, requests):
    return [self.one(r) for r in requests]
"""
IDENTITY = (
    EACH
    + """
def one(self, r):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(r, "X").as_numpy())])
"""
)
LAYOUTS = (
    EACH
    + """
def one(self, r):
    x = pb_utils.get_input_tensor_by_name(r, "X").as_numpy()
    made = {"T": x.transpose(1, 0), "S": x[::2], "F": np.asfortranarray(x), "Z": np.array(x[0, 0]), "B": x.astype(">f4")}
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in made.items()])
"""
)
ERRORS = (
    EACH
    + """
def one(self, r):
    what = int(pb_utils.get_input_tensor_by_name(r, "X").as_numpy()[0])
    y = pb_utils.Tensor("Y", np.zeros(1, np.int32))
    if what == 1:
        return pb_utils.InferenceResponse([], pb_utils.TritonError("not today", pb_utils.TritonError.UNAVAILABLE))
    if what == 2:
        raise KeyError("no such thing")
    if what == 3:
        return 7
    if what == 4:
        return pb_utils.InferenceResponse([pb_utils.Tensor("Q", np.zeros(1, np.int32))])
    if what == 5:
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros(1, np.float64))])
    if what == 6:
        return pb_utils.InferenceResponse([y], parameters={"x": 1.5})
    if what == 7:
        os._exit(3)
    if what == 8:
        time.sleep(60)
    return pb_utils.InferenceResponse([y], parameters={"a": 1, "b": True, "c": "text"})
"""
)
ASKS = (
    """
def initialize(self, args):
    self.args = args
    print("hello from", args["model_name"])
    pb_utils.Logger.log_warn("a warning of its own")
"""
    + EACH
    + """
def one(self, r):
    told = {
        "id": r.request_id(), "correlation": r.correlation_id(), "flags": r.flags(), "timeout": r.timeout(),
        "parameters": json.loads(r.parameters()), "outputs": r.requested_output_names(), "args": sorted(self.args),
        "config": json.loads(self.args["model_config"])["name"], "dir": pb_utils.get_model_dir(),
        "cancelled": r.is_cancelled(), "shape": r.inputs()[0].shape(),
    }
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([json.dumps(told).encode()], np.object_))])
"""
)
COMPLETES = (
    """
@staticmethod
def auto_complete_config(config):
    config.add_input({"name": "X", "data_type": "TYPE_INT32", "dims": [2]})
    config.add_output({"name": "Y", "data_type": "TYPE_INT32", "dims": [2]})
    config.set_max_batch_size(4)
    config.set_dynamic_batching()
    return config
"""
    + IDENTITY
)
STREAMS = """
def execute(self, requests):
    for r in requests:
        threading.Thread(target=self.work, args=(r.get_response_sender(), r.inputs()[0].as_numpy().copy())).start()
def work(self, sender, x):
    for value in x:
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([value]))]))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COROUTINES = """
async def execute(self, requests):
    for r in requests:
        sender = r.get_response_sender()
        for value in r.inputs()[0].as_numpy():
            await asyncio.sleep(0.001)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([value]))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
LATER = """
def execute(self, requests):
    for r in requests:
        threading.Timer(0.05, self.work, (r.get_response_sender(), r.inputs()[0].as_numpy())).start()
def work(self, sender, x):
    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DLPACK = (
    EACH
    + """
def one(self, r):
    x = r.inputs()[0]
    twice = np.from_dlpack(x) * 2
    y = pb_utils.Tensor.from_dlpack("Y", twice)
    again = pb_utils.Tensor.from_dlpack("Y", y.to_dlpack())
    return pb_utils.InferenceResponse([again])
"""
)
CALLS = """
def call(self, model, x, **more):
    asked = pb_utils.InferenceRequest(model_name=model, inputs=[pb_utils.Tensor("X", x)], requested_output_names=["Y"], request_id="sub")
    return asked.exec(**more)
def execute(self, requests):
    answers = []
    for r in requests:
        x = r.inputs()[0].as_numpy()
        response = self.call("identity", x.reshape(1, -1))
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        y = pb_utils.get_output_tensor_by_name(response, "Y").as_numpy().reshape(-1)
        many = self.call("streams", np.arange(4, dtype=np.int32), decoupled=True)
        total = sum(int(each.output_tensors()[0].as_numpy()[0]) for each in many if each.output_tensors())
        assert pb_utils.is_model_ready("identity") and not pb_utils.is_model_ready("nobody")
        assert self.call("nobody", x).error().code() == pb_utils.TritonError.NOT_FOUND
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y + total)]))
    return answers
"""
ASYNC_CALLS = """
async def execute(self, requests):
    answers = []
    for r in requests:
        x = r.inputs()[0].as_numpy()
        asked = [pb_utils.InferenceRequest(model_name="identity", inputs=[pb_utils.Tensor("X", x.reshape(1, -1) * n)],
                                           requested_output_names=["Y"]) for n in (1, 2, 3)]
        done = await asyncio.gather(*(each.async_exec() for each in asked))
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", sum(d.output_tensors()[0].as_numpy()[0] for d in done))]))
    return answers
"""
LOOP = """
def execute(self, requests):
    x = requests[0].inputs()[0]
    asked = pb_utils.InferenceRequest(model_name="NEXT", inputs=[x], requested_output_names=["Y"])
    return [pb_utils.InferenceResponse([], asked.exec().error())]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("python")
    grow = {"X": "FP32 -1"}, {"Y": "FP32 -1"}
    lay(repository, "identity", IDENTITY, *grow, more="max_batch_size: 8\ndynamic_batching { }\n")
    lay(repository, "strings", IDENTITY, {"X": "STRING -1"}, {"Y": "STRING -1"})
    outputs = {"T": "FP32 -1 -1", "S": "FP32 -1 -1", "F": "FP32 -1 -1", "Z": "FP32 1", "B": "FP32 -1 -1"}
    lay(repository, "layouts", LAYOUTS, {"X": "FP32 -1 -1"}, outputs)
    limit = parameter("EXECUTION_TIMEOUT_MS", "500")
    lay(repository, "errors", ERRORS, {"X": "INT32 1"}, {"Y": "INT32 1"}, more=limit)
    lay(repository, "asks", ASKS, {"X": "INT32 -1"}, {"Y": "STRING 1"})
    lay(repository, "completes", COMPLETES, {}, {})
    for name, body in [("streams", STREAMS), ("coroutines", COROUTINES)]:
        lay(repository, name, body, {"X": "INT32 -1"}, {"Y": "INT32 1"}, more=DECOUPLED)
    lay(repository, "later", LATER, *grow)
    lay(repository, "dlpack", DLPACK, *grow)
    lay(repository, "calls", CALLS, *grow)
    lay(repository, "async_calls", ASYNC_CALLS, *grow)
    lay(repository, "loop_a", LOOP.replace("NEXT", "loop_b"), *grow)
    lay(repository, "loop_b", LOOP.replace("NEXT", "loop_a"), *grow)
    with Server(repository=repository, environment=ENVIRONMENT) as running:
        yield running
        assert running.alive()


def infer(server: Server, model: str, x: np.ndarray, **more):
    with httpclient.InferenceServerClient(server.http) as client:
        given = httpclient.InferInput("X", x.shape, np_to_triton_dtype(x.dtype))
        given.set_data_from_numpy(x)
        return client.infer(model, [given], **more)


def failure(server: Server, model: str, x: np.ndarray) -> str:
    with pytest.raises(InferenceServerException) as caught:
        infer(server, model, x)
    return str(caught.value)


def workers(server: Server) -> dict[str, int]:
    """Processes of the server by the name that they were started with."""
    command = ["ps", "--ppid", str(server.process.pid), "-o", "pid=,args=", "-ww"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {words[-1]: int(words[0]) for words in map(str.split, lines) if str(server.process.pid) in words}


@pytest.mark.parametrize("elements", [0, 3, 5000, 1 << 20])
def test_tensors_of_any_size_come_back(server, elements):
    x = np.arange(elements, dtype=np.float32).reshape(1, -1)
    for _ in range(3):
        np.testing.assert_array_equal(infer(server, "identity", x).as_numpy("Y"), x)


def test_many_at_once_each_get_their_own(server):
    wrong = []

    def work(seed: int) -> None:
        with httpclient.InferenceServerClient(server.http) as client:
            for round in range(20):
                x = np.full((1, 9000 if round % 3 else 4), seed * 100 + round, np.float32)
                given = httpclient.InferInput("X", x.shape, "FP32")
                given.set_data_from_numpy(x)
                if not np.array_equal(client.infer("identity", [given]).as_numpy("Y"), x):
                    wrong.append((seed, round))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


def test_strings_are_bytes(server):
    x = np.array([b"a", b"", "ß".encode(), b"\x00\xff", b"x" * 50000], np.object_)
    np.testing.assert_array_equal(infer(server, "strings", x).as_numpy("Y"), x)


def test_py_01_arrays_of_any_layout_are_written_row_by_row(server):
    x = np.arange(300 * 40, dtype=np.float32).reshape(300, 40)
    for rows in (x[:3, :2].copy(), x):
        result = infer(server, "layouts", rows)
        expected = {"T": rows.T, "S": rows[::2], "F": rows, "B": rows, "Z": rows[0, 0]}
        for name, value in expected.items():
            np.testing.assert_array_equal(result.as_numpy(name), value, name)


def test_dlpack_goes_both_ways(server):
    x = np.arange(7, dtype=np.float32)
    np.testing.assert_array_equal(infer(server, "dlpack", x).as_numpy("Y"), x * 2)


def test_an_error_says_what_went_wrong_and_where(server):
    def said(what: int) -> str:
        return failure(server, "errors", np.array([what], np.int32))

    assert said(1) == "[503] not today"
    text = said(2)
    assert "Failed to process the request(s) for model instance 'errors_0_0', message: KeyError: 'no such thing'" in text
    assert "model.py" in text and 'raise KeyError("no such thing")' in text
    assert "found type 'int'" in said(3)
    assert "an output 'Q', which its configuration does not have" in said(4)
    assert "has the data type TYPE_FP64, its configuration says TYPE_INT32" in said(5)
    assert "Expect parameters values to have type bool/int/str, found type" in said(6)
    assert "KeyError: 'no such thing'" in server.log()
    response = infer(server, "errors", np.array([0], np.int32)).get_response()
    assert response["parameters"] == {"a": 1, "b": True, "c": "text"}


@pytest.mark.parametrize(("what", "how"), [(7, "ended with exit code 3"), (8, "did not end an execution within 500 ms")])
def test_a_worker_that_exits_or_hangs_fails_its_request_and_comes_back(server, what, how):
    text = failure(server, "errors", np.array([what], np.int32))
    assert "Stub process 'errors_0_0' is not healthy." in text and how in text
    begin = time.monotonic()
    assert infer(server, "errors", np.array([0], np.int32)).as_numpy("Y").tolist() == [0]
    assert time.monotonic() - begin < 5
    assert server.get("/v2/models/errors/ready")[0] == 200


def test_a_request_tells_the_model_everything(server):
    x = np.zeros(2, np.int32)
    wanted = [httpclient.InferRequestedOutput("Y")]
    result = infer(server, "asks", x, request_id="me", timeout=7_000_000, parameters={"k": "v", "n": 3}, outputs=wanted)
    told = json.loads(result.as_numpy("Y")[0])
    assert told["id"] == "me" and told["timeout"] == 7_000_000 and told["outputs"] == ["Y"]
    assert told["parameters"]["k"] == "v" and told["parameters"]["n"] == 3
    assert told["correlation"] == 0 and told["flags"] == 0 and told["cancelled"] is False and told["shape"] == [2]
    assert told["config"] == "asks" and told["dir"].endswith("/asks/1")
    for key in ("model_config", "model_name", "model_version", "model_repository", "model_instance_kind"):
        assert key in told["args"]
    assert "hello from asks" in server.log() and "a warning of its own" in server.log()


def test_a_model_completes_its_configuration(server):
    with httpclient.InferenceServerClient(server.http) as client:
        config = client.get_model_config("completes")
        assert config["max_batch_size"] == 4 and config["input"][0]["dims"] == [2] and "dynamic_batching" in config
    assert infer(server, "completes", np.array([[1, 2]], np.int32)).as_numpy("Y").tolist() == [[1, 2]]


@pytest.mark.parametrize("model", ["streams", "coroutines"])
def test_decoupled_models_answer_as_often_as_they_like(server, model):
    answers, ended = [], threading.Event()

    def took(result, error):
        assert error is None, error
        response = result.get_response()
        if response.outputs:
            answers.append(int(result.as_numpy("Y")[0]))
        if response.parameters["triton_final_response"].bool_param:
            ended.set()

    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(took)
        given = grpcclient.InferInput("X", [5], "INT32")
        given.set_data_from_numpy(np.array([5, 4, 3, 2, 1], np.int32))
        client.async_stream_infer(model, [given], enable_empty_final_response=True)
        assert ended.wait(10)
        client.stop_stream()
    assert answers == [5, 4, 3, 2, 1]


@pytest.mark.parametrize("elements", [5, 20000])
def test_a_model_calls_other_models(server, elements):
    x = np.arange(elements, dtype=np.float32)
    np.testing.assert_array_equal(infer(server, "calls", x).as_numpy("Y"), x + 6)
    np.testing.assert_array_equal(infer(server, "async_calls", x).as_numpy("Y"), x * 6)


def test_answers_of_other_models_stay_as_they_came(server):
    """Each large answer lies in memory of its own while the model looks at it, however many come at once."""
    x = np.arange(20000, dtype=np.float32)

    def ask(_: int) -> None:
        for _ in range(25):
            np.testing.assert_array_equal(infer(server, "async_calls", x).as_numpy("Y"), x * 6)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))


def test_a_model_that_would_wait_for_itself_is_told(server):
    text = failure(server, "loop_a", np.zeros(1, np.float32))
    assert "circular call between models: loop_a -> loop_b -> loop_a" in text


def test_a_sender_may_answer_after_the_execution(server):
    x = np.arange(20000, dtype=np.float32)
    np.testing.assert_array_equal(infer(server, "later", x).as_numpy("Y"), x)


def test_killed_workers_are_replaced_and_nothing_leaks(tmp_path):
    lay(tmp_path, "m", IDENTITY, {"X": "FP32 -1"}, {"Y": "FP32 -1"})
    lay(tmp_path, "other", IDENTITY, {"X": "FP32 -1"}, {"Y": "FP32 -1"})
    answered, failed, harmed, over = [], [], [], threading.Event()

    def load(model: str, size: int) -> None:
        x = np.arange(size, dtype=np.float32)
        with httpclient.InferenceServerClient(running.http) as client:
            given = httpclient.InferInput("X", x.shape, "FP32")
            given.set_data_from_numpy(x)
            while not over.is_set():
                try:
                    assert np.array_equal(client.infer(model, [given]).as_numpy("Y"), x)
                    answered.append(model)
                except InferenceServerException as error:
                    (failed if model == "m" and "is not healthy" in str(error) else harmed).append(str(error))

    with Server(repository=tmp_path, environment=ENVIRONMENT) as running:
        fds = Path(f"/proc/{running.process.pid}/fd")
        threads = [threading.Thread(target=load, args=each) for each in [("m", 10), ("m", 20000), ("other", 20000)]]
        [thread.start() for thread in threads]
        before = len(list(fds.iterdir()))
        for _ in range(KILLS):
            time.sleep(0.05)
            victim = next((pid for name, pid in workers(running).items() if name.startswith("m")), None)
            if victim is None:
                continue
            os.kill(victim, signal.SIGKILL)
            begin, seen = time.monotonic(), answered.count("m")
            while answered.count("m") < seen + 3:
                assert time.monotonic() < begin + 20, "no service after a kill"
                time.sleep(0.01)
        over.set()
        [thread.join() for thread in threads]
        assert not harmed, harmed[:3]
        assert answered.count("other") > 0 and len(failed) <= 2 * KILLS
        assert len(list(fds.iterdir())) <= before + 12
        left = list(workers(running).values())
        assert len(left) == 2
    for pid in left:
        assert not Path(f"/proc/{pid}").exists()


def test_workers_do_not_outlive_a_killed_server(tmp_path):
    lay(tmp_path, "m", IDENTITY, {"X": "FP32 -1"}, {"Y": "FP32 -1"})
    with Server(repository=tmp_path, environment=ENVIRONMENT) as running:
        left = list(workers(running).values())
        running.process.kill()
        running.process.wait()
        deadline = time.monotonic() + 10
        while any(alive(pid) for pid in left):
            assert time.monotonic() < deadline, "an orphan"
            time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_py_04_large_tensors_need_no_named_shared_memory(tmp_path):
    for index in range(3):
        lay(tmp_path, f"m{index}", IDENTITY, {"X": "FP32 -1"}, {"Y": "FP32 -1"})
    before = set(os.listdir("/dev/shm"))
    with Server(repository=tmp_path, environment=ENVIRONMENT) as running:
        x = np.arange(12_500_000, dtype=np.float32)
        for index in range(3):
            assert np.array_equal(infer(running, f"m{index}", x).as_numpy("Y"), x)
        new = set(os.listdir("/dev/shm")) - before
        assert not [name for name in new if "triton" in name or "trireme" in name]


VERSION = (
    EACH
    + """
def one(self, r):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([sys.prefix.encode()], np.object_))])
"""
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """A virtual environment with the numpy of this interpreter."""
    folder = tmp_path_factory.mktemp("environment") / "env"
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "numpy.pth").write_text(str(Path(np.__file__).parents[1]))
    return folder


def test_py_05_environments_are_found_where_the_model_says(tmp_path, environment):
    repository = tmp_path / "models"
    (repository).mkdir()
    packed = {"bare": "env.tar.gz", "marked": "$$TRITON_MODEL_DIRECTORY/env.tar.gz", "folder": str(environment)}
    wrong = {"missing": "nothing.tar.gz", "empty": "1"}
    for name, path in (packed | wrong).items():
        folder = lay(repository, name, VERSION, {"X": "INT32 1"}, {"Y": "STRING 1"}, more=parameter("EXECUTION_ENV_PATH", path))
        if name in ("bare", "marked"):
            with tarfile.open(folder / "env.tar.gz", "w:gz") as archive:
                for each in environment.iterdir():
                    archive.add(each, each.name)
    with Server("--exit-on-error=false", "--strict-readiness=false", repository=repository, environment=ENVIRONMENT, wait="live") as running:
        with httpclient.InferenceServerClient(running.http) as client:
            index = {}
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                index = {entry["name"]: entry for entry in client.get_model_repository_index()}
                if len(index) == 5 and all(entry.get("state") in ("READY", "UNAVAILABLE") for entry in index.values()):
                    break
                time.sleep(0.1)
        prefixes = {name: infer(running, name, np.zeros(1, np.int32)).as_numpy("Y")[0].decode() for name in packed}
        assert prefixes["folder"] == str(environment)
        for name in ("bare", "marked"):
            assert prefixes[name] not in (str(environment), sys.prefix)
        assert "there is nothing at" in index["missing"]["reason"] and "nothing.tar.gz" in index["missing"]["reason"]
        assert "there is no bin/python in" in index["empty"]["reason"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1\n", "expected a class 'TritonPythonModel'"),
        ("class TritonPythonModel:\n    def execute(self): pass\n", "'execute' of TritonPythonModel must take self and 1 argument"),
        ("class TritonPythonModel\n", "SyntaxError"),
    ],
)
def test_check_imports_the_model(tmp_path, code, reason):
    folder = lay(tmp_path, "m", "pass\n", {"X": "INT32 1"}, {"Y": "INT32 1"})
    (folder / "1" / "model.py").write_text(code)
    command = [str(binary()), "check", str(tmp_path)]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0 and reason in ended.stdout + ended.stderr


def test_what_is_not_built_is_refused_by_name(tmp_path):
    lay(
        tmp_path,
        "m",
        "def initialize(self, args):\n    pb_utils.MetricFamily('n', 'd', pb_utils.MetricFamily.COUNTER)\n" + IDENTITY,
        {"X": "FP32 -1"},
        {"Y": "FP32 -1"},
    )
    command = [str(binary()), "check", str(tmp_path)]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert "custom metrics ('n') are not available yet" in ended.stdout + ended.stderr
