"""Mathematical answers: hand-checked pairs, malformed and endless ones, in the pool."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from lora_rl.config.schema import RewardConfig
from lora_rl.data import Prompt
from lora_rl.rewards import RewardError, Scorer, ScoreRequest
from tests.support.malformed import GOLDS, malformed_answers

TIMEOUT_S, HASTE_S = 5.0, 0.75


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with Scorer(RewardConfig(name="math_verify", num_workers=2, timeout_s=TIMEOUT_S)) as started:
        started.wait_ready()
        yield started


@pytest.fixture(scope="module")
def hasty() -> Iterator[Scorer]:
    """For answers that may take the whole limit."""
    with Scorer(RewardConfig(name="math_verify", num_workers=2, timeout_s=HASTE_S)) as started:
        started.wait_ready()
        yield started


RIGHT = [
    ("46", "46"),
    ("The answer is 46.", "46"),
    ("$46$", "46"),
    (r"so \boxed{46}", "46"),
    ("x = 46", "46"),
    ("92/2 = 46", "46"),
    (r"$\frac{1}{2}$", "0.5"),
    ("0.5", r"\frac{1}{2}"),
    ("1/2", r"\frac{1}{2}"),
    (r"$\dfrac{2}{4}$", r"$\frac{1}{2}$"),
    (r"$\sqrt{8}$", r"2\sqrt{2}"),
    (r"$\{2, 1\}$", r"\{1, 2\}"),
    (r"$(1, 2)$", r"(1, 2)"),
    (r"$1 + x^2$", r"x^2 + 1"),
    (r"$(x + 1)^2$", "x^2 + 2x + 1"),
    (r"$[0, 1)$", r"[0, 1)"),
    ("1,234", "1234"),
    (r"$\boxed{\text{east}}$", r"\text{east}"),
]
WRONG = [
    ("47", "46"),
    ("-46", "46"),
    ("46 or 45", "46"),
    (r"\boxed{45, 46}", "46"),
    (r"\boxed{46} no, \boxed{45}", "46"),
    (r"$\frac{2}{1}$", r"\frac{1}{2}"),
    (r"$\sqrt{2}$", r"2\sqrt{2}"),
    (r"$(2, 1)$", r"(1, 2)"),
    (r"$x^2 - 1$", r"x^2 + 1"),
    (r"$[0, 1]$", r"[0, 1)"),
    (r"$\pm 46$", "46"),
    ("1e400", "46"),
]
NONE = ["", " ", "nan", "inf", "I do not know", r"\boxed{}", "$", "{" * 100, "\x00", "٤٦"]


def test_hand_checked_answers(scorer: Scorer) -> None:
    cases = [
        *((text, gold, "correct") for text, gold in RIGHT),
        *((text, gold, "wrong") for text, gold in WRONG),
        *((text, "46", "unparseable") for text in NONE),
    ]
    scores = scorer.score([ScoreRequest(text, gold) for text, gold, _ in cases])
    assert [(c[:2], s.reason.value) for c, s in zip(cases, scores, strict=True)] == [(c[:2], c[2]) for c in cases]


CUT_OUT = [
    (r"\boxed{45} no, \boxed{46}", "46", "correct"),
    (r"\boxed{46} no, \boxed{45}", "46", "wrong"),
    (r"\boxed{\frac12}", "0.5", "correct"),
    (r"\boxed{2x + 1}", "1 + 2x", "correct"),
    (r"\boxed{2x + 1}", "1", "wrong"),
    (r"\boxed{2x + 1}", "2", "wrong"),
    (r"\boxed{5!}", "120", "correct"),
    (r"\boxed{5!}", "5", "wrong"),
    (r"\boxed{3, 4}", "4", "wrong"),
    (r"\boxed{(1, 2)}", "(1, 2)", "correct"),
    (r"\boxed{(2, 1)}", "(1, 2)", "wrong"),
    (r"\boxed{[0, 1)}", "[0, 1)", "correct"),
    (r"\boxed{\text{east}}", r"\text{east}", "correct"),
    (r"\boxed{\text{west}}", r"\text{east}", "wrong"),
    (r"\boxed{}", "46", "unparseable"),
    ("46", "46", "unparseable"),
]


def test_answers_that_are_cut_out() -> None:
    settings = RewardConfig(name="math_verify", answer_from="boxed", num_workers=1, timeout_s=TIMEOUT_S)
    with Scorer(settings) as scorer:
        scores = scorer.score([ScoreRequest(text, gold) for text, gold, _ in CUT_OUT])
    assert [(*case[:2], s.reason.value) for case, s in zip(CUT_OUT, scores, strict=True)] == CUT_OUT


def test_truncated_answers_never_score(scorer: Scorer) -> None:
    assert scorer.score([ScoreRequest("46", "46", truncated=True)])[0].reason == "truncated"


def test_right_answers_that_are_none(scorer: Scorer) -> None:
    scorer.check([Prompt(str(n), "", (1,), gold) for n, (_, gold) in enumerate(RIGHT)])
    for bad, problem in [
        ("?", "there is no mathematical expression"),
        ("", "there is no mathematical expression"),
        ("yes", "'yes' in it is not LaTeX"),
        ("5 dollars", "'dollars' in it is not LaTeX"),
        ("1e5", "'1e5' in it is not LaTeX"),
        ("1 000", "'1 0' in it is not LaTeX"),
    ]:
        with pytest.raises(RewardError, match="prompt bad: math_verify: the answer") as caught:
            scorer.check([Prompt("good", "", (1,), "46"), Prompt("bad", "", (1,), bad)])
        assert problem in str(caught.value)


ENDLESS = [
    "$9^{9^{9^{9^{9}}}}$",
    "9**9**9**9**9",
    r"$\boxed{" + "{" * 3000 + "}" * 3000 + "}$",
    r"$" + r"\frac{1}{" * 400 + "2" + "}" * 400 + "$",
    r"$" + r"\sqrt{" * 1000 + "2" + "}" * 1000 + "$",
    "$" + "(" * 2000 + "1" + ")" * 2000 + "$",
    "1" * 100_000,
    "$" + "9" * 19_000 + "$",
    "$" + "x^{" * 500 + "2" + "}" * 500 + "$",
    r"$\int_0^1 \sin(x^{x^{x}}) dx$",
    r"$\sum_{n=1}^{10^{12}} \frac{1}{n!}$",
    r"$100000000!$",
    r"$\left(" * 500,
    " " * 19_000 + "47",
    "1 + " * 4_000 + "1",
    "$" + "1 , " * 4_000 + "1$",
]


def test_endless_answers_end_and_do_not_score(hasty: Scorer) -> None:
    start = time.monotonic()
    scores = hasty.score([ScoreRequest(text, "46") for text in ENDLESS] + [ScoreRequest("46", "46")] * 4)
    took = time.monotonic() - start
    assert all(s.value == 0.0 for s in scores[:-4]), [s.reason for s in scores]
    assert [s.reason for s in scores[-4:]] == ["correct"] * 4
    late = sum(s.reason == "timed_out" for s in scores)
    assert late >= 1
    # Each costs at most the limit and a fork, twice if its worker died.
    assert took < len(ENDLESS) * (HASTE_S + 0.5)
    assert hasty.score([ScoreRequest("1" * 100_000, "1" * 100_000)])[0].reason == "unparseable"


def test_malformed_answers_do_not_score(hasty: Scorer) -> None:
    rng = random.Random(0)
    for gold in GOLDS:
        answers = malformed_answers(rng, 40)
        scores = hasty.score([ScoreRequest(text, gold) for text in answers])
        assert not [(text, gold) for text, s in zip(answers, scores, strict=True) if s.value > 0.0]
        assert not [s.reason for s in scores if s.reason in ("error", "worker_died")]
