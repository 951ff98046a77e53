"""Procedural tasks, scored by the package reasoning-gym. Runs in worker processes only."""

from __future__ import annotations

import functools
import json
import math
import re
from typing import Any

from lora_rl.rewards.types import RewardReason, RewardResult, ScoreRequest, failed, verdict

KEY = "reasoning_gym"
# Tasks that compare with tuples, which JSON turns into lists.
_OF_TUPLES = ("arc_agi", "rearc")
_NONSENSE = "qqq zz"
_NON_FINITE = re.compile(r"(?<![a-z])(nan|inf(inity)?)(?![a-hk-z])", re.IGNORECASE)


def check_task(request: ScoreRequest) -> None:
    """Raise ValueError when the prompt does not carry its task, or the task does not accept its own answer."""
    task = request.metadata.get(KEY)
    wanted = "{'dataset': name, 'config': options, 'item': {'question', 'answer', 'metadata'}}"
    if not isinstance(task, dict) or not {"dataset", "item"} <= task.keys():
        raise ValueError(f"reasoning_gym: the prompt's metadata must have {KEY} = {wanted}; it has {task!r}")
    own = task["item"].get("answer")
    # Where many answers are right, the item has none.
    if own is not None and (score := _score(own, task)) != 1.0:
        raise ValueError(f"reasoning_gym: {task['dataset']} scores its own answer {own!r} with {score}, not with 1")
    if _score(_NONSENSE, task) == 1.0:
        raise ValueError(f"reasoning_gym: {task['dataset']} takes any text for a right answer; use another task")


def match_task(text: str, request: ScoreRequest, *, partial_credit: bool) -> RewardResult:
    """The task's own score of the text, in [0, 1]; without `partial_credit` only 1 counts.

    Some tasks give a part of the score for form alone, or to any text that is not empty; some raise for a malformed
    one. Not-a-number is unparseable unless the item's own answer has it: comparisons with it are easily passed.
    """
    task = request.metadata[KEY]
    if _NON_FINITE.search(text) and not _NON_FINITE.search(str(task["item"].get("answer"))):
        return failed(RewardReason.UNPARSEABLE)
    score = _score(text, task)
    if score is None:
        return failed(RewardReason.UNPARSEABLE)
    if not (math.isfinite(score) and 0.0 <= score <= 1.0):
        return failed(RewardReason.INVALID_VALUE, f"{task['dataset']} scored {score}, which is not in [0, 1]")
    if score == 1.0 or not partial_credit or score == 0.0:
        return verdict(score == 1.0)
    return RewardResult(score, RewardReason.PARTIAL)


def warm_up() -> None:
    """Import, which takes seconds."""
    import reasoning_gym  # noqa: F401


def _score(text: str, task: dict[str, Any]) -> float | None:
    """The task's score; None if it raises, as the item itself was found to be good."""
    item = task["item"]
    if task["dataset"] in _OF_TUPLES:
        item = {**item, "metadata": _tuples(item["metadata"])}
    dataset = _dataset(task["dataset"], json.dumps(task.get("config") or {}, sort_keys=True))
    try:
        return float(dataset.score_answer(text, item))
    except MemoryError:
        raise
    except Exception:
        return None


def _tuples(value: Any) -> Any:
    """The same with tuples for lists, all the way down."""
    if isinstance(value, dict):
        return {key: _tuples(one) for key, one in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


@functools.lru_cache(maxsize=256)
def _dataset(name: str, config: str) -> Any:
    import reasoning_gym

    # One item is enough: scoring looks at the item it is given.
    return reasoning_gym.create_dataset(name, **{**json.loads(config), "size": 1})
