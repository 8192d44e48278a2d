"""perf_analyzer, the load generator of the Triton project, runs against the server."""

import csv
import json
import subprocess

import pytest
from server import ROOT, Server

SCRIPT = ROOT / "tools" / "perf_analyzer.sh"


@pytest.fixture(scope="module")
def perf_analyzer():
    """Runs perf_analyzer, or skips with the reason why it cannot be installed on this machine."""
    probe = subprocess.run([SCRIPT, "--version"], capture_output=True, text=True, timeout=600, check=False)
    if probe.returncode == 77:
        pytest.skip(probe.stderr.strip())
    assert probe.returncode == 0, probe.stderr

    def run(*arguments: str) -> str:
        command = [SCRIPT, *arguments, "--measurement-mode=count_windows", "--measurement-request-count=50"]
        command += ["--stability-percentage=999", "--max-trials=3"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_image_model(perf_analyzer, examples, protocol, tmp_path):
    address = examples.http if protocol == "http" else examples.grpc
    report = tmp_path / "report.csv"
    output = perf_analyzer("-m", "orientation", "-i", protocol, "-u", address, "-f", str(report))
    assert "Throughput:" in output and "Failed" not in output, output
    (row,) = list(csv.DictReader(report.open()))
    assert float(row["Inferences/Second"]) > 1


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_concurrent_small_requests(perf_analyzer, server, protocol):
    address = server.http if protocol == "http" else server.grpc
    arguments = ["-m", "mlp", "-i", protocol, "-u", address, "--concurrency-range=4", "-b", "2"]
    output = perf_analyzer(*arguments)
    assert "Throughput:" in output, output


def test_streaming(perf_analyzer, server):
    output = perf_analyzer("-m", "mlp", "-i", "grpc", "-u", server.grpc, "--streaming")
    assert "Throughput:" in output, output


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_sequences(perf_analyzer, tmp_path, protocol, strategy):
    """It reads that the model has sequences, and sends them with ids and flags of its own."""
    controls = ", ".join(
        f'{{ name: "{kind}" control [ {{ kind: CONTROL_SEQUENCE_{kind} {values} }} ] }}'
        for kind, values in [(kind, "int32_false_true: [ 0, 1 ]") for kind in ("START", "END", "READY")]
        + [("CORRID", "data_type: TYPE_UINT64")]
    )
    (tmp_path / "sums" / "1").mkdir(parents=True)
    (tmp_path / "sums" / "config.pbtxt").write_text(
        f'backend: "sequence"\nmax_batch_size: 4\nsequence_batching {{ {strategy} {{ }} control_input [ {controls} ] }}\n'
        'input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'
        'output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'
    )
    with Server(repository=tmp_path) as server:
        address = server.http if protocol == "http" else server.grpc
        arguments = ["-m", "sums", "-i", protocol, "-u", address, "--concurrency-range=6", "--sequence-length=5"]
        output = perf_analyzer(*arguments, *(["--streaming"] if protocol == "grpc" else []))
        assert "Throughput:" in output and "Failed" not in output, output
        model = json.loads(server.get("/v2/models/sums/stats")[1])["model_stats"][0]
    assert model["inference_stats"]["fail"]["count"] == 0 and model["inference_count"] > 50, model
