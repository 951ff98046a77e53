"""From a YAML file and overrides to a checked RunConfig, and back to YAML."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lora_rl.config.errors import NO_VALUE, ConfigError, Violation
from lora_rl.config.keys import Key, all_keys, all_sections, nearest_choice
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
    key = all_keys().get(path)
    if key is None:
        names = ", ".join(all_sections()[path].model_fields)
        return Violation(path, f"this is a section; expected its keys ({names})", detail["input"])
    if detail["type"] == "missing" and detail["loc"][-1] == path.rpartition(".")[2]:
        return Violation(path, f"required, but not set. {key.description.rstrip('.')}")
    inside = detail["loc"][len(path.split(".")) :]
    if inside:
        return _item_violation(key, inside, detail)
    near = nearest_choice(detail["input"], key.choices)
    return Violation(path, f"expected {key.valid}", detail["input"], near)


def _item_violation(key: Key, inside: tuple[int | str, ...], detail: Any) -> Violation:
    """What is wrong inside a list: with the entry, or with a key of it."""
    names = [name for name in inside if isinstance(name, str)]
    entry = f"entry {inside[0] + 1}" if isinstance(inside[0], int) else str(inside[0])
    if not names:
        return Violation(key.path, f"expected {key.valid}; {entry} is not", detail["input"])
    if detail["type"] == "extra_forbidden":
        problem = f"{entry} has the unknown key {names[0]}; expected {key.valid}"
        return Violation(key.path, problem, NO_VALUE, nearest_choice(names[0], key.item_keys))
    if detail["type"] == "missing":
        return Violation(key.path, f"{entry} lacks {names[0]}; expected {key.valid}")
    return Violation(key.path, f"{entry}: {'.'.join(names)}: {detail['msg'].lower()}", detail["input"])


def _key_path(location: tuple[int | str, ...]) -> str:
    """Dotted key of a pydantic error location; what lies inside a list is left off."""
    names = list(itertools.takewhile(lambda part: isinstance(part, str), location))
    return ".".join(names)


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
        elif isinstance(value, str) and value.startswith("${") and value.endswith("}"):
            del tree[name]
            problem = "references to other keys are not supported; write the value, or leave the key out"
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
