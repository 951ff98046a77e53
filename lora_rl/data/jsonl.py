"""Prompts with their answers from a file with one JSON object per line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from lora_rl.data.source import Prompt
from lora_rl.data.tokenizer import Tokenizer


def jsonl_prompts(path: Path, tokenizer: Tokenizer, *, prompt_key: str, answer_key: str) -> list[Prompt]:
    """Read every line; the texts are used as they are, without a chat template.

    A prompt's id is a hash of prompt and answer, so that it does not depend on the line. Repeated lines are errors.

    Raises:
        FileNotFoundError: no such file.
        ValueError: naming file, line and key: not an object, a key that is missing or no text, an empty prompt or
            answer, a line that occurred before; or a file without lines.
    """
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not JSON: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{where}: a {type(record).__name__}; each line must be an object")
            prompt, answer = (_text(record, key, where) for key in (prompt_key, answer_key))
            name = "jsonl/" + hashlib.sha256(f"{prompt}\0{answer}".encode()).hexdigest()[:16]
            if name in seen:
                raise ValueError(f"{where}: the same prompt and answer as line {seen[name]}")
            seen[name] = number
            prompts.append(Prompt(id=name, text=prompt, token_ids=tokenizer.encode(prompt), answer=answer))
    if not prompts:
        raise ValueError(f"{path}: no examples in it")
    return prompts


def _text(record: dict, key: str, where: str) -> str:
    if key not in record:
        raise ValueError(f"{where}: no key {key!r}; it has {', '.join(map(repr, record))}")
    if not isinstance(record[key], str) or not record[key]:
        raise ValueError(f"{where}: {key} is {record[key]!r}; it must be a text that is not empty")
    return record[key]
