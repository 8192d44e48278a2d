"""What a request to a python model costs: server and workers together, and how many are answered.

    .venv/bin/python bench/python_models.py [--seconds N]

An identity of FP32[16] over gRPC at concurrency 1, 16 and 64, then of 16 MB tensors at concurrency 4. CPU is that of the
server and its workers, from /proc, so the client's own does not count; on a machine with few cores it still takes
their time.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python"))
from server import Server  # noqa: E402

MODEL = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
"""
CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: -1 }
output { name: "Y" data_type: TYPE_FP32 dims: -1 }
instance_group { kind: KIND_CPU count: 1 }
"""


def cpu_seconds(server: Server) -> float:
    """CPU that the server and its workers have used so far."""
    command = ["ps", "--ppid", str(server.process.pid), "-o", "pid="]
    children = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    ticks = 0
    for pid in [str(server.process.pid), *children]:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(server: Server, elements: int, concurrency: int, seconds: float) -> tuple[float, float]:
    """Requests a second, and CPU microseconds of server and workers a request."""
    counts = [0] * concurrency
    over = threading.Event()
    x = np.arange(elements, dtype=np.float32)

    def work(index: int) -> None:
        with grpcclient.InferenceServerClient(server.grpc) as client:
            given = grpcclient.InferInput("X", [elements], "FP32")
            given.set_data_from_numpy(x)
            while not over.is_set():
                client.infer("identity", [given])
                counts[index] += 1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(concurrency)]
    used, begin = cpu_seconds(server), time.monotonic()
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    over.set()
    for thread in threads:
        thread.join()
    total = sum(counts)
    return total / (time.monotonic() - begin), (cpu_seconds(server) - used) / max(total, 1) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "identity"
        (model / "1").mkdir(parents=True)
        (model / "1" / "model.py").write_text(MODEL)
        (model / "config.pbtxt").write_text(CONFIG)
        with Server(repository=Path(folder)) as server:
            print(f"{'tensor':>10} {'concurrency':>11} {'requests/s':>11} {'CPU us/request':>15}")
            for elements, concurrency in [(16, 1), (16, 16), (16, 64), (4 << 20, 4)]:
                rate, cost = measure(server, elements, concurrency, seconds)
                print(f"{elements * 4:>10} {concurrency:>11} {rate:>11.0f} {cost:>15.0f}")


if __name__ == "__main__":
    main()
