"""Numbers: what is one, which one counts, and when two are equal."""

from __future__ import annotations

import random
import time
from fractions import Fraction

import pytest

from lora_rl.rewards.numeric import MAX_DIGITS, check_number, find_number, match_number, parse_number


def score(text: str, answer: str, *, which: str = "whole", atol: float = 0.0, rtol: float = 0.0) -> str:
    return match_number(text, answer, which=which, atol=atol, rtol=rtol).reason.value


@pytest.mark.parametrize("text", ["46", "46.0", "+46", "4.6e1", "0046", "460e-1", "46.000000000000000000000"])
def test_ways_to_write_a_number(text: str) -> None:
    assert score(text, "46") == "correct"


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "46 ", " 46", "nan", "NaN", "inf", "-inf", "Infinity", "1e400", "1e-400", "1e99999999999", "0x2e",
        "4_6", "46,0", "4,6", "1,2345", ",46", "46.", ".46", "--46", "46%", "1/2", "4 6", "٤٦", "4²", "46\n", "\x0046",
        "e5", "1e", "sNaN",
        "9" * (MAX_DIGITS + 1), "1" * 100_000, "0." + "0" * 100_000 + "1", "46" + "\u200b",
    ],
)  # fmt: skip
def test_what_is_no_number(text: str) -> None:
    assert score(text, "46") == "unparseable"
    with pytest.raises(ValueError, match="is not a number"):
        check_number(text)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("0.30000000000000004", "0.3"),
        ("9007199254740993", "9007199254740992"),  # equal as floats
        ("1e308", "1.0000000000000000001e308"),
        ("47", "46"),
        ("-46", "46"),
        ("1e-300", "0"),
        ("460", "46"),
    ],
)
def test_no_float_makes_two_numbers_equal(text: str, answer: str) -> None:
    assert score(text, answer) == "wrong"


@pytest.mark.parametrize(
    ("text", "which", "reason"),
    [
        ("The answer is 46.", "last", "correct"),
        ("12+34=46", "last", "correct"),
        ("46 is 12 + 34", "first", "correct"),
        ("46 is 12 + 34", "last", "wrong"),
        ("**46**", "last", "correct"),
        ("$46$", "last", "correct"),
        ("It is $1,046.50, I think", "last", "wrong"),
        ("(46)", "first", "correct"),
        ("46, I think", "first", "correct"),
        ("x = 46 or 47", "last", "wrong"),
        ("a number: none", "last", "unparseable"),
        ("92/46", "last", "unparseable"),
        ("46km", "last", "unparseable"),
        ("46%", "last", "unparseable"),
        ("46 nan", "last", "correct"),  # nan has no digit: the number before it is the last
        ("46 1e400", "last", "unparseable"),
        ("\\boxed{46}", "last", "unparseable"),
        ("46^2", "last", "unparseable"),
        ("4.6.46", "last", "unparseable"),
        ("146", "last", "wrong"),
    ],
)
def test_numbers_in_a_text(text: str, which: str, reason: str) -> None:
    assert score(text, "46", which=which) == reason


@pytest.mark.parametrize(
    ("text", "answer", "atol", "rtol", "reason"),
    [
        ("0.4", "0.3", 0.1, 0, "correct"),  # exactly at the bound, which floats miss
        ("0.40000000000000000001", "0.3", 0.1, 0, "wrong"),
        ("101", "100", 0, 0.01, "correct"),
        ("101.1", "100", 0, 0.01, "wrong"),
        ("-101", "-100", 0, 0.01, "correct"),
        ("0.001", "0", 0, 0.5, "wrong"),
        ("105", "100", 5, 0.01, "correct"),
    ],
)
def test_tolerances(text: str, answer: str, atol: float, rtol: float, reason: str) -> None:
    assert score(text, answer, atol=atol, rtol=rtol) == reason


def test_against_fractions() -> None:
    """Random decimals, near each other or not, compared with exact rationals."""
    rng = random.Random(0)
    for _ in range(2000):
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 30)))
        answer = f"{rng.choice(['', '-'])}{digits}.{rng.randint(0, 999)}e{rng.randint(-40, 40)}"
        near = Fraction(answer) + Fraction(rng.choice([0, 1, -1]), 10 ** rng.randint(0, 60))
        scaled = near * 10**120
        text = f"{scaled.numerator}e-120" if scaled.denominator == 1 else answer
        assert (score(text, answer) == "correct") == (Fraction(text) == Fraction(answer)), (text, answer)
        close = abs(Fraction(text) - Fraction(answer)) <= Fraction("0.001") * abs(Fraction(answer))
        assert (score(text, answer, rtol=0.001) == "correct") == close


def test_long_texts_take_no_time() -> None:
    start = time.perf_counter()
    for text in ("1" * 100_000, "1," * 100_000, "1 " * 100_000, "=" * 100_000, "." * 100_000 + "1"):
        find_number(text, "last")
    assert parse_number("9" * 100_000) is None
    assert time.perf_counter() - start < 2
