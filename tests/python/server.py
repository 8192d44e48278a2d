"""Starts the server under test on free ports of 127.0.0.1 and stops it again.

Invariant: a server started here is stopped by its own process id, and what it printed is kept for the
message of a failing test.
"""

import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def binary() -> Path:
    """The server to test: $TRIREME, or the release build, or the debug build."""
    if named := os.environ.get("TRIREME"):
        return Path(named)
    builds = [ROOT / "target" / profile / "trireme" for profile in ("release", "debug")]
    found = next((path for path in builds if path.exists()), None)
    if found is None:
        raise RuntimeError(f"no server to test: build it with `make binary`, or name it in TRIREME (looked for {builds})")
    return found


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Server:
    """A running server. Use as a context manager."""

    def __init__(
        self,
        *arguments: str,
        repository: Path | None = None,
        wait: str = "ready",
        seconds: float = 60,
        program: Path | None = None,
        environment: dict[str, str] | None = None,
        popen: dict | None = None,
    ) -> None:
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        self.http = f"127.0.0.1:{self.http_port}"
        self.grpc = f"127.0.0.1:{self.grpc_port}"
        self.metrics = f"127.0.0.1:{self.metrics_port}"
        command = [str(program or binary()), "serve"]
        if repository is not None:
            command.append(f"--model-repository={repository}")
        command += [f"--http-port={self.http_port}", f"--grpc-port={self.grpc_port}"]
        command += [f"--metrics-port={self.metrics_port}", "--http-address=127.0.0.1", "--grpc-address=127.0.0.1"]
        command += arguments
        environment = dict(os.environ) if environment is None else dict(environment)
        library = ROOT / ".trireme" / "onnxruntime" / "libonnxruntime.so"
        if library.exists():
            environment.setdefault("TRIREME_ONNXRUNTIME", str(library))
        environment.setdefault("TRIREME_PYTHON", sys.executable)
        self.output = tempfile.NamedTemporaryFile("w+", prefix="trireme-", suffix=".log")
        self.begin = time.monotonic()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env=environment,
            **(popen or {}),
        )
        self.ready_after = None
        if wait:
            self.wait(wait, seconds)

    def wait(self, what: str = "ready", seconds: float = 60) -> None:
        """Waits until the health page `what` (live or ready) answers 200."""
        while time.monotonic() < self.begin + seconds:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode} before it was {what}:\n{self.log()}")
            try:
                if self.get(f"/v2/health/{what}")[0] == 200:
                    self.ready_after = time.monotonic() - self.begin
                    return
            except OSError:
                pass
            time.sleep(0.01)
        self.stop()
        raise RuntimeError(f"the server was not {what} within {seconds} s:\n{self.log()}")

    def get(self, path: str) -> tuple[int, bytes]:
        """A GET over a connection of its own."""
        return self.request("GET", path)

    def request(self, method: str, path: str, body: bytes | None = None, headers: dict | None = None) -> tuple[int, bytes]:
        """One request over a connection of its own: status and body."""
        connection = http.client.HTTPConnection(self.http, timeout=30)
        try:
            connection.request(method, path, body=body, headers=headers or {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def metrics_page(self) -> str:
        """The page that Prometheus scrapes."""
        connection = http.client.HTTPConnection(self.metrics, timeout=30)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def log(self) -> str:
        """What the server printed so far."""
        return Path(self.output.name).read_text(errors="replace")

    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self, seconds: float = 40) -> float:
        """Sends SIGTERM and returns how long the server took to end, in seconds."""
        begin = time.monotonic()
        if self.alive():
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise RuntimeError(f"the server did not stop within {seconds} s:\n{self.log()}") from None
        return time.monotonic() - begin

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
