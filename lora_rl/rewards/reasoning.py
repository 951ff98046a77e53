"""Procedural tasks, scored by the package reasoning-gym. Runs in worker processes only."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

from lora_rl.rewards.types import RewardReason, RewardResult, ScoreRequest, failed, verdict

KEY = "reasoning_gym"


def check_task(request: ScoreRequest) -> None:
    """Raise ValueError when the prompt does not carry its task, or the task does not accept its own answer."""
    task = request.metadata.get(KEY)
    wanted = "{'dataset': name, 'config': options, 'item': {'question', 'answer', 'metadata'}}"
    if not isinstance(task, dict) or not {"dataset", "item"} <= task.keys():
        raise ValueError(f"reasoning_gym: the prompt's metadata must have {KEY} = {wanted}; it has {task!r}")
    dataset = _dataset_of(task)
    if task["item"].get("answer") is not None:
        own = dataset.score_answer(task["item"]["answer"], task["item"])
        if own < 1.0:
            raise ValueError(f"reasoning_gym: {task['dataset']} scores its own answer with {own}, not 1")


def match_task(text: str, request: ScoreRequest, *, partial_credit: bool) -> RewardResult:
    """The task's own score of the text, in [0, 1]; without `partial_credit` only 1 counts.

    Some tasks give a part of the score for form alone, or to any text that is not empty.
    """
    task = request.metadata[KEY]
    score = float(_dataset_of(task).score_answer(text, task["item"]))
    if not (math.isfinite(score) and 0.0 <= score <= 1.0):
        return failed(RewardReason.INVALID_VALUE, f"{task['dataset']} scored {score}, which is not in [0, 1]")
    if score == 1.0 or not partial_credit or score == 0.0:
        return verdict(score == 1.0)
    return RewardResult(score, RewardReason.PARTIAL)


def warm_up() -> None:
    """Import, which takes seconds."""
    import reasoning_gym  # noqa: F401


def _dataset_of(task: dict[str, Any]) -> Any:
    return _dataset(task["dataset"], json.dumps(task.get("config") or {}, sort_keys=True))


@functools.lru_cache(maxsize=256)
def _dataset(name: str, config: str) -> Any:
    import reasoning_gym

    # One item is enough: scoring looks at the item it is given.
    return reasoning_gym.create_dataset(name, **{**json.loads(config), "size": 1})
