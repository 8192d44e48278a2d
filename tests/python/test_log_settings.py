"""The logging extension: settings are read and changed while the server runs, and followed from the next line on."""

import json
import re

import fixtures
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from server import Server
from tritonclient.utils import InferenceServerException

START = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}


@pytest.fixture(scope="module")
def logging(tmp_path_factory):
    repository = tmp_path_factory.mktemp("logging")
    fixtures.echo(repository, "echo", "FP32")
    with Server("--model-control-mode=explicit", "--load-model=echo", repository=repository) as server:
        yield server


@pytest.fixture(autouse=True)
def as_started(logging):
    """Each test leaves the settings as they were."""
    yield
    with httpclient.InferenceServerClient(logging.http) as client:
        client.update_log_settings({k: v for k, v in START.items() if k != "log_file"})


def lines_of(server: Server, work) -> str:
    """What is logged while `work` runs."""
    before = len(server.log())
    work()
    return server.log()[before:]


def reload(server: Server):
    with httpclient.InferenceServerClient(server.http) as client:
        client.unload_model("echo")
        client.load_model("echo")


def test_settings_are_read_over_both_protocols(logging):
    with httpclient.InferenceServerClient(logging.http) as client:
        assert client.get_log_settings() == START
    with grpcclient.InferenceServerClient(logging.grpc) as client:
        shown = client.get_log_settings(as_json=True)["settings"]
    assert shown["log_format"] == {"string_param": "default"} and shown["log_info"] == {"bool_param": True}
    assert set(shown) == set(START)


def test_verbose_messages_come_and_go(logging):
    assert "loading 'echo'" not in lines_of(logging, lambda: reload(logging))
    with httpclient.InferenceServerClient(logging.http) as client:
        assert client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
    assert "echo" in lines_of(logging, lambda: reload(logging))
    with grpcclient.InferenceServerClient(logging.grpc) as client:
        client.update_log_settings({"log_verbose_level": 0})
    assert "loading 'echo'" not in lines_of(logging, lambda: reload(logging))


def test_the_format_changes_with_the_next_line(logging):
    with grpcclient.InferenceServerClient(logging.grpc) as client:
        client.update_log_settings({"log_format": "ISO8601", "log_verbose_level": 1})
    written = lines_of(logging, lambda: reload(logging)).splitlines()
    assert written and all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ [IWE] \d+ ", line) for line in written), written


def test_a_bad_value_changes_nothing(logging):
    bad = [
        ({"log_info": False, "log_format": "xml"}, 400, "log_format, got: xml"),
        ({"log_info": False, "colour": 1}, 400, "unknown log setting 'colour'"),
        ({"log_info": "no"}, 400, "boolean"),
        ({"log_verbose_level": -1}, 400, "unsigned-integer"),
        ({"log_file": "/tmp/other.log"}, 501, "can not be updated through network protocol"),
        ([], 400, "JSON object"),
    ]
    for body, status, says in bad:
        got, answer = logging.request("POST", "/v2/logging", json.dumps(body).encode())
        assert got == status and says in answer.decode(), (body, answer)
    with grpcclient.InferenceServerClient(logging.grpc) as client:
        with pytest.raises(InferenceServerException, match="invalid argument for log_format, got: xml"):
            client.update_log_settings({"log_format": "xml", "log_info": False})
    assert json.loads(logging.get("/v2/logging")[1]) == START
