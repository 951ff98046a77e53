"""Dotted overrides from the command line: `grpo.max_num_steps=50`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from lora_rl.config.errors import NO_VALUE, Violation
from lora_rl.config.keys import all_keys, all_sections, nearest_keys
from lora_rl.config.yaml_source import NULL_SPELLINGS, Document, merge_trees, parse_value

COMMAND_LINE = "command line"


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Lay `key=value` arguments over a document, in order; mistakes are added to its violations.

    Hydra's `+key=value` and `++key=value` mean the same here: every valid key already exists.
    """
    for override in overrides:
        path, equals, text = override.lstrip("+").partition("=")
        path = path.strip()
        if not equals:
            problem = "expected key=value, such as grpo.max_num_steps=50"
            document.violations.append(Violation(override, problem, origin=COMMAND_LINE))
        elif path not in all_keys() and path not in all_sections():
            document.violations.append(unknown_key(path, text, COMMAND_LINE))
        else:
            _apply(document, path, text)


def unknown_key(path: str, value: Any, origin: str | None) -> Violation:
    """The violation for a key that the schema does not have."""
    among = all_sections() if isinstance(value, dict) else None
    hints = nearest_keys(path, among)
    problem = "unknown key" if hints else "unknown key, and none is spelt like it; --list-keys prints all keys"
    return Violation(path, problem, NO_VALUE if isinstance(value, dict) else value, hints, origin)


def _apply(document: Document, path: str, text: str) -> None:
    key = all_keys().get(path)
    try:
        value = parse_value(text) if key is None or key.structured or _is_quoted(text) else _scalar(text)
    except yaml.YAMLError as error:
        problem = f"not valid YAML: {' '.join(str(error).split())}"
        document.violations.append(Violation(path, problem, text, origin=COMMAND_LINE))
        return
    over: Any = value
    for name in reversed(path.split(".")):
        over = {name: over}
    merge_trees(document.tree, over)
    document.origins[path] = COMMAND_LINE
    if isinstance(value, dict):
        document.origins.update(dict.fromkeys(_paths(value, path), COMMAND_LINE))


def _scalar(text: str) -> str | None:
    return None if text.strip() in NULL_SPELLINGS else text


def _is_quoted(text: str) -> bool:
    return len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""


def _paths(tree: dict[str, Any], prefix: str) -> list[str]:
    paths = []
    for name, value in tree.items():
        paths.append(f"{prefix}.{name}")
        if isinstance(value, dict):
            paths.extend(_paths(value, f"{prefix}.{name}"))
    return paths
