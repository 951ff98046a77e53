"""The thread that owns an engine: calls between steps, jobs answered as wholes, what it says of itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lora_rl.rollout.serving import GENERATING, IDLE, EngineServer, Job, JobResult
from lora_rl.rollout.types import GenerationRequest, SamplingSettings
from tests.support.talking import BREAKS, IS_REFUSED, STEPS, TalkingEngine

SAMPLING = SamplingSettings(max_tokens=2)


def job(number: int, *seeds: int, first: int = 5) -> Job:
    return Job(number, tuple(GenerationRequest((first, number), seed) for seed in seeds), SAMPLING)


def fetch(server: EngineServer, count: int, seconds: float = 10) -> list[JobResult]:
    results: list[JobResult] = []
    deadline = time.monotonic() + seconds
    while len(results) < count and time.monotonic() < deadline:
        results += server.results()
        time.sleep(0.002)
    return results


def test_jobs_are_answered_whole_and_in_the_order_of_their_requests() -> None:
    server = EngineServer(TalkingEngine)
    server.submit([job(0, 11, 12, 13), job(1, 21)])
    results = fetch(server, 2)
    assert {r.number: [c.token_ids[0] for c in r.completions] for r in results} == {0: [11, 12, 13], 1: [21]}
    assert server.results() == []


def test_a_refused_job_leaves_nothing_running_and_harms_no_other() -> None:
    server = EngineServer(TalkingEngine)
    refused = Job(0, (*job(0, 1, 2).requests, GenerationRequest((IS_REFUSED,), 3)), SAMPLING)
    server.submit([refused, job(1, 4)])
    results = {r.number: r for r in fetch(server, 2)}
    assert results[0].refusal == "ValueError: the prompt is too long"
    assert results[0].completions == ()
    assert [c.token_ids[0] for c in results[1].completions] == [4]
    assert server.call("look", lambda engine: engine.busy).result(5) is False


def gate() -> tuple[type, threading.Event, threading.Semaphore]:
    """A class of engines whose steps wait for the semaphore, and an event set when one waits."""
    waits, steps = threading.Event(), threading.Semaphore(0)

    class Gated(TalkingEngine):
        def step(self) -> Any:
            waits.set()
            steps.acquire()
            return super().step()

    return Gated, waits, steps


def test_calls_come_between_steps_and_see_running_requests() -> None:
    engine, waits, steps = gate()
    server = EngineServer(engine)
    server.submit([job(0, 1)])
    assert waits.wait(5)
    push = server.call("push", lambda e: (setattr(e, "weight_version", 2), e.busy)[1])
    with pytest.raises(TimeoutError):
        push.result(0.05)
    steps.release()
    assert push.result(5) is True
    for _ in range(STEPS - 1):
        steps.release()
    [result] = fetch(server, 1)
    # One stretch before the push, one after it.
    assert result.completions[0].spans == ((0, 1), (2, 1))


def test_while_held_no_step_is_made() -> None:
    server = EngineServer(TalkingEngine)
    server.hold(True)
    server.submit([job(0, 1)])
    assert server.call("look", lambda e: e.busy).result(5)
    assert fetch(server, 1, seconds=0.1) == []
    server.hold(False)
    assert len(fetch(server, 1)) == 1


def test_aborted_jobs_bring_no_result() -> None:
    engine, waits, steps = gate()
    server = EngineServer(engine)
    server.submit([job(0, 1, 2), job(1, 3)])
    assert waits.wait(5)
    server.abort([0, 77])
    for _ in range(10):
        steps.release()
    assert [r.number for r in fetch(server, 1)] == [1]
    assert server.call("look", lambda e: e.busy).result(5) is False


def test_the_heartbeat_tells_a_long_step_from_idleness() -> None:
    engine, waits, steps = gate()
    server = EngineServer(engine)
    time.sleep(0.05)
    beat = server.heartbeat()
    assert (beat.activity, beat.running) == (IDLE, 0)
    assert beat.idle_s >= 0.04
    server.submit([job(0, 1, 2)])
    assert waits.wait(5)
    time.sleep(0.05)
    first, second = server.heartbeat(), server.heartbeat()
    assert (first.activity, first.running) == (GENERATING, 2)
    assert first.since_s >= 0.04
    assert second.idle_s == pytest.approx(first.idle_s)
    for _ in range(STEPS):
        steps.release()


@pytest.mark.parametrize("when", ["building", "stepping"])
def test_what_ends_the_thread_reaches_whoever_asks(when: str) -> None:
    def broken() -> TalkingEngine:
        raise RuntimeError("no such model")

    told = threading.Event()
    build: Callable[[], TalkingEngine] = broken if when == "building" else TalkingEngine
    server = EngineServer(build, told.set)
    if when == "stepping":
        server.submit([job(0, 1, first=BREAKS)])
    assert told.wait(5)
    message = "no such model" if when == "building" else "illegal memory access"
    with pytest.raises(RuntimeError, match=message):
        server.results()
    with pytest.raises(RuntimeError, match=message):
        server.call("anything", lambda e: None).result(5)


def test_an_error_of_a_call_is_its_own() -> None:
    server = EngineServer(TalkingEngine)
    with pytest.raises(ZeroDivisionError):
        server.call("divide", lambda e: 1 / 0).result(5)
    server.submit([job(0, 1)])
    assert len(fetch(server, 1)) == 1
