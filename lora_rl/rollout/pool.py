"""The driver's view of the engines: jobs spread over them, pushes to all of them, a new process for a lost one."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_rl.cluster.workers import Worker, WorkerError, WorkerLost, describe_failure, log_end, wait
from lora_rl.rollout.seats import JobRefused, OpenJob, Seat, SeatState
from lora_rl.rollout.serving import GENERATING, Job
from lora_rl.sync.errors import SyncError
from lora_rl.sync.manifest import Manifest, SyncReport, Transfer

if TYPE_CHECKING:
    from lora_rl.rollout.actor import Collected
    from lora_rl.rollout.types import Completion, GenerationRequest, SamplingSettings

logger = logging.getLogger(__name__)

# How long a request for results waits at an engine: the pulse of the supervision.
_COLLECT_SECONDS = 0.5


@dataclass(frozen=True)
class Supervision:
    """What happens when an engine fails.

    Attributes:
        relaunch: starts a new process for an engine, given its number; None: none is started, the run ends.
        has_place: whether there is still room for an engine, given its number; not when its node is gone.
        max_restarts: new processes in a row for one engine, without a finished job in between.
        max_attempts: engines that may be lost over a job before it is given up.
        heartbeat_s: seconds after which an engine that makes no step, or does not answer, counts as hung.
        startup_s: seconds a new process may take.
        warn: tells the user.
    """

    relaunch: Callable[[int], Worker] | None = None
    has_place: Callable[[int], bool] = lambda index: True
    max_restarts: int = 3
    max_attempts: int = 3
    heartbeat_s: float = 120.0
    startup_s: float = 300.0
    warn: Callable[[str], None] = logger.warning


class EnginePool:
    """All engines as one: jobs are spread over them, and given to others when one is lost.

    A thread fetches results and watches the engines. One that dies or hangs is replaced by a new process, which loads
    the current weight version before it serves.
    """

    def __init__(
        self, workers: Sequence[Worker], *, timeout_s: float, supervision: Supervision = Supervision()
    ) -> None:
        """
        Args:
            workers: the engines' actors, built.
            timeout_s: seconds without any progress after which waiting for results ends the run.
        """
        self.seats = [Seat(n, worker) for n, worker in enumerate(workers)]
        self.weight_version = 0
        self.restarts = 0
        self.failure: WorkerError | None = None
        self._timeout, self._supervision = timeout_s, supervision
        self._lock, self._push_lock = threading.RLock(), threading.Lock()
        self._numbers = itertools.count()
        self._waiting: deque[OpenJob] = deque()
        self._transfer: Transfer | None = None
        self._manifest: Manifest | None = None
        self._payload: Callable[[], Any] | None = None
        self._progress = time.monotonic()
        self._closing = threading.Event()
        self._pump: threading.Thread | None = None

    # -- jobs --------------------------------------------------------------------------------------------------

    def submit(
        self, jobs: Sequence[Sequence[GenerationRequest]], sampling: SamplingSettings
    ) -> list[Future[tuple[Completion, ...]]]:
        """Start jobs, each a list of requests that one engine answers together.

        Returns:
            One future per job: its completions in order, or a `JobRefused`, or the `WorkerError` that ended the run.
            It can be given to `abort`.
        """
        opened = []
        for requests in jobs:
            future: Future[tuple[Completion, ...]] = Future()
            opened.append(OpenJob(Job(next(self._numbers), tuple(requests), sampling), future))
        with self._lock:
            if self.failure is not None:
                raise self.failure
            self._waiting.extend(opened)
            self._dispatch()
        self._start_pump()
        return [o.future for o in opened]

    def abort(self, futures: Sequence[Future[Any]]) -> None:
        """End jobs without a result; their futures are cancelled."""
        wanted = set(futures)
        with self._lock:
            for open_job in [o for o in self._waiting if o.future in wanted]:
                self._waiting.remove(open_job)
            for seat in self.seats:
                numbers = [n for n, o in seat.jobs.items() if o.future in wanted]
                for number in numbers:
                    del seat.jobs[number]
                if numbers and seat.state is SeatState.SERVING:
                    seat.worker.call("abort", numbers)
        for future in wanted:
            future.cancel()

    def generate(
        self, jobs: Sequence[Sequence[GenerationRequest]], sampling: SamplingSettings
    ) -> list[tuple[Completion, ...] | JobRefused]:
        """Start jobs and wait for all of them.

        Raises:
            WorkerError: all engines are lost, or nothing happens any more.
        """
        futures = self.submit(jobs, sampling)
        try:
            self.wait(futures)
        except BaseException:
            self.abort(futures)
            raise
        return [future.exception() or future.result() for future in futures]  # type: ignore[misc]

    def wait(self, futures: Sequence[Future[Any]]) -> None:
        """Until all futures have a result.

        Raises:
            WorkerError: see `generate`.
        """
        self.restart_clock()
        left: set[Future[Any]] = set(futures)
        while left:
            _, left = futures_wait(left, timeout=1.0)
            self.check()

    def check(self) -> None:
        """Raise what ended the run, or that nothing happens any more.

        Raises:
            WorkerError: as it says.
        """
        if self.failure is not None:
            raise self.failure
        if time.monotonic() - self._progress > self._timeout:
            doing = "; ".join(seat.describe() for seat in self.seats)
            raise WorkerError(f"generating: no result for {self._timeout:.0f} s. {doing}")

    def restart_clock(self) -> None:
        """Waiting begins now; see `check`."""
        self._progress = time.monotonic()

    def idle_seconds(self) -> float:
        """Engine seconds without work since the last call."""
        with self._lock:
            return sum(seat.idle_seconds() for seat in self.seats)

    # -- calls to all engines ----------------------------------------------------------------------------------

    @property
    def workers(self) -> list[Worker]:
        """The processes of all seats."""
        return [seat.worker for seat in self.seats]

    def ask(
        self, method: str, *args: Any, doing: str, own: Callable[[Seat], tuple] = lambda seat: ()
    ) -> list[tuple[str, Any]]:
        """(name, answer) of all serving engines to a call; engines that are lost over it are left out.

        Args:
            own: further arguments for each engine.

        Raises:
            WorkerError: an engine answered with an error.
        """
        with self._lock:
            asked = [(s, s.worker, s.worker.call(method, *args, *own(s))) for s in self._serving()]
        answers = []
        for seat, worker, call in asked:
            try:
                [answer] = wait([call], timeout_s=self._timeout, doing=doing)
                answers.append((worker.name, answer))
            except WorkerLost as error:
                # Without the end of the log, which `_lose` adds where it belongs.
                self._lose(seat, worker, str(error).splitlines()[0].rstrip("."))
        return answers

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[str, list[list[float]]]]:
        """(name, logprobs of each sequence's tokens after the first) of every serving engine."""
        return self.ask("score", list(sequences), doing="scoring the probe prompts")

    # -- weights -----------------------------------------------------------------------------------------------

    def open_transfer(
        self, transfer: Transfer, host: str, transport: str, payload: Callable[[], Any] | None = None
    ) -> None:
        """Connect every engine to the trainer's buffer.

        Args:
            transfer: from the sending rank.
            host: Ray node of the sending rank.
            transport: `shared_memory` maps the buffer, `object_store` copies each push through Ray's object store;
                `auto` maps it on the trainer's host and copies elsewhere.
            payload: a Ray reference to the bytes of the last push, for engines that are started later.

        Raises:
            SyncError: `shared_memory`, but an engine is on another host.
        """
        self._transfer, self._payload = transfer, payload
        doing = "start-up: opening the transfer"
        hosts = wait([w.call("host") for w in self.workers], timeout_s=self._timeout, doing=doing)
        elsewhere = [s for s, engine_host in zip(self.seats, hosts, strict=True) if engine_host != host]
        if elsewhere and transport == "shared_memory":
            raise SyncError(
                "policy.generation.weight_sync.transport: shared_memory reaches only the trainer's host, and "
                f"{', '.join(s.worker.name for s in elsewhere)} run elsewhere; use auto or object_store"
            )
        for seat in self.seats:
            seat.relayed = transport == "object_store" or seat in elsewhere
        calls = [s.worker.call("open_relay" if s.relayed else "open_transfer", transfer) for s in self.seats]
        wait(calls, timeout_s=self._timeout, doing=doing)

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """No engine joins the pool within the block: what the trainer's buffer holds is changing."""
        with self._push_lock:
            yield

    @property
    def needs_payload(self) -> bool:
        """Whether `load` must be given the bytes: some engine does not map the trainer's buffer."""
        return any(seat.relayed for seat in self._serving())

    def load(self, manifest: Manifest, payload: Any = None) -> list[SyncReport]:
        """Load a push into every serving engine; all of their workers' reports. Within `pushing`.

        Args:
            payload: Ray reference to the push's bytes, if `needs_payload`.
        """
        # Known before any engine has it: one that is lost now loads it when it comes back.
        self._manifest = manifest
        own = lambda seat: (payload,) if seat.relayed else ()  # noqa: E731
        return self._loaded(manifest, "load_push", "loading weights into the engines", own)

    def confirm(self, manifest: Manifest) -> list[SyncReport]:
        """Like `load` for a push that the ranks streamed into the engines themselves."""
        return self._loaded(manifest, "confirm_push", "proving the weights in the engines", lambda seat: ())

    def _loaded(self, manifest: Manifest, method: str, doing: str, own: Callable[[Seat], tuple]) -> list[SyncReport]:
        reports = self.ask(method, manifest.to_dict(), doing=doing, own=own)
        self.weight_version = manifest.version
        return [report for _, of_engine in reports for report in of_engine]

    # -- supervision -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop watching. The engines themselves end with Ray."""
        self._closing.set()
        if self._pump is not None:
            self._pump.join(timeout=10)

    def _start_pump(self) -> None:
        if self._pump is None:
            self._pump = threading.Thread(target=self._watch, name="engines", daemon=True)
            self._pump.start()

    def _serving(self) -> list[Seat]:
        return [seat for seat in self.seats if seat.state is SeatState.SERVING]

    def _dispatch(self) -> None:
        """Give waiting jobs to serving engines, each to the one with the fewest requests."""
        given: dict[int, list[Job]] = {}
        serving = self._serving()
        while self._waiting and serving:
            seat = min(serving, key=lambda s: s.load)
            open_job = self._waiting.popleft()
            seat.jobs[open_job.job.number] = open_job
            given.setdefault(seat.index, []).append(open_job.job)
        for index, jobs in given.items():
            self.seats[index].worker.call("submit", jobs)

    def _watch(self) -> None:
        try:
            while not self._closing.is_set():
                self._watch_once()
        except Exception as error:
            logger.exception("watching the engines failed")
            self._fail(WorkerError(f"watching the engines failed: {type(error).__name__}: {error}"))

    def _watch_once(self) -> None:
        import ray

        with self._lock:
            refs: dict[Any, Seat] = {}
            for seat in self.seats:
                if seat.state is SeatState.SERVING:
                    if seat.collecting is None:
                        seat.collecting = (seat.worker.handle.collect.remote(_COLLECT_SECONDS), time.monotonic())
                    refs[seat.collecting[0]] = seat
                elif seat.pending:
                    refs[seat.pending[0]] = seat
                    if seat.ping is None and time.monotonic() - seat.pinged > _COLLECT_SECONDS:
                        seat.ping, seat.pinged = seat.worker.handle.ping.remote(), time.monotonic()
                    if seat.ping is not None:
                        refs[seat.ping] = seat
        if not refs:
            self._closing.wait(_COLLECT_SECONDS)
        ready = ray.wait(list(refs), num_returns=1, timeout=_COLLECT_SECONDS)[0] if refs else []
        for ref in ready:
            seat = refs[ref]
            worker = seat.worker
            try:
                value = ray.get(ref)
            except Exception as error:
                self._lose(seat, worker, describe_failure(worker, error))
                continue
            with self._lock:
                if seat.collecting is not None and seat.collecting[0] == ref:
                    seat.collecting = None
                    self._take(seat, value)
                elif seat.ping == ref:
                    seat.ping, seat.is_up = None, True
                elif seat.pending and seat.pending[0] == ref:
                    seat.pending.pop(0)
                    if not seat.pending and seat.state is SeatState.CATCHING_UP:
                        seat.become(SeatState.SERVING)
                        seat.ping = None
                        self._push_lock.release()
                        self._progress = time.monotonic()
                        self._dispatch()
        for seat in self.seats:
            self._look_after(seat)

    def _take(self, seat: Seat, collected: Collected) -> None:
        seat.heartbeat = collected.heartbeat
        for result in collected.results:
            open_job = seat.jobs.pop(result.number, None)
            if open_job is None:
                # Aborted while its result was under way.
                continue
            seat.failures, self._progress = 0, time.monotonic()
            if result.refusal is not None:
                open_job.future.set_exception(JobRefused(result.refusal))
            else:
                open_job.future.set_result(result.completions)

    def _look_after(self, seat: Seat) -> None:
        """Bring a new engine on, and find one that hangs."""
        worker, limits = seat.worker, self._supervision
        if seat.state is SeatState.CATCHING_UP and not self._has_come(seat.payload):
            # The trainer gives it between two of its steps, however long they are.
            seat.since = time.monotonic()
        waited = time.monotonic() - seat.since
        if seat.state is SeatState.STARTING and not seat.pending:
            self._catch_up(seat)
        elif seat.is_up and seat.ping is not None and time.monotonic() - seat.pinged > limits.heartbeat_s:
            # It answers while it imports and loads; before it is up, only the time for starting counts.
            silent = time.monotonic() - seat.pinged
            self._lose(seat, worker, f"{worker.name} gave no sign of life for {silent:.0f} s")
        elif seat.state is SeatState.STARTING and not limits.has_place(seat.index):
            self._lose(seat, worker, f"{worker.name} has no node any more")
        elif seat.state in (SeatState.STARTING, SeatState.CATCHING_UP) and waited > limits.startup_s:
            self._lose(seat, worker, f"{worker.name} was {seat.state} for {waited:.0f} s")
        elif seat.state is SeatState.SERVING and seat.collecting is not None:
            silent = time.monotonic() - seat.collecting[1] - _COLLECT_SECONDS
            beat = seat.heartbeat
            if silent > limits.heartbeat_s:
                self._lose(seat, worker, f"{worker.name} gave no sign of life for {silent:.0f} s")
            elif beat is not None and beat.activity == GENERATING and beat.since_s > limits.heartbeat_s:
                self._lose(seat, worker, f"{worker.name} has been in one step for {beat.since_s:.0f} s")

    @staticmethod
    def _has_come(ref: Any) -> bool:
        import ray

        return bool(ray.wait([ref], timeout=0)[0])

    def _catch_up(self, seat: Seat) -> None:
        """Let a new engine load the current weights, unless a push is under way just now."""
        if not self._push_lock.acquire(blocking=False):
            return
        manifest, worker = self._manifest, seat.worker
        seat.become(SeatState.CATCHING_UP)
        # The name of the trainer's buffer is gone; the bytes come through Ray's object store.
        seat.relayed = True
        assert self._payload is not None and manifest is not None
        opened, seat.payload = worker.call("open_relay", self._transfer), self._payload()
        seat.pending = [opened.ref, worker.call("load_push", manifest.to_dict(), seat.payload).ref]

    def _lose(self, seat: Seat, worker: Worker, reason: str) -> None:
        """A process is gone or of no use: give its jobs to others, and start a new one."""
        import ray

        with self._lock:
            if seat.worker is not worker or seat.state is SeatState.LOST or self._closing.is_set():
                return
            limits = self._supervision
            if seat.state is SeatState.CATCHING_UP:
                self._push_lock.release()
            ray.kill(worker.handle, no_restart=True)
            jobs, seat.jobs = list(seat.jobs.values()), {}
            seat.collecting, seat.pending, seat.heartbeat = None, [], None
            seat.ping, seat.pinged, seat.is_up = None, 0.0, False
            seat.failures += 1
            last_words = f"{reason}.{log_end(worker)}"
            if limits.relaunch is None or seat.failures > limits.max_restarts or not limits.has_place(seat.index):
                seat.become(SeatState.LOST)
                if limits.relaunch is None or not any(s.state is not SeatState.LOST for s in self.seats):
                    self._fail(WorkerError(last_words), jobs)
                    return
                limits.warn(f"{reason} (log: {worker.log}); it failed {seat.failures} times in a row and is given up")
            else:
                self.restarts += 1
                limits.warn(f"{reason} (log: {worker.log}); it is started anew, its {len(jobs)} jobs go on elsewhere")
                seat.worker = limits.relaunch(seat.index)
                seat.become(SeatState.STARTING)
                seat.pending = [seat.worker.call("build").ref]
            for open_job in reversed(jobs):
                open_job.attempts += 1
                if open_job.attempts >= limits.max_attempts:
                    problem = f"{open_job.attempts} engines were lost over it; the last: {reason}"
                    open_job.future.set_exception(JobRefused(problem))
                else:
                    self._waiting.appendleft(open_job)
            self._dispatch()

    def _fail(self, error: WorkerError, jobs: Sequence[OpenJob] = ()) -> None:
        with self._lock:
            self.failure = error
            waiting = [*jobs, *self._waiting, *(o for seat in self.seats for o in seat.jobs.values())]
            self._waiting.clear()
        for open_job in waiting:
            if not open_job.future.done():
                open_job.future.set_exception(error)
