"""What a step trains on: shaping, advantages, and who is left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lora_rl.config import RunConfig
from lora_rl.rollout.source import is_informative
from lora_rl.rollout.types import Rollout, StopReason, TrainBatch, reward_parts
from lora_rl.train.learning_signal import LearningSignal, components_of, learning_signal
from tests.support.configs import tiny_config
from tests.support.rollouts import rollout


@dataclass
class ScriptedPolicy:
    """Stands where `PolicyGroup` does: the KL per token to the reference is `gap` times the row number."""

    gap: float = 0.0
    asked: list[tuple[TrainBatch, bool]] = field(default_factory=list)

    def logprobs(self, batch: TrainBatch, *, reference: bool = False) -> np.ndarray:
        self.asked.append((batch, reference))
        rows = np.arange(len(batch), dtype=np.float32)[:, None]
        values = np.full(batch.token_ids.shape, -1.0, np.float32)
        return values - self.gap * rows if reference else values


@pytest.fixture(scope="module")
def config(models: dict[str, Path]) -> RunConfig:
    return tiny_config(models["tied"])


@pytest.fixture
def make(models: dict[str, Path]) -> Any:
    return lambda *overrides: tiny_config(models["tied"], *overrides)


def signal_of(rollouts: Sequence[Rollout], config: RunConfig, policy: ScriptedPolicy | None = None) -> LearningSignal:
    return learning_signal(rollouts, config, policy or ScriptedPolicy())


def with_grpo(config: RunConfig, **changes: Any) -> RunConfig:
    return config.model_copy(update={"grpo": config.grpo.model_copy(update=changes)})


def group(number: int, rewards: Sequence[float], lengths: Sequence[int] = (), cut: Sequence[int] = ()) -> list[Rollout]:
    """Rollouts of one group; those in `cut` were truncated."""
    lengths = lengths or [2] * len(rewards)
    return [
        rollout(number, n, reward, (8,) * length, stop=StopReason.LENGTH if n in cut else StopReason.STOP)
        for n, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]


# Group 0 is half right, group 1 all wrong, group 2 all right.
ROLLOUTS = [*group(0, (1, 0)), *group(1, (0, 0)), *group(2, (1, 1))]


def kept_groups(rollouts: Sequence[Rollout], config: RunConfig) -> tuple[list[int], list[float]]:
    signal = signal_of(rollouts, config)
    return [r.group_id for r in signal.kept], signal.advantages


def test_groups_without_variance_are_dropped_or_kept(config: RunConfig) -> None:
    groups, values = kept_groups(ROLLOUTS, with_grpo(config, drop_zero_variance_groups=True))
    assert groups == [0, 0]
    assert values == pytest.approx([2**-0.5, -(2**-0.5)], rel=1e-4)
    groups, values = kept_groups(ROLLOUTS, with_grpo(config, drop_zero_variance_groups=False))
    assert groups == [0, 0, 1, 1, 2, 2]
    assert values[2:] == [0.0] * 4
    signal = signal_of(ROLLOUTS, config)
    assert (signal.num_groups, signal.num_zero_variance_groups, signal.metrics, signal.reason) == (3, 2, {}, "")


@pytest.mark.parametrize("drop", [True, False])
def test_only_constant_groups_leave_nothing_to_train(config: RunConfig, drop: bool) -> None:
    signal = signal_of(ROLLOUTS[2:], with_grpo(config, drop_zero_variance_groups=drop))
    assert (signal.kept, signal.advantages, signal.reason) == ([], [], "every group's rewards were equal")


def test_a_completion_without_tokens_counts_in_its_group_but_is_not_trained(config: RunConfig) -> None:
    groups, values = kept_groups(group(0, (1, 0, 0), (2, 0, 2)), config)
    assert groups == [0, 0]
    assert values == kept_groups(group(0, (1, 0, 0)), config)[1][::2]


def test_advantages_follow_the_configuration(config: RunConfig) -> None:
    def values(normalize: bool, leave_one_out: bool) -> list[float]:
        changed = with_grpo(config, normalize_rewards=normalize, use_leave_one_out_baseline=leave_one_out)
        return signal_of(group(0, (1, 0, 0, 0)), changed).advantages

    assert values(False, False) == pytest.approx([0.75, -0.25, -0.25, -0.25])
    assert values(False, True) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert values(True, False) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-4)


def test_reinforce_plus_plus_whitens_what_is_trained_by_its_tokens(make: Any) -> None:
    config = make("grpo.adv_estimator.name=reinforce_plus_plus")
    rollouts = [*group(0, (1, 0), (1, 3)), *group(1, (0, 0), (5, 5)), *group(2, (1, 0, 0), (2, 2, 2))]
    signal = signal_of(rollouts, config)
    assert [r.group_id for r in signal.kept] == [0, 0, 2, 2, 2]
    tokens = [len(r.completion.token_ids) for r in signal.kept]
    total = sum(tokens)
    assert sum(a * n for a, n in zip(signal.advantages, tokens, strict=True)) == pytest.approx(0, abs=1e-4)
    assert sum(a * a * n for a, n in zip(signal.advantages, tokens, strict=True)) / total == pytest.approx(1, rel=1e-4)


def test_without_a_baseline_groups_of_equal_rewards_and_groups_of_one_teach(make: Any) -> None:
    options = ("grpo.adv_estimator.minus_baseline=false", "grpo.drop_zero_variance_groups=false")
    config = make("grpo.adv_estimator.name=reinforce_plus_plus", "grpo.num_generations_per_prompt=1", *options)
    signal = signal_of([*group(0, (1,)), *group(1, (0,))], config)
    assert signal.advantages == pytest.approx([1, -1], rel=1e-4)
    equal = signal_of([*group(0, (1,)), *group(1, (1,))], config)
    assert (equal.kept, equal.reason) == ([], "every group's rewards were equal")


def with_gdpo(config: RunConfig) -> RunConfig:
    return with_grpo(config, adv_estimator=config.grpo.adv_estimator.model_copy(update={"name": "gdpo"}))


def in_parts(rollouts: Sequence[Rollout], parts: Sequence[tuple[float, float]]) -> list[Rollout]:
    """The same rollouts with rewards of two components."""
    return [
        replace(r, reward=c + f, reward_components={"correct": c, "format": f})
        for r, (c, f) in zip(rollouts, parts, strict=True)
    ]


def test_gdpo_takes_the_components_of_the_reward(config: RunConfig) -> None:
    rollouts = in_parts(group(0, (1, 1, 1, 0)), [(1.0, 0.0), (0.0, 1.0), (0.0, 1.0), (0.0, 0.0)])
    advantages = signal_of(rollouts, with_gdpo(config)).advantages
    assert advantages[0] > advantages[1] + 0.1


def test_gdpo_weighs_components_as_the_reward_does(make: Any) -> None:
    """One that counts for nearly nothing moves nearly nothing."""
    rollouts = in_parts(group(0, (1, 1, 1, 0)), [(1.0, 0.0), (0.0, 1.0), (0.0, 1.0), (0.0, 0.0)])
    rollouts = [replace(r, reward_components={"exact_match": r.reward_components["correct"],
                                              "f": r.reward_components["format"]}) for r in rollouts]  # fmt: skip
    advantages = {}
    for weight in (0.001, 1.0, 1000.0):
        more = f"reward.additional=[{{name: format, label: f, pattern: x, weight: {weight}}}]"
        advantages[weight] = signal_of(rollouts, make(more, "grpo.adv_estimator.name=gdpo")).advantages
    assert advantages[0.001][0] > 1.5 and abs(advantages[0.001][1] - advantages[0.001][3]) < 0.01
    assert advantages[1000.0][1] > 0.5 and abs(advantages[1000.0][0] - advantages[1000.0][3]) < 0.01
    assert advantages[1.0] != advantages[1000.0]


def test_gdpo_takes_a_function_by_its_parts_or_by_its_value(config: RunConfig) -> None:
    """Its value is made of its parts, which would count twice."""
    both = [replace(r, reward_components={"function": a + b, "function/a": a, "function/b": b})
            for r, (a, b) in zip(group(0, (1, 1, 0)), [(1, 0), (0, 1), (0, 0)], strict=True)]  # fmt: skip
    assert sorted(components_of(both)) == ["function/a", "function/b"]
    one = [replace(r, reward_components={"function": 1.0, "function/a": 0.5, "other": 0.0}) for r in both]
    assert sorted(components_of(one)) == ["function", "function/a", "other"]


def test_gdpo_refuses_a_value_without_the_parts_that_others_have(config: RunConfig) -> None:
    """The parts would be 0, and the penalty nowhere."""
    whole = {"f": 1.0, "f/a": 1.0, "f/b": 0.0}
    first, second = group(0, (1, 0))
    nothing = replace(second, reward_components={"f": 0.0})
    assert components_of([replace(first, reward_components=whole), nothing])["f/a"].tolist() == [1.0, 0.0]
    penalty = replace(second, reward_components={"f": -1.0})
    with pytest.raises(ValueError, match="rollout 1 of group 0 has no reward component 'f/a'"):
        components_of([replace(first, reward_components=whole), penalty])


def test_gdpo_judges_groups_by_their_components(config: RunConfig) -> None:
    # Group 0 earns 1 each time, but not with the same component; group 1 earns the same of each.
    rollouts = in_parts(
        [*group(0, (1, 1, 1)), *group(1, (1, 1))], [(1.0, 0.0), (0.0, 1.0), (0.0, 1.0), (1.0, 0.0), (1.0, 0.0)]
    )
    signal = signal_of(rollouts, with_grpo(with_gdpo(config), normalize_rewards=False, use_leave_one_out_baseline=True))
    assert signal.num_zero_variance_groups == 1
    # Their sum is the same all the same, unless the components are of different spread.
    assert (signal.kept, signal.reason) == ([], "every advantage was 0")
    rollouts += in_parts(group(2, (1, 1, 0)), [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)])
    assert {r.group_id for r in signal_of(rollouts, with_gdpo(config)).kept} == {0, 2}


def test_gdpo_refuses_components_that_are_missing_or_no_number(config: RunConfig) -> None:
    rollouts = in_parts(group(4, (1, 1)), [(1.0, 0.0), (0.0, 1.0)])
    lacking = [rollouts[0], replace(rollouts[1], reward_components={"correct": 0.0})]
    with pytest.raises(ValueError, match="rollout 1 of group 4 has no reward component 'format', which others have"):
        signal_of(lacking, with_gdpo(config))
    no_number = [rollouts[0], replace(rollouts[1], reward_components={"correct": 0.0, "format": math.nan})]
    with pytest.raises(ValueError, match=r"the reward component format of rollout 1 of group 4 .* is nan"):
        signal_of(no_number, with_gdpo(config))
    with pytest.raises(ValueError, match="at least 2 reward components, got 0"):
        signal_of(group(0, (1, 0)), with_gdpo(config))


def test_advantages_that_are_all_0_are_told_from_equal_rewards(make: Any) -> None:
    config = make("grpo.overlong_filtering=true", "grpo.normalize_rewards=false")
    signal = signal_of(group(0, (0, 0.5, 1), cut=(0, 2)), config)
    assert (signal.kept, signal.reason) == ([], "every advantage was 0")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_ends_the_step_naming_the_rollout(config: RunConfig, bad: float) -> None:
    with pytest.raises(ValueError, match=r"the reward of rollout 1 of group 3 \(prompt p3\) is (nan|inf)"):
        signal_of(group(3, (1, bad, 0)), config)


# -- shaping ---------------------------------------------------------------------------------------------------------

SHAPING = (
    "grpo.reward_shaping.enabled=true",
    "grpo.reward_shaping.overlong_buffer_length=4",
    "grpo.reward_shaping.overlong_buffer_penalty=1.0",
    "grpo.normalize_rewards=false",
)


def test_the_overlong_penalty_is_subtracted_before_the_baseline(make: Any) -> None:
    # max_new_tokens is 8: the ramp runs from 4 to 8 tokens.
    signal = signal_of(group(0, (1, 1, 0, 0), (4, 6, 4, 8)), make(*SHAPING))
    shaped = [1.0, 0.5, 0.0, -1.0]
    assert signal.advantages == pytest.approx([r - sum(shaped) / 4 for r in shaped])
    assert signal.metrics == pytest.approx({"overlong_penalty": -1.5 / 4, "shaped_reward": 0.5 / 4})


def test_zero_variance_is_judged_by_the_reward_before_shaping(make: Any) -> None:
    rollouts = [*group(0, (0, 0), (4, 8)), *group(1, (1, 0), (4, 4))]
    signal = signal_of(rollouts, make(*SHAPING))
    assert [r.group_id for r in signal.kept] == [1, 1]
    assert signal.num_zero_variance_groups == 1
    kept = signal_of(rollouts, make(*SHAPING, "grpo.drop_zero_variance_groups=false"))
    assert kept.advantages == pytest.approx([0.5, -0.5, 0.5, -0.5])


def test_overlong_filtering_leaves_truncated_completions_out_but_counts_them(make: Any) -> None:
    config = make("grpo.overlong_filtering=true", "grpo.normalize_rewards=false")
    rollouts = [*group(0, (1, 0, 0, 0), cut=(3,)), *group(1, (0, 0), cut=(0, 1))]
    signal = signal_of(rollouts, config)
    assert [r.sample_index for r in signal.kept] == [0, 1, 2]
    assert signal.advantages == pytest.approx([0.75, -0.25, -0.25])
    assert signal.metrics == {"filtered_share": pytest.approx(1 / 6)}
    # Without it they are trained on like all others.
    assert len(signal_of(rollouts, make("grpo.normalize_rewards=false")).kept) == 4


def test_a_step_of_truncated_completions_only_says_so(make: Any) -> None:
    signal = signal_of(group(0, (1, 0), cut=(0, 1)), make("grpo.overlong_filtering=true"))
    assert signal.kept == []
    assert signal.reason == "every completion that differs in reward from its group was truncated or empty"


# -- KL in the reward ------------------------------------------------------------------------------------------------

KL = (
    "loss_fn.use_kl_in_reward=true",
    "loss_fn.reference_policy_kl_type=k1",
    "loss_fn.reference_policy_kl_penalty=0.5",
    "grpo.normalize_rewards=false",
)


def test_kl_in_the_reward_is_taken_off_before_the_baseline(make: Any) -> None:
    policy = ScriptedPolicy(gap=0.1)
    # Rows of the batch that is asked about: group 1 is out, so its rollouts have no row.
    rollouts = [*group(1, (1, 1)), *group(0, (1, 0, 0), (3, 1, 2))]
    signal = signal_of(rollouts, make(*KL), policy)
    kl = [0.0, 0.1 * 1, 0.2 * 2]
    shaped = [r - 0.5 * k for r, k in zip((1, 0, 0), kl, strict=True)]
    assert signal.advantages == pytest.approx([r - sum(shaped) / 3 for r in shaped], abs=1e-6)
    assert signal.metrics == pytest.approx(
        {"kl": sum(kl) / 6, "kl_per_sequence": sum(kl) / 3, "shaped_reward": sum(shaped) / 3}, rel=1e-5
    )
    assert [(len(batch), reference) for batch, reference in policy.asked] == [(3, False), (3, True)]
    assert signal.old_logprobs is not None and signal.old_logprobs.shape == (3, 2 + 3)


def test_old_logprobs_are_those_of_the_kept_rollouts(make: Any) -> None:
    class Numbered(ScriptedPolicy):
        def logprobs(self, batch: TrainBatch, *, reference: bool = False) -> np.ndarray:
            return super().logprobs(batch) - np.arange(len(batch), dtype=np.float32)[:, None]

    config = make(*KL, "grpo.overlong_filtering=true")
    signal = signal_of(group(0, (1, 0, 0, 0), cut=(1,)), config, Numbered())
    assert [r.sample_index for r in signal.kept] == [0, 2, 3]
    assert signal.old_logprobs[:, 0].tolist() == [-1.0, -3.0, -4.0]


def test_kl_in_the_reward_of_empty_completions_is_zero(make: Any) -> None:
    signal = signal_of(group(0, (1, 0, 0), (2, 0, 2)), make(*KL), ScriptedPolicy(gap=0.1))
    shaped = [1.0, 0.0, -0.5 * 0.1 * 2]
    mean = sum(shaped) / 3
    assert signal.advantages == pytest.approx([shaped[0] - mean, shaped[2] - mean], abs=1e-6)


def test_the_policy_is_not_asked_for_logprobs_otherwise(make: Any) -> None:
    policy = ScriptedPolicy()
    config = make("loss_fn.reference_policy_kl_penalty=0.1")
    assert signal_of(ROLLOUTS, config, policy).old_logprobs is None
    assert signal_of(ROLLOUTS[2:], make(*KL), policy).kept == []
    assert policy.asked == []


def judged(rollouts: Sequence[Rollout], components: Sequence[dict[str, float]]) -> list[Rollout]:
    return [replace(r, reward=c["function"], reward_components=c) for r, c in zip(rollouts, components, strict=True)]


def test_a_completion_without_a_verdict_earned_nothing_in_every_part(config: RunConfig) -> None:
    """A function reports parts for what it judged; for what was cut off, or took too long, there are none."""
    parts = [
        {"function": 1.0, "function/format": 1.0},
        {"function": 0.0},
        {"function": 1.0, "function/format": 0.0},
    ]
    for order in (parts, parts[::-1]):
        rollouts = judged(group(0, (1, 0, 1)), order)
        assert reward_parts(rollouts)["function/format"] == [c.get("function/format", 0.0) for c in order]
        assert is_informative(rollouts, by_component=True)
        assert len(signal_of(rollouts, with_gdpo(config)).kept) == 3
    lacking = judged(group(4, (1, 1)), [{"function": 1.0, "function/a": 1.0}, {"function": 1.0, "function/b": 1.0}])
    with pytest.raises(ValueError, match="no reward component 'function/a'"):
        reward_parts(lacking[::-1])
