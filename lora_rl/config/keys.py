"""The schema as a flat table of dotted keys, and the search for the key that was probably meant."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from lora_rl.config.schema import RunConfig, Section

REQUIRED = PydanticUndefined


@dataclass(frozen=True)
class Key:
    """One leaf of the schema.

    Attributes:
        path: dotted path.
        valid: the valid values in words, such as `int > 0 | null`.
        default: default value; REQUIRED if the key has none.
        description: one line, units included.
        choices: the valid words, if only certain words are valid.
        structured: whether the value is a list.
    """

    path: str
    valid: str
    default: Any
    description: str
    choices: tuple[str, ...] = ()
    structured: bool = False


@functools.cache
def all_keys() -> dict[str, Key]:
    """Every key by its dotted path, in the order of the schema."""
    return {key.path: key for key in _walk(RunConfig, "")}


@functools.cache
def all_sections() -> dict[str, type[Section]]:
    """Every section by its dotted path, in the order of the schema."""
    found: dict[str, type[Section]] = {}

    def visit(section: type[Section], prefix: str) -> None:
        for name, field in section.model_fields.items():
            if _is_section(field.annotation):
                found[prefix + name] = field.annotation
                visit(field.annotation, f"{prefix}{name}.")

    visit(RunConfig, "")
    return found


def item_keys(path: str) -> dict[str, Key]:
    """The keys of one item of a list of sections, by their names; empty if the key is no such list."""
    *sections, name = path.split(".")
    owner = all_sections().get(".".join(sections))
    if owner is None or name not in owner.model_fields:
        return {}
    arguments = get_args(owner.model_fields[name].annotation)
    return {key.path: key for key in _walk(arguments[0], "")} if arguments and _is_section(arguments[0]) else {}


def nearest_keys(path: str, among: Iterable[str] | None = None, limit: int = 3) -> tuple[str, ...]:
    """Keys that `path` may have been meant to be, best first.

    A key scores by the likeness of its last name (0.7) and of its section (0.3), so the right name in the wrong
    section is found as well as a slip in either; or by its likeness as a whole, which forgives a slip at a dot.
    """
    scores = {key: _likeness(path, key) for key in (all_keys() if among is None else among)}
    best = max(scores.values(), default=0.0)
    near = [key for key, score in scores.items() if score >= max(0.6, best - 0.15)]
    return tuple(sorted(near, key=lambda key: -scores[key])[:limit])


def nearest_choice(value: Any, choices: Iterable[str]) -> tuple[str, ...]:
    """The valid word that is spelt most like `value`, if any."""
    return tuple(get_close_matches(value, list(choices), n=1)) if isinstance(value, str) else ()


def _likeness(path: str, key: str) -> float:
    path_section, _, path_name = path.rpartition(".")
    key_section, _, key_name = key.rpartition(".")
    name = _ratio(path_name, key_name)
    parts = 0.7 * name + 0.3 * _ratio(path_section, key_section) if name >= 0.5 else 0.0
    whole = _ratio(path.replace(".", ""), key.replace(".", ""))
    return max(parts, whole if whole >= 0.9 else 0.0)


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b, autojunk=False).ratio()


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _walk(section: type[Section], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        if _is_section(field.annotation):
            yield from _walk(field.annotation, f"{prefix}{name}.")
            continue
        parts = _union_parts(field.annotation)
        yield Key(
            path=prefix + name,
            valid=_valid_text(field.annotation, field.metadata),
            default=field.default,
            description=field.description or "",
            choices=tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part)),
            structured=any(get_origin(part) is list for part in parts),
        )


def _union_parts(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _valid_text(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    parts = _union_parts(annotation)
    if len(parts) > 1:
        return " | ".join(_valid_text(part) for part in parts)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _valid_text(arguments[0], arguments[1:])
    if origin is Literal:
        return " | ".join(arguments)
    if origin is list:
        return f"list of {_valid_text(arguments[0])}"
    if origin is dict:
        return "mapping"
    if _is_section(annotation):
        return f"{{{', '.join(annotation.model_fields)}}}"
    name = {NoneType: "null", bool: "true | false", str: "text", float: "number"}.get(annotation, "int")
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounds = [
        f"{sign} {getattr(bound, attribute)}"
        for bound in metadata
        for attribute, sign in signs.items()
        if hasattr(bound, attribute)
    ]
    return f"{name} {' and '.join(bounds)}".strip()
