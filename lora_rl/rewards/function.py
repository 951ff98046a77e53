"""A user's own function as a verifier. Runs in worker processes only."""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lora_rl.config.metric_names import ALLOWED, is_metric_part
from lora_rl.rewards.types import RewardError, RewardReason, RewardResult, ScoreRequest, failed

PARAMETERS = ("completion", "answer", "prompt", "truncated", "metadata")


def load_function(path: str) -> Callable[..., Any]:
    """Import `package.module:name` or `file.py:name`; the name may be dotted. The current directory is searched last.

    Raises:
        RewardError: the import fails, there is no such name, or it cannot be called. The message has the traceback's
            last line; the cause has the rest.
    """
    place, _, name = path.rpartition(":")
    try:
        module = _module_of_file(Path(place)) if place.endswith(".py") else _module(place)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise RewardError(
            f"reward function {path}: importing {place} failed: {type(error).__name__}: {error}"
        ) from error
    try:
        function = functools.reduce(getattr, name.split("."), module)
    except AttributeError as error:
        own = sorted(
            n
            for n, v in vars(module).items()
            if callable(v) and getattr(v, "__module__", None) == module.__name__ and not n.startswith("_")
        )
        raise RewardError(
            f"reward function {path}: {place} has no {name}; it has {', '.join(own) or 'none'}"
        ) from error
    if not callable(function):
        raise RewardError(f"reward function {path}: {name} is {type(function).__name__}, which cannot be called")
    return function


class FunctionVerifier:
    """Calls a function for each completion, with those of `PARAMETERS` that it takes, by name.

    Coroutines are run to their end on one event loop per process. Partial functions and callable objects are functions.

    Raises:
        RewardError: see `load_function`; or the function requires a parameter that is none of `PARAMETERS`.
    """

    def __init__(self, path: str):
        self.path = path
        self._function = load_function(path)
        self._wanted = wanted_parameters(self._function, path)
        self._runner: asyncio.Runner | None = None

    def check(self, request: ScoreRequest) -> None:
        """Only the function knows what is a right answer."""

    def score(self, request: ScoreRequest) -> RewardResult:
        """What the function returns, see `to_result`. Its exceptions are the caller's to handle."""
        returned = self._function(**{name: getattr(request, name) for name in self._wanted})
        if inspect.isawaitable(returned):
            self._runner = self._runner or asyncio.Runner()
            returned = self._runner.run(_finish(returned))
        return to_result(returned)


async def _finish(awaitable: Any) -> Any:
    return await awaitable


def wanted_parameters(function: Callable[..., Any], path: str) -> tuple[str, ...]:
    """Those of `PARAMETERS` that a function takes by name; all of them if it takes `**` or hides its signature.

    Raises:
        RewardError: it requires another, or one that has no name to pass it by.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return PARAMETERS
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return PARAMETERS
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL}
    if unknown := sorted(required - (by_name & set(PARAMETERS))):
        raise RewardError(
            f"reward function {path}: it requires {', '.join(unknown)}; what it may take, by name, is "
            f"{', '.join(PARAMETERS)}"
        )
    return tuple(name for name in PARAMETERS if name in by_name)


def to_result(returned: Any) -> RewardResult:
    """A function's return value as a result: a finite number, a bool, a mapping or a `RewardResult`.

    A mapping needs `reward`, its other entries are numbers that are reported as parts. 1 and more is correct, between 0
    and 1 partial, 0 and less wrong. Anything else, such as None, NaN or a text, is INVALID_VALUE with 0.
    """
    if isinstance(returned, RewardResult):
        value, components = _number(returned.value), {n: _number(v) for n, v in returned.components.items()}
        if value is None or None in components.values():
            return failed(RewardReason.INVALID_VALUE, f"it returned {returned!r}")
        # Plain numbers, which can be written as JSON.
        return _unless_unnameable(replace(returned, value=value, components=components))
    parts: dict[str, float] = {}
    value = returned
    if isinstance(returned, Mapping):
        if "reward" not in returned:
            return failed(RewardReason.INVALID_VALUE, f"it returned a mapping without 'reward': {_short(returned)}")
        value = returned["reward"]
        for name, part in returned.items():
            if (number := _number(part)) is None:
                return failed(RewardReason.INVALID_VALUE, f"it returned {name} = {_short(part)}, which is no number")
            if name != "reward":
                parts[str(name)] = number
    number = _number(value)
    if number is None:
        return failed(RewardReason.INVALID_VALUE, f"it returned {_short(value)}, which is no finite number")
    reason = RewardReason.CORRECT if number >= 1 else RewardReason.PARTIAL if number > 0 else RewardReason.WRONG
    return _unless_unnameable(RewardResult(number, reason, parts))


def _unless_unnameable(result: RewardResult) -> RewardResult:
    for name in result.components:
        if not is_metric_part(name):
            problem = f"it returned a part called {_short(name)}; the name of a metric has {ALLOWED} only"
            return failed(RewardReason.INVALID_VALUE, problem)
    return result


def _number(value: Any) -> float | None:
    """A finite number as float; None for all else. NumPy's and PyTorch's scalars are numbers, texts are not."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _module(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        # Behind everything else: a file here must not stand in the place of an installed package.
        sys.path.append(here)
    return importlib.import_module(name)


def _module_of_file(path: Path) -> Any:
    # A file may import what lies beside it.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look a module up by its name; a file must not hide a module that is already in use.
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
