"""Shared memory over HTTP and gRPC: regions of every kind and shape, with the official client where it can.

GPU memory is a stand-in driver's, compiled here: the handle of its memory is the name of a POSIX object.
"""

import base64
import contextlib
import json
import os
import re
import subprocess
import threading
import uuid
from pathlib import Path

import fixtures
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from server import ROOT, Server
from tritonclient.utils import InferenceServerException, serialize_byte_tensor
from wire import infer, refused, tensor

CLIENTS = pytest.mark.parametrize("module", [httpclient, grpcclient], ids=["http", "grpc"])
DISABLED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = ROOT / "crates" / "shm" / "tests" / "stand_in_driver.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    repository = tmp_path_factory.mktemp("shared")
    for name in ("fp32", "str"):
        fixtures.copy(repository, f"id_{name}", fixtures.TYPES[name], ["n"])
    fixtures.lay_sums(repository)
    fixtures.echo(repository, "echo", "FP32")
    delay = 'parameters { key: "execute_delay_ms" value: { string_value: "300" } }\n'
    fixtures.echo(repository, "slow", "FP32", more=delay)
    fixtures.repeat(repository)
    return repository


@pytest.fixture(scope="module")
def sharing(models, driver):
    environment = dict(os.environ, TRIREME_CUDA_DRIVER=str(driver))
    with Server("--allow-client-shm=true", repository=models, environment=environment) as running:
        yield running


@pytest.fixture
def server(sharing):
    """The server that shares memory, without regions before and after."""
    yield sharing
    assert sharing.alive(), sharing.log()[-4000:]
    for kind in ("system", "cuda"):
        assert sharing.request("POST", f"/v2/{kind}sharedmemory/unregister")[0] == 200


@contextlib.contextmanager
def region(size: int, key: str | None = None):
    """An object made by the official client, and its key."""
    key = key or f"/trireme-{uuid.uuid4().hex[:12]}"
    handle = shm.create_shared_memory_region(key[1:], key, size)
    try:
        yield handle, key
    finally:
        with contextlib.suppress(shm.SharedMemoryException, FileNotFoundError):
            shm.destroy_shared_memory_region(handle)


def register(server, name, key, offset=0, byte_size=64, **more):
    body = json.dumps({"key": key, "offset": offset, "byte_size": byte_size, **more}).encode()
    status, answer = server.request("POST", f"/v2/systemsharedmemory/region/{name}/register", body)
    return status, json.loads(answer)["error"] if answer else ""


def placed(name, region, byte_size, offset=0):
    parameters = {"shared_memory_region": region, "shared_memory_byte_size": byte_size}
    if offset:
        parameters["shared_memory_offset"] = offset
    return {"name": name, "parameters": parameters}


def regions(server, kind="system"):
    status, answer = server.get(f"/v2/{kind}sharedmemory/status")
    assert status == 200
    return json.loads(answer)


def run(module, server, model, inputs, outputs):
    """Inputs are (name, shape, datatype, region, size, offset), outputs (name, region, size, offset)."""
    with module.InferenceServerClient(server.http if module is httpclient else server.grpc) as client:
        made = []
        for name, shape, datatype, where, size, offset in inputs:
            made.append(module.InferInput(name, shape, datatype))
            made[-1].set_shared_memory(where, size, offset)
        wanted = []
        for name, where, size, offset in outputs:
            wanted.append(module.InferRequestedOutput(name))
            wanted[-1].set_shared_memory(where, size, offset)
        return client.infer(model, made, outputs=wanted)


# ---- the official client


@CLIENTS
def test_the_clients_own_way(server, module):
    """Two inputs and two outputs of one model, each pair in one region, as the client's examples do it."""
    a, b = np.arange(16, dtype=np.float32).reshape(4, 4), np.full((4, 4), 2, np.float32)
    with region(128) as (given, given_key), region(128) as (got, got_key):
        shm.set_shared_memory_region(given, [a, b])
        with module.InferenceServerClient(server.http if module is httpclient else server.grpc) as client:
            client.unregister_system_shared_memory()
            client.register_system_shared_memory("given", given_key, 128)
            client.register_system_shared_memory("got", got_key, 128)
            listed = client.get_system_shared_memory_status()
            if module is httpclient:
                assert listed[0] == {"name": "given", "key": given_key, "offset": 0, "byte_size": 128}
            else:
                assert listed.regions["got"].key == got_key and listed.regions["got"].byte_size == 128
            result = run(
                module,
                server,
                "addsub",
                [("A", [4, 4], "FP32", "given", 64, 0), ("B", [4, 4], "FP32", "given", 64, 64)],
                [("SUM", "got", 64, 0), ("DIFF", "got", 64, 64)],
            )
            output = result.get_output("SUM")
            assert (output["shape"] if module is httpclient else list(output.shape)) == [4, 4]
            np.testing.assert_array_equal(shm.get_contents_as_numpy(got, np.float32, [4, 4]), a + b)
            np.testing.assert_array_equal(shm.get_contents_as_numpy(got, np.float32, [4, 4], 64), a - b)
            client.unregister_system_shared_memory("given")
            client.unregister_system_shared_memory()
            assert not regions(server)


@CLIENTS
def test_strings(server, module):
    """BYTES in and out; the output's place may be larger than the output, not smaller."""
    text = np.array([b"a", b"", "\u00e4\u00f6".encode(), b"x" * 100], dtype=object)
    packed = serialize_byte_tensor(text)
    raw = packed.item()
    with region(512) as (handle, key):
        shm.set_shared_memory_region(handle, [packed])
        assert register(server, "r", key, byte_size=512)[0] == 200
        run(module, server, "id_str", [("X", [4], "BYTES", "r", len(raw), 0)], [("Y", "r", 256, 256)])
        np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.object_, [4], 256), text)
        with pytest.raises(InferenceServerException, match=f"{len(raw) - 1} bytes\\) should be at least {len(raw)} bytes"):
            run(module, server, "id_str", [("X", [4], "BYTES", "r", len(raw), 0)], [("Y", "r", len(raw) - 1, 256)])
        # A length that points beyond the tensor.
        shm.set_shared_memory_region(handle, [np.array([255, 255], np.uint32)])
        with pytest.raises(InferenceServerException, match="incomplete string data"):
            run(module, server, "id_str", [("X", [4], "BYTES", "r", len(raw), 0)], [("Y", "r", 256, 256)])


@CLIENTS
@pytest.mark.parametrize("model, names", [("id_fp32", ("X", "Y")), ("echo", ("INPUT0", "OUTPUT0"))])
def test_large_tensors_at_any_offset(server, module, model, names):
    """Tensors that begin at no multiple of anything, through an engine and through a model that passes them on."""
    values = np.random.default_rng(7).standard_normal(300_000).astype(np.float32)
    size = values.nbytes
    with region(2 * size + 100) as (handle, key):
        shm.set_shared_memory_region(handle, [values], 13)
        assert register(server, "odd", key, 3, 2 * size + 90)[0] == 200
        run(module, server, model, [(names[0], [300_000], "FP32", "odd", size, 10)], [(names[1], "odd", size, size + 77)])
        np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.float32, [300_000], size + 80), values)


def test_a_decoupled_model_writes_each_response(server):
    with region(64) as (handle, key):
        shm.set_shared_memory_region(handle, [np.array([5, 6, 7], np.int32)])
        assert register(server, "r", key)[0] == 200
        answers = []
        with grpcclient.InferenceServerClient(server.grpc) as client:
            done = threading.Event()

            def receive(result, error):
                answers.append(error or int(shm.get_contents_as_numpy(handle, np.int32, [1], 32)[0]))
                if len(answers) == 3 or error:
                    done.set()

            client.start_stream(receive)
            given, got = grpcclient.InferInput("IN", [3], "INT32"), grpcclient.InferRequestedOutput("OUT")
            given.set_shared_memory("r", 12)
            got.set_shared_memory("r", 4, 32)
            client.async_stream_infer("repeat", [given], outputs=[got])
            assert done.wait(10)
            client.stop_stream()
        # The next response may be there before the client has looked at this one.
        assert answers[-1] == 7 and all(isinstance(each, int) for each in answers), answers


# ---- what cannot be


def test_shm_01_more_than_the_object_has(server):
    """SHM-01"""
    with region(64) as (_, key):
        for offset, size in ((0, 128), (60, 8), (64, 1), (2**64 - 8, 16), (0, 2**64 - 1)):
            status, message = register(server, "r", key, offset, size)
            assert status == 400 and message.startswith("failed to register shared memory region 'r': invalid args"), message
    assert not regions(server)


def test_shm_03_an_offset_is_applied_once(server):
    """SHM-03"""
    with region(8192) as (handle, key):
        shm.set_shared_memory_region(handle, [np.zeros(2048, np.float32)])
        shm.set_shared_memory_region(handle, [np.full(16, 7, np.float32)], 4096 + 8)
        assert register(server, "r", key, 4096, 4096)[0] == 200
        for module in (httpclient, grpcclient):
            run(module, server, "id_fp32", [("X", [16], "FP32", "r", 64, 8)], [("Y", "r", 64, 1024)])
            whole = shm.get_contents_as_numpy(handle, np.float32, [2048])
            wanted = np.zeros(2048, np.float32)
            wanted[1026:1042] = wanted[1280:1296] = 7
            np.testing.assert_array_equal(whole, wanted)
            whole[1280:1296] = 0


def test_shm_06_an_object_that_the_server_cannot_see(server):
    """SHM-06"""
    status, message = register(server, "r", "/trireme-nowhere")
    assert status == 400 and message.startswith("Unable to open shared memory region: '/trireme-nowhere'")
    assert "--ipc=host" in message and "server sees no object" in message


def test_shm_07_churn(server):
    """SHM-07, with as many cycles as a debug build on a small machine allows."""
    values = np.arange(16, dtype=np.float32)

    def state():
        process = Path(f"/proc/{server.process.pid}")
        memory = int(re.search(r"VmRSS:\s+(\d+)", (process / "status").read_text())[1])
        return memory, len(list((process / "fd").iterdir())), len((process / "maps").read_text().splitlines())

    with httpclient.InferenceServerClient(server.http) as client:
        given, got = httpclient.InferInput("INPUT0", [16], "FP32"), httpclient.InferRequestedOutput("OUTPUT0")
        given.set_shared_memory("churn", 64)
        got.set_shared_memory("churn", 64, 64)

        def cycle():
            with region(128) as (handle, key):
                shm.set_shared_memory_region(handle, [values])
                client.register_system_shared_memory("churn", key, 128)
                client.infer("echo", [given], outputs=[got])
                assert shm.get_contents_as_numpy(handle, np.float32, [16], 64)[15] == 15
                client.unregister_system_shared_memory("churn")

        for _ in range(300):
            cycle()
        before = state()
        for _ in range(1000):
            cycle()
        after = state()
    assert after[0] < before[0] * 1.1 + 2048, (before, after)
    assert after[1] <= before[1] + 2 and after[2] <= before[2] + 8, (before, after)
    assert not regions(server)


def test_shm_08_an_output_that_does_not_fit(server):
    """SHM-08"""
    with region(4096) as (handle, key):
        shm.set_shared_memory_region(handle, [np.full(1024, 9, np.float32)])
        assert register(server, "r", key, 0, 4096)[0] == 200
        body = {"inputs": [tensor("X", "FP32", [4], [1, 2, 3, 4])], "outputs": [placed("Y", "r", 8)]}
        assert "output 'Y' (8 bytes) should be at least 16 bytes" in refused(server, "id_fp32", body)
        body = {"inputs": [tensor("X", "BYTES", [2], ["abc", "d"])], "outputs": [placed("Y", "r", 8)]}
        assert "output 'Y' (8 bytes) should be at least 12 bytes" in refused(server, "id_str", body)
        assert (shm.get_contents_as_numpy(handle, np.float32, [1024]) == 9).all()


def test_bounds_of_a_request(server):
    with region(128) as (_, key):
        assert register(server, "r", key, 0, 100)[0] == 200
        for size, offset, says in (
            (64, 101, "Invalid offset for shared memory region: 'r'"),
            (64, 37, "Invalid offset + byte size for shared memory region: 'r'"),
            (0, 0, "Invalid offset + byte size for shared memory region: 'r'"),
            (2**64 - 1, 100, "Integer overflow detected: byte_size (18446744073709551615) + offset (100)"),
            (60, 0, "input byte size mismatch for input 'X' for model 'id_fp32'. Expected 64, got 60"),
        ):
            given = placed("X", "r", size, offset) | {"datatype": "FP32", "shape": [16]}
            message = refused(server, "id_fp32", {"inputs": [given]})
            assert message.removeprefix("[request id: <id_unknown>] ").startswith(says), message
        given = placed("X", "r", 64) | {"datatype": "FP32", "shape": [16]}
        missing = {"inputs": [given], "outputs": [placed("Y", "q", 64)]}
        assert refused(server, "id_fp32", missing, status=404) == "Unable to find shared memory region: 'q'"


def test_names_and_kinds(server):
    with region(64) as (_, key):
        assert register(server, "r", key)[0] == 200
        assert register(server, "r", key) == (400, "shared memory region 'r' already in manager")
        assert register(server, "s", key, 32, 32)[0] == 200, "two regions on one key"
        status, answer = server.get("/v2/cudasharedmemory/region/r/status")
        assert status == 404 and b"is registered as system shared memory, not CUDA shared memory" in answer
        assert server.request("POST", "/v2/cudasharedmemory/region/r/unregister")[0] == 200
        assert [each["name"] for each in regions(server)] == ["r", "s"]
        page = server.metrics_page()
        assert 'trireme_shared_memory_regions{kind="system"} 2\n' in page
        assert 'trireme_shared_memory_bytes{kind="system"} 96\n' in page
        assert server.request("POST", "/v2/systemsharedmemory/region/nobody/unregister")[0] == 200
        for key, says in (
            ("//", "invalid shm key '//'"),
            ("/triton_python_backend_shm_region_7", "the reserved prefix 'triton_python_backend_shm_region_'"),
            ("/../../etc/passwd", "Unable to open shared memory region"),
            ("/a/b", "Unable to open shared memory region"),
        ):
            status, message = register(server, "t", key)
            assert status == 400 and says in message, message


# ---- owners who go, shrink or meddle


def test_a_region_in_use_outlives_its_name(server):
    """Unregistered and unlinked while a request runs: the answer still comes to its place."""
    with region(128) as (handle, key):
        shm.set_shared_memory_region(handle, [np.arange(16, dtype=np.float32)])
        assert register(server, "r", key, 0, 128)[0] == 200
        body = {
            "inputs": [placed("INPUT0", "r", 64) | {"datatype": "FP32", "shape": [16]}],
            "outputs": [placed("OUTPUT0", "r", 64, 64)],
        }
        answer = []
        waiting = threading.Thread(target=lambda: answer.append(infer(server, "slow", body)))
        waiting.start()
        view = shm.get_contents_as_numpy(handle, np.float32, [16], 64).copy()
        assert (view == 0).all()
        threading.Event().wait(0.1)
        assert server.request("POST", "/v2/systemsharedmemory/unregister")[0] == 200
        os.unlink(f"/dev/shm{key}")
        waiting.join()
        assert answer[0][0] == 200, answer
        assert shm.get_contents_as_numpy(handle, np.float32, [16], 64)[15] == 15


def test_an_object_that_is_cut_off(server):
    """The owner makes the object smaller, before a request and again and again during requests."""
    values = np.ones(262_144, np.float32)
    size = values.nbytes
    with region(2 * size) as (handle, key):
        shm.set_shared_memory_region(handle, [values])
        assert register(server, "r", key, 0, 2 * size)[0] == 200
        for model, names in (("id_fp32", "XY"), ("echo", ("INPUT0", "OUTPUT0"))):
            body = {
                "inputs": [placed(names[0], "r", size) | {"datatype": "FP32", "shape": [262_144]}],
                "outputs": [placed(names[1], "r", size, size)],
            }
            path = f"/dev/shm{key}"
            os.truncate(path, 4096)
            message = refused(server, model, body)
            assert "which has only 4096 now: its owner has made it smaller" in message
            os.truncate(path, 2 * size)
            stop = threading.Event()

            def flutter():
                while not stop.is_set():
                    os.truncate(path, 4096)
                    os.truncate(path, 2 * size)

            meddling = threading.Thread(target=flutter)
            meddling.start()
            try:
                statuses = {infer(server, model, body)[0] for _ in range(60)}
            finally:
                stop.set()
                meddling.join()
            assert statuses <= {200, 400}, statuses
            os.truncate(path, 2 * size)
            assert infer(server, model, body)[0] == 200
    assert server.alive()


def test_an_object_that_is_cut_off_while_it_is_read(server):
    """A slow model begins with an input that is whole and reads it when most of it is gone."""
    size = 1 << 20
    with region(size) as (handle, key):
        shm.set_shared_memory_region(handle, [np.ones(size // 4, np.float32)])
        assert register(server, "r", key, 0, size)[0] == 200
        given = placed("INPUT0", "r", size) | {"datatype": "FP32", "shape": [size // 4]}
        answer = []
        waiting = threading.Thread(target=lambda: answer.append(infer(server, "slow", {"inputs": [given]})))
        waiting.start()
        threading.Event().wait(0.1)
        os.truncate(f"/dev/shm{key}", 4096)
        waiting.join()
        status, answer = answer[0]
        assert status == 400 and "which has only 4096 now: its owner has made it smaller" in answer["error"], answer
        os.truncate(f"/dev/shm{key}", size)
        status, answer = infer(server, "echo", {"inputs": [given]})
        assert status == 200 and sum(answer["outputs"][0]["data"]) == 1024, "the rest is zeros that are there"


def test_bytes_that_change_meanwhile(server):
    """Strings and lengths that are rewritten while they are read never harm the server."""
    text = np.array([b"x" * 60] * 500, dtype=object)
    packed = serialize_byte_tensor(text)
    raw = packed.item()
    with region(len(raw) + 65536) as (handle, key):
        shm.set_shared_memory_region(handle, [packed])
        assert register(server, "r", key, 0, len(raw))[0] == 200
        stop = threading.Event()
        words = shm.get_contents_as_numpy(handle, np.uint32, [len(raw) // 4])

        def scribble():
            while not stop.is_set():
                words[0::16] = 0xFFFFFFFF
                words[0::16] = 60

        meddling = threading.Thread(target=scribble)
        meddling.start()
        try:
            given = placed("X", "r", len(raw)) | {"datatype": "BYTES", "shape": [500]}
            statuses = {infer(server, "id_str", {"inputs": [given]})[0] for _ in range(100)}
        finally:
            stop.set()
            meddling.join()
        assert statuses <= {200, 400}
        del words


def test_owners_that_died_make_room(models):
    """Regions whose object nobody else has any more give way when there is no room."""
    with Server("--allow-client-shm=true", "--shm-max-regions=2", "--shm-max-bytes=1000", repository=models) as server:
        with region(256) as (_, key):
            assert register(server, "a", key)[0] == 200
            status, message = register(server, "b", key, 0, 256)
            assert status == 200, message
            status, message = register(server, "c", key)
            assert status == 503 and "as many as --shm-max-regions allows" in message
        with region(2048) as (_, key):
            assert register(server, "c", key)[0] == 200, "the owner of a and b is gone"
            assert [each["name"] for each in regions(server)] == ["c"]
            status, message = register(server, "d", key, 0, 1000)
            assert status == 503 and "more than the 1000 that --shm-max-bytes allows" in message


def test_refused_unless_allowed(models):
    with Server(repository=models) as server, region(64) as (_, key):
        assert register(server, "r", key) == (501, DISABLED)
        for kind in ("system", "cuda"):
            assert regions(server, kind) == []
            status, answer = server.request("POST", f"/v2/{kind}sharedmemory/unregister")
            assert (status, json.loads(answer)["error"]) == (501, DISABLED)
        with grpcclient.InferenceServerClient(server.grpc) as client:
            for call in (
                lambda: client.register_system_shared_memory("r", key, 64),
                lambda: client.unregister_system_shared_memory(),
                lambda: client.register_cuda_shared_memory("r", base64.b64encode(bytes(64)), 0, 64),
                lambda: client.unregister_cuda_shared_memory("r"),
            ):
                with pytest.raises(InferenceServerException) as refusal:
                    call()
                assert refusal.value.status() == "StatusCode.UNIMPLEMENTED" and DISABLED in refusal.value.message()


# ---- memory of GPUs


def handle_of(key: str) -> bytes:
    return base64.b64encode(key.encode().ljust(64, b"\0"))


@CLIENTS
def test_memory_of_a_gpu(server, module):
    values = np.arange(1000, dtype=np.float32)
    with region(8192) as (handle, key):
        shm.set_shared_memory_region(handle, [values], 64)
        with module.InferenceServerClient(server.http if module is httpclient else server.grpc) as client:
            client.register_cuda_shared_memory("gpu", handle_of(key), 1, 8192)
            listed = client.get_cuda_shared_memory_status()
            if module is httpclient:
                assert listed == [{"name": "gpu", "device_id": 1, "byte_size": 8192}]
            else:
                assert listed.regions["gpu"].device_id == 1 and listed.regions["gpu"].byte_size == 8192
            run(module, server, "id_fp32", [("X", [1000], "FP32", "gpu", 4000, 64)], [("Y", "gpu", 4000, 4100)])
            np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.float32, [1000], 4100), values)
            with pytest.raises(InferenceServerException, match="Invalid offset \\+ byte size for shared memory region"):
                run(module, server, "id_fp32", [("X", [1000], "FP32", "gpu", 4000, 64)], [("Y", "gpu", 4000, 4300)])
            with pytest.raises(InferenceServerException, match="already in manager"):
                client.register_cuda_shared_memory("gpu", handle_of(key), 1, 8192)
            maps = Path(f"/proc/{server.process.pid}/maps")
            assert key in maps.read_text()
            client.unregister_cuda_shared_memory("gpu")
            assert key not in maps.read_text(), "the handle is closed"
            for handle64, device, size, says in (
                (handle_of(key), 2, 64, "there is no device 2; this machine has 2"),
                (handle_of(key), 0, 8193, "the memory of the handle has 8192 bytes"),
                (handle_of(key), 0, 0, "invalid args"),
                (handle_of("/trireme-none"), 0, 64, "cuIpcOpenMemHandle failed with 1 \\(invalid argument\\)"),
            ):
                with pytest.raises(InferenceServerException, match=says):
                    client.register_cuda_shared_memory("bad", handle64, device, size)


def test_handles_that_are_none(server):
    path = "/v2/cudasharedmemory/region/c/register"
    for body, says in (
        ({"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 64}, "'raw_handle' must be a valid base64"),
        ({"raw_handle": {"b64": "!"}, "device_id": 0, "byte_size": 64}, "'raw_handle' must be a valid base64"),
        ({"device_id": 0, "byte_size": 64}, "Shared memory register request has no 'raw_handle' field"),
        ({"raw_handle": {"b64": "AAAA"}, "byte_size": 64}, "Shared memory register request has no 'device_id' field"),
        ({"raw_handle": {"b64": "AAAA"}, "device_id": 0}, "Shared memory register request has no 'byte_size' field"),
    ):
        status, answer = server.request("POST", path, json.dumps(body).encode())
        assert status == 400 and json.loads(answer)["error"].startswith(says), answer


def test_without_a_driver(models):
    environment = {name: value for name, value in os.environ.items() if name != "TRIREME_CUDA_DRIVER"}
    environment["TRIREME_CUDA_DRIVER"] = "/nowhere/libcuda.so.1"
    with Server("--allow-client-shm=true", repository=models, environment=environment) as server:
        with grpcclient.InferenceServerClient(server.grpc) as client:
            with pytest.raises(InferenceServerException) as refusal:
                client.register_cuda_shared_memory("c", base64.b64encode(bytes(64)), 0, 64)
        assert refusal.value.status() == "StatusCode.INVALID_ARGUMENT"
        says = "failed to register CUDA shared memory region: 'c', GPUs not supported: the CUDA driver"
        assert refusal.value.message().startswith(says), refusal.value.message()
