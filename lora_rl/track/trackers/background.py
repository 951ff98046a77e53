"""A sink that may take its time: it is called from a thread of its own, behind a queue that cannot grow without end."""

import queue
import threading
from collections.abc import Callable, Mapping

from lora_rl.track.sinks import Sink

QUEUE_STEPS = 256
CLOSE_TIMEOUT_S = 20.0


class BackgroundSink:
    """Hands metrics to another sink. `log` never waits and never raises.

    Steps that come while the queue is full are dropped and counted. A sink that raises is switched off. At the end
    it is waited for a while and then given up. Each of these is one warning.

    Args:
        sink: where metrics go; if it has a method `abandon`, that is called when it is given up. Nothing is called
            from two threads at once but that.
        name: as warnings call it.
        warn: takes a line, from any thread.
        queue_steps: steps that may wait.
        close_timeout_s: how long `close` waits for the steps that are still in the queue.
    """

    def __init__(
        self,
        sink: Sink,
        name: str,
        warn: Callable[[str], None],
        *,
        queue_steps: int = QUEUE_STEPS,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ):
        self._sink, self._name, self._warn = sink, name, warn
        self._close_timeout_s = close_timeout_s
        self._queue: queue.Queue[tuple[int, dict[str, float]]] = queue.Queue(queue_steps)
        self._closing, self._off = threading.Event(), threading.Event()
        self._given = self._taken = self._dropped = 0
        # A daemon: a tracker that hangs must not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics of one step."""
        if self._off.is_set():
            return
        self._given += 1
        try:
            self._queue.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                self._warn(f"{self._name} does not keep up: steps are left out there. metrics.jsonl has all of them.")

    def close(self) -> None:
        """Let the queue run empty and close the sink, or give it up."""
        self._closing.set()
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            self._off.set()
            self._abandon()
            what = f"did not end within {self._close_timeout_s:g} s and is given up"
        elif self._off.is_set():
            return
        else:
            what = "left some out"
        if self._taken < self._given:
            self._warn(
                f"{self._name} {what}: it has {self._taken} of {self._given} steps. metrics.jsonl has all of them."
            )
        elif self._thread.is_alive():
            self._warn(f"{self._name} {what}.")

    def _abandon(self) -> None:
        if abandon := getattr(self._sink, "abandon", None):
            abandon()

    def _work(self) -> None:
        try:
            while True:
                try:
                    step, metrics = self._queue.get(timeout=0.1)
                except queue.Empty:
                    if self._closing.is_set():
                        break
                    continue
                self._sink.log(step, metrics)
                self._taken += 1
            self._sink.close()
        except Exception as error:
            if not self._off.is_set():
                self._off.set()
                self._abandon()
                self._warn(
                    f"{self._name} is switched off after {type(error).__name__}: {error}. metrics.jsonl goes on."
                )
