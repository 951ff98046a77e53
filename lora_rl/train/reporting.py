"""The last thing of a run: how it ended, and its report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_rl.track import Console
from lora_rl.track.report import REPORT_NAME, write_report
from lora_rl.track.run_info import FAILED, FINISHED, INTERRUPTED, RunInfo


class Outcome:
    """How the run ended, as far as whoever runs it has said; finished otherwise."""

    def __init__(self) -> None:
        self.kind, self.error = FINISHED, None

    def interrupted(self) -> None:
        """A signal ended it."""
        self.kind = INTERRUPTED

    def failed(self, error: str) -> None:
        """It could not go on."""
        self.kind, self.error = FAILED, error


@contextmanager
def reporting(run_dir: Path, kind: str, console: Console) -> Iterator[Outcome]:
    """Write run.json when the body starts and when it ends, and report.html at the end, however that comes about.

    Neither can end or fail the run: what goes wrong with them is a warning.

    Args:
        kind: `grpo` or `sft`.
        console: is warned, and knows how many steps there were to be.
    """
    outcome, info = Outcome(), None
    with _only_warning(console.warn, "run.json could not be written"):
        info = RunInfo(run_dir, kind)
    try:
        yield outcome
    except KeyboardInterrupt:
        outcome.interrupted()
        raise
    except BaseException as error:
        outcome.failed(f"{type(error).__name__}: {error}")
        raise
    finally:
        with _only_warning(console.warn, "run.json could not be written"):
            if info is not None:
                info.end(outcome.kind, outcome.error, console.state.total_steps)
        with _only_warning(console.warn, f"{REPORT_NAME} could not be made; `lora-rl report {run_dir}` tries again"):
            write_report(run_dir)


@contextmanager
def _only_warning(warn: Callable[[str], None], problem: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        warn(f"{problem}: {type(error).__name__}: {error}")
