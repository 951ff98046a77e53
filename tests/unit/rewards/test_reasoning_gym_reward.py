"""Procedural tasks: right answers of many, wrong ones that the package half accepts, items that went through JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lora_rl.config.schema import RewardConfig
from lora_rl.data import Prompt
from lora_rl.rewards import RewardError, Scorer, ScoreRequest
from tests.support.malformed import malformed_answers

TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 3},
    "products": {},
    "basic_arithmetic": {},
    "leg_counting": {},
    "word_sorting": {},
    "simple_equations": {},
    "complex_arithmetic": {},
    "prime_factorization": {},
    "spell_backward": {},
    "arc_agi": {},
    "rearc": {},
}


@pytest.fixture(scope="module")
def items() -> Callable[[str], dict[str, Any]]:
    import reasoning_gym

    def make(name: str, place: int = 0) -> dict[str, Any]:
        config = TASKS.get(name, {})
        item = reasoning_gym.create_dataset(name, **config, seed=5, size=place + 1)[place]
        return {"reasoning_gym": json.loads(json.dumps({"dataset": name, "config": config, "item": item}))}

    return make


def pooled(**options: Any) -> Scorer:
    return Scorer(RewardConfig(name="reasoning_gym", num_workers=2, timeout_s=5, **options))


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with pooled() as started:
        started.wait_ready()
        yield started


def right(task: dict[str, Any]) -> str:
    return task["reasoning_gym"]["item"]["answer"]


def test_right_answers_of_many_tasks(scorer: Scorer, items) -> None:
    tasks = [items(name, place) for name in TASKS for place in range(2)]
    scores = scorer.score([ScoreRequest(right(t), right(t), metadata=t) for t in tasks])
    assert [s.reason for s in scores] == ["correct"] * len(tasks)
    scorer.check([Prompt(str(n), "", (1,), right(t), t) for n, t in enumerate(tasks)])


def test_partial_credit_is_a_choice(scorer: Scorer, items) -> None:
    """For chain_sum the package gives a part of the score to a text that holds the answer somewhere."""
    task = items("chain_sum")
    text = f"not {right(task)}"
    request = ScoreRequest(text, right(task), metadata=task)
    assert (scorer.score([request])[0].value, scorer.score([request])[0].reason) == (0.0, "wrong")
    with pooled(partial_credit=True) as generous:
        [score] = generous.score([request])
        assert (score.value, score.reason) == (len(right(task)) / len(text), "partial")
        assert generous.score([ScoreRequest(right(task), "", metadata=task)])[0].reason == "correct"
        assert generous.score([ScoreRequest("x", "", metadata=task)])[0].reason == "wrong"


def test_the_answer_is_extracted(items) -> None:
    task = items("chain_sum")
    with pooled(answer_from="regex", answer_pattern="<answer>(.*?)</answer>") as scorer:
        texts = [f"so <answer> {right(task)} </answer>", right(task), f"<answer>{right(task)}1</answer>"]
        scores = scorer.score([ScoreRequest(t, right(task), metadata=task) for t in texts])
        assert [s.reason for s in scores] == ["correct", "unparseable", "wrong"]


def test_malformed_answers_score_nothing(scorer: Scorer, items) -> None:
    rng = random.Random(1)
    for name in TASKS:
        task = items(name)
        answers = [*malformed_answers(rng, 60), "nan", "NaN+1i", "inf", "nanj"]
        scores = scorer.score([ScoreRequest(a, right(task), metadata=task) for a in answers])
        assert not [(name, a, s) for a, s in zip(answers, scores, strict=True) if s.value > 0.0]
        assert not [(name, s) for s in scores if s.reason in ("error", "worker_died", "timed_out")]


def test_a_task_that_takes_any_text_is_refused(scorer: Scorer, items) -> None:
    task = items("game_of_life_halting")
    with pytest.raises(RewardError, match="prompt p: reasoning_gym: game_of_life_halting takes any text"):
        scorer.check([Prompt("p", "", (1,), right(task), task)])


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "the prompt's metadata must have reasoning_gym = .*; it has None"),
        ({"reasoning_gym": {"dataset": "chain_sum"}}, "metadata must have reasoning_gym"),
        ({"reasoning_gym": {"dataset": "nope", "item": {"answer": "1"}}}, "Dataset 'nope' not registered"),
        (
            {"reasoning_gym": {"dataset": "products", "item": {"answer": "", "question": "", "metadata": {}}}},
            "products scores its own answer '' with 0.0",
        ),
    ],
)
def test_prompts_that_carry_no_task(scorer: Scorer, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        scorer.check([Prompt("p", "", (1,), "46", metadata)])
