"""Questions with answers before they are tokens: read from rows, checked, split, kept apart."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_rl.data.files import read_rows

Message = dict[str, Any]
Warn = Callable[[str], None]


@dataclass(frozen=True)
class Example:
    """One question, as text or as chat messages, with its reference answer.

    `where` says where it was read, for messages about it; `metadata` holds the columns that are neither.
    """

    id: str
    content: str | tuple[Message, ...]
    answer: str
    where: str
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What makes two questions the same: the text without blanks around it; a single user message is its text."""
        if isinstance(self.content, str):
            return self.content.strip()
        if [message["role"] for message in self.content] == ["user"]:
            return self.content[0]["content"].strip()
        return json.dumps(self.content, ensure_ascii=False, sort_keys=True)


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a file. Without `id`, an id is made from prompt and answer."""

    prompt: str
    answer: str
    id: str | None = None


def read_examples(path: Path, columns: Columns, warn: Warn) -> list[Example]:
    """All examples of a file. Rows that repeat a prompt with the same answer are left out, and counted in a warning.

    Raises:
        FileNotFoundError: no such file.
        ValueError: naming file, line or row, and column: see `lora_rl.data.files.read_rows`; a missing column, an
            empty or mistyped prompt or answer, an id that occurred before.
    """
    examples: list[Example] = []
    seen: dict[tuple[str, str], str] = {}
    ids: dict[str, str] = {}
    repeated: list[str] = []
    for where, row in read_rows(path):
        example = _example(where, row, columns)
        pair = (example.key, example.answer)
        if pair in seen:
            repeated.append(f"{example.where} repeats {seen[pair]}")
            continue
        if example.id in ids:
            raise ValueError(f"{where}: the id {example.id!r} in {columns.id!r} is also that of {ids[example.id]}")
        seen[pair] = ids[example.id] = where
        examples.append(example)
    if repeated:
        warn(f"{len(repeated)} rows with the same prompt and answer as another were left out; {repeated[0]}")
    return examples


def split_examples(examples: Sequence[Example], fraction: float) -> tuple[list[Example], list[Example]]:
    """(train, held out). A prompt's side depends on its own text alone, so all its copies are on one side.

    About `fraction` of the prompts are held out, the same ones whatever else is in the file.

    Raises ValueError if a side with a share of its own is left empty.
    """
    train: list[Example] = []
    held_out: list[Example] = []
    for example in examples:
        digest = hashlib.sha256(f"validation split\0{example.key}".encode()).digest()
        (held_out if int.from_bytes(digest[:8], "big") < fraction * 2**64 else train).append(example)
    if not train or (fraction and not held_out):
        side = "train on" if not train else "validate on"
        raise ValueError(
            f"data.validation_split={fraction} of {len(examples)} examples leaves none to {side}: "
            "use another share, more examples, or a val_path"
        )
    return train, held_out


def keep_apart(
    train: Sequence[Example], held_out: Sequence[Example], *, drop_overlap: bool, warn: Warn
) -> list[Example]:
    """The training examples whose prompt is not held out.

    Raises ValueError if there are others and they may not be dropped, or if nothing is left to train on.
    """
    held = {example.key: example for example in held_out}
    shared = [example for example in train if example.key in held]
    if not shared:
        return list(train)
    first = shared[0]
    what = (
        f"{len(shared)} of {len(train)} training prompts are also in the validation data, such as "
        f"{first.where} ({shorten(first.key)}), which is {held[first.key].where}"
    )
    if not drop_overlap:
        raise ValueError(f"{what}: remove them, or set data.drop_overlap=true to leave them out of training")
    if len(shared) == len(train):
        raise ValueError(f"{what}: none would be left to train on")
    warn(f"{what}: left out of training")
    return [example for example in train if example.key not in held]


def shorten(text: str, width: int = 60) -> str:
    """The beginning of a text, quoted, on one line."""
    return repr(text if len(text) <= width else f"{text[: width - 1]}…")


def _example(where: str, row: dict[str, Any], columns: Columns) -> Example:
    content = _prompt(_value(row, columns.prompt, where), columns.prompt, where)
    answer = _value(row, columns.answer, where)
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError(f"{where}: {columns.answer} is {shown(answer)}; it must be a text that is not empty")
    metadata = {name: value for name, value in row.items() if name not in (columns.prompt, columns.answer, columns.id)}
    if columns.id is not None:
        name = _value(row, columns.id, where)
        if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
            raise ValueError(f"{where}: {columns.id} is {shown(name)}; an id must be a text or a whole number")
        return Example(str(name), content, answer, where, metadata)
    example = Example("", content, answer, where, metadata)
    digest = hashlib.sha256(f"{example.key}\0{answer}".encode()).hexdigest()[:16]
    return Example(f"file/{digest}", content, answer, where, metadata)


def _value(row: dict[str, Any], column: str, where: str) -> Any:
    if column in row:
        return row[column]
    near = difflib.get_close_matches(column, row, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{where}: no column {column!r}; there are {_listed(row)}{hint}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _prompt(value: Any, column: str, where: str) -> str | tuple[Message, ...]:
    if isinstance(value, str) and value.strip():
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{where}: {column} is {shown(value)}; it must be a text that is not empty, or a list of messages"
        )
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) and message[key].strip() for key in ("role", "content")
        ):
            raise ValueError(
                f"{where}: message {number} of {column} is {shown(message)}; a message must be an object with a role "
                "and a content, both text that is not empty"
            )
        # Columnar files give every message all keys that any has.
        messages.append({key: part for key, part in message.items() if part is not None})
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"{where}: {column} ends with a message of the assistant; it must end before the answer")
    return tuple(messages)


def shown(value: Any) -> str:
    """A value in a message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
