"""val_samples.jsonl, read: which held-out prompts are answered better or worse than before."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_NAME = "val_samples.jsonl"


@dataclass(frozen=True)
class Validation:
    """One validation.

    Attributes:
        step: after which it was made.
        answers: the lines of the file by prompt id, in their order.
    """

    step: int
    answers: Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Change:
    """One prompt in two validations.

    Attributes:
        before, after: its lines in both.
        gain: share of right completions, after less before.
    """

    before: Sequence[Mapping[str, Any]]
    after: Sequence[Mapping[str, Any]]
    gain: float


@dataclass(frozen=True)
class Changes:
    """The prompts that two validations have in common; the largest change first, then in the order of the file."""

    improved: list[Change]
    regressed: list[Change]
    still_right: list[Change]
    still_wrong: list[Change]

    @property
    def total(self) -> int:
        return sum(map(len, (self.improved, self.regressed, self.still_right, self.still_wrong)))


def first_and_last(path: Path | str) -> tuple[Validation, Validation] | None:
    """The first and the last validation of a run, None when there are not two; others are not kept in memory.

    A last line without its newline is still being written and is left out.

    Raises:
        ValueError: a line is not what `lora_rl.train.validation_log` writes, with its number.
    """
    path = Path(path)
    if not path.exists():
        return None
    first: list[dict[str, Any]] = []
    last: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):
                break
            line = _parse(path, number, text)
            if not first or line["step"] == first[0]["step"]:
                first.append(line)
                continue
            if last and line["step"] != last[0]["step"]:
                last = []
            last.append(line)
    return (_validation(first), _validation(last)) if last else None


def compare(before: Validation, after: Validation) -> Changes:
    """Sort the prompts of two validations by what changed."""
    changes = Changes([], [], [], [])
    for prompt, new in after.answers.items():
        old = before.answers.get(prompt)
        if old is None:
            continue
        share, earlier = right_share(new), right_share(old)
        change = Change(old, new, share - earlier)
        if share > earlier:
            changes.improved.append(change)
        elif share < earlier:
            changes.regressed.append(change)
        else:
            (changes.still_right if share > 0 else changes.still_wrong).append(change)
    for part in (changes.improved, changes.regressed):
        part.sort(key=lambda change: -abs(change.gain))
    return changes


def right_share(lines: Iterable[Mapping[str, Any]]) -> float:
    """Share of completions that are right."""
    marks = [bool(line["right"]) for line in lines]
    return sum(marks) / len(marks)


def _parse(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
    needed = ("step", "prompt_id", "prompt", "expected", "completion", "reward", "right")
    if not isinstance(line, dict) or any(name not in line for name in needed):
        raise ValueError(f"{path}, line {number}: a sample is an object with {', '.join(needed)}")
    return line


def _validation(lines: Sequence[dict[str, Any]]) -> Validation:
    answers: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        answers.setdefault(str(line["prompt_id"]), []).append(line)
    return Validation(lines[0]["step"], answers)
