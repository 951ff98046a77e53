"""Mathematical expressions in LaTeX, compared with the package math-verify. Runs in worker processes only."""

from __future__ import annotations

import functools
import logging
from typing import Any

from lora_rl.rewards.types import RewardReason, RewardResult, failed, verdict


def check_expression(answer: str) -> None:
    """Raise ValueError when math-verify finds no expression in the right answer."""
    if not _parse_gold(answer):
        raise ValueError(
            f"math_verify: no mathematical expression in the answer {answer!r}; write a number or LaTeX such as "
            r"'\frac{1}{2}'"
        )


def match_expression(text: str, answer: str) -> RewardResult:
    """1.0 if math-verify holds the last expression in the text and the answer to be equal, else 0.0."""
    from math_verify import verify

    right, given = _parse_gold(answer), _parse(text)
    if not given:
        return failed(RewardReason.UNPARSEABLE)
    # Its own limits use SIGALRM, which cannot interrupt sympy everywhere; the pool's limit holds instead. Exceptions
    # out of the comparison mean that the two are not comparable, and it takes those for unequal.
    return verdict(verify(right, given, strict=True, timeout_seconds=None))


def warm_up() -> None:
    """Import and build the parsers, which takes seconds."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    check_expression(r"\frac{1}{2}")
    match_expression(r"The answer is $\boxed{\sqrt{2}^2}$", "2")


def _parse(text: str) -> list[Any]:
    """Expressions, without the text they were read from: an expression that cannot be parsed is none."""
    from math_verify import parse

    found = parse(text, fallback_mode="no_fallback", parsing_timeout=None)
    return [one for one in found if not isinstance(one, str)]


@functools.lru_cache(maxsize=4096)
def _parse_gold(answer: str) -> list[Any]:
    """Expressions of a right answer. One without dollar signs, as data often have it, is LaTeX all the same."""
    as_latex = _parse(f"${answer}$") if "\\" in answer and "$" not in answer else []
    return as_latex or _parse(answer)
