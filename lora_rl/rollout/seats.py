"""The place of one engine in the pool, through restarts: its process, what it works on, and its life cycle."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lora_rl.cluster.workers import Worker
from lora_rl.rollout.serving import Heartbeat, Job


class SeatState(StrEnum):
    """Life cycle of an engine."""

    STARTING = "starting"  # its process comes up, imports vLLM, loads the model from disk
    CATCHING_UP = "catching up"  # it loads the current weight version, before it may serve
    SERVING = "serving"
    LOST = "lost"  # it failed too often


_NEXT = {
    SeatState.STARTING: {SeatState.CATCHING_UP, SeatState.STARTING, SeatState.LOST},
    SeatState.CATCHING_UP: {SeatState.SERVING, SeatState.STARTING, SeatState.LOST},
    SeatState.SERVING: {SeatState.STARTING, SeatState.LOST},
    SeatState.LOST: set(),
}


class JobRefused(RuntimeError):
    """A job that no engine will do: vLLM refused a request of it, or engines kept failing over it."""


@dataclass
class OpenJob:
    """A job without a result yet.

    Attributes:
        attempts: engines that were lost while they worked on it.
    """

    job: Job
    future: Future[Any]
    attempts: int = 0


@dataclass
class Seat:
    """One engine.

    Attributes:
        index: from 0; names the engine.
        worker: the process that fills the seat now.
        jobs: what it works on, by number.
        failures: lost processes in a row, without a finished job in between.
        collecting: answer that brings its next results, and since when it has been asked for.
        pending: answers that end the present state, when starting or catching up.
        payload: when catching up, the answer that brings the weights.
        ping: then a question whether the process is alive, and when it was asked; and whether one was ever answered.
        heartbeat: the last one.
    """

    index: int
    worker: Worker
    state: SeatState = SeatState.SERVING
    jobs: dict[int, OpenJob] = field(default_factory=dict)
    failures: int = 0
    collecting: Any = None
    pending: list[Any] = field(default_factory=list)
    payload: Any = None
    ping: Any = None
    pinged: float = 0.0
    is_up: bool = False
    since: float = field(default_factory=time.monotonic)
    heartbeat: Heartbeat | None = None
    relayed: bool = False
    _idle_before: float = 0.0

    def become(self, state: SeatState) -> None:
        """Go to another state.

        Raises:
            RuntimeError: the life cycle has no such step.
        """
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"{self.worker.name} cannot go from {self.state} to {state}")
        self.state, self.since = state, time.monotonic()

    @property
    def load(self) -> int:
        """Requests it works on."""
        return sum(len(o.job.requests) for o in self.jobs.values())

    def describe(self) -> str:
        """For messages: what it is doing, and for how long."""
        seconds = time.monotonic() - self.since
        if self.state is not SeatState.SERVING or self.heartbeat is None:
            return f"{self.worker.name} {self.state} for {seconds:.0f} s"
        beat = self.heartbeat
        return f"{self.worker.name} {beat.activity} for {beat.since_s:.0f} s with {len(self.jobs)} jobs"

    def idle_seconds(self) -> float:
        """Seconds without work since the last call."""
        now = self.heartbeat.idle_s if self.heartbeat is not None else 0.0
        # A new process counts from 0.
        spent = now - self._idle_before if now >= self._idle_before else now
        self._idle_before = now
        return spent
