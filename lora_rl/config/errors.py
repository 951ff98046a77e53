"""What is wrong with a configuration: a list of violations, raised together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

NO_VALUE: Final = object()  # a violation about a key that has no value to show; `None` is shown as null


@dataclass(frozen=True)
class Violation:
    """One mistake.

    Attributes:
        key: dotted path of the key, or the option or file that the mistake is about.
        problem: what is wrong and what would be valid, without a final full stop.
        value: what was given; NO_VALUE when there is nothing to show.
        hints: keys or values that were probably meant, best first.
        origin: where the value was set: `file:line` or `command line`; None for a default.
    """

    key: str
    problem: str
    value: Any = NO_VALUE
    hints: tuple[str, ...] = ()
    origin: str | None = None

    def __str__(self) -> str:
        given = "" if self.value is NO_VALUE else f" = {show(self.value)}"
        origin = f"  ({self.origin})" if self.origin else ""
        *others, last = self.hints or ("",)
        near = f"{', '.join(others)} or {last}" if others else last
        hints = f"; did you mean {near}?" if near else ""
        return f"{self.key}{given}{origin}\n    {self.problem}{hints}"


class ConfigError(Exception):
    """A configuration was refused.

    Attributes:
        violations: every mistake that was found, in the order of the file, then of the rules.
    """

    def __init__(self, violations: Sequence[Violation], source: str | None = None):
        self.violations = tuple(violations)
        count = f"{len(self.violations)} mistake{'s' if len(self.violations) != 1 else ''}"
        where = f"in {source}" if source else "in the configuration"
        lines = "\n".join(f"  {violation}" for violation in self.violations)
        super().__init__(f"{count} {where}:\n{lines}")


def show(value: Any) -> str:
    """A value as one would write it in YAML, on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(show(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {show(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str) and (not value.isprintable() or value != value.strip() or not value):
        return repr(value)
    return str(value)
