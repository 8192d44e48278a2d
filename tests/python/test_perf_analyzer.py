"""perf_analyzer, the load generator of the Triton project, runs against the server."""

import csv
import subprocess

import pytest
from server import ROOT

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
