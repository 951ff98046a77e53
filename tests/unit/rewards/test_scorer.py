"""Several verifiers as one reward; checks of the data. Everything here runs in the driver."""

from __future__ import annotations

from typing import Any

import pytest

from lora_rl.config.reward_rules import REASON_NAMES
from lora_rl.config.schema import RewardConfig
from lora_rl.config.schema.reward import OPTIONS, VerifierConfig, VerifierName
from lora_rl.data import Prompt
from lora_rl.rewards import RewardError, RewardReason, Scorer, ScoreRequest

TAGS = {"answer_from": "regex", "answer_pattern": "<answer>(.*?)</answer>"}


def score(config: dict[str, Any], completion: str, answer: str = "46", **request: Any):
    [result] = Scorer(RewardConfig(**config)).score([ScoreRequest(completion, answer, **request)])
    return result


def prompt(answer: str, name: str = "p") -> Prompt:
    return Prompt(name, "text", (1,), answer)


def test_the_default_is_exact_match_alone() -> None:
    scores = Scorer().score([ScoreRequest(c, "46") for c in ("46", "47", "x")])
    assert [s.value for s in scores] == [1.0, 0.0, 0.0]
    assert [s.reason for s in scores] == ["correct", "wrong", "unparseable"]
    assert scores[0].components == {"exact_match": 1.0}
    assert not Scorer().needs_workers


WEIGHTED = {
    "name": "exact_match",
    "weight": 2.0,
    **TAGS,
    "additional": [
        {"name": "format", "pattern": "<think>.*</think><answer>.*</answer>", "weight": 0.25},
        {"name": "numeric", "number": "last", "weight": 0.5, "label": "close", "atol": 1, **TAGS},
    ],
}


@pytest.mark.parametrize(
    ("completion", "value", "reason", "parts"),
    [
        ("<think>a\nb</think><answer>46</answer>", 2.75, "correct", (1, 1, 1)),
        ("<answer>46</answer>", 2.5, "correct", (1, 0, 1)),
        ("<think></think><answer>47</answer>", 0.75, "wrong", (0, 1, 1)),
        ("<think></think><answer>x</answer>", 0.25, "unparseable", (0, 1, 0)),
        ("46", 0.0, "unparseable", (0, 0, 0)),
    ],
)
def test_a_weighted_sum(completion: str, value: float, reason: str, parts: tuple[int, ...]) -> None:
    result = score(WEIGHTED, completion)
    assert (result.value, result.reason) == (value, reason)
    assert result.components == dict(zip(("exact_match", "format", "close"), map(float, parts), strict=True))


def test_a_truncated_completion_scores_nothing_anywhere() -> None:
    result = score(WEIGHTED, "<think></think><answer>46</answer>", truncated=True)
    assert (result.value, result.reason) == (0.0, "truncated")


def test_format_of_truncated_completions_on_request() -> None:
    options = {"name": "format", "pattern": "<think>.*"}
    assert score(options, "<think>on", truncated=True).reason == "truncated"
    assert score({**options, "score_truncated": True}, "<think>on", truncated=True).reason == "correct"


def test_long_answers_are_not_parsed() -> None:
    options = {"name": "numeric", "number": "last", "max_answer_chars": 10}
    assert score(options, "it is 46").reason == "correct"
    assert score(options, "I think it is 46").reason == "unparseable"
    assert score({**options, **TAGS}, "I think it is <answer>46</answer>").reason == "correct"


def test_a_pattern_that_never_ends_times_out(caplog: pytest.LogCaptureFixture) -> None:
    options = {"name": "exact_match", "answer_from": "regex", "answer_pattern": "((?:a|aa)+)c"}
    result = score(options, "a" * 60 + "b")
    assert (result.value, result.reason) == (0.0, "timed_out")
    assert "answer_pattern backtracks without end" in caplog.text


@pytest.mark.parametrize(
    ("config", "answer", "message"),
    [
        (
            {"name": "exact_match"},
            "4.6",
            "prompt bad: exact_match: the answer '4.6' is not an integer in canonical form",
        ),
        ({"name": "exact_match", "match": "text"}, "", "prompt bad: exact_match: the answer is empty"),
        ({"name": "numeric"}, "about 4", "prompt bad: numeric: the answer 'about 4' is not a number"),
        (WEIGHTED, "x", "prompt bad: exact_match: the answer 'x'"),
    ],
)
def test_an_answer_that_cannot_be_used_names_its_prompt(config: dict[str, Any], answer: str, message: str) -> None:
    scorer = Scorer(RewardConfig(**config))
    scorer.check([prompt("46")])
    with pytest.raises(RewardError, match=message):
        scorer.check([prompt("46"), prompt(answer, "bad"), prompt("47")])


def test_the_rules_know_every_verifier_option_and_reason() -> None:
    assert set(OPTIONS) == set(VerifierName.__args__)
    assert {o for options in OPTIONS.values() for o in options} == set(VerifierConfig.model_fields) - {
        "name", "weight", "label",
    }  # fmt: skip
    assert set(REASON_NAMES) == {reason.value for reason in RewardReason}
