"""From a YAML file and overrides to a checked RunConfig, and back to YAML."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lora_rl.config.errors import ConfigError, Violation
from lora_rl.config.keys import all_keys, all_sections, item_keys, nearest_choice, nearest_keys
from lora_rl.config.model_files import resolve_path
from lora_rl.config.overrides import apply_overrides, unknown_key
from lora_rl.config.rule_engine import check_rules
from lora_rl.config.schema import RunConfig
from lora_rl.config.yaml_source import NULL_SPELLINGS, Document, read_document

# Keys that may name something on disk, relative to the current directory or to the configuration file's project.
_PATH_KEYS = (
    "policy.model_name",
    "policy.tokenizer.name",
    "policy.tokenizer.chat_template",
    "policy.megatron_cfg.peft.adapter_path",
    "data.train_path",
    "data.val_path",
    "data.prompt_file",
    "data.system_prompt_file",
    "sft.train_path",
    "sft.val_path",
)


# Relative to the current directory.
_FOLDERS_TO_MAKE = (("logger", "log_dir"), ("checkpointing", "checkpoint_dir"))
# As OmegaConf and shells have it; within other text only where that is a path, as it may mean itself elsewhere.
_REFERENCE = re.compile(r"\$\{[^}]*\}")
_WITHIN = {*_PATH_KEYS, *map(".".join, _FOLDERS_TO_MAKE)}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, merge, type and check a configuration.

    Args:
        path: YAML file; its `defaults:` names files to inherit from, relative to it.
        overrides: `dotted.key=value`, applied in order over the file.

    Returns:
        The configuration, with local model paths made absolute and `logger.log_dir` set.

    Raises:
        ConfigError: with every violation of the schema and of the rules. Only a file that cannot be read at all is
            reported alone.
    """
    path = Path(path)
    document = read_document(path)
    apply_overrides(document, overrides)
    _fill_log_dir(document, path)
    _resolve_paths(document, path)
    config, violations, unusable = _validate(document)
    violations += check_rules(config, unusable)
    if violations:
        located = [dataclasses.replace(v, origin=v.origin or document.origins.get(v.key)) for v in violations]
        raise ConfigError(located, str(path))
    return config


def resolved_yaml(config: RunConfig) -> str:
    """Every key of a configuration as YAML; loading it again gives an equal configuration."""
    return yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


_BREAKS = frozenset("\r\x85\u2028\u2029")


class _Dumper(yaml.SafeDumper):
    """Quotes text that reads as null here but not in plain YAML, such as None, and escapes exotic line breaks."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.Node:
    style = "'" if text in NULL_SPELLINGS else None
    if _BREAKS & set(text):
        # In any other style a reader may turn them into blanks.
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def _validate(document: Document) -> tuple[RunConfig, list[Violation], frozenset[str]]:
    """Type a document by the schema.

    Returns:
        The configuration, in which every key that has no valid value stands at its default; the violations; and
        the keys whose value is therefore not what the user meant.
    """
    tree = document.tree
    violations = list(document.violations)
    violations += _take_out_unknown(tree, "", document)
    # After a misspelt key, the key that was meant still has its default: nothing can be concluded from that.
    unusable = {v.hints[0] for v in violations if v.hints}
    tree.setdefault("policy", {})  # so that what is missing is policy.model_name, not the section around it
    try:
        return RunConfig.model_validate(tree), violations, frozenset(unusable)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            path = _key_path(detail["loc"])
            inside_a_reported_list = path in unusable and len(detail["loc"]) > len(path.split("."))
            if not inside_a_reported_list and (detail["type"] != "missing" or path not in unusable):
                violations.append(_schema_violation(path, detail))
            unusable.add(path)
            _remove(tree, path)
    if unusable & {"policy", "policy.model_name"}:
        unusable.add("policy.model_name")
        tree.setdefault("policy", {})["model_name"] = "unset"  # the one key without a default; no rule will see it
    return RunConfig.model_validate(tree), violations, frozenset(unusable)


def _schema_violation(path: str, detail: Any) -> Violation:
    if (item := _item_violation(detail)) is not None:
        return item
    key = all_keys().get(path)
    if key is None:
        names = ", ".join(all_sections()[path].model_fields)
        return Violation(path, f"this is a section; expected its keys ({names})", detail["input"])
    if detail["type"] == "missing":
        return Violation(path, f"required, but not set. {key.description.rstrip('.')}")
    near = nearest_choice(detail["input"], key.choices)
    return Violation(path, f"expected {key.valid}", detail["input"], near)


def _item_violation(detail: Any) -> Violation | None:
    """The violation for a key of an item in a list of sections, such as `reward.additional[0].weight`."""
    location = detail["loc"]
    place = next((at for at, part in enumerate(location) if isinstance(part, int)), len(location))
    path, names = ".".join(location[:place]), location[place + 1 :]
    keys = item_keys(path)
    if not keys or place == len(location):
        return None
    where = ".".join((f"{path}[{location[place]}]", *map(str, names[:1])))
    if not names:
        return Violation(where, f"expected a mapping with the keys {', '.join(keys)}", detail["input"])
    key = keys.get(names[0])
    if key is None:
        return Violation(where, "unknown key", detail["input"], nearest_keys(names[0], keys))
    if detail["type"] == "missing":
        return Violation(where, f"required, but not set. {key.description.rstrip('.')}")
    return Violation(where, f"expected {key.valid}", detail["input"], nearest_choice(detail["input"], key.choices))


def _key_path(location: tuple[int | str, ...]) -> str:
    """Dotted key of a pydantic error location; an item of a list is the list."""
    return ".".join(takewhile(lambda part: isinstance(part, str), location))


def _take_out_unknown(tree: dict[str, Any], prefix: str, document: Document) -> Iterator[Violation]:
    """Remove what the schema does not know from a tree, and report it."""
    for name in list(tree):
        path, value = prefix + name, tree[name]
        if path in all_sections():
            if isinstance(value, dict):
                yield from _take_out_unknown(value, f"{path}.", document)
        elif path not in all_keys():
            del tree[name]
            origin = document.origins.get(path)
            while isinstance(value, dict) and len(value) == 1:  # a misspelt section around a single key
                [(name, value)] = value.items()
                path += f".{name}"
            yield unknown_key(path, value, origin)
        elif isinstance(value, str) and (_REFERENCE.search if path in _WITHIN else _REFERENCE.fullmatch)(value):
            del tree[name]
            problem = "references to other keys or to the environment are not supported; write the value"
            yield Violation(path, problem, value, origin=document.origins.get(path))


def _remove(tree: dict[str, Any], path: str) -> None:
    *sections, name = path.split(".")
    for section in sections:
        tree = tree.get(section, {})
    tree.pop(name, None)


def _fill_log_dir(document: Document, path: Path) -> None:
    logger = document.tree.setdefault("logger", {})
    if isinstance(logger, dict) and logger.get("log_dir") is None:
        logger["log_dir"] = f"results/{path.stem}"


def _resolve_paths(document: Document, config_file: Path) -> None:
    """Make local model and tokenizer paths absolute, so that every process finds them from its own directory."""
    for key in _PATH_KEYS:
        *sections, name = key.split(".")
        node: Any = document.tree
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if isinstance(node, dict) and isinstance(node.get(name), str):
            found = resolve_path(node[name], config_file)
            node[name] = node[name] if found is None else str(found)
    for section, name in _FOLDERS_TO_MAKE:
        node = document.tree.get(section)
        if isinstance(node, dict) and isinstance(node.get(name), str):
            node[name] = os.path.expanduser(node[name])
    _resolve_function_files(document.tree.get("reward"), config_file)


def _resolve_function_files(section: Any, config_file: Path) -> None:
    """The same for `file.py:name` of reward functions, in the section and in its list of further verifiers."""
    if not isinstance(section, dict):
        return
    file, colon, name = str(section.get("function") or "").rpartition(":")
    if file.endswith(".py") and (found := resolve_path(file, config_file)) is not None:
        section["function"] = f"{found}{colon}{name}"
    for item in section.get("additional") or [] if isinstance(section.get("additional"), list) else []:
        _resolve_function_files(item, config_file)
