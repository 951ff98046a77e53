"""val_samples.jsonl: what every held-out prompt was answered with, at each validation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_rl.track.samples import FILE_NAME
from lora_rl.train.rollout_log import append_lines, drop_later_steps

if TYPE_CHECKING:
    from lora_rl.config import RunConfig
    from lora_rl.rollout.types import Rollout


class ValidationLog:
    """Appends the completions of each validation; a continued run first drops those behind its checkpoint.

    Args:
        path: the file; None: nothing is written.
        done: steps of an earlier start that are kept; None: none.
    """

    def __init__(self, path: Path | None = None, done: int | None = None) -> None:
        self._path = path
        if path is not None:
            drop_later_steps(path, done)

    def write(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Append the validation that was made after `step`."""
        if self._path is not None:
            append_lines(self._path, (_line(step, rollout) for rollout in rollouts))


def open_validation_log(config: RunConfig, run_dir: Path, done: int | None) -> ValidationLog:
    """The log of a run as `logger.log_val_samples` wants it; `done` as above."""
    return ValidationLog(run_dir / FILE_NAME if config.logger.log_val_samples else None, done)


def _line(step: int, rollout: Rollout) -> dict[str, Any]:
    return {
        "step": step,
        "prompt_id": rollout.prompt.id,
        "sample": rollout.sample_index,
        "prompt": rollout.prompt.text,
        "expected": rollout.prompt.answer,
        "completion": rollout.text,
        "reward": rollout.reward,
        "right": rollout.is_right,
        "reason": rollout.reason,
        "stop_reason": rollout.completion.stop_reason.value,
        "tokens": len(rollout.completion.token_ids),
    }
