"""Sends what a noisy process prints to a log file, C++ output included."""

import ctypes
import os
import sys
from collections import deque
from pathlib import Path
from typing import TextIO


class Capture:
    """File descriptors 1 and 2 of this process redirected into a file, until `restore`.

    The redirection is below Python: it also takes what C and C++ code and child processes print. `sys.stdout`
    and `sys.stderr` are replaced by line-buffered writers onto the same descriptors, because in a worker they
    may not be the ones that write to descriptors 1 and 2.

    Attributes:
        path: the log file.
        stderr: line-buffered text stream onto what standard error was before, for our own messages.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # O_APPEND, so that several processes may share one file without overwriting each other.
        log = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        _flush()
        self._saved = {fd: os.dup(fd) for fd in (1, 2)}
        self._python_streams = (sys.stdout, sys.stderr)
        self.stderr: TextIO = open(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        for fd in (1, 2):
            os.dup2(log, fd)
        os.close(log)
        sys.stdout, sys.stderr = (
            open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            for fd in (1, 2)
        )

    def restore(self) -> None:
        """Put both descriptors and both Python streams back. A second call does nothing."""
        _flush()
        for fd, saved in self._saved.items():
            os.dup2(saved, fd)
            os.close(saved)
        if self._saved:
            sys.stdout, sys.stderr = self._python_streams
            self.stderr.close()
        self._saved = {}

    def __enter__(self) -> "Capture":
        return self

    def __exit__(self, *exc_info) -> None:
        self.restore()


def capture_to_file(path: Path | str) -> Capture:
    """Append everything this process prints from now on to `path`; its directory is made when missing.

    Use as a context manager, or keep the result for the life of the process.

    Raises:
        OSError: the file cannot be opened; nothing is redirected then.
    """
    return Capture(path)


def tail(path: Path | str, n: int = 20) -> str:
    """The last `n` lines of a log file, for an error message.

    A file that is missing gives a line that says so instead of raising: the failure being reported matters
    more. Bytes that are not UTF-8 are shown as escapes.
    """
    path = Path(path)
    if not path.exists():
        return f"(no log file at {path})"
    with path.open(encoding="utf-8", errors="backslashreplace") as file:
        return "".join(deque(file, maxlen=n)).rstrip("\n")


def _flush() -> None:
    """Empty Python's and C's buffers, so that what was printed before goes where it was meant to go."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
