"""Where in a completion the answer is."""

from __future__ import annotations

import time

import pytest

from lora_rl.rewards.extract import AnswerExtractor, PatternTimeout, last_boxed, matches_whole

TAGS = AnswerExtractor("regex", pattern="<answer>(.*?)</answer>")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<answer>46</answer>", "46"),
        ("so <answer> 46\n</answer> it is", "46"),
        ("<answer>45</answer><answer>46</answer>", "46"),
        ("<answer>4\n6</answer>", "4\n6"),
        ("<answer></answer>", ""),
        ("<answer>46", None),
        ("46", None),
        ("", None),
    ],
)
def test_tags(text: str, found: str | None) -> None:
    assert TAGS(text) == found


def test_a_group_that_takes_no_part_is_no_answer() -> None:
    assert AnswerExtractor("regex", pattern="x|(y)")("x") is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{46}", "46"),
        (r"\boxed{45} then \boxed{46}", "46"),
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a}b}", "a"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{}", ""),
        (r"\boxed{46", None),
        (r"\boxed{\}", None),
        (r"\boxed 46", None),
        ("boxed{46}", None),
        (r"\boxed{46} \boxed{", None),  # the last one is broken
    ],
)
def test_boxed(text: str, found: str | None) -> None:
    assert last_boxed(text) == found


def test_marker_and_whole() -> None:
    after = AnswerExtractor("marker", marker="####")
    assert after("so #### 45 #### 46 ") == "46"
    assert after("46") is None
    assert after("####") == ""
    assert AnswerExtractor()(" 46 ") == " 46 "


def test_brackets_of_any_depth_take_no_time() -> None:
    start = time.perf_counter()
    for text in ("\\boxed{" * 50_000, "\\boxed{" + "{" * 100_000 + "}" * 100_000 + "}", "\\" * 100_000):
        last_boxed(text)
    assert time.perf_counter() - start < 2


def test_a_pattern_that_backtracks_without_end_is_given_up() -> None:
    start = time.perf_counter()
    with pytest.raises(PatternTimeout):
        matches_whole(r"(?:a|aa)+c", "a" * 60 + "b")
    with pytest.raises(PatternTimeout):
        AnswerExtractor("regex", pattern=r"((?:a|aa)+)c")("a" * 60 + "b")
    assert time.perf_counter() - start < 4
