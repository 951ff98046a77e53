"""Mathematical expressions in LaTeX, compared with the package math-verify. Runs in worker processes only."""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from lora_rl.rewards.types import RewardReason, RewardResult, failed, verdict

# A word, a number in scientific notation, digits with blanks between them: LaTeX reads products of letters and digits.
_NO_LATEX = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}|[0-9][eE][+-]?[0-9]|[0-9]\s+[0-9]")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|operatorname|begin|end)\s*\{[^{}]*\}")
_DELIMITERS = ("$", "\\(", "\\[", "\\boxed")


def check_expression(answer: str) -> None:
    """Raise ValueError when the right answer is no expression that a completion could be compared with."""
    problem = ""
    if not _is_delimited(answer) and (found := _NO_LATEX.search(_TEXT_COMMAND.sub("", answer))):
        problem = f"{found.group()!r} in it is not LaTeX"
    elif not _parse_gold(answer):
        problem = "there is no mathematical expression in it"
    if problem:
        raise ValueError(
            f"math_verify: the answer {answer!r} cannot be used, {problem}; write a number or LaTeX such as "
            r"'\frac{1}{2}' or '\text{east}', or take exact_match with match: text"
        )


def match_expression(text: str, answer: str, *, bare: bool) -> RewardResult:
    """1.0 if math-verify holds the expression in the text and the answer to be equal, else 0.0.

    Args:
        text: what the model said.
        answer: a number or LaTeX; it has passed `check_expression`.
        bare: the text is an answer that was cut out of a completion, LaTeX without delimiters. Otherwise it is prose,
            in which the package looks for the last expression.
    """
    from math_verify import verify

    given = _parse_bare(text) if bare else _parse(text)
    if not given:
        return failed(RewardReason.UNPARSEABLE)
    # Its own limits use SIGALRM, which cannot interrupt sympy everywhere; the pool's limit holds instead. Exceptions
    # out of the comparison mean that the two are not comparable, and it takes those for unequal.
    return verdict(verify(_parse_gold(answer), given, strict=True, timeout_seconds=None))


def warm_up() -> None:
    """Import and build the parsers, which takes seconds."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    check_expression(r"\frac{1}{2}")
    match_expression(r"The answer is $\boxed{\sqrt{2}^2}$", "2", bare=False)


def _parse(text: str) -> list[Any]:
    """Expressions, without the text they were read from: an expression that cannot be parsed is none."""
    from math_verify import parse

    found = parse(text, fallback_mode="no_fallback", parsing_timeout=None)
    return [one for one in found if not isinstance(one, str)]


def _parse_bare(text: str) -> list[Any]:
    """The whole of a text without delimiters is one expression; in prose, `2x + 1` would be its last number, 1."""
    return _parse(text if _is_delimited(text) else f"${text}$")


def _is_delimited(text: str) -> bool:
    return any(mark in text for mark in _DELIMITERS)


@functools.lru_cache(maxsize=4096)
def _parse_gold(answer: str) -> list[Any]:
    return _parse_bare(answer)
