"""Reading YAML files with `defaults:` inheritance into one tree of text.

Every scalar stays the text it was written as, and the schema gives it its type. So YAML 1.1's own guesses never
apply: `1e-3` is a number where a number is due, `no` and `007` are text where text is due.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lora_rl.config.errors import ConfigError, Violation

NULL_SPELLINGS = frozenset({"", "~", "null", "Null", "NULL", "none", "None", "NONE"})


@dataclass
class Document:
    """A configuration before it is typed.

    Attributes:
        tree: nested dicts and lists of text; None for null.
        origins: `file:line` of every dotted key.
        violations: mistakes that do not keep the rest from being read.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)

    def merge(self, other: Document) -> None:
        """Lay `other` over this document: its keys win, sections are merged, lists are replaced."""
        merge_trees(self.tree, other.tree)
        self.origins.update(other.origins)
        self.violations.extend(other.violations)


def merge_trees(tree: dict[str, Any], over: dict[str, Any]) -> None:
    """Lay `over` over `tree`, in place."""
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(tree.get(name), dict):
            merge_trees(tree[name], value)
        else:
            tree[name] = value


def read_document(path: Path, chain: tuple[Path, ...] = ()) -> Document:
    """Read a file and everything its `defaults:` names; later files win, the file itself wins over all.

    Args:
        path: the file.
        chain: the files whose `defaults:` led here, to recognise a cycle.

    Raises:
        ConfigError: a file that is missing or not YAML, or a cycle. What is wrong inside a readable file is
            collected in the result's `violations` instead.
    """
    identity = path.resolve()
    if identity in (file.resolve() for file in chain):
        names = " -> ".join(str(file) for file in (*chain, path))
        raise ConfigError([Violation("defaults", f"the files inherit in a circle: {names}; remove one link")])
    own = _Reader(path).read()
    document = Document()
    for parent in _parents(own, path):
        document.merge(read_document(path.parent / parent, (*chain, path)))
    document.merge(own)
    return document


def parse_value(text: str) -> Any:
    """A YAML value from the command line, as text, lists and dicts. Raises yaml.YAMLError."""
    reader = _Reader(Path("command line"))
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    value = None if node is None else reader.build(node, "")
    if reader.document.violations:
        raise yaml.YAMLError(reader.document.violations[0].problem)
    return value


def _parents(document: Document, path: Path) -> list[str]:
    """Take `defaults:` out of a document."""
    value = document.tree.pop("defaults", None)
    origin = document.origins.pop("defaults", None)
    names = [] if value is None else [value] if isinstance(value, str) else value
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return names
    problem = f"expected a file relative to {path.parent}, or a list of files"
    document.violations.append(Violation("defaults", problem, value, origin=origin))
    return []


class _Reader:
    """Turns the YAML nodes of one file into a Document."""

    def __init__(self, path: Path):
        self.path = path
        self.document = Document()
        self._open: list[yaml.Node] = []  # the mappings and lists around the current node

    def read(self) -> Document:
        node = self._compose()
        if isinstance(node, yaml.MappingNode):
            self.document.tree = self.build(node, "")
        elif node is not None:
            raise ConfigError([Violation(str(self.path), "expected sections with keys (`section:` lines)")])
        return self.document

    def _compose(self) -> yaml.Node | None:
        try:
            return yaml.compose(self.path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f"{self.path}:{mark.line + 1}:{mark.column + 1}"
            place = f"line {mark.line + 1}, column {mark.column + 1}"
            problem = ", ".join(part for part in (error.context, error.problem) if part)
            raise ConfigError([Violation(where, f"not valid YAML at {place}: {problem}")]) from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError([Violation(str(self.path), f"not a UTF-8 YAML file: {error}")]) from error
        except OSError as error:
            raise ConfigError([self._unreadable(error)]) from error

    def _unreadable(self, error: OSError) -> Violation:
        """The file cannot be opened: name the files that could have been meant."""
        folder = self.path.parent
        if self.path.is_dir():
            folder, problem = self.path, "this is a folder; name a YAML file"
        elif not folder.is_dir():
            return Violation(str(self.path), f"no such file; the folder {folder} does not exist either")
        else:
            problem = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        files = {file.stem: file for file in sorted(folder.iterdir()) if file.suffix in (".yaml", ".yml")}
        near = difflib.get_close_matches(self.path.stem, files, n=3)
        if not near and files:
            problem += f"; {folder} has {', '.join(file.name for file in list(files.values())[:10])}"
        return Violation(str(self.path), problem, hints=tuple(str(files[stem]) for stem in near))

    def build(self, node: yaml.Node, prefix: str) -> Any:
        if isinstance(node, yaml.ScalarNode):
            plain = node.style is None
            return None if plain and node.value in NULL_SPELLINGS else node.value
        if node in self._open:
            where = f"{self.path}:{node.start_mark.line + 1}"
            self.document.violations.append(Violation(prefix, "the alias contains itself", origin=where))
            return None
        self._open.append(node)
        if isinstance(node, yaml.SequenceNode):
            result = [self.build(item, prefix) for item in node.value]
        else:
            result = self._mapping(node, prefix)
        self._open.pop()
        return result

    def _mapping(self, node: yaml.MappingNode, prefix: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            where = f"{self.path}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                self.document.violations.append(Violation(prefix or str(self.path), "a key must be text", origin=where))
                continue
            path = f"{prefix}.{key_node.value}" if prefix else key_node.value
            if key_node.value in result:
                problem = f"the key is there twice, first at {self.document.origins[path]}; keep one"
                self.document.violations.append(Violation(path, problem, origin=where))
                continue
            self.document.origins[path] = where
            result[key_node.value] = self.build(value_node, path)
        return result
