"""Numbers, compared as exact decimals."""

import re
from decimal import Context, Decimal
from typing import Literal

from lora_rl.rewards.types import RewardReason, RewardResult, failed, verdict

# ASCII digits; a comma only between groups of three. No nan, no infinity, no underscores, no hexadecimal.
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?")
# More than any answer needs; `Decimal` is exact up to here and no comparison of two such numbers takes noticeable time.
MAX_DIGITS = 400
_MAX_EXPONENT = 308
# Words are separated by blanks and equal signs; around a number, these say nothing about its value.
_WORD = re.compile(r"[^\s=]+")
_BEFORE, _AFTER = "\"'`*$([{<", "\"'`*$)]}>.,;:!?"
_EXACT = Context(prec=2 * (MAX_DIGITS + _MAX_EXPONENT) + 10)

Which = Literal["whole", "first", "last"]


def parse_number(text: str) -> Decimal | None:
    """The exact value of a text that is a number and nothing else: `-7`, `1,234.5`, `6.02e23`; None for all others.

    More than `MAX_DIGITS` characters, or an exponent beyond that of a float, is no number.
    """
    if len(text) > MAX_DIGITS or not _NUMBER.fullmatch(text):
        return None
    value = Decimal(text.replace(",", ""))
    return value if value == 0 or -_MAX_EXPONENT <= value.adjusted() <= _MAX_EXPONENT else None


def find_number(text: str, which: Which) -> Decimal | None:
    """The whole text, or its first or last word with a digit in it, as a number.

    Such a word must be a number once quotes, brackets, `$`, `*` and punctuation around it are gone: of `1/2`, `5km` or
    `46%` no part is taken for a number, and no other word is looked for.
    """
    if which == "whole":
        return parse_number(text)
    words = [m for m in _WORD.findall(text) if any("0" <= c <= "9" for c in m)]
    if not words:
        return None
    return parse_number(words[0 if which == "first" else -1].lstrip(_BEFORE).rstrip(_AFTER))


def check_number(answer: str) -> None:
    """Raise ValueError when the right answer is not a number."""
    if parse_number(answer) is None:
        raise ValueError(f"numeric: the answer {answer!r} is not a number such as '-7', '1,234.5' or '6.02e23'")


def match_number(text: str, answer: str, *, which: Which, atol: float, rtol: float) -> RewardResult:
    """1.0 if the number in the text differs from the answer by at most max(atol, rtol |answer|), else 0.0.

    Differences are exact: without a tolerance `0.30000000000000004` is not `0.3`, and `1.50` is `1.5`.
    """
    value, right = find_number(text, which), parse_number(answer)
    assert right is not None, "the data were checked"
    if value is None:
        return failed(RewardReason.UNPARSEABLE)
    # `repr` of a tolerance is what the configuration says: 0.1 is one tenth.
    bound = max(Decimal(repr(atol)), _EXACT.multiply(Decimal(repr(rtol)), abs(right)))
    return verdict(abs(_EXACT.subtract(value, right)) <= bound)
