"""Rules of the section `reward`: options belong to the verifier, patterns compile, functions are there."""

from __future__ import annotations

import ast
import importlib.machinery
import sys
from collections.abc import Iterator
from pathlib import Path

import regex

from lora_rl.config.errors import Violation, show
from lora_rl.config.keys import nearest_choice
from lora_rl.config.metric_names import ALLOWED, is_metric_part
from lora_rl.config.schema import RunConfig, VerifierConfig
from lora_rl.config.schema.reward import OPTIONS

# What each verifier cannot do without.
_REQUIRED = {"format": "pattern", "function": "function"}
_SOURCE_OPTIONS = {"regex": "answer_pattern", "marker": "answer_marker"}
# `RewardReason`; the shares of the reasons are metrics of these names.
REASON_NAMES = (
    "correct", "partial", "wrong", "unparseable", "truncated", "timed_out", "worker_died", "error", "invalid_value",
)  # fmt: skip


def reward_options_fit(config: RunConfig) -> Iterator[Violation]:
    """An option of another verifier would be without effect."""
    all_options = {option for options in OPTIONS.values() for option in options}
    for key, verifier in _verifiers(config):
        for option in sorted(all_options - set(OPTIONS[verifier.name])):
            value = getattr(verifier, option)
            if value is not None:
                owners = " and ".join(name for name, options in OPTIONS.items() if option in options)
                problem = f"{key}.name is {verifier.name}, which has no such option ({owners} has); leave it null"
                yield Violation(f"{key}.{option}", problem, value)
        required = _REQUIRED.get(verifier.name)
        if required and not getattr(verifier, required):
            yield Violation(
                f"{key}.{required}", f"needed when {key}.name is {verifier.name}; {_example(required)}", None
            )


def reward_extraction_fits(config: RunConfig) -> Iterator[Violation]:
    """`answer_from` and the option it needs come together."""
    for key, verifier in _verifiers(config):
        for source, option in _SOURCE_OPTIONS.items():
            value = getattr(verifier, option)
            if verifier.answer_from == source and not value:
                yield Violation(
                    f"{key}.{option}", f"needed when {key}.answer_from is {source}; {_example(option)}", value
                )
            elif verifier.answer_from != source and value is not None and option in OPTIONS[verifier.name]:
                problem = f"has no effect unless {key}.answer_from is {source}; set that, or leave this null"
                yield Violation(f"{key}.{option}", problem, value)


def reward_patterns_compile(config: RunConfig) -> Iterator[Violation]:
    """Regular expressions are such, and an answer's has the one group that is the answer."""
    for key, verifier in _verifiers(config):
        for option in ("pattern", "answer_pattern"):
            pattern = getattr(verifier, option)
            if not pattern:
                continue
            try:
                groups = regex.compile(pattern, regex.DOTALL).groups
            except regex.error as error:
                yield Violation(f"{key}.{option}", f"not a regular expression: {error}; {_example(option)}", pattern)
                continue
            if option == "answer_pattern" and groups != 1:
                problem = f"must have exactly one group, which is the answer, but has {groups}; {_example(option)}"
                yield Violation(f"{key}.{option}", problem, pattern)


def reward_labels_differ(config: RunConfig) -> Iterator[Violation]:
    """Each verifier has a metric of its own, next to those of the reasons."""
    seen: set[str] = set()
    for key, verifier in _verifiers(config):
        label = verifier.label or verifier.name
        if label in seen:
            yield Violation(f"{key}.label", f"another verifier is called {label} already; give this one a label", label)
        if label in REASON_NAMES:
            problem = f"the share of completions with this reason is called so; not {', '.join(REASON_NAMES)}"
            yield Violation(f"{key}.label", problem, label)
        # A part of a verifier follows its label and a slash.
        if not is_metric_part(label) or "/" in label:
            problem = f"it becomes the name of a metric, which has {ALLOWED} only"
            yield Violation(f"{key}.label", problem, label)
        seen.add(label)


def reward_function_is_there(config: RunConfig) -> Iterator[Violation]:
    """What can be seen of a function without running its module: the file, and the name in it."""
    for key, verifier in _verifiers(config):
        if verifier.name != "function" or not verifier.function:
            continue
        place, colon, name = verifier.function.rpartition(":")
        if not (colon and place and name):
            yield Violation(
                f"{key}.function", f"expected module:name or file:name; {_example('function')}", verifier.function
            )
            continue
        file, problem = (Path(place), "") if place.endswith(".py") else _find_module(place)
        hints: tuple[str, ...] = ()
        if not problem and file is not None:
            problem, hints = _problem_in_file(file, name.split(".")[0])
        if problem:
            yield Violation(f"{key}.function", problem, verifier.function, hints)


REWARD_RULES = (
    reward_options_fit,
    reward_extraction_fits,
    reward_patterns_compile,
    reward_labels_differ,
    reward_function_is_there,
)

_EXAMPLES = {
    "pattern": r"such as <think>.*</think><answer>.*</answer>",
    "function": "such as rewards.py:length_penalty or my_package.rewards:length_penalty",
    "answer_pattern": r"such as <answer>(.*?)</answer>",
    "answer_marker": "such as '####'",
}


def _example(option: str) -> str:
    return _EXAMPLES[option]


def _verifiers(config: RunConfig) -> Iterator[tuple[str, VerifierConfig]]:
    yield "reward", config.reward  # type: ignore[misc]
    for place, verifier in enumerate(config.reward.additional):
        yield f"reward.additional[{place}]", verifier


def _find_module(name: str) -> tuple[Path | None, str]:
    """A module's source file, or what is wrong. Nothing is imported; None: it is there, without a source file."""
    # In the order of the import, see `lora_rl.rewards.function`.
    search: list[str] | None = [*sys.path, str(Path.cwd())]
    spec = None
    parts = name.split(".")
    for place, part in enumerate(parts):
        full = ".".join(parts[: place + 1])
        spec = importlib.machinery.PathFinder.find_spec(full, search)
        if spec is None and place == 0:
            # Packages that are installed in place may have a finder of their own.
            spec = next(filter(None, (finder.find_spec(full, None) for finder in sys.meta_path)), None)
        if spec is None:
            inside = f"in {'.'.join(parts[:place])}" if place else "here or in the environment"
            return (
                None,
                f"there is no module {part} {inside}; name one that can be imported, or a file: path/to/file.py:name",
            )
        search = list(spec.submodule_search_locations or [])
    assert spec is not None
    return (Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None), ""


def _problem_in_file(file: Path, name: str) -> tuple[str, tuple[str, ...]]:
    """What is wrong with a source file as the place of a name, and names that were perhaps meant."""
    try:
        tree = ast.parse(file.read_bytes())
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}; give a Python file, as path/to/file.py:name", ()
    except (SyntaxError, ValueError) as error:
        return f"{file} is not Python: {error}", ()
    names, open_ended = _top_level_names(tree)
    if name in names or open_ended:
        return "", ()
    functions = sorted(n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return f"{file} defines no {name}; it has {show(functions)}", nearest_choice(name, sorted(names))


def _top_level_names(tree: ast.Module) -> tuple[set[str], bool]:
    """Names that a module's own statements may bind, and whether others can come from elsewhere."""
    names: set[str] = set()
    open_ended = False
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            open_ended |= node.name == "*"
            names.add((node.asname or node.name).split(".")[0])
    return names, open_ended or "__getattr__" in names or "globals" in {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name)
    }
