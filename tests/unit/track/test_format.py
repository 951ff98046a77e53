"""Numbers, durations, sparklines, shares."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from lora_rl.track.format import UNICODE, apportion, duration, number, printable, shorten, sparkline


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0.0 s"), (3.14, "3.1 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 m 00 s"), (192, "3 m 12 s"),
     (3599.7, "1 h 00 m"), (7500, "2 h 05 m"), (273600, "3 d 04 h")],
)  # fmt: skip
def test_duration(seconds, shown):
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.431, "0.431"), (-0.05, "-0.0500"), (0.00123, "0.00123"), (4e-5, "4.00e-05"), (12.34, "12.3"),
     (812.4, "812"), (18249, "18.2k"), (1_310_720, "1.3M"), (math.nan, "nan"), (-math.inf, "-inf")],
)  # fmt: skip
def test_number(value, shown):
    assert number(value) == shown


def test_sparkline_scales_averages_and_leaves_gaps():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20, UNICODE.spark) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2, UNICODE.spark) == "▁█"
    assert sparkline([0, math.nan, 7], 3, UNICODE.spark) == "▁ █"
    assert sparkline([5, 5], 9, UNICODE.spark) == "▄▄"
    assert sparkline([math.nan], 9, UNICODE.spark) == " "
    assert sparkline([], 9, UNICODE.spark) == ""
    assert len(sparkline(list(range(1001)), 40, UNICODE.spark)) == 40


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.integers(1, 200))
def test_apportion_adds_up_and_stays_within_one_of_the_exact_share(shares, total):
    counts = apportion(shares, total)
    if sum(shares) == 0:
        assert counts == [0] * len(shares)
        return
    assert sum(counts) == total
    whole = math.fsum(shares)
    assert all(abs(count - share / whole * total) < 1 + 1e-6 for count, share in zip(counts, shares, strict=True))


@settings(max_examples=50)
@given(st.text(max_size=300), st.integers(1, 60))
def test_shorten_fits_and_is_printable(text, cells):
    shown = shorten(text, cells)
    assert cell_len(shown) <= cells
    assert shown.isprintable()


def test_shorten_keeps_both_ends_and_short_texts_whole():
    assert shorten("a" * 100 + "answer 42", 30) == "aaaaaaaaaaaa ... aaaaanswer 42"
    assert shorten("日本語", 6) == "日本語"
    assert printable("a\nb\x1b[0m\u200b") == "a\\nb\\x1b[0m\\u200b"
