"""Health, metadata, configuration, statistics, index, metrics, logs and stopping."""

import http.client
import re
import socket
import threading
import time

import fixtures
import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as tritonhttp
from prometheus_client.parser import text_string_to_metric_families
from server import ROOT, Server
from tritonclient.utils import InferenceServerException


@pytest.fixture(params=["http", "grpc"])
def client(request, server):
    if request.param == "http":
        with tritonhttp.InferenceServerClient(server.http) as made:
            yield made
    else:
        with grpc.InferenceServerClient(server.grpc) as made:
            made.as_json = True
            yield made


def asked(client, method: str, *arguments, **named) -> dict | list:
    """The same shape of answer from both clients: JSON."""
    if isinstance(client, grpc.InferenceServerClient):
        named["as_json"] = True
    return getattr(client, method)(*arguments, **named)


def page(server: Server) -> dict[str, object]:
    connection = http.client.HTTPConnection(server.metrics, timeout=10)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    text = response.read().decode()
    assert response.status == 200 and response.getheader("Content-Type").startswith("text/plain")
    connection.close()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(server: Server, name: str, **labels: str) -> float:
    samples = [s for f in page(server).values() for s in f.samples if s.name in (name, f"{name}_total")]
    return sum(s.value for s in samples if labels.items() <= s.labels.items())


def run(server: Server, model: str = "addsub", times: int = 1) -> None:
    with tritonhttp.InferenceServerClient(server.http) as client:
        inputs = []
        for name in ("A", "B"):
            one = tritonhttp.InferInput(name, [2, 4], "FP32")
            one.set_data_from_numpy(np.ones((2, 4), np.float32))
            inputs.append(one)
        for _ in range(times):
            client.infer(model, inputs)


def test_health(client):
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("addsub") and client.is_model_ready("versions", "3")
    if isinstance(client, grpc.InferenceServerClient):
        for model, version in (("nope", ""), ("versions", "4")):
            with pytest.raises(InferenceServerException, match="nope|versions"):
                client.is_model_ready(model, version)
    else:
        assert not client.is_model_ready("nope") and not client.is_model_ready("versions", "4")


def test_server_metadata(client):
    metadata = asked(client, "get_server_metadata")
    assert metadata["name"] == "triton" and metadata["version"]
    assert {"classification", "binary_tensor_data", "statistics", "model_configuration"} <= set(metadata["extensions"])


def test_model_metadata(client):
    metadata = asked(client, "get_model_metadata", "addsub")
    assert metadata["platform"] == "onnxruntime_onnx" and metadata["versions"] == ["1"]
    assert [(i["name"], i["datatype"], [int(d) for d in i["shape"]]) for i in metadata["inputs"]] == [
        ("A", "FP32", [-1, 4]),
        ("B", "FP32", [-1, 4]),
    ]
    assert [output["name"] for output in metadata["outputs"]] == ["SUM", "DIFF"]
    with pytest.raises(InferenceServerException, match="nope"):
        client.get_model_metadata("nope")


def test_versions_are_served_side_by_side(client):
    assert asked(client, "get_model_metadata", "versions")["versions"] == ["1", "3", "10"]
    assert asked(client, "get_model_metadata", "versions", "3")["versions"] == ["3"]


def test_model_configuration(client):
    config = asked(client, "get_model_config", "addsub")
    config = config.get("config", config)
    assert config["max_batch_size"] == 8 and config["backend"] == "onnxruntime"
    assert [i["data_type"] for i in config["input"]] == ["TYPE_FP32"] * 2
    assert [[int(d) for d in i["dims"]] for i in config["input"]] == [[4], [4]]


def test_configuration_that_was_completed_from_the_model(server):
    with tritonhttp.InferenceServerClient(server.http) as client:
        config = client.get_model_config("mlp")
    assert config["name"] == "mlp" and config["platform"] == "onnxruntime_onnx"
    assert config["input"][0]["dims"] == [64] and config["output"][0]["dims"] == [32]
    assert config["max_batch_size"] == 4 and config["default_model_filename"] == "model.onnx"


def test_repository_index(client):
    index = asked(client, "get_model_repository_index")
    index = index.get("models", index) if isinstance(index, dict) else index
    assert {"name": "addsub", "version": "1", "state": "READY"} in [
        {key: entry[key] for key in ("name", "version", "state")} for entry in index
    ]
    assert sorted(e["version"] for e in index if e["name"] == "versions") == ["1", "10", "3"]


def test_statistics_count_requests_rows_and_executions(server, client):
    def now() -> dict:
        statistics = asked(client, "get_inference_statistics", "addsub")
        (model,) = statistics["model_stats"]
        return model

    before = now()
    run(server, times=3)
    after = now()
    assert int(after["inference_count"]) - int(before.get("inference_count", 0)) == 6
    assert int(after["execution_count"]) - int(before.get("execution_count", 0)) == 3
    success = [int(s["inference_stats"].get("success", {}).get("count", 0)) for s in (before, after)]
    assert success[1] - success[0] == 3
    for part in ("queue", "compute_input", "compute_infer", "compute_output"):
        assert int(after["inference_stats"][part]["ns"]) > 0
    sizes = {int(entry["batch_size"]) for entry in after["batch_stats"]}
    assert 2 in sizes


def test_statistics_of_all_models(client):
    statistics = asked(client, "get_inference_statistics")
    assert {"addsub", "versions"} <= {entry["name"] for entry in statistics["model_stats"]}


def test_metrics_families_are_those_of_triton(server):
    """Every inference family of a recorded page of Triton is here, with its type, help and labels."""
    run(server)
    recorded = {
        family.name: family
        for family in text_string_to_metric_families((ROOT / "tests" / "golden" / "metrics.txt").read_text())
    }
    ours = page(server)
    wanted = [name for name in recorded if name.startswith(("nv_inference_", "nv_cpu_"))]
    assert len(wanted) >= 10
    for name in wanted:
        assert name in ours, name
        assert (ours[name].type, ours[name].documentation) == (recorded[name].type, recorded[name].documentation)
        labels = [{frozenset(sample.labels) for sample in pages[name].samples} for pages in (recorded, ours)]
        assert labels[0] == labels[1], name


def test_metrics_count_what_happened(server):
    labels = {"model": "addsub", "version": "1"}
    names = ["nv_inference_request_success_total", "nv_inference_count_total", "nv_inference_exec_count_total"]
    names = [name if name in {s.name for f in page(server).values() for s in f.samples} else name[:-6] for name in names]
    before = [value(server, name, **labels) for name in names]
    run(server, times=4)
    after = [value(server, name, **labels) for name in names]
    assert [b - a for a, b in zip(before, after)] == [4, 8, 4]
    durations = [
        value(server, f"nv_inference_{part}_duration_us", **labels)
        for part in ("request", "queue", "compute_input", "compute_infer", "compute_output")
    ]
    assert durations[0] > 0 and durations[0] >= durations[3]


def test_a_request_that_fails_in_the_checks_is_counted(server):
    before = value(server, "trireme_refused_requests_total") + value(server, "nv_inference_request_failure")
    status, _ = server.request("POST", "/v2/models/addsub/infer", b"{}")
    assert status == 400
    after = value(server, "trireme_refused_requests_total") + value(server, "nv_inference_request_failure")
    assert after == before + 1


@pytest.mark.parametrize("method, path", [("GET", "/v2/nope"), ("GET", "/"), ("POST", "/v2/health/live/x"), ("GET", "/v3")])
def test_unknown_paths(server, method, path):
    assert server.request(method, path)[0] == 404


@pytest.mark.parametrize("method, path", [("DELETE", "/v2/models/addsub/infer"), ("PUT", "/v2/repository/index")])
def test_methods_that_a_path_does_not_have(server, method, path):
    assert server.request(method, path)[0] in (400, 404, 405)


@pytest.mark.parametrize(
    "method, path",
    [
        ("GET", "/v2/trace/setting"),
        ("GET", "/v2/logging"),
        ("GET", "/v2/systemsharedmemory/status"),
        ("GET", "/v2/cudasharedmemory/status"),
        ("POST", "/v2/models/addsub/generate"),
        ("POST", "/v2/models/addsub/generate_stream"),
        ("POST", "/v2/repository/models/addsub/load"),
        ("POST", "/v2/repository/models/addsub/unload"),
    ],
)
def test_every_route_of_triton_exists(server, method, path):
    """A part that is not built yet says so with 501, one that is switched off with 503; no route is unknown."""
    status, answer = server.request(method, path, b"{}" if method == "POST" else None)
    assert status != 404 and status in (200, 400, 501, 503), (status, answer)
    if status != 200:
        assert b"error" in answer


def test_grpc_health_service(server):
    """grpc.health.v1, as probes of Kubernetes use it."""
    import grpc as transport

    with transport.insecure_channel(server.grpc) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=10) == b"\x08\x01"


def test_the_log_names_the_addresses_and_the_models(server):
    log = server.log()
    assert re.search(rf"Started GRPCInferenceService at 127.0.0.1:{server.grpc_port}", log)
    assert re.search(rf"Started HTTPService at 127.0.0.1:{server.http_port}", log)
    assert re.search(rf"Started Metrics Service at 127.0.0.1:{server.metrics_port}", log)
    assert re.search(r"\| addsub +\| 1 +\| READY", log)


def test_stops_at_once_when_idle(tmp_path):
    """Under 0.1 s idle, with idle keep-alive connections open as well."""
    fixtures.echo(tmp_path, "echo", "FP32")
    server = Server(repository=tmp_path)
    idle = [socket.create_connection(("127.0.0.1", server.http_port)) for _ in range(3)]
    idle[0].sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
    assert idle[0].recv(1000).startswith(b"HTTP/1.1 200")
    client = grpc.InferenceServerClient(server.grpc)
    assert client.is_server_live()
    seconds = server.stop()
    assert server.process.returncode == 0
    assert seconds < 0.5, seconds
    for each in idle:
        each.close()
    client.close()


def test_finishes_what_is_in_flight_when_stopped(tmp_path):
    more = 'parameters { key: "execute_delay_ms" value: { string_value: "800" } }\n'
    fixtures.echo(tmp_path, "slow", "FP32", more=more)
    server = Server(repository=tmp_path)
    answers = []

    def ask() -> None:
        with tritonhttp.InferenceServerClient(server.http) as client:
            made = tritonhttp.InferInput("INPUT0", [1], "FP32")
            made.set_data_from_numpy(np.ones(1, np.float32))
            answers.append(client.infer("slow", [made]).as_numpy("OUTPUT0"))

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.3)
    seconds = server.stop()
    asking.join()
    assert len(answers) == 1 and 0.2 < seconds < 3 and server.process.returncode == 0


def test_a_port_in_use_is_named_with_the_flag_to_change(tmp_path):
    fixtures.echo(tmp_path, "echo", "FP32")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError) as failure:
            Server(f"--http-port={port}", repository=tmp_path)
    assert str(port) in str(failure.value) and "--http-port" in str(failure.value)


def test_grpc_reflection_lists_the_services(server):
    import grpc as transport
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with transport.insecure_channel(server.grpc) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= set(database.get_services())
        file = database.FindFileContainingSymbol("inference.GRPCInferenceService")
        assert "ModelInfer" in [method.name for service in file.service for method in service.method]
