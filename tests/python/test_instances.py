"""Instances: groups, host policies, threads of idle models, and settings that do nothing."""

import os
import subprocess
import threading
import time
from pathlib import Path

import fixtures
import pytest
from server import Server, binary
from wire import infer, tensor, values


def ask(server: Server, model: str) -> None:
    status, answer = infer(server, model, {"inputs": [tensor("INPUT0", "INT32", [2], [1, 2])]})
    assert status == 200 and values(answer) == [1, 2], answer


def test_500_idle_models_take_no_threads(tmp_path):
    models = [f"model_{number}" for number in range(500)]
    for name in models:
        fixtures.echo(tmp_path, name, "INT32")
    with Server(repository=tmp_path) as server:
        for name in models:
            ask(server, name)
        threads = len(os.listdir(f"/proc/{server.process.pid}/task"))
    assert threads <= 50, threads


def test_groups_run_side_by_side_and_passive_ones_get_nothing(tmp_path):
    delay = 'parameters { key: "execute_delay_ms" value { string_value: "200" } }\n'
    cpu, model = "{ kind: KIND_CPU count: 2 }", "{ kind: KIND_MODEL count: 1 }"
    passive = "{ kind: KIND_CPU count: 8 passive: true }"
    fixtures.echo(tmp_path, "groups", "INT32", more=f"instance_group [ {cpu}, {passive}, {model} ]\n" + delay)
    with Server(repository=tmp_path) as server:

        def together(count: int) -> float:
            threads = [threading.Thread(target=ask, args=(server, "groups")) for _ in range(count)]
            begin = time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return time.monotonic() - begin

        assert together(3) < 0.39, "three instances"
        assert together(4) >= 0.4, "and not one more"


def test_a_model_that_could_never_run_is_refused(tmp_path):
    fixtures.echo(tmp_path, "m", "INT32", more="instance_group [ { kind: KIND_CPU passive: true } ]\n")
    code, output = check(tmp_path)
    assert code == 1 and "every instance group of model m is passive, so no request could ever run" in output


def bound_threads(server: Server) -> set[str]:
    """The core lists of the server's threads that are not those of the process."""
    folder = Path(f"/proc/{server.process.pid}/task")
    found = set()
    for task in folder.iterdir():
        try:
            status = (task / "status").read_text()
        except OSError:  # it ended
            continue
        found.add(next(line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list:")))
    return found


def test_an_execution_under_a_host_policy_is_bound_to_its_cores(tmp_path):
    core = min(os.sched_getaffinity(0))
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core: every thread is bound to it")
    delay = 'parameters { key: "execute_delay_ms" value { string_value: "500" } }\n'
    own = 'instance_group [ { kind: KIND_CPU count: 1 host_policy: "own" } ]\n'
    fixtures.echo(tmp_path, "bound", "INT32", more=own + delay)
    fixtures.echo(tmp_path, "free", "INT32", more=delay)
    with Server(f"--host-policy=own,cpu-cores={core}", repository=tmp_path) as server:
        before = bound_threads(server)
        assert str(core) not in before
        for model, seen in (("free", before), ("bound", before | {str(core)})):
            asking = threading.Thread(target=ask, args=(server, model))
            asking.start()
            time.sleep(0.2)
            during = bound_threads(server)
            asking.join()
            assert during == seen, model
        assert bound_threads(server) == before, "the thread is free again"


def test_threads_of_an_engine_stay_on_the_cores_of_its_policy(tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core: every thread is bound to it")
    fixtures.mlp(tmp_path, config='backend: "onnxruntime"\nmax_batch_size: 8\n' + THREADS)
    with Server(f"--host-policy=cpu,cpu-cores={cores[0]}", repository=tmp_path) as server:
        threads = [task for task in bound_threads(server) if task == str(cores[0])]
        assert threads, bound_threads(server)


THREADS = 'parameters { key: "intra_op_thread_count" value { string_value: "3" } }\n'


def test_policies_that_are_not_defined_are_told(tmp_path):
    fixtures.echo(tmp_path, "m", "INT32", more='instance_group [ { kind: KIND_CPU host_policy: "absent" } ]\n')
    with Server(repository=tmp_path) as server:
        ask(server, "m")
        assert "names the host_policy 'absent', which no --host-policy defines" in server.log()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("cpu", "--host-policy expects NAME,numa-node=N or NAME,cpu-cores=FIRST-LAST, got 'cpu'"),
        ("cpu,cores=1", "a policy has numa-node or cpu-cores, got 'cores'"),
        ("cpu,numa-node=x", "numa-node expects a whole number of at least 0, got 'x'"),
        ("cpu,cpu-cores=3-1", "cpu-cores expects cores as 0-3 or 0-3,8-11, got '3-1'"),
        ("cpu,cpu-cores=900", "core 900 does not exist or is not allowed for this process"),
        ("cpu,numa-node=900", "numa-node=900: there is no such node"),
    ],
)
def test_policies_that_make_no_sense_are_refused(tmp_path, value, message):
    fixtures.echo(tmp_path, "m", "INT32")
    with pytest.raises(RuntimeError, match="the server ended with 1") as error:
        Server(f"--host-policy={value}", repository=tmp_path)
    assert message in str(error.value)


def check(repository: Path) -> tuple[int, str]:
    done = subprocess.run([binary(), "check", repository], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


ONE = "instance_group [ { kind: KIND_CPU count: 1 } ]"


@pytest.mark.parametrize(
    ("batch", "more", "message"),
    [
        (0, "dynamic_batching { }", "max_batch_size is 0, so no two requests are ever batched"),
        (1, "dynamic_batching { }", "max_batch_size is 1, so no two requests are ever batched"),
        (8, "dynamic_batching { preferred_batch_size: 4 }", "does nothing without max_queue_delay_microseconds"),
        (
            8,
            "dynamic_batching { preferred_batch_size: [ 1, 8 ] max_queue_delay_microseconds: 100 }",
            "1 is a preferred_batch_size, so a request that is alone runs at once",
        ),
        (8, "dynamic_batching { preserve_ordering: true } " + ONE, "its only instance answers in order anyway"),
        (
            8,
            "dynamic_batching { priority_queue_policy { key: 1 value { max_queue_size: 3 } } }",
            "priority_queue_policy of model 'm' does nothing without priority_levels",
        ),
        (
            8,
            "dynamic_batching { default_priority_level: 1 }",
            "default_priority_level of model 'm' does nothing without priority_levels",
        ),
        (
            8,
            "dynamic_batching { priority_levels: 1 default_priority_level: 1 }",
            "every request is on the same level",
        ),
        (
            8,
            "dynamic_batching { default_queue_policy { timeout_action: DELAY } }",
            "timeout_action DELAY in default_queue_policy of model 'm' does nothing",
        ),
        (8, "instance_group [ { kind: KIND_CPU secondary_devices { } } ]", "secondary_devices of instance group m"),
    ],
)
def test_settings_that_do_nothing_are_told(tmp_path, batch, more, message):
    fixtures.echo(tmp_path, "m", "FP32", batch=batch, more=more + "\n")
    code, output = check(tmp_path)
    assert code == 0 and "1 warning" in output and message in output, output
    with Server(repository=tmp_path) as server:
        assert message in server.log()


def test_more_instances_than_cores_are_told_where_the_engine_computes(tmp_path):
    many = "instance_group [ { kind: KIND_CPU count: 500 } ]\n"
    fixtures.mlp(tmp_path, config='backend: "onnxruntime"\nmax_batch_size: 8\n' + many)
    code, output = check(tmp_path)
    cores = len(os.sched_getaffinity(0))
    assert code == 0 and f"has 500 instances for {cores} core(s)" in output, output
    # A backend that only waits may have as many as it likes.
    waits = fixtures.echo(tmp_path / "other", "m", "FP32", more=many).parent
    assert "0 warnings" in check(waits)[1]
