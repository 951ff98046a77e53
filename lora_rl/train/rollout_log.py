"""rollouts.jsonl: every completion of each training step, one line each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lora_rl.rollout.types import Rollout

FILE_NAME = "rollouts.jsonl"


class RolloutLog:
    """Appends the completions of each step; a continued run first drops those behind its checkpoint.

    Args:
        path: the file; None: nothing is written.
        done: steps of an earlier start that are kept; None: none.
    """

    def __init__(self, path: Path | None, done: int | None = None) -> None:
        self._path = path
        if path is not None:
            drop_later_steps(path, done)

    def write(self, step: int, rollouts: Sequence[Rollout], advantages: Mapping[tuple[int, int], float]) -> None:
        """Append one step.

        Args:
            advantages: by (group id, sample index), of the completions that were trained on; others have none.
        """
        if self._path is None:
            return
        append_lines(self._path, (_line(step, r, advantages.get((r.group_id, r.sample_index))) for r in rollouts))


def append_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Append objects to a file of one JSON object a line."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def drop_later_steps(path: Path, done: int | None) -> None:
    """Keep of such a file, if it is there, the lines of `step` up to `done`, none when that is None."""
    if not path.exists():
        return
    kept = [line for line in _whole_lines(path) if done is not None and json.loads(line)["step"] <= done]
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(b"".join(kept))
    os.replace(temporary, path)


def _whole_lines(path: Path) -> list[bytes]:
    """Lines of a file that may end in the middle of one."""
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _line(step: int, rollout: Rollout, advantage: float | None) -> dict[str, Any]:
    completion = rollout.completion
    return {
        "step": step,
        "group": rollout.group_id,
        "sample": rollout.sample_index,
        "prompt_id": rollout.prompt.id,
        "completion": rollout.text,
        "reward": rollout.reward,
        "reason": rollout.reason,
        "advantage": advantage,
        "stop_reason": completion.stop_reason.value,
        "tokens": len(completion.token_ids),
        # [weight version, tokens] of each stretch.
        "versions": [list(span) for span in completion.spans],
    }
