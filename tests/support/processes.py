"""What tests ask of processes that they do not own."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path


def running(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_gone(pids: Iterable[int], seconds: float = 5.0) -> list[int]:
    """The processes that are still there after so long."""
    pids, end = list(pids), time.monotonic() + seconds
    while time.monotonic() < end and any(map(running, pids)):
        time.sleep(0.02)
    return [pid for pid in pids if running(pid)]
