"""Which part of a completion is the answer."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import regex

# Long enough for any pattern that does not backtrack without bound, on completions of any length.
PATTERN_TIMEOUT_S = 1.0
_BOXED = "\\boxed{"


class PatternTimeout(Exception):
    """A regular expression backtracked for longer than `PATTERN_TIMEOUT_S`."""


@dataclass(frozen=True)
class AnswerExtractor:
    r"""Finds the answer in a completion; every verifier uses it.

    Attributes:
        source: `whole`, the completion as it is; `regex`, the group of the last match of `pattern`; `boxed`, the
            content of the last \boxed{}; `marker`, what follows the last `marker`. All but `whole` strip blanks.
        pattern: regular expression (package `regex`) with one group; `.` matches line breaks.
        marker: text.
    """

    source: str = "whole"
    pattern: str = ""
    marker: str = ""

    def __call__(self, completion: str) -> str | None:
        """The answer; None if there is none.

        Raises:
            PatternTimeout: the pattern took too long.
        """
        if self.source == "regex":
            found = last_match(self.pattern, completion)
        elif self.source == "boxed":
            found = last_boxed(completion)
        elif self.source == "marker":
            _, marker, rest = completion.rpartition(self.marker)
            found = rest if marker else None
        else:
            return completion
        return None if found is None else found.strip()


def last_match(pattern: str, text: str) -> str | None:
    """The first group of the last match in the text; None without a match, or where the group took no part in it.

    Raises:
        PatternTimeout: it took too long.
    """
    found = regex.finditer(pattern, text, regex.DOTALL, timeout=PATTERN_TIMEOUT_S, concurrent=True)
    try:
        last = deque(found, maxlen=1)
    except TimeoutError as error:
        raise PatternTimeout(pattern) from error
    return last[0].group(1) if last else None


def matches_whole(pattern: str, text: str) -> bool:
    """Whether a regular expression matches the whole text; `.` matches line breaks.

    Raises:
        PatternTimeout: it took too long.
    """
    try:
        return regex.fullmatch(pattern, text, regex.DOTALL, timeout=PATTERN_TIMEOUT_S, concurrent=True) is not None
    except TimeoutError as error:
        raise PatternTimeout(pattern) from error


def last_boxed(text: str) -> str | None:
    r"""What is between the braces of the last \boxed{...}; None if there is none, or its braces do not close."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth, at = 1, start + len(_BOXED)
    while at < len(text):
        if text[at] == "\\":
            at += 1  # an escaped brace is text
        elif text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return text[start + len(_BOXED) : at]
        at += 1
    return None
