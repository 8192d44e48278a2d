"""Measures dynamic batching: mean batch, server CPU an inference, latency, beside a bare onnxruntime loop.

    .venv/bin/python bench/batching.py [--windows 3] [--seconds 1] [--model mlp|conv] [--connections 1,4,16,64]

Two models, the MLP of the tests and a convolutional network (whether a line of text stands upside down, of the
example repository), are served in four ways: without batching, with batching and no delay, and with a delay limit of 2 ms
under the adaptive and under the fixed rule. One request over HTTP has one row. Each window of a case is followed by a
bare loop on one thread at the batch size that the server had on the average, so that both share the machine's moment.
Needs wrk.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime
from light import OURS, ROOT, Server, fixtures, http_request, lua, spread

FIXED = 'parameters { key: "TRIREME_QUEUE_DELAY" value: { string_value: "fixed" } }\n'
DELAY = "dynamic_batching { max_queue_delay_microseconds: 2000 }\n"
WAYS = {"off": "", "no delay": "dynamic_batching { }\n", "2 ms, adaptive": DELAY, "2 ms, fixed": DELAY + FIXED}


@dataclass
class Model:
    """A model under measurement: its file, and the input of one request."""

    name: str
    file: Path
    input: str
    row: tuple[int, ...]
    threads: int
    # The batch size at which the bare engine is best.
    limit: int
    # Configuration beside the batch size, for models whose file leaves dimensions open.
    more: str = ""

    def bare(self, batch: int, seconds: float) -> float:
        """CPU microseconds an inference of onnxruntime alone, one thread, its tensors made beforehand."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(self.file, options, providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        array = np.ones((batch, *self.row), np.float32)
        binding.bind_ortvalue_input(self.input, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        binding.bind_output(session.get_outputs()[0].name)
        for _ in range(3):
            session.run_with_iobinding(binding)
        count, before, end = 0, time.process_time(), time.monotonic() + seconds
        while time.monotonic() < end:
            session.run_with_iobinding(binding)
            count += batch
        return (time.process_time() - before) / count * 1e6


@dataclass
class Result:
    batch: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)


def lay(repository: Path, models: list[Model]) -> None:
    for model in models:
        for index, more in enumerate(WAYS.values()):
            limit = model.limit if more else 1
            folder = repository / f"{model.name}_{index}"
            (folder / "1").mkdir(parents=True)
            (folder / "1" / "model.onnx").symlink_to(model.file)
            threads = f'parameters {{ key: "intra_op_thread_count" value: {{ string_value: "{model.threads}" }} }}\n'
            one = "instance_group [ { kind: KIND_CPU count: 1 } ]\n"
            fixtures.configure(folder, f'backend: "onnxruntime"\nmax_batch_size: {limit}\n{model.more}{one}{threads}{more}')


def counts(server: Server, model: str) -> tuple[int, int]:
    """Rows and batches executed so far."""
    body = server.request("GET", f"/v2/models/{model}/stats")[1]
    shown = json.loads(body)["model_stats"][0]
    return shown["inference_count"], shown["execution_count"]


def latency(text: str, percent: str) -> float:
    """Milliseconds of a percentile in the output of wrk."""
    number, unit = re.search(rf"{percent}%\s+([\d.]+)(us|ms|s)\b", text).groups()
    return float(number) * {"us": 1e-3, "ms": 1, "s": 1e3}[unit]


def window(server: Server, model: Model, way: int, connections: int, seconds: float, script: Path, into: Result) -> None:
    name = f"{model.name}_{way}"
    rows, batches = counts(server, name)
    before, begin = server.cpu_seconds(), time.monotonic()
    command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--latency", "--timeout", "10s"]
    command += ["-s", str(script), f"http://127.0.0.1:{server.http}/v2/models/{name}/infer"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    took = time.monotonic() - begin
    if bad := re.search(r"(Non-2xx.*|Socket errors.*)", done.stdout):
        sys.exit(f"{name}: {bad[1]}")
    spent = server.cpu_seconds() - before
    rows, batches = (after - earlier for after, earlier in zip(counts(server, name), (rows, batches)))
    mean = rows / batches
    into.batch.append(mean)
    into.cpu.append(spent / rows * 1e6)
    into.rate.append(rows / took)
    into.p50.append(latency(done.stdout, "50"))
    into.p99.append(latency(done.stdout, "99"))
    into.bare.append(model.bare(max(1, round(mean)), 0.3 * seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=3, help="windows of each case (default 3)")
    parser.add_argument("--seconds", type=float, default=1, help="length of a window (default 1)")
    parser.add_argument("--model", choices=["mlp", "conv"], help="only this model")
    parser.add_argument("--connections", default="1,4,16,64", help="numbers of clients (default 1,4,16,64)")
    parser.add_argument("--server", default=OURS, metavar="COMMAND", help="the server's command line")
    arguments = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed: apt-get install wrk")
    with tempfile.TemporaryDirectory(prefix="trireme-bench-") as scratch:
        folder = Path(scratch)
        fixtures.mlp(folder)
        direction = ROOT / "examples/repository/text_direction/1/model.onnx"
        dims = 'input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, 48, 192 ] } ]\n'
        models = [
            Model("mlp", folder / "mlp/1/model.onnx", "X", (64,), 1, 64),
            Model("conv", direction.resolve(), "x", (3, 48, 192), 1, 16, dims),
        ]
        models = [model for model in models if arguments.model in (None, model.name)]
        repository = folder / "models"
        lay(repository, models)
        connections = [int(number) for number in arguments.connections.split(",")]
        cases = {(m.name, way, c): Result() for m in models for c in connections for way in range(len(WAYS))}
        best: dict[str, dict[int, list[float]]] = {model.name: {} for model in models}
        server = Server("trireme", arguments.server, repository)
        try:
            for turn in range(-1, arguments.windows):
                for model in models:
                    for count in connections:
                        for way in range(len(WAYS)):
                            script = folder / f"{model.name}.lua"
                            body = http_request("", model.input, np.ones((1, *model.row), np.float32), True, True)
                            script.write_text(lua(*body))
                            # The first turn warms up and is not counted.
                            into = Result() if turn < 0 else cases[(model.name, way, count)]
                            window(server, model, way, count, arguments.seconds, script, into)
                    for batch in (1, 2, 4, 8, 16, 32, 64) if turn >= 0 else ():
                        best[model.name].setdefault(batch, []).append(1e6 / model.bare(batch, 0.2))
                print(f"window {turn + 1} of {arguments.windows}", file=sys.stderr)
        finally:
            server.stop()
    print(f"Medians of {arguments.windows} windows of {arguments.seconds:g} s (least to most), {os.cpu_count()} cores.\n")
    print("| Model | Clients | Batching | Mean batch | CPU us an inference | bare at that batch | Inferences a second | p50 ms | p99 ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (name, way, count), r in cases.items():
        title = list(WAYS)[way]
        print(f"| {name} | {count} | {title} | {spread(r.batch)} | {spread(r.cpu)} | {spread(r.bare)} | "
              f"{spread(r.rate, 0)} | {spread(r.p50, 2)} | {spread(r.p99, 2)} |")
    print()
    for name, rates in best.items():
        medians = {batch: statistics.median(rate) for batch, rate in rates.items()}
        size = max(medians, key=medians.get)
        print(f"{name}: the bare loop is best at a batch of {size}: {medians[size]:.0f} inferences a second on one thread.")


if __name__ == "__main__":
    main()
