"""The rate limiter: instances of all models share resources."""

import json
import threading
import time

import fixtures
import pytest
from server import Server
from wire import infer, tensor


def group(name: str, *, count: int = 1, resource: str = "R", needs: int = 1, priority: int = 1, more: str = "") -> str:
    limiter = f'rate_limiter {{ resources [ {{ name: "{resource}" global: true count: {needs} }} ] priority: {priority} }}'
    return f'{{ name: "{name}" kind: KIND_CPU count: {count} {limiter} {more} }}'


def lay(repository, name: str, *groups: str, milliseconds: int = 20) -> None:
    delay = f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{milliseconds}" }} }}\n'
    fixtures.echo(repository, name, "INT32", dims="[ 1 ]", more=f"instance_group [ {', '.join(groups)} ]\n" + delay)


def ask(server: Server, model: str) -> float:
    """When the answer came."""
    status, answer = infer(server, model, {"inputs": [tensor("INPUT0", "INT32", [1], [7])]})
    assert status == 200 and answer["outputs"][0]["data"] == [7], answer
    return time.monotonic()


def at_once(server: Server, models: list[str]) -> float:
    """Asks all of them side by side; how long it took until the last answer."""
    answered: list[float] = []
    threads = [threading.Thread(target=lambda model=model: answered.append(ask(server, model))) for model in models]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answered) == len(models)
    return max(answered) - begin


def count(server: Server, model: str) -> int:
    status, body = server.get(f"/v2/models/{model}/stats")
    assert status == 200
    return json.loads(body)["model_stats"][0]["inference_count"]


LIMIT = "--rate-limit=execution_count"


def test_models_that_share_a_resource_take_turns(tmp_path):
    for name in ("a", "b", "c"):
        lay(tmp_path, name, group(name), milliseconds=200)
    models = ["a", "b", "c"]
    with Server(repository=tmp_path) as server:
        assert at_once(server, models) < 0.45, "off, as by default"
    with Server(LIMIT, repository=tmp_path) as server:
        assert at_once(server, models) >= 0.6
    with Server(LIMIT, "--rate-limit-resource=R:3", repository=tmp_path) as server:
        assert at_once(server, models) < 0.45, "there are three, for one each"
    with Server(LIMIT, "--rate-limit-resource=R:2", repository=tmp_path) as server:
        assert 0.4 <= at_once(server, models) < 0.59, "two at once, then the third"


def test_instances_of_one_model_and_groups_without_limits(tmp_path):
    free = '{ name: "free" kind: KIND_CPU count: 1 }'
    lay(tmp_path, "own", group("tight", count=3), milliseconds=200)
    lay(tmp_path, "mixed", group("tight", count=2), free, milliseconds=200)
    with Server(LIMIT, repository=tmp_path) as server:
        assert at_once(server, ["own"] * 3) >= 0.6, "three instances, one of which may run"
        assert at_once(server, ["mixed"] * 2) < 0.39, "the group without limits always may"


def test_turns_follow_the_priorities(tmp_path):
    lay(tmp_path, "first", group("f", priority=1), milliseconds=5)
    lay(tmp_path, "second", group("s", priority=3), milliseconds=5)
    with Server(LIMIT, repository=tmp_path) as server:
        stop = threading.Event()

        def keep_busy(model: str) -> None:
            while not stop.is_set():
                ask(server, model)

        # Two clients each, so that a request always waits.
        threads = [threading.Thread(target=keep_busy, args=(model,)) for model in ("first", "second") * 2]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        before = count(server, "first"), count(server, "second")
        time.sleep(3)
        after = count(server, "first"), count(server, "second")
        stop.set()
        for thread in threads:
            thread.join()
        first, second = (b - a for a, b in zip(before, after))
        assert second >= 30, "nobody is shut out"
        assert 2 <= first / second <= 4, (first, second)


def test_a_large_need_is_served_beside_many_small_ones(tmp_path):
    lay(tmp_path, "large", group("l", needs=3), milliseconds=10)
    lay(tmp_path, "small", group("s", count=3), milliseconds=10)
    with Server(LIMIT, repository=tmp_path) as server:
        stop = threading.Event()

        def keep_busy() -> None:
            while not stop.is_set():
                ask(server, "small")

        threads = [threading.Thread(target=keep_busy) for _ in range(6)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        for _ in range(5):
            begin = time.monotonic()
            assert ask(server, "large") - begin < 2
        stop.set()
        for thread in threads:
            thread.join()


def test_a_resource_that_is_too_small_fails_the_load_with_tritons_words(tmp_path):
    lay(tmp_path, "needy", group("n", needs=4))
    lay(tmp_path, "modest", group("m", needs=1))
    arguments = (LIMIT, "--rate-limit-resource=R:2", "--exit-on-error=false")
    with Server(*arguments, repository=tmp_path, wait="live") as server:
        ask(server, "modest")
        assert (
            'Resource count for "R" is limited to 2 which will prevent scheduling of one or more model instances, the '
            "minimum required count is 4"
        ) in server.log()


def test_unloading_gives_the_resources_back(tmp_path):
    lay(tmp_path, "a", group("a"), milliseconds=100)
    lay(tmp_path, "b", group("b"), milliseconds=100)
    with Server(LIMIT, "--model-control-mode=explicit", "--load-model=*", repository=tmp_path) as server:
        for _ in range(3):
            at_once(server, ["a", "b", "a"])
            assert server.request("POST", "/v2/repository/models/a/unload")[0] == 200
            ask(server, "b")
            assert server.request("POST", "/v2/repository/models/a/load")[0] == 200
        at_once(server, ["a", "b"])


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--rate-limit=sometimes", "--rate-limit expects execution_count or off, got 'sometimes'"),
        ("--rate-limit-resource=R", "--rate-limit-resource expects NAME:COUNT or NAME:COUNT:DEVICE, got 'R'"),
        ("--rate-limit-resource=R:many", "COUNT must be a whole number"),
        ("--rate-limit-resource=R:1:-2", "DEVICE must be a whole number of at least 0, got '-2'"),
    ],
)
def test_flags_that_make_no_sense_are_refused(tmp_path, flag, message):
    with pytest.raises(RuntimeError, match="the server ended with 1") as error:
        Server(flag, repository=tmp_path)
    assert message in str(error.value)
