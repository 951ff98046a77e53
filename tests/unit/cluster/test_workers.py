"""Waiting for actors on a real Ray: the process at fault is named, whatever arrives first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_rl.cluster import workers
from lora_rl.cluster.local import ray_session
from lora_rl.cluster.workers import Worker, WorkerError, wait

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.e2e


class Toy:
    """An actor that works, fails, hangs or dies when told to."""

    def __init__(self, log: str) -> None:
        Path(log).write_text("first line\nlast words of this process\n")

    def ping(self) -> bool:
        return True

    def pid(self) -> int:
        return os.getpid()

    def add(self, a: int, b: int) -> int:
        return a + b

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "rested"

    def fail(self, after: float = 0.0) -> None:
        time.sleep(after)
        raise ValueError("the answer is not 42")

    def die(self, after: float = 0.0) -> None:
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def start(start_worker: Callable[..., Worker], tmp_path: Path) -> Callable[[str], Worker]:
    return lambda name: start_worker(name, Toy, str(tmp_path / f"{name}.log"))


def test_results_come_in_order_of_the_calls(start: Callable[[str], Worker]) -> None:
    slow, quick = start("slow"), start("quick")
    done = []
    calls = [slow.call("sleep", 0.5), quick.call("add", 1, b=2), quick.call("add", 3, 4)]
    assert wait(calls, timeout_s=30, doing="adding", on_done=lambda w: done.append(w.name)) == ["rested", 3, 7]
    assert sorted(done) == ["quick", "quick", "slow"]
    assert done[-1] == "slow"
    assert wait([], timeout_s=1, doing="nothing") == []


def test_a_call_that_raises_names_worker_cause_and_log(
    start: Callable[[str], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_ROOT_CAUSE_SECONDS", 1.0)
    good, bad = start("rank 0"), start("rank 1")
    begin = time.monotonic()
    with pytest.raises(WorkerError) as error:
        wait([good.call("sleep", 60), bad.call("fail")], timeout_s=60, doing="training")
    message = str(error.value)
    assert message.startswith("training: rank 1 failed: ValueError: the answer is not 42")
    assert str(bad.log) in message
    assert time.monotonic() - begin < 20


def test_a_killed_process_is_named_with_the_end_of_its_log(start: Callable[[str], Worker]) -> None:
    alive, dead = start("rank 0"), start("rank 1")
    pid = wait([dead.call("pid")], timeout_s=60, doing="asking")[0]
    calls = [alive.call("sleep", 60), dead.call("sleep", 60)]
    os.kill(pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=r"^training: rank 1 died\.") as error:
        wait(calls, timeout_s=60, doing="training")
    assert "last words of this process" in str(error.value)
    assert time.monotonic() - begin < 20


def test_a_death_explains_the_errors_of_its_peers(start: Callable[[str], Worker]) -> None:
    """When a rank dies, the collectives of the others fail, often before the death itself is known."""
    peer, dead = start("rank 0"), start("rank 1")
    wait([w.call("ping") for w in (peer, dead)], timeout_s=60, doing="starting")
    with pytest.raises(WorkerError, match="rank 1 died"):
        wait([peer.call("fail"), dead.call("die", after=1.5)], timeout_s=60, doing="training")


def test_a_timeout_names_who_is_hung_and_nobody_else(start: Callable[[str], Worker]) -> None:
    quick, hung = start("engine 0"), start("engine 1")
    wait([w.call("ping") for w in (quick, hung)], timeout_s=60, doing="starting")
    begin = time.monotonic()
    with pytest.raises(WorkerError) as error:
        wait([quick.call("add", 1, 1), hung.call("sleep", 60)], timeout_s=2, doing="generating")
    assert str(error.value).startswith("generating: no answer from engine 1 within 2 s.")
    assert "engine 0" not in str(error.value).splitlines()[0]
    assert 1.5 < time.monotonic() - begin < 10


def test_watched_processes_must_stay_alive(start: Callable[[str], Worker]) -> None:
    busy, watched = start("rank 0"), start("engine 0")
    assert wait([busy.call("add", 2, 2)], timeout_s=60, doing="training", watch=[watched]) == [4]
    watched.call("die")
    with pytest.raises(WorkerError, match="engine 0 died"):
        wait([busy.call("sleep", 60)], timeout_s=60, doing="training", watch=[watched])


def test_the_cluster_has_the_asked_for_cpus(local_ray: None) -> None:
    import ray

    assert ray.cluster_resources()["CPU"] == 4


UNDER_UV = """
import ray
from pathlib import Path
from lora_rl.cluster.local import ray_session

with ray_session(address=None, num_cpus=1, num_gpus=0, log_file=Path("ray.log")):
    # Ray would add the working directory, and how `uv` starts Python in it.
    print("environment of workers:", ray.get_runtime_context().get_runtime_env_string())
"""


def test_workers_use_the_same_environment_under_uv_wherever_ray_was_imported(tmp_path: Path) -> None:
    uv = ["uv", "run", "--directory", str(tmp_path), "--no-sync", "--active", "--no-project", "python", "-c", UNDER_UV]
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix}
    done = subprocess.run(uv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert "environment of workers: {}\n" in done.stdout, done


@pytest.mark.xfail(reason="Ray replaces a loopback _node_ip_address by the host's own address", strict=True)
def test_a_started_ray_listens_on_loopback_only(local_ray: None) -> None:
    import ray

    [node] = ray.nodes()
    assert node["NodeManagerAddress"] == "127.0.0.1"


@pytest.mark.parametrize("message", ["The current node timed out during startup.", "no space left"])
def test_a_start_that_timed_out_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, message: str
) -> None:
    import ray

    starts = []

    def init(**options: object) -> None:
        starts.append(options)
        raise RuntimeError(message)

    monkeypatch.setattr(ray, "init", init)
    with (
        pytest.raises(RuntimeError, match=message),
        ray_session(address=None, num_cpus=1, num_gpus=0, log_file=tmp_path / "ray.log"),
    ):
        raise AssertionError("there is no Ray")
    assert len(starts) == (2 if "timed out" in message else 1)
    assert all(options == starts[0] for options in starts)
