"""Around the loop: the run folder, what the user sees, and how a run ends."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from lora_rl.cluster.workers import WorkerError
from lora_rl.config import resolved_yaml
from lora_rl.sync.errors import SyncError
from lora_rl.track import Console, PhaseTimer, RunRecorder, TensorBoardSink, learning_curve, read_metrics
from lora_rl.track.recorder import FILE_NAME
from lora_rl.train.grpo import ADAPTER_FOLDER, run_grpo

if TYPE_CHECKING:
    from lora_rl.config import Layout, RunConfig

logger = logging.getLogger(__name__)

FAILED, INTERRUPTED = 1, 130


def run(config: RunConfig, layout: Layout) -> int:
    """Run a GRPO job in its run folder.

    Returns:
        The process's exit code: 0 when every step was done, 130 after Ctrl-C or SIGTERM, 1 after a failure. In each
        case the terminal says where the results are, and metrics.jsonl holds every finished step.
    """
    run_dir = free_run_dir(Path(config.logger.log_dir))
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(resolved_yaml(config))
    timer = PhaseTimer()
    paths = {
        "metrics": run_dir / FILE_NAME,
        "adapter": run_dir / ADAPTER_FOLDER,
        "curve": run_dir / "learning_curve.png",
        "config": run_dir / "config.yaml",
        "logs": run_dir / "logs",
        "tensorboard": run_dir / "tensorboard",
    }
    console = Console(
        config.logger.console,
        config.grpo.max_num_steps,
        timer=timer,
        paths=paths,
        sample_every=config.logger.sample_table_period or sys.maxsize,
        sample_count=config.logger.num_val_samples_to_print,
    )
    sinks = [TensorBoardSink(paths["tensorboard"])] if config.logger.tensorboard_enabled else []
    code, failure = 0, ""
    with RunRecorder(run_dir, sinks=sinks, warn=console.warn) as recorder, _sigterm_as_interrupt(), console:
        console.info(f"run folder {run_dir}")
        try:
            run_grpo(config, layout, console, recorder, timer, run_dir)
        except KeyboardInterrupt:
            code = INTERRUPTED
        except (WorkerError, SyncError, OSError, ValueError) as error:
            code, failure = FAILED, f"{type(error).__name__}: {error}"
        finally:
            records = read_metrics(recorder.path)
            if any("train/reward" in record for record in records):
                learning_curve(records, paths["curve"], title=run_dir.name)
    if code == INTERRUPTED:
        sys.stderr.write(f"interrupted after {max(len(records) - 1, 0)} finished steps; results are in {run_dir}\n")
    if failure:
        sys.stderr.write(f"\n{failure}\n")
    return code


def free_run_dir(wanted: Path) -> Path:
    """`wanted`, or `wanted-2`, `wanted-3`, ... when earlier runs left their records there: nothing is overwritten."""
    candidate, number = wanted, 1
    while (candidate / FILE_NAME).exists():
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    return candidate


class _sigterm_as_interrupt:
    """Within the block SIGTERM ends the run as Ctrl-C does. Does nothing outside the main thread."""

    def __enter__(self) -> None:
        self._active = threading.current_thread() is threading.main_thread()
        if self._active:
            self._previous = signal.signal(signal.SIGTERM, self._interrupt)

    def __exit__(self, *exc_info: object) -> None:
        if self._active:
            signal.signal(signal.SIGTERM, self._previous)

    @staticmethod
    def _interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt
