"""Measures the server's CPU microseconds per request under light load generators, as Markdown.

    .venv/bin/python bench/light.py [--windows 5] [--only TEXT] [--server NAME=COMMAND ...]

The figure that holds on a shared machine is the CPU time of the server process (user and system, from
/proc/PID/stat) divided by the requests it answered; requests per second depend on what else runs. Cases alternate,
and so do the servers where several are given, window by window; the table has the median of the windows, with
the least and the most. Needs wrk and h2load (Debian: wrk, nghttp2-client).

COMMAND may hold {repository}, {http}, {grpc} and {metrics}. The requests that the load generator counts are checked
against the server's own statistics, so that refused requests cannot pass for fast ones.
"""

import argparse
import http.client
import json
import os
import re
import shutil
import shlex
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime
from tritonclient.grpc import service_pb2

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "python"))
import fixtures  # noqa: E402
from server import free_ports  # noqa: E402

OURS = (
    "target/release/trireme serve --model-repository={repository} --http-port={http} --grpc-port={grpc} "
    "--metrics-port={metrics} --http-address=127.0.0.1 --grpc-address=127.0.0.1 --log-info=false"
)
TICKS = os.sysconf("SC_CLK_TCK")
MILLION = 1_000_000


# ---- servers


class Server:
    """A server under measurement, started from a command line."""

    def __init__(self, name: str, command: str, repository: Path) -> None:
        self.name = name
        self.http, self.grpc, self.metrics = free_ports(3)
        words = command.format(repository=repository, http=self.http, grpc=self.grpc, metrics=self.metrics)
        environment = dict(os.environ)
        environment.setdefault("TRIREME_ONNXRUNTIME", str(ROOT / ".trireme/onnxruntime/libonnxruntime.so"))
        self.log = tempfile.TemporaryFile("w+")
        begin = time.monotonic()
        self.process = subprocess.Popen(
            shlex.split(words), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log
        )
        self.ready_after = self.wait(begin)

    def wait(self, begin: float) -> float:
        """Seconds from the start of the process to the first 200 of /v2/health/ready."""
        while time.monotonic() < begin + 60:
            if self.process.poll() is not None:
                self.log.seek(0)
                sys.exit(f"{self.name} ended before it was ready:\n{self.log.read()[-4000:]}")
            try:
                if self.request("GET", "/v2/health/ready")[0] == 200:
                    return time.monotonic() - begin
            except OSError:
                pass
            time.sleep(0.001)
        sys.exit(f"{self.name} was not ready within 60 s")

    def request(self, method: str, path: str, body: bytes | None = None, headers: dict | None = None):
        connection = http.client.HTTPConnection("127.0.0.1", self.http, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def cpu_seconds(self) -> float:
        """User and system time of the process so far; the kernel counts in steps of 10 ms."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def resident_mib(self) -> float:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def answered(self, model: str) -> int:
        """Successful requests of a model, by the server's own statistics."""
        status, body = self.request("GET", f"/v2/models/{model}/stats")
        if status != 200:
            return 0
        return json.loads(body)["model_stats"][0]["inference_stats"]["success"]["count"]

    def stop(self) -> float:
        begin = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        return time.monotonic() - begin


def lay(repository: Path) -> None:
    """The models of the cases: identity of FP32[16], of any FP32, and the MLP, none of them batching."""
    fixtures.echo(repository, "identity", "FP32", batch=64, dims="[ 16 ]")
    fixtures.echo(repository, "copy", "FP32")
    one = 'parameters { key: "intra_op_thread_count" value: { string_value: "1" } }\n'
    fixtures.mlp(repository, config=f'backend: "onnxruntime"\nmax_batch_size: 1\n{one}')


# ---- requests


def http_request(model: str, name: str, array: np.ndarray, binary_in: bool, binary_out: bool) -> tuple[bytes, dict]:
    """Body and headers of an inference request over HTTP."""
    tensor = {"name": name, "datatype": "FP32", "shape": list(array.shape)}
    if binary_in:
        tensor["parameters"] = {"binary_data_size": array.nbytes}
    else:
        tensor["data"] = array.reshape(-1).tolist()
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": binary_out}}).encode()
    if not binary_in:
        return head, {"Content-Type": "application/json"}
    length = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    return head + array.tobytes(), length


def grpc_request(model: str, name: str, array: np.ndarray) -> bytes:
    """A ModelInferRequest behind its five bytes of gRPC framing."""
    message = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[array.tobytes()])
    message.inputs.add(name=name, datatype="FP32", shape=array.shape)
    text = message.SerializeToString()
    return b"\0" + struct.pack(">I", len(text)) + text


def lua(body: bytes, headers: dict) -> str:
    """A script for wrk that sends one prepared request over and over."""
    quoted = "".join(f"\\{byte:03d}" for byte in body)
    lines = ['wrk.method = "POST"', f'wrk.body = "{quoted}"']
    lines += [f'wrk.headers["{name}"] = "{value}"' for name, value in headers.items()]
    return "\n".join(lines) + "\n"


# ---- load generators; each returns how many requests it saw answered, and in how many seconds


def wrk(server: Server, path: str, connections: int, seconds: float, script: Path | None) -> tuple[int, float]:
    command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "10s"]
    command += ["-s", str(script)] if script else []
    done = subprocess.run([*command, f"http://127.0.0.1:{server.http}{path}"], capture_output=True, text=True, check=True)
    if bad := re.search(r"(Non-2xx.*|Socket errors.*)", done.stdout):
        sys.exit(f"{server.name} {path}: {bad[1]}")
    requests = int(re.search(r"(\d+) requests in", done.stdout)[1])
    return requests, requests / float(re.search(r"Requests/sec:\s+([\d.]+)", done.stdout)[1])


def h2load(server: Server, connections: int, requests: int, body: Path) -> tuple[int, float]:
    """Ends every request it began: some servers do not survive connections that close in the middle."""
    command = ["h2load", "-t1", f"-c{connections}", "-m1", f"-n{requests}", f"-d{body}"]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    command += [f"http://127.0.0.1:{server.grpc}/inference.GRPCInferenceService/ModelInfer"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    succeeded = int(re.search(r"(\d+) succeeded", done.stdout)[1])
    if succeeded != requests:
        sys.exit(f"{server.name}: {requests - succeeded} of {requests} gRPC calls failed")
    seconds = re.search(r"finished in ([\d.]+)(s|ms)", done.stdout)
    return requests, float(seconds[1]) / (1000 if seconds[2] == "ms" else 1)


def one_by_one(server: Server, path: str, body: bytes, headers: dict, count: int) -> tuple[int, float]:
    """The same request over one connection, `count` times."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=120)
    begin = time.monotonic()
    for _ in range(count):
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            sys.exit(f"{server.name} {path}: {response.status} {answer[:300]!r}")
    connection.close()
    return count, time.monotonic() - begin


# ---- cases


@dataclass
class Case:
    name: str
    load: Callable[[Server, float], tuple[int, float]]
    # Whose statistics must agree with the load generator; none for requests without a model.
    model: str | None = None
    cpu: dict[str, list[float]] = field(default_factory=dict)
    rate: dict[str, list[float]] = field(default_factory=dict)

    def window(self, server: Server, seconds: float) -> None:
        counted = server.answered(self.model) if self.model else 0
        before = server.cpu_seconds()
        requests, took = self.load(server, seconds)
        spent = server.cpu_seconds() - before
        if self.model and server.answered(self.model) - counted < requests:
            sys.exit(f"{server.name}, {self.name}: {requests} requests were sent, but fewer succeeded")
        self.cpu.setdefault(server.name, []).append(spent / requests * 1e6)
        self.rate.setdefault(server.name, []).append(requests / took)


def cases(folder: Path) -> list[Case]:
    sixteen, features = np.arange(16, dtype=np.float32)[None] / 2, np.ones((1, 64), np.float32)
    found = [Case("health/live, HTTP, 16 connections", lambda s, t: wrk(s, "/v2/health/live", 16, t, None))]

    def over_http(title: str, model: str, name: str, array: np.ndarray, connections: int, binary: bool = True) -> None:
        script = folder / f"{model}-{'binary' if binary else 'json'}.lua"
        script.write_text(lua(*http_request(model, name, array, binary, binary)))
        path = f"/v2/models/{model}/infer"
        found.append(Case(f"{title}, HTTP, {connections}", lambda s, t: wrk(s, path, connections, t, script), model))

    def over_grpc(title: str, model: str, name: str, array: np.ndarray, connections: int) -> None:
        body = folder / f"{model}.grpc"
        body.write_bytes(grpc_request(model, name, array))
        pace: dict[str, float] = {}

        def load(server: Server, seconds: float) -> tuple[int, float]:
            # The first window finds out how many requests fill the time.
            requests = max(round(pace.get(server.name, 2000) * seconds), connections)
            count, took = h2load(server, connections, requests, body)
            pace[server.name] = count / took
            return count, took

        found.append(Case(f"{title}, gRPC, {connections}", load, model))

    for connections in (1, 16, 64):
        over_http("identity FP32[16] binary", "identity", "INPUT0", sixteen, connections)
    over_http("identity FP32[16] as JSON", "identity", "INPUT0", sixteen, 16, binary=False)
    for connections in (1, 16, 64):
        over_grpc("identity FP32[16]", "identity", "INPUT0", sixteen, connections)
    for connections in (1, 16):
        over_http("MLP, no batching", "mlp", "X", features, connections)
        over_grpc("MLP, no batching", "mlp", "X", features, connections)
    million = np.random.default_rng(5).standard_normal(MILLION, np.float32)
    for binary_in in (True, False):
        for binary_out in (True, False):
            body, headers = http_request("copy", "INPUT0", million, binary_in, binary_out)
            title = f"one million FP32, {'binary' if binary_in else 'JSON'} to {'binary' if binary_out else 'JSON'}"
            path = "/v2/models/copy/infer"
            load = lambda s, t, b=body, h=headers: one_by_one(s, path, b, h, max(4, round(10 * t)))  # noqa: E731
            found.append(Case(title, load, "copy"))
    return found


def bare_loop(model: Path, seconds: float) -> float:
    """CPU microseconds per inference of onnxruntime on one thread, its tensors made beforehand."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    binding.bind_ortvalue_input("X", onnxruntime.OrtValue.ortvalue_from_numpy(np.ones((1, 64), np.float32)))
    binding.bind_ortvalue_output("Y", onnxruntime.OrtValue.ortvalue_from_numpy(np.empty((1, 32), np.float32)))
    for _ in range(200):
        session.run_with_iobinding(binding)
    count, before, end = 0, time.process_time(), time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(100):
            session.run_with_iobinding(binding)
        count += 100
    return (time.process_time() - before) / count * 1e6


def starts_and_stops(name: str, command: str, folder: Path, rounds: int) -> list[tuple[str, list[float]]]:
    """Milliseconds from start to ready over twenty small models, and from SIGTERM to the end when idle."""
    repository = folder / "small"
    if not repository.exists():
        for index in range(10):
            fixtures.echo(repository, f"echo_{index}", "FP32")
            fixtures.copy(repository, f"onnx_{index}", fixtures.TYPES["fp32"], ["N", 4])
    ready, stopped, connected = [], [], []
    for _ in range(rounds):
        server = Server(name, command, repository)
        ready.append(server.ready_after * 1000)
        stopped.append(server.stop() * 1000)
        server = Server(name, command, repository)
        idle = [socket.create_connection(("127.0.0.1", server.http)) for _ in range(4)]
        for each in idle:
            each.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            each.recv(4096)
        connected.append(server.stop() * 1000)
        for each in idle:
            each.close()
    return [
        ("start to ready, 20 small models", ready),
        ("stop when idle", stopped),
        ("stop with 4 idle keep-alive connections", connected),
    ]


def spread(numbers: list[float], digits: int = 1) -> str:
    return f"{statistics.median(numbers):.{digits}f} ({min(numbers):.{digits}f} to {max(numbers):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=5, help="windows of each case and server (default 5)")
    parser.add_argument("--seconds", type=float, default=2, help="length of a window (default 2)")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--server", action="append", metavar="NAME=COMMAND", help="a server; several are compared")
    parser.add_argument("--no-starts", action="store_true", help="leave out the times of starting and stopping")
    arguments = parser.parse_args()
    for tool, package in (("wrk", "wrk"), ("h2load", "nghttp2-client")):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is not installed: apt-get install {package}")
    commands = dict(text.split("=", 1) for text in arguments.server or [f"trireme={OURS}"])

    with tempfile.TemporaryDirectory(prefix="trireme-bench-") as scratch:
        folder = Path(scratch)
        lay(folder / "models")
        servers = [Server(name, command, folder / "models") for name, command in commands.items()]
        chosen = [case for case in cases(folder) if arguments.only in case.name]
        bare = []
        try:
            for case in chosen:  # warm-up, not counted
                for server in servers:
                    case.load(server, 0.3)
            for window in range(arguments.windows):
                for case in chosen:
                    for server in servers:
                        case.window(server, arguments.seconds)
                if any(case.model == "mlp" for case in chosen):
                    bare.append(bare_loop(folder / "models" / "mlp" / "1" / "model.onnx", arguments.seconds))
                print(f"window {window + 1} of {arguments.windows}", file=sys.stderr)
            resident = {server.name: server.resident_mib() for server in servers}
        finally:
            for server in servers:
                if server.process.poll() is None:
                    server.stop()
        print(f"Medians of {arguments.windows} alternating windows of {arguments.seconds:g} s (least to most), "
              f"{os.cpu_count()} cores.\n")
        print("| Case | Server | CPU us a request | Requests a second |\n|---|---|---|---|")
        for case in chosen:
            for name in commands:
                print(f"| {case.name} | {name} | {spread(case.cpu[name])} | {spread(case.rate[name], 0)} |")
        if bare:
            print(f"| MLP, bare onnxruntime loop, one thread | none | {spread(bare)} | |")
        print()
        for name in commands:
            print_json_costs(chosen, name)
            print(f"{name}: {resident[name]:.0f} MiB resident after the run.")
        if not arguments.no_starts and not arguments.only:
            print("\n| Milliseconds | Server | |\n|---|---|---|")
            for name, command in commands.items():
                for title, numbers in starts_and_stops(name, command, folder, max(3, arguments.windows)):
                    print(f"| {title} | {name} | {spread(numbers)} |")


def print_json_costs(chosen: list[Case], name: str) -> None:
    """What JSON costs an element, each way, over the same request in binary."""
    medians = {case.name: statistics.median(case.cpu[name]) for case in chosen if case.model == "copy"}
    plain = medians.get("one million FP32, binary to binary")
    if plain is None or len(medians) < 4:
        return
    into = (medians["one million FP32, JSON to binary"] - plain) * 1000 / MILLION
    out = (medians["one million FP32, binary to JSON"] - plain) * 1000 / MILLION
    print(f"{name}: JSON costs {into:.1f} ns an element in and {out:.1f} ns an element out.")


if __name__ == "__main__":
    main()
