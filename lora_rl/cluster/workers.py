"""Calling actors and waiting for them, with one clear error that names the process at fault."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_rl.track import tail

# How long to look for a dead process behind an error that may only be its consequence (a broken collective).
_ROOT_CAUSE_SECONDS = 5.0
_LOG_LINES = 15


class WorkerError(RuntimeError):
    """A process of the job failed, died or hung. The message names it and shows the end of its log."""


class WorkerLost(WorkerError):
    """The process died, or gave no answer in time: of no use any more, whatever it was asked."""


@dataclass(frozen=True)
class Worker:
    """One actor and how to speak of it.

    Attributes:
        name: for messages, such as `rank 1 (tp 1, pp 0, dp 0)`.
        handle: the Ray actor.
        log: file with everything the process printed.
    """

    name: str
    handle: Any
    log: Path

    def call(self, method: str, *args: Any, **kwargs: Any) -> Call:
        """Start a method; wait for it with `wait`."""
        return Call(self, method, getattr(self.handle, method).remote(*args, **kwargs))


@dataclass(frozen=True)
class Call:
    """A method call under way."""

    worker: Worker
    method: str
    ref: Any


def wait(
    calls: Sequence[Call],
    *,
    timeout_s: float,
    doing: str,
    watch: Sequence[Worker] = (),
    on_done: Callable[[Worker], None] | None = None,
) -> list[Any]:
    """Results of all calls, in order.

    Args:
        calls: calls under way.
        timeout_s: seconds after which the slowest one counts as hung.
        doing: what is being waited for, for messages.
        watch: further workers that must stay alive meanwhile; they are pinged.
        on_done: called with each worker as its call ends.

    Raises:
        WorkerError: a call raised, its process died, a watched process died, or the time ran out.
    """
    import ray

    deadline = time.monotonic() + timeout_s
    pending = {call.ref: call for call in calls}
    pings = {worker.handle.ping.remote(): worker for worker in watch}
    results: dict[Any, Any] = {}
    while pending:
        ready, _ = ray.wait([*pending, *pings], num_returns=1, timeout=max(0.0, min(1.0, deadline - time.monotonic())))
        for ref in ready:
            worker = pings.pop(ref, None)
            call = pending.pop(ref, None)
            try:
                value = ray.get(ref)
            except Exception as error:
                raise _failure(call, worker, error, pending, doing) from None
            if call is not None:
                results[ref] = value
                if on_done is not None:
                    on_done(call.worker)
        if not ready and time.monotonic() >= deadline:
            names = ", ".join(call.worker.name for call in pending.values())
            first = next(iter(pending.values())).worker
            raise WorkerLost(f"{doing}: no answer from {names} within {timeout_s:.0f} s.{log_end(first)}")
    return [results[call.ref] for call in calls]


def _failure(
    call: Call | None, watched: Worker | None, error: Exception, pending: dict[Any, Call], doing: str
) -> WorkerError:
    """Turn an error into one that names its cause: a process that died explains the errors of its peers."""
    import ray
    from ray.exceptions import RayActorError

    worker = call.worker if call is not None else watched
    assert worker is not None
    failures: list[tuple[Worker, Exception]] = [(worker, error)]
    deadline = time.monotonic() + _ROOT_CAUSE_SECONDS
    rest = dict(pending)
    while rest and not any(isinstance(e, RayActorError) for _, e in failures) and time.monotonic() < deadline:
        ready, _ = ray.wait(list(rest), num_returns=1, timeout=0.5)
        for ref in ready:
            other = rest.pop(ref)
            try:
                ray.get(ref)
            except Exception as consequence:
                failures.append((other.worker, consequence))
    dead = [(w, e) for w, e in failures if isinstance(e, RayActorError)]
    worker, error = (dead or failures)[0]
    if dead:
        return WorkerLost(f"{doing}: {worker.name} died.{log_end(worker)}")
    return WorkerError(f"{doing}: {describe_failure(worker, error)}\n(log: {worker.log})")


def describe_failure(worker: Worker, error: Exception) -> str:
    """What an exception from Ray says about a process."""
    from ray.exceptions import RayActorError

    if isinstance(error, RayActorError):
        return f"{worker.name} died"
    cause = getattr(error, "cause", None) or error
    return f"{worker.name} failed: {type(cause).__name__}: {cause}"


def log_end(worker: Worker) -> str:
    """The last lines of a process's log, for a message."""
    return f"\nThe end of {worker.log}:\n{tail(worker.log, _LOG_LINES)}"
