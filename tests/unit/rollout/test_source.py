"""From prompts to scored groups: seeds, group ids, rewards, sampling settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_rl.data import PromptSource, Tokenizer, load_tokenizer
from lora_rl.rollout.queue import PromptQueue
from lora_rl.rollout.source import (
    Generator,
    SyncRolloutSource,
    request_seed,
    training_sampling,
    validation_groups,
    validation_sampling,
)
from lora_rl.rollout.types import Completion, GenerationRequest, PromptGroup, SamplingSettings, StopReason
from lora_rl.track import names
from tests.support.configs import tiny_config
from tests.support.models import write_tokenizer
from tests.support.rollouts import ScriptedEngines, completion, prompt

SAMPLING = SamplingSettings(max_tokens=4)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path)
    return load_tokenizer(tmp_path)


def answer_seven(tokenizer: Tokenizer) -> ScriptedEngines:
    return ScriptedEngines(lambda request: completion((*tokenizer.encode("7"), tokenizer.eos_token_id)))


def test_group_by_group_with_rewards(tokenizer: Tokenizer) -> None:
    engines = answer_seven(tokenizer)
    groups = [PromptGroup(40, prompt("a", (3, 4), "7")), PromptGroup(41, prompt("b", (5,), "8"))]
    scored, refused = Generator(engines, tokenizer, seed=1).answer(groups, 3, SAMPLING, purpose="train")
    assert refused == []
    rollouts = [r for group in scored for r in group]
    assert [(r.group_id, r.sample_index, r.prompt.id) for r in rollouts] == [
        *((40, n, "a") for n in range(3)),
        *((41, n, "b") for n in range(3)),
    ]
    assert [r.reward for r in rollouts] == [1, 1, 1, 0, 0, 0]
    assert [r.reason for r in rollouts] == ["correct"] * 3 + ["wrong"] * 3
    assert rollouts[0].text == "7<end>"
    assert rollouts[0].length == 4
    [(requests, sampling)] = engines.asked
    assert [r.prompt_ids for r in requests] == [(3, 4)] * 3 + [(5,)] * 3
    assert sampling is SAMPLING


@pytest.mark.parametrize("stop", [StopReason.LENGTH, StopReason.ABORT])
def test_a_completion_that_was_cut_off_scores_nothing(tokenizer: Tokenizer, stop: StopReason) -> None:
    engines = ScriptedEngines(lambda request: completion(tokenizer.encode("7"), stop=stop))
    [[rollout]], _ = Generator(engines, tokenizer, 0).answer([PromptGroup(0, prompt())], 1, SAMPLING, purpose="x")
    assert (rollout.reward, rollout.reason) == (0.0, "truncated")


def seeds(tokenizer: Tokenizer, seed: int, purpose: str) -> list[int]:
    engines = answer_seven(tokenizer)
    groups = [PromptGroup(n, prompt(str(n))) for n in range(4)]
    Generator(engines, tokenizer, seed).answer(groups, 5, SAMPLING, purpose=purpose)
    return [r.seed for r in engines.asked[0][0]]


def test_every_request_has_its_own_repeatable_seed(tokenizer: Tokenizer) -> None:
    first = seeds(tokenizer, 1, "step 1")
    assert len(set(first)) == 20
    assert first == seeds(tokenizer, 1, "step 1")
    for other in (seeds(tokenizer, 2, "step 1"), seeds(tokenizer, 1, "step 2"), seeds(tokenizer, 1, "validation 0")):
        assert not set(first) & set(other)
    assert all(0 <= seed < 2**63 for seed in first)


def test_seed_fields_do_not_run_together() -> None:
    assert request_seed(1, "step 1", 1, 2) != request_seed(1, "step 1", 12, 0)
    assert request_seed(1, "step 11", 1, 1) != request_seed(1, "step 1", 11, 1)


def test_group_ids_never_repeat_over_steps(tokenizer: Tokenizer, models: dict[str, Path]) -> None:
    engines = answer_seven(tokenizer)
    prompts = PromptSource([prompt(str(n)) for n in range(3)], shuffle=False)
    source = SyncRolloutSource(
        Generator(engines, tokenizer, 0), PromptQueue(prompts), tiny_config(models["tied"]), print
    )
    steps = [source.next_step(step) for step in (1, 2, 3)]
    for step in steps:
        # Four groups of four over three prompts: a prompt that occurs twice is two groups.
        assert [step.count(r) for r in step] == [1] * 16
        assert len({r.group_id for r in step}) == 4
    assert len({r.group_id for step in steps for r in step}) == 12
    assert [r.prompt.id for r in steps[0][::4]] == ["0", "1", "2", "0"]
    assert [r.prompt.id for r in steps[1][::4]] == ["1", "2", "0", "1"]


def test_tokens_of_dropped_groups_count_as_generated(tokenizer: Tokenizer, models: dict[str, Path]) -> None:
    sampled: list[int] = []

    def answer(request: GenerationRequest) -> Completion:
        # Every other group is all right, and dropped.
        number = len(sampled)
        text = "7" if number // 4 % 2 == 0 or number % 2 else "88"
        tokens = (*tokenizer.encode(text), tokenizer.eos_token_id)
        sampled.append(len(tokens))
        return completion(tokens)

    prompts = PromptQueue(PromptSource([prompt(str(n)) for n in range(40)], shuffle=False))
    for overrides in ((), ("grpo.use_dynamic_sampling=true",)):
        source = SyncRolloutSource(
            Generator(ScriptedEngines(answer), tokenizer, 0), prompts, tiny_config(models["tied"], *overrides), print
        )
        for step in (1, 2):
            sampled.clear()
            rollouts = source.next_step(step)
            assert source.metrics()[names.GENERATED_TOKENS] == sum(sampled)
            assert (len(sampled) > len(rollouts)) == bool(overrides)


def test_the_reward_of_dropped_groups_is_told(tokenizer: Tokenizer, models: dict[str, Path]) -> None:
    """The kept ones have a reward of 0.5 here, whatever the share of prompts that are solved."""
    asked = [0]

    def answer(request: GenerationRequest) -> Completion:
        asked[0] += 1
        # Of every four groups one is half right, three all right.
        right = (asked[0] - 1) // 4 % 4 != 0 or asked[0] % 2
        return completion((*tokenizer.encode("7" if right else "8"), tokenizer.eos_token_id))

    prompts = PromptQueue(PromptSource([prompt(str(n)) for n in range(40)], shuffle=False))
    config = tiny_config(models["tied"], "grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=4")
    source = SyncRolloutSource(Generator(ScriptedEngines(answer), tokenizer, 0), prompts, config, print)
    rollouts = source.next_step(1)
    assert sum(r.reward for r in rollouts) / len(rollouts) == 0.5
    groups = asked[0] // 4
    assert source.metrics()[names.GENERATED_REWARD] == pytest.approx((4 * 0.5 + (groups - 4)) / groups)


@pytest.mark.parametrize("flat", [0, 3])
def test_the_bound_on_generation_holds_wherever_the_flat_group_is(
    tokenizer: Tokenizer, models: dict[str, Path], flat: int
) -> None:
    asked = [0]

    def answer(request: GenerationRequest) -> Completion:
        asked[0] += 1
        right = (asked[0] - 1) // 4 == flat or asked[0] % 2
        return completion((*tokenizer.encode("7" if right else "8"), tokenizer.eos_token_id))

    prompts = PromptQueue(PromptSource([prompt(str(n)) for n in range(40)], shuffle=False))
    config = tiny_config(models["tied"], "grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=1")
    source = SyncRolloutSource(Generator(ScriptedEngines(answer), tokenizer, 0), prompts, config, print)
    with pytest.raises(ValueError, match="1 batches were generated and only 3 of 4 groups have different rewards"):
        source.next_step(1)
    assert asked[0] == 16


def test_sampling_settings_come_from_the_configuration(models: dict[str, Path]) -> None:
    settings = tiny_config(models["tied"])
    # Past the loader, which refuses combinations that training must not use.
    generation = settings.policy.generation.model_copy(
        update={
            "temperature": 0.7, "top_p": 0.9, "top_k": 11, "max_new_tokens": 5,
            "stop_token_ids": [4, 9], "stop_strings": ["x"], "ignore_eos": True,
        }
    )  # fmt: skip
    settings = settings.model_copy(
        update={
            "policy": settings.policy.model_copy(update={"generation": generation}),
            "grpo": settings.grpo.model_copy(update={"val_temperature": 0.2}),
        }
    )
    assert training_sampling(settings) == SamplingSettings(0.7, 0.9, 11, 5, (4, 9), ("x",), True)
    assert validation_sampling(settings) == SamplingSettings(0.2, 1.0, -1, 5, (4, 9), ("x",), True)


@pytest.mark.parametrize("top_k", ["null", "0", "-1"])
def test_top_k_off(models: dict[str, Path], top_k: str) -> None:
    assert training_sampling(tiny_config(models["tied"], f"policy.generation.top_k={top_k}")).top_k == -1


def test_validation_groups_are_numbered() -> None:
    assert [g.group_id for g in validation_groups([prompt("a"), prompt("b")])] == [0, 1]


def test_equal_seeds_mean_equal_requests(tokenizer: Tokenizer) -> None:
    engines = ScriptedEngines(lambda request: completion((3 + request.seed % 200,)))
    groups = [PromptGroup(0, prompt())]
    generator = Generator(engines, tokenizer, seed=9)
    one, two = (generator.answer(groups, 4, SAMPLING, purpose="train")[0] for _ in range(2))
    assert [r.completion for r in one[0]] == [r.completion for r in two[0]]
    # Another attempt samples anew.
    again, _ = generator.answer([PromptGroup(0, prompt(), attempt=1)], 4, SAMPLING, purpose="train")
    assert not {r.completion for r in one[0]} & {r.completion for r in again[0]}
    assert isinstance(engines.asked[0][0][0], GenerationRequest)


@pytest.mark.parametrize(
    ("text", "end", "sampling"),
    [
        ("7", "<end>", {}),
        ("7", "x", {"stop_token_ids": True}),
        ("7", "x", {"stop_strings": ("x",)}),
        ("7", "xyz", {"stop_strings": ("w", "xy")}),
    ],
)
def test_what_ended_a_completion_is_no_part_of_the_answer(
    tokenizer: Tokenizer, text: str, end: str, sampling: dict[str, Any]
) -> None:
    if "stop_token_ids" in sampling:
        sampling = {"stop_token_ids": tokenizer.encode(end)}
    tokens = (*tokenizer.encode(text), *((tokenizer.eos_token_id,) if end == "<end>" else tokenizer.encode(end)))
    engines = ScriptedEngines(lambda request: completion(tokens))
    groups = [PromptGroup(0, prompt("a", (3, 4), text))]
    [[rollout]], _ = Generator(engines, tokenizer, 0).answer(groups, 1, replace(SAMPLING, **sampling), purpose="train")
    assert (rollout.reward, rollout.reason) == (1.0, "correct")
    # It is trained on, and shown.
    assert rollout.text == text + end
    [[other]], _ = Generator(engines, tokenizer, 0).answer(groups, 1, SAMPLING, purpose="train")
    assert (other.reward == 1.0) == (end == "<end>")


def test_a_second_end_token_of_the_model_ends_the_answer(tmp_path: Path) -> None:
    """vLLM stops at every end token of generation_config.json; chat models have one that their tokenizer lacks."""
    write_tokenizer(tmp_path)
    second = load_tokenizer(tmp_path).encode("x")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [*second, 1]}))
    tokenizer = load_tokenizer(tmp_path, model=tmp_path / "model")
    assert {tokenizer.eos_token_id, *second} <= tokenizer.end_token_ids
    engines = ScriptedEngines(lambda request: completion((*tokenizer.encode("7"), *second)))
    groups = [PromptGroup(0, prompt("a", (3, 4), "7"))]
    [[rollout]], _ = Generator(engines, tokenizer, 0).answer(groups, 1, SAMPLING, purpose="train")
    assert rollout.reward == 1.0
