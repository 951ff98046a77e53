"""A tracker in a process of its own.

Client libraries of trackers start services, install exit handlers and wait for servers; one that hangs inside the
process of the run would keep it from ending. Here it is a child that can be ended. Parent and child speak lines of JSON
over the child's standard input and output, one answer to each line. What a library prints goes into a log.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any


class TrackerError(RuntimeError):
    """What the tracker said, or how its process ended."""


class TrackerProcess:
    """A sink whose work is done by `lora_rl.track.trackers.child`. Its methods wait for the answer and may hang.

    Args:
        kind: a name that the child knows.
        settings: for the tracker; JSON.
        log: file for what the process prints.
        tell: takes a line about where things are, once.

    Raises, from `log` and `close`:
        TrackerError: the tracker raised, or its process ended.
    """

    def __init__(self, kind: str, settings: Mapping[str, Any], log: Path, tell: Callable[[str], None]):
        self._kind, self._settings, self._log, self._tell = kind, dict(settings), log, tell
        self._process: subprocess.Popen[str] | None = None
        self._output: IO[str] | None = None
        self._abandoned = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step and wait until the tracker has them."""
        if self._process is None:
            self._start()
        self._ask({"step": step, "metrics": dict(metrics)})

    def close(self) -> None:
        """Let the tracker finish and its process end."""
        if self._process is None:
            return
        self._ask({"close": True})
        self._process.stdin.close()
        self._process.wait()

    def abandon(self) -> None:
        """End the process, and what it started, at once."""
        self._abandoned = True
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            # Of its own session: Ctrl-C is for the run, which then lets the tracker finish. -P: a folder named like
            # the library, such as W&B's own, must not stand before it.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lora_rl.track.trackers.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        if self._abandoned:
            self.abandon()
        told = self._ask({"kind": self._kind, "settings": self._settings}).get("told")
        if told:
            self._tell(told)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            code = process.wait()
            raise TrackerError(f"its process ended with status {code}; see {self._log}")
        answer = json.loads(line)
        if "error" in answer:
            raise TrackerError(answer["error"])
        return answer
