"""Histograms and summaries of latencies on the metrics page, as `--metrics-config` asks for them."""

import math
import queue
import time

import fixtures
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from prometheus_client.parser import text_string_to_metric_families
from server import Server

EXECUTE_MS = 40
SUMMARIES = [f"nv_inference_{part}_summary_us" for part in ("request", "queue", "compute_input", "compute_infer", "compute_output")]
HISTOGRAM = "nv_inference_first_response_histogram_ms"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latencies")
    delay = f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{EXECUTE_MS}" }} }}\n'
    buckets = (
        f'model_metrics {{ metric_control {{ metric_identifier {{ family: "{HISTOGRAM}" }} '
        "histogram_options { buckets: [ 20, 2000.5 ] } } }\n"
    )
    fixtures.echo(folder, "slow", "FP32", dims="[ 1 ]", more=delay + buckets)
    fixtures.echo(folder, "cached", "FP32", dims="[ 1 ]", more="response_cache { enable: true }\n")
    fixtures.repeat(folder)
    return folder


@pytest.fixture(scope="module")
def server(repository):
    config = ("histogram_latencies=true", "summary_latencies=true", "summary_quantiles=0.5:0.05,0.9:0.01")
    flags = [f"--metrics-config={one}" for one in config]
    with Server(*flags, "--cache-config=local,size=1048576", repository=repository) as running:
        yield running


def page(server: Server) -> dict:
    return {family.name: family for family in text_string_to_metric_families(server.metrics_page())}


def values(family, model: str) -> dict[str, float]:
    """Values of a model by what distinguishes them: the suffix of the name, the quantile, the bound."""
    found = {}
    for sample in family.samples:
        if sample.labels["model"] == model:
            key = sample.labels.get("quantile") or sample.labels.get("le") or sample.name.removeprefix(family.name)
            found[key] = sample.value
    return found


def ask(server: Server, model: str, times: int = 1) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        given = httpclient.InferInput("INPUT0", [1], "FP32")
        given.set_data_from_numpy(np.ones(1, np.float32))
        for _ in range(times):
            client.infer(model, [given])


def test_without_the_flag_there_are_none(repository):
    with Server(repository=repository) as server:
        ask(server, "slow")
        assert not [name for name in page(server) if "summary" in name or "histogram" in name]


def test_summaries_have_the_quantiles_that_were_asked_for(server):
    before = page(server)
    assert all(math.isnan(values(before[name], "repeat")["0.5"]) for name in SUMMARIES)
    ask(server, "slow", times=3)
    after = page(server)
    for name in SUMMARIES:
        assert after[name].type == "summary"
        seen = values(after[name], "slow")
        assert set(seen) == {"_count", "_sum", "0.5", "0.9"}, seen
        assert seen["_count"] - values(before[name], "slow")["_count"] == 3
    delay = EXECUTE_MS * 1000
    for name in ("nv_inference_request_summary_us", "nv_inference_compute_infer_summary_us"):
        seen = values(after[name], "slow")
        assert delay <= seen["0.5"] <= seen["0.9"] < 50 * delay
        assert 3 * delay <= seen["_sum"] < 150 * delay
    assert values(after["nv_inference_compute_input_summary_us"], "slow")["0.5"] < delay


def test_a_cache_has_summaries_of_its_own(server):
    ask(server, "cached", times=5)
    after = page(server)
    counts = {name: values(after[name], "cached").get("_count") for name in (*SUMMARIES, "nv_cache_hit_summary_per_model")}
    assert list(counts.values()) == [5, 5, 1, 1, 1, 4], counts
    assert values(after["nv_cache_miss_summary_per_model"], "cached")["_count"] == 1
    assert values(after["nv_cache_hit_summary_per_model"], "slow") == {}
    assert values(after[HISTOGRAM], "cached")["_count"] == 5


def test_the_histogram_has_the_bounds_of_the_configuration(server):
    before = values(page(server)[HISTOGRAM], "slow")
    ask(server, "slow", times=2)
    after = page(server)
    assert after[HISTOGRAM].type == "histogram"
    seen = values(after[HISTOGRAM], "slow")
    assert set(seen) == {"20", "2000.5", "+Inf", "_count", "_sum"}
    assert (seen["20"], seen["+Inf"] - before["+Inf"], seen["_count"]) == (0, 2, seen["+Inf"])
    assert seen["_sum"] - before["_sum"] >= 2 * EXECUTE_MS
    assert set(values(after[HISTOGRAM], "repeat")) == {"100", "500", "2000", "5000", "+Inf", "_count", "_sum"}


def test_the_first_response_of_a_decoupled_request_counts(server):
    results: queue.Queue = queue.Queue()
    made = [grpcclient.InferInput(name, [2], kind) for name, kind in (("IN", "INT32"), ("DELAY", "UINT32"))]
    made[0].set_data_from_numpy(np.arange(2, dtype=np.int32))
    made[1].set_data_from_numpy(np.array([1, 600], np.uint32))
    before = values(page(server)[HISTOGRAM], "repeat")
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback=lambda result, error: results.put(error))
        client.async_stream_infer("repeat", made)
        assert [results.get(timeout=10), results.get(timeout=10)] == [None, None]
        client.stop_stream()
    after = values(page(server)[HISTOGRAM], "repeat")
    assert after["_count"] - before["_count"] == 1
    assert after["500"] - before["500"] == 1, "the second response took longer, and does not count"
    # The request itself is counted when it has ended.
    deadline = time.monotonic() + 5
    while values(page(server)["nv_inference_request_summary_us"], "repeat")["_count"] < 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert values(page(server)["nv_inference_request_summary_us"], "repeat")["0.5"] >= 600_000
