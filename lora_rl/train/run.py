"""Around the loop: the run folder, what the user sees, and how a run ends."""

from __future__ import annotations

import glob
import logging
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from lora_rl.cluster.workers import WorkerError
from lora_rl.config import ConfigError, resolved_yaml
from lora_rl.config.memory_plan import memory_plan
from lora_rl.config.model_files import find_config
from lora_rl.config.rule_engine import check_model_rules
from lora_rl.sync.errors import SyncError
from lora_rl.track import Console, PhaseTimer, RunRecorder, learning_curve, read_metrics
from lora_rl.track.monitor import Monitor
from lora_rl.track.recorder import DAMAGED_NAME, FILE_NAME
from lora_rl.track.report import REPORT_NAME
from lora_rl.track.trackers import open_sinks
from lora_rl.train.checkpoint import Checkpoint, CheckpointError
from lora_rl.train.grpo import ADAPTER_FOLDER, run_grpo
from lora_rl.train.job import load_data
from lora_rl.train.reporting import reporting
from lora_rl.train.resume import Stop, check_fits, check_keeps_jumps, checkpoint_folder, identity, open_store, seconds
from lora_rl.train.run_lock import FolderLocks, in_use
from lora_rl.train.sft import MODEL_FOLDER, load_examples, run_sft

if TYPE_CHECKING:
    from lora_rl.config import Layout, RunConfig

logger = logging.getLogger(__name__)

FAILED, INTERRUPTED = 1, 130


# What ends a run with one message instead of a traceback.
FAILURES = (WorkerError, SyncError, CheckpointError, ConfigError, OSError, ValueError)


def run(config: RunConfig, layout: Layout, kind: Literal["grpo", "sft"] = "grpo") -> int:
    """Run a job in its run folder.

    Returns:
        The process's exit code: 0 when it ended as configured, 130 after Ctrl-C or SIGTERM, 1 after a failure. In each
        case the terminal says where the results are, and metrics.jsonl holds every finished step.
    """
    warnings: list[str] = []
    try:
        with FolderLocks(warnings.append) as locks:
            return _run(config, layout, kind, locks, warnings)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted before the run began\n")
        return INTERRUPTED
    except FAILURES as error:
        sys.stderr.write(f"\n{described(error)}\n")
        return FAILED


def _run(
    config: RunConfig, layout: Layout, kind: Literal["grpo", "sft"], locks: FolderLocks, warnings: list[str]
) -> int:
    job, load = (run_grpo, load_data) if kind == "grpo" else (run_sft, load_examples)
    timer = PhaseTimer()
    was_known = find_config(config.policy.model_name) is not None
    with timer("startup"):
        # Before anything is written or started: what is wrong with the data is then all there is to see.
        data = load(config, warnings.append)
    # A hub id's config.json may have come just now.
    if not was_known and (violations := check_model_rules(config)):
        raise ConfigError(violations, config.policy.model_name)
    if kind == "grpo":
        warnings.extend(memory_plan(config, layout).warnings())
    same: dict[str, Any] = {}
    if not config.checkpointing.enabled:
        run_dir, resume, continues = free_run_dir(Path(config.logger.log_dir), locks), None, False
    else:
        run_dir, resume, continues = find_run(config, warnings.append, locks)
        same = identity(config, data[1], kind)
        if resume is not None:
            # Before anything is written.
            check_fits(resume, same)
            check_keeps_jumps(resume, config)
    if resume is not None:
        begin_with(run_dir / FILE_NAME, resume.metrics, warnings.append)
    (run_dir / "config.yaml").write_text(resolved_yaml(config))
    paths = {
        "metrics": run_dir / FILE_NAME,
        "adapter": run_dir / ADAPTER_FOLDER,
        "model": run_dir / MODEL_FOLDER,
        "report": run_dir / REPORT_NAME,
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
        sample_every=config.logger.sample_table_period,
        sample_count=config.logger.num_val_samples_to_print,
    )
    store = open_store(config, run_dir, console.warn) if config.checkpointing.enabled else None
    if store is not None:
        store.folder.mkdir(parents=True, exist_ok=True)
        store.clean(None if resume is None else resume.step)
    told = {"warn": console.warn, "tell": console.info}
    # Records after the checkpoint will be computed again; with none, all of them.
    resume_step = resume.step if resume is not None else -1 if continues else None
    sinks = open_sinks(config, run_dir, first_step=None if resume_step is None else resume_step + 1, **told)
    monitor = Monitor(console.warn) if config.logger.monitor_gpus else None
    code, failure = 0, ""
    limit = config.checkpointing.checkpoint_must_save_by if store is not None else None
    stop = Stop(saves=store is not None, limit_s=None if limit is None else seconds(limit), notify=console.warn)
    # The console is left last: trackers may warn when they are closed.
    with (
        stop,
        console,
        monitor or nullcontext(),
        RunRecorder(
            run_dir,
            sinks=sinks,
            resume_step=resume_step,
            monitor=monitor.take if monitor else dict,
            warn=console.warn,
        ) as recorder,
        reporting(run_dir, kind, console) as outcome,
    ):
        console.info(f"run folder {run_dir}")
        if monitor and not monitor.sees_gpus:
            console.info("logger.monitor_gpus: there is no nvidia-smi here; CPU and memory are recorded (host/*)")
        for warning in warnings:
            console.warn(warning)
        if resume is not None:
            console.info(f"continuing after step {resume.step}, from {resume.path}")
            for record in recorder.earlier:
                console.state.update(record)
        try:
            job(
                config,
                layout,
                console,
                recorder,
                timer,
                run_dir,
                data,
                stop=stop,
                store=store,
                resume=resume,
                same=same,
            )
        except KeyboardInterrupt:
            code = INTERRUPTED
            outcome.interrupted()
        except FAILURES as error:
            code, failure = FAILED, described(error)
            outcome.failed(failure)
        records = read_metrics(recorder.path)
        try:
            if any("train/reward" in record for record in records):
                learning_curve(records, paths["curve"], title=run_dir.name)
        except OSError as error:
            console.warn(f"{paths['curve']} could not be drawn: {error}")
    if code == INTERRUPTED:
        sys.stderr.write(f"interrupted after {max(len(records) - 1, 0)} finished steps; results are in {run_dir}\n")
    if failure:
        sys.stderr.write(f"\n{failure}\n")
    return code


def described(error: BaseException) -> str:
    """An error as the user sees it: its kind, its message, and what was noted on the way."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])


def begin_with(file: Path, records: bytes, warn: Callable[[str], None]) -> None:
    """Make sure that metrics.jsonl begins with the records of a checkpoint, which were safely on disk when it was."""
    if not file.exists():
        file.write_bytes(records)
    elif not file.read_bytes().startswith(records):
        kept = file.with_name(DAMAGED_NAME)
        file.replace(kept)
        file.write_bytes(records)
        warn(f"{file} did not have the records up to the checkpoint: they are put back from it, and it is {kept} now")


def find_run(
    config: RunConfig, warn: Callable[[str], None], locks: FolderLocks
) -> tuple[Path, Checkpoint | None, bool]:
    """Where a run that saves checkpoints goes on, or begins; nobody else may write there from then on.

    It goes on in the newest of `log_dir`, `log_dir-2`, ... that has checkpoints of its own, or, with a
    `checkpointing.checkpoint_dir`, in the one whose records begin with those of the checkpoint. The folder of another
    run is never touched.

    Returns:
        The run folder; the checkpoint to continue from, None where there is no good one; and whether the folder is
        that of an earlier start, whose records this one takes over.

    Raises:
        ValueError: another process is writing there.
    """

    def mine(folder: Path) -> Path:
        if (holder := locks.take(folder)) is not None:
            raise ValueError(in_use(folder, holder))
        return folder

    wanted = Path(config.logger.log_dir)
    known = run_folders(wanted)
    if config.checkpointing.checkpoint_dir is None:
        own = [folder for folder in known if checkpoint_folder(config, folder).is_dir()]
        if not own:
            return free_run_dir(wanted, locks), None, False
        folder = mine(own[-1])
        return folder, open_store(config, folder, warn).load_newest(), True
    store = open_store(config, wanted, warn)
    mine(store.folder)
    resume = store.load_newest()
    if resume is not None:
        for folder in reversed(known):
            file = folder / FILE_NAME
            # It may have lost its end with the machine's power; `begin_with` puts that back.
            records = file.read_bytes() if file.exists() else b""
            if records and (records.startswith(resume.metrics) or resume.metrics.startswith(records)):
                return mine(folder), resume, True
    return free_run_dir(wanted, locks), resume, resume is not None


def run_folders(wanted: Path) -> list[Path]:
    """The run folders of `wanted` that exist: itself, `wanted-2`, `wanted-3`, ...

    Any may have been removed. After a gap only those count whose config.yaml says that they are of `wanted`: others may
    have such names, too.
    """
    numbered = {1: wanted} if wanted.exists() else {}
    for folder in wanted.parent.glob(f"{glob.escape(wanted.name)}-*"):
        number = folder.name.removeprefix(f"{wanted.name}-")
        if re.fullmatch("[1-9][0-9]*", number) and int(number) > 1 and folder.is_dir():
            numbered[int(number)] = folder
    unbroken = set(takewhile(numbered.__contains__, count(1)))
    return [numbered[n] for n in sorted(numbered) if n in unbroken or _is_of(numbered[n], wanted)]


def _is_of(folder: Path, wanted: Path) -> bool:
    try:
        found = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["logger"]["log_dir"]
        return Path(found).absolute() == wanted.absolute()
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return False


def run_evaluation(
    config: RunConfig, layout: Layout, *, adapter_path: Path | None, ks: Sequence[int], out: Path | None
) -> int:
    """Evaluate and print the summary.

    Args:
        adapter_path: see `find_adapter`; None: the base model.
        out: folder for the results; None: the run folder's name with `-eval`, numbered past earlier ones.

    Returns:
        0, or 1 after a failure, with one message.
    """
    from lora_rl.train.evaluate import SUMMARY, evaluate, find_adapter

    wanted = out or Path(f"{config.logger.log_dir}-eval")
    try:
        adapter, source = (None, None) if adapter_path is None else find_adapter(adapter_path)
        console = Console(config.logger.console, 0)
        with console, FolderLocks(console.warn) as locks:
            folder = free_run_dir(wanted, locks, SUMMARY)
            summary = evaluate(config, layout, console, folder, adapter=adapter, ks=ks)
    except FAILURES as error:
        sys.stderr.write(f"{described(error)}\n")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    lines = [f"{'model':<24}{config.policy.model_name}" + (f" with {source}" if source else "")]
    for name, value in summary.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {share:.3f}" for key, share in value.items())
        lines.append(f"{name.replace('_', ' '):<24}{f'{value:.4f}' if isinstance(value, float) else value}")
    sys.stdout.write("\n".join([*lines, f"{'results':<24}{folder}"]) + "\n")
    return 0


def free_run_dir(wanted: Path, locks: FolderLocks, marker: str = FILE_NAME) -> Path:
    """`wanted`, or `wanted-2`, `wanted-3`, ... when earlier runs left their `marker` there, or another process is about
    to: nothing is overwritten. The folder is made and locked."""
    candidate, number = wanted, 1
    while True:
        if not (candidate / marker).exists() and locks.take(candidate) is None:
            if not (candidate / marker).exists():
                return candidate
            locks.give_back(candidate)
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
