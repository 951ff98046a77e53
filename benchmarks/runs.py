"""Real jobs as runs of a benchmark: started side by side, kept in folders, not repeated when they are complete."""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Run:
    """One job.

    Attributes:
        folder: Where it keeps its records; its output goes to the file of this name with `.log`.
        steps: Its last step.
        config: File in examples/configs.
        overrides: key=value.
        script: Program in examples.
        prepare: Called with the (empty) place of the folder right before the start.
    """

    folder: Path
    steps: int
    config: str
    overrides: Sequence[str] = ()
    script: str = "run_grpo.py"
    prepare: Callable[[Path], None] | None = None

    def records(self) -> list[dict[str, Any]] | None:
        """What it recorded, a mapping per step, if it reached its last step."""
        from lora_rl.track import read_metrics

        path = self.folder / "metrics.jsonl"
        records = read_metrics(path) if path.exists() else []
        return records if records and records[-1]["step"] == self.steps else None

    def command(self) -> list[str]:
        """The command line."""
        return [
            sys.executable, str(ROOT / "examples" / self.script),
            "--config", str(ROOT / "examples/configs" / self.config), *self.overrides,
            f"logger.log_dir={self.folder.resolve()}", "logger.console=plain",
        ]  # fmt: skip


def add_run_options(parser: argparse.ArgumentParser, names: Sequence[str], *, what: str, seeds: str, note: str) -> None:
    """The options of benchmarks that compare arms over seeds.

    Args:
        names: of the arms.
        what: they are called, in the plural: the option.
        seeds: the default, separated by commas.
        note: on the seeds, for the help.
    """
    parser.add_argument(f"--{what}", default=",".join(names), help="names, separated by commas; default: all")
    parser.add_argument("--seeds", default=seeds, help=note)
    parser.add_argument("--table", action="store_true", help="start nothing, print what is complete")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, with one thread per process if several")
    parser.add_argument("--lock", type=Path, help="file to lock during each run, where the machine is shared")
    parser.add_argument("overrides", nargs="*", help="further key=value of every run")


def parse_runs(
    parser: argparse.ArgumentParser, known: Sequence[str], *, what: str
) -> tuple[argparse.Namespace, list[str], list[int]]:
    """The arguments, the names and the seeds; ends the program where a name is unknown."""
    arguments = parser.parse_args()
    names = getattr(arguments, what).split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--{what}: {', '.join(unknown)}; there are: {', '.join(known)}")
    return arguments, names, [int(seed) for seed in arguments.seeds.split(",")]


class Starter:
    """Starts runs, at most `jobs` at a time.

    Attributes:
        lock: File to lock during each run, where the machine is shared.
    """

    def __init__(self, jobs: int = 1, lock: Path | None = None) -> None:
        self.jobs, self.lock = jobs, lock
        self._processes: set[subprocess.Popen] = set()
        self._ending = threading.Event()

    def complete(self, runs: Sequence[Run]) -> list[Run]:
        """Run what is not complete yet; returns the runs that failed.

        SIGTERM to this process is like Ctrl-C: the jobs end in an orderly way.
        """
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        missing = [run for run in runs if run.records() is None]
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                ended_well = list(pool.map(self._run, missing))
            except BaseException:
                # They end their own processes; killed, they would leave them.
                self._ending.set()
                for process in list(self._processes):
                    process.terminate()
                raise
        failed = [run for run, well in zip(missing, ended_well, strict=True) if not well or run.records() is None]
        for run in failed:
            sys.stderr.write(f"failed: see {run.folder.with_suffix('.log')}\n")
        return failed

    def _run(self, run: Run) -> bool:
        if self._ending.is_set():
            return False
        shutil.rmtree(run.folder, ignore_errors=True)
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        if run.prepare is not None:
            run.prepare(run.folder)
        sys.stderr.write(f"{run.folder.name} ...\n")
        with locked(self.lock), run.folder.with_suffix(".log").open("w") as log:
            # Side by side, each of them has one core.
            environment = {**os.environ, "OMP_NUM_THREADS": "1"} if self.jobs > 1 else None
            process = subprocess.Popen(run.command(), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)
            self._processes.add(process)
            try:
                return process.wait() == 0
            finally:
                self._processes.discard(process)


@contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Hold an exclusive lock on the file, if there is one."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_at_end(page: Path, script: str, text: str) -> None:
    """Put what a script measured at the end of a page, in place of what it wrote there before."""
    marker = f"<!-- Below: written by benchmarks/{script}. -->\n"
    above = page.read_text(encoding="utf-8").partition(marker)[0].rstrip("\n")
    page.write_text(f"{above}\n\n{marker}\n{text}", encoding="utf-8")


def last(records: Sequence[Mapping[str, Any]], metric: str) -> float:
    """The last value of a metric; NaN if there is none."""
    return next((record[metric] for record in reversed(records) if metric in record), float("nan"))


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation (of a sample) as text; empty without values."""
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join(["---"] * len(heads)) + " |"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"
