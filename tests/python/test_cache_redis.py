"""The response cache in a real Redis server: shared, kept over restarts, and no harm when Redis is slow or gone."""

import concurrent.futures
import os
import re
import shutil
import signal
import socket
import subprocess
import time

import fixtures
import numpy as np
import pytest
import tritonclient.http as httpclient
from server import ROOT, Server, free_ports
from test_cache import ENABLED, counts, metric
from wire import infer, tensor

PASSWORD = "not-a-word"


class Redis:
    """A Redis server on a free port. Use as a context manager."""

    def __init__(self, *arguments: str, port: int | None = None) -> None:
        self.port = port or free_ports(1)[0]
        settings = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(
            [ROOT / "tools" / "redis_server.sh", *settings, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        end = time.monotonic() + 120
        while True:
            if self.process.poll() is not None:
                reason = self.process.stderr.read()
                if self.process.returncode == 77:
                    pytest.skip(reason.strip())
                raise RuntimeError(f"redis-server ended with {self.process.returncode}: {reason}")
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < end, "redis-server does not listen"
                time.sleep(0.02)

    def flags(self, *more: str) -> list[str]:
        settings = ["host=127.0.0.1", f"port={self.port}", *more]
        return [f"--cache-config=redis,{setting}" for setting in settings]

    def ask(self, *words: str) -> str:
        """One command, its reply as it is on the wire."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            parts = [f"*{len(words)}\r\n", *(f"${len(word.encode())}\r\n{word}\r\n" for word in words)]
            connection.sendall("".join(parts).encode())
            return connection.recv(1 << 16).decode(errors="replace")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            self.process.wait(20)
        self.process.stderr.close()

    def __enter__(self) -> "Redis":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@pytest.fixture
def redis():
    with Redis() as running:
        yield running


def lay_adder(folder, add, name="adder"):
    node = fixtures.helper.make_node("Add", ["X", "C"], ["Y"])
    vector = (fixtures.TensorProto.FLOAT, ["n"])
    weights = {"C": np.array([add], np.float32)}
    model = fixtures.save(folder, name, [node], [("X", *vector)], [("Y", *vector)], weights=weights)
    fixtures.configure(model, fixtures.whole_shapes(inputs={"X": vector}, outputs={"Y": vector}) + ENABLED)


def ask(server, number=1, model="adder"):
    status, answer = infer(server, model, {"inputs": [tensor("X", "FP32", [1], [number])]})
    assert status == 200, answer
    return answer["outputs"][0]["data"][0]


def stored(server, count):
    """Waits until that many answers were stored: that happens after the clients have theirs."""
    end = time.monotonic() + 20
    while metric(server, "trireme_redis_cache_stored_total") < count:
        assert time.monotonic() < end, "the answers were not stored"
        time.sleep(0.01)


def test_answers_are_shared_and_survive_a_restart(redis, tmp_path):
    lay_adder(tmp_path / "one", 1)
    with Server(*redis.flags(), repository=tmp_path / "one") as server:
        assert [ask(server, n) for n in range(3)] == [1, 2, 3]
        stored(server, 3)
        assert [ask(server, n) for n in range(3)] == [1, 2, 3]
        assert counts(server, "adder").tolist() == [3, 3, 6, 3]
        # Another server over a copy of the repository, whose files have other times.
        shutil.copytree(tmp_path / "one", tmp_path / "two", copy_function=shutil.copyfile)
        with Server(*redis.flags(), repository=tmp_path / "two") as other:
            assert [ask(other, n) for n in range(4)] == [1, 2, 3, 4]
            assert counts(other, "adder").tolist() == [3, 1, 4, 1]
            stored(other, 1)
    with Server(*redis.flags(), repository=tmp_path / "one") as server:
        assert [ask(server, n) for n in range(4)] == [1, 2, 3, 4]
        assert counts(server, "adder").tolist() == [4, 0, 4, 0]
    assert redis.ask("DBSIZE") == ":4\r\n"
    assert re.search(r"trireme:adder:1:[0-9a-f]{64}\r\n", redis.ask("KEYS", "trireme:adder:*"))


def test_other_weights_have_other_answers(redis, tmp_path):
    """Also after a reload, and also when the file has the same size and time as before."""
    lay_adder(tmp_path, 1)
    file = tmp_path / "adder" / "1" / "model.onnx"
    before = file.stat()
    flags = ["--model-control-mode=explicit", "--load-model=adder", *redis.flags()]
    with Server(*flags, repository=tmp_path) as server:
        assert [ask(server), ask(server)] == [2, 2]
        stored(server, 1)
        lay_adder(tmp_path, 10)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert file.stat().st_size == before.st_size
        with httpclient.InferenceServerClient(server.http) as client:
            client.load_model("adder")
            assert ask(server) == 11
            stored(server, 2)
            lay_adder(tmp_path, 1)
            client.load_model("adder")
        assert ask(server) == 2
        assert counts(server, "adder").tolist() == [1, 0, 1, 0], "the first weights find their answers again"


def test_every_type_of_tensor_comes_back_as_it_was(redis, tmp_path):
    for name, data_type in fixtures.TYPES.items():
        folder = fixtures.copy(tmp_path, f"id_{name}", data_type, ["a"])
        with (folder / "config.pbtxt").open("a") as config:
            config.write(ENABLED)
    values = {
        "bool": np.array([True, False, True]),
        "str": np.array([b"", b"text", "模型".encode()], dtype=np.object_),
        "fp16": np.array([1, 2, -3], np.float16),
        **{name: np.array([1, 2, 3], name) for name in ("uint8", "uint16", "uint32", "uint64")},
        **{name: np.array([1, -2, 3], name) for name in ("int8", "int16", "int32", "int64")},
        "fp32": np.array([1, -2.5, np.inf], np.float32),
        "fp64": np.array([1, -2.5, np.inf], np.float64),
    }
    types = {"str": "BYTES"}
    with Server(*redis.flags(), repository=tmp_path) as server:
        with httpclient.InferenceServerClient(server.http) as client:
            for count, (name, value) in enumerate(values.items(), 1):
                one = httpclient.InferInput("X", [3], types.get(name, name.upper()))
                one.set_data_from_numpy(value)
                first = client.infer(f"id_{name}", [one]).as_numpy("Y")
                stored(server, count)
                second = client.infer(f"id_{name}", [one], request_id="second")
                assert second.get_response()["id"] == "second"
                assert np.array_equal(first, value) and np.array_equal(second.as_numpy("Y"), value)
                assert counts(server, f"id_{name}").tolist() == [1, 1, 2, 1], name


def test_an_ensemble_is_as_new_as_its_models(redis, tmp_path):
    lay_adder(tmp_path, 1)
    (tmp_path / "ensemble" / "1").mkdir(parents=True)
    fixtures.configure(
        tmp_path / "ensemble",
        'platform: "ensemble"\n'
        'input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]\n'
        'output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]\n'
        'ensemble_scheduling { step [ { model_name: "adder" model_version: -1\n'
        '  input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } } ] }\n' + ENABLED,
    )
    flags = ["--model-control-mode=explicit", "--load-model=*", *redis.flags()]
    with Server(*flags, repository=tmp_path) as server:
        assert ask(server, model="ensemble") == 2
        stored(server, 2)
        assert ask(server, model="ensemble") == 2
        assert counts(server, "ensemble").tolist()[:3] == [1, 1, 2]
        assert counts(server, "adder").tolist()[:3] == [0, 1, 1], "its model was not asked again"
        lay_adder(tmp_path, 10)
        with httpclient.InferenceServerClient(server.http) as client:
            client.load_model("adder")
        assert ask(server, model="ensemble") == 11
        stored(server, 4)
    with Server(*flags, repository=tmp_path) as server:
        assert ask(server, model="ensemble") == 11
        assert counts(server, "ensemble").tolist()[:3] == [1, 0, 1], "found by another server"


def test_a_stopped_redis_delays_few_requests_and_little(redis, tmp_path):
    """SIGSTOP leaves the connections open and nothing answers: the worst that Redis can do."""
    lay_adder(tmp_path, 1)
    with Server(*redis.flags("socket_timeout=200"), repository=tmp_path) as server:
        assert ask(server) == 2
        stored(server, 1)
        redis.process.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            assert list(pool.map(lambda n: ask(server, n), range(64))) == [n + 1 for n in range(64)]
        assert time.monotonic() - begin < 5
        begin = time.monotonic()
        for n in range(50):
            assert ask(server, n) == n + 1
        assert time.monotonic() - begin < 2.5, "nobody waits any more"
        assert metric(server, "trireme_redis_cache_up") == 0
        assert len(re.findall(r"W.*does not answer", server.log())) == 1, "told once"
        redis.process.send_signal(signal.SIGCONT)
        end = time.monotonic() + 20
        while metric(server, "trireme_redis_cache_up") == 0:
            assert time.monotonic() < end, "it is found back"
            time.sleep(0.05)
        hits = counts(server, "adder")[0]
        assert ask(server) == 2
        assert counts(server, "adder")[0] == hits + 1
        assert "answers again" in server.log()


def test_a_redis_that_comes_and_goes(tmp_path):
    lay_adder(tmp_path, 1)
    with Redis() as redis:
        port = redis.port
    flags = redis.flags("connect_timeout=500")
    with Server(*flags, repository=tmp_path) as server:
        assert "does not answer" in server.log() and "Connection refused" in server.log()
        assert [ask(server), ask(server)] == [2, 2]
        assert counts(server, "adder").tolist() == [0, 2, 2, 2]
        for _ in range(2):
            with Redis(port=port):
                end = time.monotonic() + 20
                while metric(server, "trireme_redis_cache_up") == 0:
                    assert time.monotonic() < end, "it is found back"
                    time.sleep(0.05)
                before = metric(server, "trireme_redis_cache_stored_total")
                ask(server, 5)
                stored(server, before + 1)
                hits = counts(server, "adder")[0]
                assert ask(server, 5) == 6
                assert counts(server, "adder")[0] == hits + 1
            assert ask(server, 5) == 6
            assert metric(server, "trireme_redis_cache_up") == 0


def test_passwords(tmp_path):
    lay_adder(tmp_path, 1)
    with Redis("--requirepass", PASSWORD) as redis:
        with Server(*redis.flags(f"password={PASSWORD}", "db=2"), repository=tmp_path) as server:
            ask(server)
            stored(server, 1)
            assert PASSWORD not in server.log()
        environment = {**os.environ, "TRITONCACHE_REDIS_PASSWORD": PASSWORD}
        with Server(*redis.flags("db=2"), repository=tmp_path, environment=environment) as server:
            assert ask(server) == 2
            assert counts(server, "adder").tolist() == [1, 0, 1, 0]
        for wrong in (["password=wrong"], [f"password={PASSWORD}", "db=1000"]):
            with pytest.raises(RuntimeError, match="refuses the connection of the response cache"):
                Server(*redis.flags(*wrong), repository=tmp_path)


def certificates(folder):
    """An authority, and certificates of it for a server on 127.0.0.1 and a client."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with")

    def openssl(*words):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")
    for name in ("server", "client"):
        (folder / "extensions").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        openssl("req", *new[:-2], "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", "2", "-extfile", "extensions", "-out", f"{name}.pem"),
        )


def test_encrypted_connections(tmp_path):
    keys = tmp_path / "keys"
    keys.mkdir()
    certificates(keys)
    lay_adder(tmp_path / "models", 1)
    port = free_ports(1)[0]
    settings = ["--tls-cert-file", "server.pem", "--tls-key-file", "server.key", "--tls-ca-cert-file", "ca.pem"]
    settings = [word if word.startswith("--") else str(keys / word) for word in settings]
    with Redis("--tls-port", str(port), *settings) as redis:
        redis.port = port
        client = ["tls_enabled=true", f"cert={keys}/client.pem", f"key={keys}/client.key"]
        for authority in (f"cacert={keys}/ca.pem", f"cacert_dir={keys}/authorities"):
            (keys / "authorities").mkdir(exist_ok=True)
            shutil.copy(keys / "ca.pem", keys / "authorities")
            with Server(*redis.flags(*client, authority), repository=tmp_path / "models") as server:
                assert [ask(server), metric(server, "trireme_redis_cache_up")] == [2, 1]
                hits = counts(server, "adder")[0]
                if not hits:
                    stored(server, 1)
        assert hits == 1, "the second server found the answer of the first"
        # A server that nobody vouches for is not talked to.
        with Server(*redis.flags(*client), repository=tmp_path / "models") as server:
            assert [ask(server), metric(server, "trireme_redis_cache_up")] == [2, 0]
            assert "does not answer" in server.log()
        with pytest.raises(RuntimeError, match="absent.pem"):
            Server(*redis.flags("tls_enabled=true", "cacert=absent.pem"), repository=tmp_path / "models")


def test_a_full_redis_is_told_about_and_harms_nobody(tmp_path):
    lay_adder(tmp_path, 1)
    with Redis("--maxmemory", "1", "--maxmemory-policy", "noeviction") as redis:
        with Server(*redis.flags(), repository=tmp_path) as server:
            assert [ask(server, n) for n in range(20)] == [n + 1 for n in range(20)]
            end = time.monotonic() + 10
            while "SET was refused" not in server.log():
                assert time.monotonic() < end
                time.sleep(0.02)
            assert metric(server, "trireme_redis_cache_up") == 1
            assert server.log().count("was refused") == 1, "told once a minute"


def test_many_clients_and_large_answers(redis, tmp_path):
    lay_adder(tmp_path, 1)
    with Server(*redis.flags(), repository=tmp_path) as server:

        def work(thread):
            with httpclient.InferenceServerClient(server.http) as client:
                for round in range(60):
                    length = [1, 100, 200_000][round % 3]
                    value = np.full(length, (round * 7 + thread) % 11, np.float32)
                    one = httpclient.InferInput("X", [length], "FP32")
                    one.set_data_from_numpy(value)
                    assert np.array_equal(client.infer("adder", [one]).as_numpy("Y"), value + 1)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        hits, misses, success, executions = counts(server, "adder")
        assert hits + misses == success == 480 and executions == misses and hits > 200
        assert server.stop() < 5
