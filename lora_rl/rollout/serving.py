"""Serving an engine: one thread steps it while it has requests, and does everything else between two steps."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lora_rl.rollout.types import Completion, GenerationRequest, SamplingSettings

IDLE, GENERATING = "idle", "generating"


@dataclass(frozen=True)
class Job:
    """Requests that belong together, such as the samples of one prompt: answered together or not at all.

    Attributes:
        number: unique within a run.
        requests: what to complete.
        sampling: how.
    """

    number: int
    requests: tuple[GenerationRequest, ...]
    sampling: SamplingSettings


@dataclass(frozen=True)
class JobResult:
    """What became of a job: completions in the order of its requests, or why the engine refused it."""

    number: int
    completions: tuple[Completion, ...] = ()
    refusal: str | None = None


@dataclass(frozen=True)
class Heartbeat:
    """What an engine's thread is doing.

    Attributes:
        activity: `idle`, `generating`, or the name of the call it works on.
        since_s: seconds since it last finished a step or a call.
        idle_s: seconds it has been without work, in all.
        running: requests under way.
    """

    activity: str
    since_s: float
    idle_s: float
    running: int


class Steppable(Protocol):
    """What a server needs of `lora_rl.rollout.engine.Engine`."""

    busy: bool

    def add(self, name: str, request: GenerationRequest, sampling: SamplingSettings) -> None: ...
    def step(self) -> list[tuple[str, Completion]]: ...
    def abort(self, names: Sequence[str]) -> None: ...


@dataclass
class _Open:
    job: Job
    missing: int
    completions: dict[int, Completion] = field(default_factory=dict)


class EngineServer:
    """Owns an engine. Every method may be called from any thread; the engine itself is touched by its own only.

    Calls are done in the order they come, each between two steps, so that requests of other jobs go on around them.
    """

    def __init__(self, build: Callable[[], Steppable], on_result: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            build: makes the engine, in the server's thread.
            on_result: called from that thread when there is something for `results`.
        """
        self._build, self._on_result = build, on_result
        self._calls: queue.SimpleQueue[tuple[str, Callable[[Any], Any], Future[Any]]] = queue.SimpleQueue()
        self._open: dict[int, _Open] = {}
        self._results: list[JobResult] = []
        self._lock = threading.Lock()
        self._activity, self._since, self._idle = IDLE, time.monotonic(), 0.0
        self._held = False
        self.failure: BaseException | None = None
        threading.Thread(target=self._serve, name="engine", daemon=True).start()

    def call(self, name: str, function: Callable[[Any], Any]) -> Future[Any]:
        """Run `function(engine)` in the engine's thread."""
        future: Future[Any] = Future()
        if self.failure is not None:
            future.set_exception(self.failure)
        else:
            self._calls.put((name, function, future))
        return future

    def submit(self, jobs: Sequence[Job]) -> None:
        """Start jobs, all before the next step; their results come by `results`."""
        self.call("adding requests", lambda engine: [self._add(engine, job) for job in jobs])

    def abort(self, numbers: Sequence[int]) -> None:
        """End jobs without a result; unknown numbers are ignored."""

        def abort(engine: Steppable) -> None:
            for number in numbers:
                if (found := self._open.pop(number, None)) is not None:
                    engine.abort([_name(number, n) for n in range(len(found.job.requests))])

        self.call("aborting requests", abort)

    def hold(self, held: bool) -> None:
        """While held, do calls but no steps: the weights are being replaced piece by piece."""
        self._held = held
        self.call("holding", lambda engine: None)

    def results(self) -> list[JobResult]:
        """Results that were not fetched yet, in the order the jobs ended.

        Raises:
            Exception: whatever ended the engine's thread.
        """
        with self._lock:
            results, self._results = self._results, []
        if self.failure is not None and not results:
            raise self.failure
        return results

    def heartbeat(self) -> Heartbeat:
        """What the engine's thread is doing now."""
        since = time.monotonic() - self._since
        idle = self._idle + (since if self._activity == IDLE else 0.0)
        running = sum(o.missing for o in list(self._open.values()))
        return Heartbeat(self._activity, since, idle, running)

    # -- in the engine's thread --------------------------------------------------------------------------------

    def _serve(self) -> None:
        pending: Future[Any] | None = None
        try:
            engine = self._build()
            while True:
                stepping = engine.busy and not self._held
                while not (stepping and self._calls.empty()):
                    name, function, pending = self._calls.get()
                    self._begin(name)
                    try:
                        pending.set_result(function(engine))
                    except Exception as error:
                        pending.set_exception(error)
                    self._begin(IDLE)
                    stepping = engine.busy and not self._held
                self._begin(GENERATING)
                for name, completion in engine.step():
                    self._take(name, completion)
                self._begin(IDLE)
        except BaseException as error:
            self.failure = error
            while not self._calls.empty():
                self._calls.get()[2].set_exception(error)
            self._on_result()

    def _begin(self, activity: str) -> None:
        now = time.monotonic()
        if self._activity == IDLE:
            self._idle += now - self._since
        self._activity, self._since = activity, now

    def _add(self, engine: Steppable, job: Job) -> None:
        names = [_name(job.number, n) for n in range(len(job.requests))]
        try:
            for name, request in zip(names, job.requests, strict=True):
                engine.add(name, request, job.sampling)
        except ValueError as error:
            # One that cannot be served, such as a prompt that is too long; the others can.
            engine.abort(names)
            self._deliver(JobResult(job.number, refusal=f"{type(error).__name__}: {error}"))
            return
        self._open[job.number] = _Open(job, len(names))

    def _take(self, name: str, completion: Completion) -> None:
        number, _, index = name.partition(".")
        found = self._open[int(number)]
        found.completions[int(index)] = completion
        found.missing -= 1
        if found.missing == 0:
            del self._open[int(number)]
            self._deliver(JobResult(int(number), tuple(found.completions[n] for n in range(len(found.completions)))))

    def _deliver(self, result: JobResult) -> None:
        with self._lock:
            self._results.append(result)
        self._on_result()


def _name(number: int, index: int) -> str:
    return f"{number}.{index}"
