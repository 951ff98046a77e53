"""When a run saves, how it stops, and what it may continue from."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from lora_rl.data import model_folder
from lora_rl.train.checkpoint import Checkpoint, CheckpointError, CheckpointStore, differences, file_hashes

if TYPE_CHECKING:
    from lora_rl.config import RunConfig
    from lora_rl.config.layout import Layout
    from lora_rl.config.schema import PeftConfig
    from lora_rl.data import PromptSource
    from lora_rl.train.extrapolation_state import SavedExtrapolation
    from lora_rl.train.job import Job
    from lora_rl.train.sft import SftJob


class Stop:
    """A wish to stop after the current step: by a first Ctrl-C or SIGTERM, or because the time is up.

    A second signal stops at once. Without checkpoints, so does the first: there is nothing to finish the step for.

    Args:
        saves: whether the run writes checkpoints.
        limit_s: seconds after which to stop; None: never.
        notify: tells the user that the first signal was understood.
    """

    def __init__(
        self,
        *,
        saves: bool,
        limit_s: float | None = None,
        notify: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._saves, self._limit, self._notify, self._clock = saves, limit_s, notify, clock
        self._start = clock()
        self.signalled = False

    @property
    def time_is_up(self) -> bool:
        """Whether the run time is used up."""
        return self._limit is not None and self._clock() - self._start >= self._limit

    @property
    def requested(self) -> bool:
        """Whether to save and stop now, at the end of a step."""
        return self.signalled or self.time_is_up

    def __enter__(self) -> Stop:
        self._active = threading.current_thread() is threading.main_thread()
        if self._active:
            self._previous = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._active:
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signalled or not self._saves:
            raise KeyboardInterrupt
        self.signalled = True
        self._notify("stopping after this step, with a checkpoint; once more stops at once")


def seconds(duration: str) -> float:
    """Seconds in `days:hours:minutes:seconds`, from which the front may be left out.

    Raises:
        ValueError: anything else.
    """
    parts = duration.split(":")
    if not 1 <= len(parts) <= 4 or not all(part.strip().isdigit() for part in parts):
        raise ValueError(f"{duration!r} is not days:hours:minutes:seconds, such as 0:03:45:00")
    return sum(int(part) * factor for part, factor in zip(reversed(parts), (1, 60, 3600, 86400), strict=False))


def checkpoint_folder(config: RunConfig, run_dir: Path) -> Path:
    """`checkpointing.checkpoint_dir`, or `checkpoints` in the run folder."""
    return Path(config.checkpointing.checkpoint_dir or run_dir / "checkpoints")


def open_store(config: RunConfig, run_dir: Path, warn: Callable[[str], None]) -> CheckpointStore:
    """The store that the section `checkpointing` describes."""
    section = config.checkpointing
    return CheckpointStore(
        checkpoint_folder(config, run_dir),
        # Without a metric the latest ones are kept.
        keep=section.keep_top_k,
        higher_is_better=section.higher_is_better,
        warn=warn,
    )


def identity(config: RunConfig, prompts: PromptSource, job: str = "grpo") -> dict[str, Any]:
    """What a run must have in common with the checkpoint it continues from.

    Base model and starting adapter (hashes of their files; they may have moved), adapter settings, and prompts with
    their order.

    Args:
        job: `grpo` or `sft`.
    """
    cursor, peft = prompts.state_dict(), config.policy.megatron_cfg.peft
    return {
        "job": job,
        "base_model": file_hashes(model_folder(config.policy.model_name)),
        "adapter": _adapter_settings(peft),
        "start_adapter": {} if peft.adapter_path is None else file_hashes(Path(peft.adapter_path)),
        "optimizer": config.policy.megatron_cfg.optimizer.optimizer,
        "data": {key: cursor[key] for key in ("prompts", "seed", "shuffle")},
    }


def _adapter_settings(peft: PeftConfig) -> dict[str, Any]:
    settings = peft.model_dump(mode="json", exclude={"adapter_path", "svd"})
    if peft.svd.enabled:
        # How fast it is trained, and how it travels, may change.
        settings["svd"] = peft.svd.model_dump(mode="json", include={"enabled", "mode", "parameterization"})
    return settings


def check_fits(checkpoint: Checkpoint, current: dict[str, Any]) -> None:
    """Refuse to continue a run as another one.

    Raises:
        CheckpointError: with every difference.
    """
    lines = [f"{line}{_hint(line)}" for line in differences(checkpoint.identity, current)]
    if lines:
        raise CheckpointError(
            f"this run cannot continue from {checkpoint.path}:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nUse the settings of the checkpoint, or another logger.log_dir or checkpointing.checkpoint_dir"
        )


def _hint(difference: str) -> str:
    """What a hash does not say."""
    if difference.startswith("data.prompts:"):
        return " (a hash of the training prompts, in order; grpo.next.gate sets some of them aside)"
    return ""


def check_keeps_jumps(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Refuse to continue with settings under which jumps ahead that are merged into the weights would be lost.

    Raises:
        CheckpointError: naming the key.
    """
    if checkpoint.extrapolation is None or not checkpoint.extrapolation[0]["merged"]:
        return
    mode, precision = config.policy.generation.weight_sync.mode, config.policy.precision
    wrong = [
        # No later checkpoint would hold them.
        (not config.grpo.next.enabled, "grpo.next.enabled = false", "true; grpo.next.max_jumps prevents further jumps"),
        (mode != "merged", f"policy.generation.weight_sync.mode = {mode}", "merged: no other brings them to engines"),
        (precision != "float32", f"policy.precision = {precision}", "float32: others would round them away"),
    ]
    lines = [f"  {what}; continue with {instead}" for is_wrong, what, instead in wrong if is_wrong]
    if lines:
        raise CheckpointError(
            f"{checkpoint.path} holds jumps ahead that are merged into the weights, and would lose them:\n"
            + "\n".join(lines)
        )


def is_save_step(step: int, last_step: int, config: RunConfig) -> bool:
    """Every `save_period` steps, and after the last."""
    return step % config.checkpointing.save_period == 0 or step == last_step


def take(
    job: Job | SftJob,
    config: RunConfig,
    layout: Layout,
    step: int,
    record: dict[str, float],
    metrics: Path,
    *,
    cursor: dict[str, Any],
    version: int = 0,
    payload: str = "",
    extrapolation: SavedExtrapolation | None = None,
) -> Checkpoint:
    """A checkpoint of a job after a step.

    Args:
        cursor: state of the prompts' order.
        version, payload: of the last push to the engines, where there are any.
        extrapolation: see `lora_rl.train.extrapolation_state`.
        record: what was logged for the step; holds the ranking metric where it was measured.
        metrics: metrics.jsonl.
    """
    from dataclasses import replace

    from lora_rl.config import resolved_yaml

    adapter, state = job.policy.state()
    if extrapolation is not None and extrapolation[0]["merged"]:
        # What it computes on the base model as it is on disk; its own ranks come first.
        adapter = job.policy.extrapolation("whole_adapter")
    name = config.checkpointing.metric_name
    return Checkpoint(
        step=step,
        weight_version=version,
        payload_digest=payload,
        adapter=replace(adapter, base_model_name_or_path=config.policy.model_name),
        moments=state.moments,
        counters=state.counters,
        flags=state.flags,
        random=state.random,
        svd=state.svd,
        cursor=cursor,
        identity=job.identity,
        layout={"tp": layout.tp, "pp": layout.pp, "dp": layout.dp},
        config=resolved_yaml(config),
        metrics=metrics.read_bytes(),
        start=job.start,
        extrapolation=extrapolation,
        score=record.get(name) if name else None,
    )
