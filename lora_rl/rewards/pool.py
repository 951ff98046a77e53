"""A pool of worker processes with a time limit per answer. The workers are in `fork_server`.

One thread of the driver belongs to each worker: it hands over one request at a time over a connection of its own, waits
for the limit, and has the worker killed and replaced when that passes. No lock and no pipe is shared between workers,
so that one that dies, wherever it was, takes nothing along but its own answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rl.rewards.fork_server import FORK, KILL
from lora_rl.rewards.types import RewardError, RewardReason, RewardResult, ScoreRequest, failed
from lora_rl.rewards.verifier import PRELOADED

if TYPE_CHECKING:
    from lora_rl.config.schema import VerifierConfig

# Deaths of the worker that one answer may cause before it is given up.
_ATTEMPTS = 2
_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from lora_rl.rewards.fork_server import main; main(int(sys.argv[2]))"
)


@dataclass(frozen=True)
class PoolSettings:
    """How a pool runs.

    Attributes:
        verifiers: what its workers can score with; requests name one by its place.
        num_workers: processes.
        timeout_s: seconds for one answer.
        startup_timeout_s: seconds until a process must be ready.
        max_chars: longest answer that is parsed.
        memory_gib: see `reward.worker_memory_gib`.
        log_file: where the processes print; None: where this one does.
    """

    verifiers: Sequence[VerifierConfig]
    num_workers: int
    timeout_s: float
    startup_timeout_s: float = 300.0
    max_chars: int = 20_000
    memory_gib: float | None = None
    log_file: Path | None = None


@dataclass
class _Job:
    index: int
    pickled: bytes
    only_check: bool
    future: Future = field(default_factory=Future)


class WorkerPool:
    """Workers, from `start` to `close`. `submit` and `check` may be called from any thread, and never block."""

    def __init__(self, settings: PoolSettings):
        self.settings = settings
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._server = _ForkServer(settings)
        self._closed = threading.Event()
        self._started = [Future() for _ in range(settings.num_workers)]
        self._threads = [
            threading.Thread(target=self._run, args=(started,), name=f"reward-{n}", daemon=True)
            for n, started in enumerate(self._started)
        ]

    def start(self) -> None:
        """Begin to start the processes, and return."""
        for thread in self._threads:
            thread.start()

    def wait_ready(self) -> None:
        """Wait until every worker can score.

        Raises:
            RewardError: one could not be started, such as for a function that cannot be imported.
        """
        for started in self._started:
            started.result()

    def submit(self, index: int, request: ScoreRequest) -> Future[RewardResult]:
        """Have a request scored by the verifier at `index`. Faults of the answer are results, see `RewardReason`.

        The future raises RewardError when no worker can be started any more, or the pool was closed.
        """
        return self._put(index, request, only_check=False)

    def check(self, index: int, request: ScoreRequest) -> Future[str | None]:
        """What is wrong with the request's right answer, or None. The future raises as that of `submit`."""
        return self._put(index, request, only_check=True)

    def close(self) -> None:
        """Kill the workers, whatever they do; futures that are not done raise RewardError."""
        self._closed.set()
        for _ in self._threads:
            self._jobs.put(None)
        self._server.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        with contextlib.suppress(queue.Empty):
            while True:
                if job := self._jobs.get_nowait():
                    job.future.set_exception(RewardError("the rewards were closed"))

    def _put(self, index: int, request: ScoreRequest, *, only_check: bool) -> Future:
        job = _Job(index, pickle.dumps(request), only_check)
        if self._closed.is_set():
            raise RewardError("the rewards were closed")
        self._jobs.put(job)
        return job.future

    def _run(self, started: Future) -> None:
        """One worker after the other, and the requests they score."""
        worker: _Worker | None = None
        try:
            worker = _Worker(self._server, self.settings)
            started.set_result(None)
        except Exception as error:
            started.set_exception(error)
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                answer, worker = self._score(job, worker)
                job.future.set_result(answer)
            except Exception as error:
                worker = None
                job.future.set_exception(error)
        if worker is not None:
            worker.close()

    def _score(self, job: _Job, worker: _Worker | None) -> tuple[RewardResult | str | None, _Worker | None]:
        """The answer, and the worker that is left."""
        ending = ""
        for _ in range(_ATTEMPTS):
            if self._closed.is_set():
                raise RewardError("the rewards were closed")
            worker = worker or _Worker(self._server, self.settings)
            try:
                if worker.ask(job, self.settings.timeout_s):
                    return worker.connection.recv(), worker
            except (EOFError, OSError):
                ending = worker.close()
                worker = None
                continue
            worker.close()
            late = f"no answer within {self.settings.timeout_s:g} s"
            return (late if job.only_check else failed(RewardReason.TIMED_OUT, late)), None
        if self._closed.is_set():
            raise RewardError("the rewards were closed")
        died = f"its worker died {_ATTEMPTS} times, the last time by {ending}"
        return (died if job.only_check else failed(RewardReason.WORKER_DIED, died)), None


class _Worker:
    """One worker process, ready to score.

    Raises RewardError if it cannot be started.
    """

    def __init__(self, server: _ForkServer, settings: PoolSettings):
        self._server = server
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        try:
            with theirs:
                self._pid, self._generation = server.fork(theirs.fileno())
            problem: str | None = "it is not ready"
            try:
                self.connection.send((list(settings.verifiers), settings.max_chars, settings.memory_gib))
                if self.connection.poll(settings.startup_timeout_s):
                    problem = self.connection.recv()
                else:
                    problem = f"it is not ready after {settings.startup_timeout_s:g} s"
            except (EOFError, OSError):
                problem = f"a reward worker died while it started, by {self.close()}"
            if problem is not None:
                self.close()
                raise RewardError(problem)
        except BaseException:
            self.connection.close()
            raise

    def ask(self, job: _Job, timeout_s: float) -> bool:
        """Hand over a job; whether there is something to receive within the time.

        Raises:
            OSError: the worker died.
        """
        self.connection.send((job.index, job.only_check))
        self.connection.send_bytes(job.pickled)
        return self.connection.poll(timeout_s)

    def close(self) -> str:
        """Kill the process, if it still runs, and say how it ended."""
        self.connection.close()
        return self._server.kill(self._pid, self._generation)


class _ForkServer:
    """The driver's side of the fork server; started with the first fork, and again should it have died."""

    def __init__(self, settings: PoolSettings):
        self._settings = settings
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._generation = 0
        self._closed = False

    def fork(self, fd: int) -> tuple[int, int]:
        """A new worker that serves on a descriptor: its pid, and which server's child it is.

        Raises:
            RewardError: the server cannot be started.
        """
        with self._lock:
            for _ in range(2):
                if self._closed:
                    raise RewardError("the rewards were closed")
                if self._socket is None:
                    self._start()
                assert self._socket is not None
                try:
                    socket.send_fds(self._socket, [FORK], [fd])
                    answer = self._socket.recv(16)
                except OSError:
                    answer = b""
                if answer:
                    return struct.unpack("i", answer)[0], self._generation
                self._stop()
            raise RewardError("the process that reward workers are forked from died twice in a row")

    def kill(self, pid: int, generation: int) -> str:
        """End a worker and collect it; how it ended, in words."""
        with self._lock:
            if self._socket is None or generation != self._generation:
                return "the death of the process it was forked from"
            try:
                self._socket.send(KILL + struct.pack("i", pid))
                answer = self._socket.recv(16)
            except OSError:
                answer = b""
            if not answer:
                self._stop()
                return "the death of the process it was forked from"
        code = os.waitstatus_to_exitcode(struct.unpack("i", answer)[0])
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """End the server, and with it every worker."""
        # A start may take long: killing what it waits for ends it.
        self._closed = True
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
        with self._lock:
            self._stop()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        settings = self._settings
        # A second thread of a numerical library would be lost in a fork, and workers share the cores anyway.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with contextlib.ExitStack() as stack:
            stack.enter_context(theirs)
            log = stack.enter_context(settings.log_file.open("ab")) if settings.log_file else None
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, json.dumps(sys.path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
        self._socket = ours
        self._generation += 1
        names = {config.name for config in settings.verifiers} & PRELOADED.keys()
        ours.settimeout(settings.startup_timeout_s)
        try:
            ours.send(" ".join(sorted(names)).encode() or b" ")
            problem = ours.recv(64 * 1024).decode()
        except TimeoutError:
            problem = f"not ready after {settings.startup_timeout_s:g} s"
        except OSError as error:
            problem = str(error)
        if not problem.startswith("ready"):
            self._stop()
            raise RewardError(f"the process for reward workers could not be started: {problem or 'it died'}")
        ours.settimeout(None)

    def _stop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
