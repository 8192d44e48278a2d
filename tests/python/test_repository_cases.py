"""The repository cases of public bug reports, one test a case; each server here has a repository of its own."""

import json
import os
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path

import fixtures
import numpy as np
import onnx
import pytest
import tritonclient.http as http
from server import ROOT, Server, binary
from wire import infer, tensor, values


def ask(server: Server, model: str = "good", version: str = "") -> list:
    """The answer of a copying model."""
    name = f"{model}/versions/{version}" if version else model
    status, answer = infer(server, name, {"inputs": [tensor("X", "FP32", [2], [1, 2])]})
    assert status == 200, answer
    return values(answer)


def good(repository: Path, name: str = "good", version: str = "1") -> Path:
    return fixtures.copy(repository, name, onnx.TensorProto.FLOAT, [2], version=version)


def index(server: Server) -> dict[tuple[str, str], str]:
    status, answer = server.request("POST", "/v2/repository/index")
    assert status == 200
    return {(entry["name"], entry.get("version", "")): entry.get("state", "") for entry in json.loads(answer)}


def test_repo_02_folders_that_are_no_versions(tmp_path):
    """REPO-02 (without polling)"""
    folder = good(tmp_path)
    for junk in ("model", "configs", "1_old", "v2", ".hidden"):
        (folder / junk).mkdir()
    (folder / "model" / "x").touch()
    with Server(repository=tmp_path) as server:
        assert ask(server) == [1, 2]
        assert index(server) == {("good", "1"): "READY"}
        log = server.log()
    assert not [line for line in log.splitlines() if line.startswith(("E", "W")) and "good" in line], log


def test_repo_03_junk_beside_the_models(tmp_path):
    """REPO-03: junk is skipped, an empty folder is named, the good model serves and the server stays."""
    good(tmp_path)
    for junk in (".ipynb_checkpoints", "lost+found", "empty", "__pycache__", ".git"):
        (tmp_path / junk).mkdir()
    for junk in (".DS_Store", "README.md"):
        (tmp_path / junk).touch()
    with Server(repository=tmp_path, wait="live") as server:
        assert ask(server) == [1, 2]
        names = {name for name, _ in index(server)}
        log = server.log()
    assert names <= {"good", "empty"} and "good" in names
    assert "empty" in log and "version" in log


def test_repo_05_extreme_version_numbers(tmp_path):
    """REPO-05"""
    versions = ["20201016", "202211070999", "9223372036854775807"]
    for version in [*versions, "-1", "9223372036854775808", "18446744073709551615"]:
        folder = good(tmp_path, version=version)
    fixtures.configure(folder, 'backend: "onnxruntime"\nversion_policy: { all { } }\n')
    with Server(repository=tmp_path) as server:
        assert index(server) == {("good", version): "READY" for version in versions}
        status, answer = server.get("/v2/models/good")
        assert status == 200 and json.loads(answer)["versions"] == versions
        for version in versions:
            assert ask(server, version=version) == [1, 2]
        status, answer = infer(server, "good", {"inputs": [tensor("X", "FP32", [2], [1, 2])]})
        assert (status, answer["model_version"]) == (200, versions[-1])


def test_repo_06_model_names_that_leave_the_repository(tmp_path):
    """REPO-06: refused, and nothing outside is read or written."""
    good(tmp_path / "models")
    good(tmp_path, "outside")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with Server("--model-control-mode=explicit", repository=tmp_path / "models") as server:
        for name in ("..%2Foutside", "..%2F..%2Fetc", "a%2Fb", ".", "..", "%2e%2e", "good%2F..%2F..%2Foutside", "%00"):
            for verb in ("load", "unload"):
                status, answer = server.request("POST", f"/v2/repository/models/{name}/{verb}", b"{}")
                assert status in (400, 404), (name, verb, status, answer)
        body = {"parameters": {"config": "{}", "file:../../x": "aGk="}}
        status, _ = server.request("POST", "/v2/repository/models/good/load", json.dumps(body).encode())
        assert status != 200
        assert {name for name, _ in index(server)} == {"good"}
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_repo_07_the_same_name_in_two_repositories(tmp_path):
    """REPO-07: the error names both paths, the other models load."""
    one, two = tmp_path / "one", tmp_path / "two"
    for repository in (one, two):
        good(repository, "add")
    good(one)
    with Server(f"--model-repository={two}", "--exit-on-error=false", repository=one, wait="live") as server:
        assert ask(server) == [1, 2]
        status, _ = infer(server, "add", {"inputs": [tensor("X", "FP32", [1], [1])]})
        assert status in (400, 404)
        log = server.log()
    assert str(one / "add") in log and str(two / "add") in log


def test_repo_08_a_read_only_repository_and_any_user():
    """REPO-08: nothing is written to the repository or to the home of the user."""
    # pytest's own folders are closed to other users.
    folder = Path(tempfile.mkdtemp(prefix="trireme-read-only-"))
    try:
        good(folder / "models")
        shutil.copy(binary(), folder / "trireme")
        library = Path(os.environ.get("TRIREME_ONNXRUNTIME", ROOT / ".trireme/onnxruntime/libonnxruntime.so"))
        shutil.copy(library, folder / "libonnxruntime.so")
        for path in [folder, *folder.rglob("*")]:
            mode = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH
            executable = path.is_dir() or path.name == "trireme"
            path.chmod(mode | (stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH if executable else 0))
        user = {"user": 12345, "group": 12345, "extra_groups": []} if os.geteuid() == 0 else {}
        environment = {"TRIREME_ONNXRUNTIME": str(folder / "libonnxruntime.so"), "PATH": "/usr/bin:/bin"}
        with Server(
            repository=folder / "models", program=folder / "trireme", environment=environment, popen=user
        ) as server:
            assert ask(server) == [1, 2]
    finally:
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755)
        shutil.rmtree(folder)


def test_repo_09_links_as_kubernetes_lays_them(tmp_path):
    """REPO-09 (without the swap): links are followed, `..` folders are no versions, dangling links do not matter."""
    elsewhere = good(tmp_path / "elsewhere", "model")
    models = tmp_path / "models"
    (models / "mapped" / "..2024_1").mkdir(parents=True)
    fixtures.configure(models / "mapped" / "..2024_1", 'backend: "onnxruntime"\nmax_batch_size: 0\n')
    (models / "mapped" / "..data").symlink_to("..2024_1")
    (models / "mapped" / "config.pbtxt").symlink_to("..data/config.pbtxt")
    (models / "mapped" / "1").symlink_to(elsewhere / "1")
    (models / "linked").symlink_to(elsewhere)
    (models / "file" / "1").mkdir(parents=True)
    (models / "file" / "1" / "model.onnx").symlink_to(elsewhere / "1" / "model.onnx")
    (models / "..data").symlink_to("mapped")
    (models / "dangling").symlink_to(tmp_path / "nowhere")
    (models / "loop").symlink_to("loop")
    with Server(repository=models, wait="live") as server:
        for name in ("mapped", "linked", "file"):
            assert ask(server, name) == [1, 2]
        assert {name for name, state in index(server).items() if state == "READY"} == {
            ("mapped", "1"),
            ("linked", "1"),
            ("file", "1"),
        }


@pytest.mark.parametrize("name", ["{repository}/good", "good/", "./good"])
def test_repo_15_loading_by_path_or_an_unknown_name(tmp_path, name):
    """REPO-15: the message says that a name is expected and which one was meant."""
    good(tmp_path)
    name = name.format(repository=tmp_path)
    command = [binary(), "serve", f"--model-repository={tmp_path}", "--model-control-mode=explicit"]
    command += [f"--load-model={name}", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    command += ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    output = done.stdout + done.stderr
    assert done.returncode != 0, output
    assert "'good'" in output and "model name" in output, output


def test_repo_15_loading_a_name_that_does_not_exist(tmp_path):
    """REPO-15: the message has the name and where it was looked for."""
    good(tmp_path)
    with pytest.raises(RuntimeError) as failure:
        Server("--model-control-mode=explicit", "--load-model=good2", repository=tmp_path)
    assert "good2" in str(failure.value) and str(tmp_path) in str(failure.value)


def test_a_repository_that_is_empty_explains_itself(tmp_path):
    with Server(repository=tmp_path) as server:
        assert index(server) == {}
        assert str(tmp_path) in server.log()


def test_a_model_that_fails_does_not_stop_the_others(tmp_path):
    good(tmp_path)
    broken = tmp_path / "broken" / "1"
    broken.mkdir(parents=True)
    (broken / "model.onnx").write_bytes(b"this is no model")
    with Server("--exit-on-error=false", "--strict-readiness=false", repository=tmp_path) as server:
        assert ask(server) == [1, 2]
        states = index(server)
        assert states[("good", "1")] == "READY" and states[("broken", "1")] == "UNAVAILABLE"
        log = server.log()
    assert str(broken / "model.onnx") in log, log


def test_a_failing_model_ends_the_start_by_default(tmp_path):
    good(tmp_path)
    broken = tmp_path / "broken" / "1"
    broken.mkdir(parents=True)
    (broken / "model.onnx").write_bytes(b"this is no model")
    with pytest.raises(RuntimeError, match="ended with") as failure:
        Server(repository=tmp_path)
    assert "broken" in str(failure.value)


def test_named_configurations(tmp_path):
    folder = good(tmp_path)
    (folder / "configs").mkdir()
    (folder / "configs" / "small.pbtxt").write_text('backend: "onnxruntime"\nversion_policy: { specific { versions: [ 1 ] } }\n')
    good(tmp_path, version="2")
    with Server("--model-config-name=small", repository=tmp_path) as server:
        assert index(server)[("good", "1")] == "READY"
        status, answer = infer(server, "good", {"inputs": [tensor("X", "FP32", [2], [1, 2])]})
        assert (status, answer["model_version"]) == (200, "1")


def test_a_single_file_needs_no_repository(tmp_path):
    model = good(tmp_path) / "1" / "model.onnx"
    shutil.copy(model, tmp_path / "copy.onnx")
    with Server(str(tmp_path / "copy.onnx"), f"second={model}") as server:
        assert ask(server, "copy") == [1, 2]
        assert ask(server, "second") == [1, 2]


def test_explicit_mode_loads_what_is_named(tmp_path):
    good(tmp_path)
    good(tmp_path, "other")
    with Server("--model-control-mode=explicit", "--load-model=good", repository=tmp_path) as server:
        assert ask(server) == [1, 2]
        assert infer(server, "other", {"inputs": [tensor("X", "FP32", [1], [1])]})[0] in (400, 404)


def test_two_instances_answer_at_once(tmp_path):
    fixtures.echo(
        tmp_path,
        "pair",
        "FP32",
        more='instance_group [ { kind: KIND_CPU count: 2 } ]\n'
        'parameters { key: "execute_delay_ms" value: { string_value: "400" } }\n',
    )
    with Server(repository=tmp_path) as server, http.InferenceServerClient(server.http, concurrency=2) as client:
        made = http.InferInput("INPUT0", [1], "FP32")
        made.set_data_from_numpy(np.ones(1, np.float32))
        begin = time.monotonic()
        handles = [client.async_infer("pair", [made]) for _ in range(2)]
        for handle in handles:
            handle.get_result()
        assert time.monotonic() - begin < 0.75
