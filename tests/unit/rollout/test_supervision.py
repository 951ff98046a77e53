"""Engines that die, hang, break or refuse: real Ray actors around an engine without a model."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait as futures_wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lora_rl.cluster.workers import Worker, WorkerError, wait
from lora_rl.rollout.pool import EnginePool, Supervision
from lora_rl.rollout.seats import JobRefused, Seat, SeatState
from lora_rl.rollout.types import GenerationRequest, SamplingSettings
from lora_rl.sync.manifest import Manifest, Transfer
from tests.support.talking import BREAKS, HANGS, IS_REFUSED, KILLS, TalkingActor

pytestmark = pytest.mark.e2e
SAMPLING = SamplingSettings(max_tokens=2)


@dataclass
class Fleet:
    """A pool, the processes it started, and what it told the user."""

    pool: EnginePool
    launched: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def push(self, version: int) -> None:
        with self.pool.pushing():
            self.pool.load(Manifest(version, ()))

    def processes(self) -> list[int]:
        return [pid for _, pid in self.pool.ask("process", doing="asking")]


@pytest.fixture
def new_fleet(local_ray: None, tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """`new_fleet(engines, **supervision)`: engines that hold weight version 1."""
    import ray

    fleets, started = [], []

    def launch(index: int, step_s: float, build_s: float = 0.0) -> Worker:
        log = tmp_path / f"engine_{index}.log"
        actor = ray.remote(TalkingActor).options(num_cpus=0, max_restarts=0, max_concurrency=64)
        started.append(Worker(f"engine {index}", actor.remote(str(log), step_s, build_s), log))
        return started[-1]

    def new(
        engines: int,
        *,
        step_s: float = 0.0,
        rebuild_s: float = 0.0,
        timeout_s: float = 60,
        restarts: bool = True,
        **limits: Any,
    ) -> Fleet:
        fleet = Fleet(None)

        def relaunch(index: int) -> Worker:
            fleet.launched.append(index)
            return launch(index, step_s, rebuild_s if len(fleet.launched) == 1 else 0.0)

        workers = [launch(n, step_s) for n in range(engines)]
        wait([w.call("build") for w in workers], timeout_s=60, doing="building")
        options = {"heartbeat_s": 60.0, "startup_s": 60.0, **limits}
        supervision = Supervision(relaunch if restarts else None, warn=fleet.warnings.append, **options)
        fleet.pool = EnginePool(workers, timeout_s=timeout_s, supervision=supervision)
        payload = ray.put(__import__("numpy").zeros(1, "uint8"))
        host = ray.get_runtime_context().get_node_id()
        path = tmp_path / "buffer"
        path.write_bytes(b"x")
        fleet.pool.open_transfer(Transfer(str(path), 1, ()), host, "auto", lambda: payload)
        fleet.push(1)
        fleets.append(fleet)
        return fleet

    yield new
    for fleet in fleets:
        fleet.pool.close()
    for worker in started:
        ray.kill(worker.handle)


def jobs(count: int, samples: int = 2, first: int = 5) -> list[list[GenerationRequest]]:
    return [[GenerationRequest((first, n), seed=10 * n + s) for s in range(samples)] for n in range(count)]


def check_answers(answers: list[Any]) -> None:
    for n, completions in enumerate(answers):
        assert [c.token_ids[0] for c in completions] == [(10 * n + s) % 100 for s in range(len(completions))]


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


def test_jobs_are_spread_and_answered_in_order(new_fleet: Callable[..., Fleet]) -> None:
    fleet = new_fleet(2)
    answers = fleet.pool.generate(jobs(20), SAMPLING)
    assert len(answers) == 20
    check_answers(answers)
    assert all(c.weight_version == 1 for group in answers for c in group)
    assert fleet.warnings == []


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_lost_engine_is_replaced_and_its_jobs_are_done_once(new_fleet: Callable[..., Fleet], how: str) -> None:
    fleet = new_fleet(2, step_s=0.2, heartbeat_s=2.0)
    victim = fleet.processes()[0]
    futures = fleet.pool.submit(jobs(12), SAMPLING)
    os.kill(victim, getattr(signal, how))
    _, left = futures_wait(futures, timeout=60)
    assert not left
    check_answers([f.result() for f in futures])
    until(lambda: all(s.state is SeatState.SERVING for s in fleet.pool.seats))
    assert fleet.launched == [0]
    assert fleet.pool.restarts == 1
    [warning] = fleet.warnings
    assert warning.startswith("engine 0 died" if how == "SIGKILL" else "engine 0 gave no sign of life")
    assert victim not in fleet.processes()


def test_a_replaced_engine_serves_the_current_version_from_its_first_request(new_fleet: Callable[..., Fleet]) -> None:
    fleet = new_fleet(1)
    for version in (2, 3):
        fleet.push(version)
    os.kill(fleet.processes()[0], signal.SIGKILL)
    # Nothing else runs: every one of these goes to the new process.
    answers = fleet.pool.generate(jobs(5), SAMPLING)
    assert {c.weight_version for group in answers for c in group} == {3}
    fleet.push(4)
    assert {c.weight_version for g in fleet.pool.generate(jobs(2), SAMPLING) for c in g} == {4}


def test_a_push_meets_an_engine_that_is_dead_or_on_its_way(new_fleet: Callable[..., Fleet]) -> None:
    fleet = new_fleet(2)
    fleet.pool.generate(jobs(2), SAMPLING)
    for version in range(2, 8):
        for pid in fleet.processes()[:1]:
            os.kill(pid, signal.SIGKILL)
        fleet.push(version)
        answers = fleet.pool.generate(jobs(6), SAMPLING)
        check_answers(answers)
        assert {c.weight_version for group in answers for c in group} == {version}
    until(lambda: all(s.state is SeatState.SERVING for s in fleet.pool.seats))
    assert [v for _, [[v]] in fleet.pool.score([(1, 2)])] == [-7.0, -7.0]


def test_all_engines_may_be_gone_at_once(new_fleet: Callable[..., Fleet]) -> None:
    fleet = new_fleet(2, step_s=0.1)
    futures = fleet.pool.submit(jobs(6), SAMPLING)
    for pid in fleet.processes():
        os.kill(pid, signal.SIGKILL)
    fleet.push(2)
    futures_wait(futures, timeout=60)
    check_answers([f.result() for f in futures])
    assert {c.weight_version for f in futures for c in f.result()} == {2}


def test_a_new_process_that_hangs_while_it_starts_is_noticed(new_fleet: Callable[..., Fleet]) -> None:
    """Its start would take forever; while it lives it answers, so that a slow start is not taken for a hung one."""
    fleet = new_fleet(1, heartbeat_s=2.0, rebuild_s=3600)
    fleet.pool.generate(jobs(1), SAMPLING)
    os.kill(fleet.processes()[0], signal.SIGKILL)
    until(lambda: fleet.pool.seats[0].is_up)
    time.sleep(3)
    assert fleet.launched == [0]
    [starting] = wait([fleet.pool.seats[0].worker.call("process")], timeout_s=30, doing="asking")
    os.kill(starting, signal.SIGSTOP)
    check_answers(fleet.pool.generate(jobs(3), SAMPLING))
    assert fleet.launched == [0, 0]
    assert fleet.warnings[-1].startswith("engine 0 gave no sign of life")


def test_a_step_that_never_ends_is_noticed(new_fleet: Callable[..., Fleet]) -> None:
    fleet = new_fleet(2, heartbeat_s=1.0, max_attempts=1)
    [hung] = fleet.pool.submit(jobs(1, first=HANGS), SAMPLING)
    assert "has been in one step for" in str(hung.exception(timeout=30))
    check_answers(fleet.pool.generate(jobs(6), SAMPLING))


@pytest.mark.parametrize("trouble", [KILLS, BREAKS])
def test_a_prompt_that_engines_fail_over_is_given_up_and_the_others_are_not(
    new_fleet: Callable[..., Fleet], trouble: int
) -> None:
    fleet = new_fleet(2, max_attempts=2)
    [poisoned] = fleet.pool.submit(jobs(1, first=trouble), SAMPLING)
    with pytest.raises(
        JobRefused, match=r"2 engines were lost over it; the last: engine \d (died|failed: RuntimeError)"
    ):
        poisoned.result(timeout=60)
    check_answers(fleet.pool.generate(jobs(6), SAMPLING))


def test_a_refused_job_costs_no_engine(new_fleet: Callable[..., Fleet]) -> None:
    fleet = new_fleet(1)
    good, bad = jobs(1), jobs(1, first=IS_REFUSED)
    [answer, refusal] = fleet.pool.generate([*good, *bad], SAMPLING)
    check_answers([answer])
    assert isinstance(refusal, JobRefused)
    assert str(refusal) == "ValueError: the prompt is too long"
    assert fleet.warnings == []


def test_when_every_engine_is_given_up_the_run_ends_and_says_why(new_fleet: Callable[..., Fleet]) -> None:
    fleet = new_fleet(1, max_restarts=1, max_attempts=100)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"engine 0 died\.\nThe end of .*engine_0\.log"):
        fleet.pool.generate(jobs(3, first=KILLS), SAMPLING)
    assert time.monotonic() - start < 45
    assert fleet.launched == [0]
    with pytest.raises(WorkerError, match="engine 0 died"):
        fleet.pool.generate(jobs(1), SAMPLING)


def test_an_engine_whose_node_is_gone_is_not_waited_for(new_fleet: Callable[..., Fleet]) -> None:
    there = {0, 1}
    fleet = new_fleet(2, has_place=lambda index: index in there)
    there.remove(0)
    os.kill(fleet.processes()[0], signal.SIGKILL)
    check_answers(fleet.pool.generate(jobs(6), SAMPLING))
    until(lambda: fleet.pool.seats[0].state is SeatState.LOST)
    assert fleet.launched == []
    # Gone while the other one is being started.
    os.kill(fleet.processes()[0], signal.SIGKILL)
    until(lambda: fleet.pool.seats[1].state is SeatState.STARTING)
    there.remove(1)
    with pytest.raises(WorkerError, match="engine 1 has no node any more"):
        fleet.pool.generate(jobs(1), SAMPLING)


def test_without_restarts_the_first_loss_ends_the_run(new_fleet: Callable[..., Fleet]) -> None:
    fleet = new_fleet(2, restarts=False)
    futures = fleet.pool.submit(jobs(1, first=KILLS), SAMPLING)
    with pytest.raises(WorkerError, match="died"):
        futures[0].result(timeout=30)
    with pytest.raises(WorkerError, match="died"):
        fleet.pool.generate(jobs(1), SAMPLING)


def test_waiting_has_a_bound_that_names_what_everybody_does(new_fleet: Callable[..., Fleet]) -> None:
    fleet = new_fleet(1, timeout_s=2.0)
    with pytest.raises(WorkerError, match=r"no result for 2 s\. engine 0 generating for \d+ s with 1 jobs"):
        fleet.pool.generate(jobs(1, first=HANGS), SAMPLING)


def test_engines_do_not_join_while_weights_change(new_fleet: Callable[..., Fleet]) -> None:
    fleet = new_fleet(1)
    fleet.pool.generate(jobs(1), SAMPLING)
    inside, leave = threading.Event(), threading.Event()

    def push_slowly() -> None:
        with fleet.pool.pushing():
            inside.set()
            leave.wait(30)
            fleet.pool.load(Manifest(2, ()))

    thread = threading.Thread(target=push_slowly)
    thread.start()
    inside.wait(10)
    os.kill(fleet.processes()[0], signal.SIGKILL)
    until(lambda: fleet.pool.seats[0].state is SeatState.STARTING and not fleet.pool.seats[0].pending)
    time.sleep(1)
    assert fleet.pool.seats[0].state is SeatState.STARTING
    leave.set()
    thread.join()
    until(lambda: fleet.pool.seats[0].state is SeatState.SERVING)
    assert fleet.pool.score([(1, 2)]) == [("engine 0", [[-2.0]])]


def test_weights_that_the_trainer_gives_late_cost_no_engine(new_fleet: Callable[..., Fleet]) -> None:
    """Rank 0 gives them between two training steps, which may be longer than an engine's start."""
    import ray

    @ray.remote
    def late(seconds: float) -> Any:
        time.sleep(seconds)
        return __import__("numpy").zeros(1, "uint8")

    # Starting a process takes some of it.
    fleet = new_fleet(1, startup_s=8.0)
    fleet.pool.generate(jobs(1), SAMPLING)
    fleet.pool._payload = lambda: late.remote(12.0)
    os.kill(fleet.processes()[0], signal.SIGKILL)
    assert {c.weight_version for c in fleet.pool.generate(jobs(1), SAMPLING)[0]} == {1}
    assert fleet.pool.restarts == 1
    assert len(fleet.warnings) == 1


def test_aborted_jobs_are_forgotten(new_fleet: Callable[..., Fleet]) -> None:
    fleet = new_fleet(1, step_s=0.2)
    futures = fleet.pool.submit(jobs(4), SAMPLING)
    fleet.pool.abort(futures[:2])
    assert [f.cancelled() for f in futures] == [True, True, False, False]
    futures_wait(futures[2:], timeout=30)
    assert all(f.result() for f in futures[2:])


def test_the_life_cycle_has_no_short_cut() -> None:
    seat = Seat(0, Worker("engine 0", None, Path("x")), SeatState.STARTING)
    with pytest.raises(RuntimeError, match="engine 0 cannot go from starting to serving"):
        seat.become(SeatState.SERVING)
    seat.become(SeatState.CATCHING_UP)
    seat.become(SeatState.SERVING)
    seat.become(SeatState.LOST)
    for state in SeatState:
        with pytest.raises(RuntimeError):
            seat.become(state)
