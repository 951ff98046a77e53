"""Around the loop: the run folder, what the user sees, and how a run ends."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rl.cluster.workers import WorkerError
from lora_rl.config import resolved_yaml
from lora_rl.sync.errors import SyncError
from lora_rl.track import Console, PhaseTimer, RunRecorder, TensorBoardSink, learning_curve, read_metrics
from lora_rl.track.recorder import FILE_NAME
from lora_rl.train.checkpoint import CheckpointError
from lora_rl.train.grpo import ADAPTER_FOLDER, run_grpo
from lora_rl.train.resume import Stop, open_store, seconds

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
    warnings: list[str] = []
    wanted = Path(config.logger.log_dir)
    store, resume = None, None
    if config.checkpointing.enabled:
        store = open_store(config, wanted, warnings.append)
        try:
            resume = store.load_newest()
        except (CheckpointError, OSError, ValueError) as error:
            sys.stderr.write(f"{error}\n")
            return FAILED
    # A run that saves is continued in its folder; any other gets a folder of its own.
    continues = resume is not None or (store is not None and store.folder.exists())
    run_dir = wanted if continues else free_run_dir(wanted)
    run_dir.mkdir(parents=True, exist_ok=True)
    if store is not None:
        store = open_store(config, run_dir, warnings.append)
        store.folder.mkdir(parents=True, exist_ok=True)
    if resume is not None and not (run_dir / FILE_NAME).exists():
        (run_dir / FILE_NAME).write_bytes(resume.metrics)
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
    # Records after the checkpoint will be computed again; with none, all of them.
    resume_step = resume.step if resume is not None else -1 if continues else None
    limit = config.checkpointing.checkpoint_must_save_by if store is not None else None
    stop = Stop(saves=store is not None, limit_s=None if limit is None else seconds(limit), notify=console.warn)
    with (
        RunRecorder(run_dir, sinks=sinks, resume_step=resume_step, warn=console.warn) as recorder,
        stop,
        console,
    ):
        console.info(f"run folder {run_dir}")
        if store is not None:
            # From now on its warnings are shown at once.
            store = open_store(config, run_dir, console.warn)
            store.clean()
            for warning in warnings:
                console.warn(warning)
        if resume is not None:
            console.info(f"continuing after step {resume.step}, from {resume.path}")
            for record in recorder.earlier:
                console.state.update(record)
        try:
            run_grpo(config, layout, console, recorder, timer, run_dir, stop=stop, store=store, resume=resume)
        except KeyboardInterrupt:
            code = INTERRUPTED
        except (WorkerError, SyncError, CheckpointError, OSError, ValueError) as error:
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
