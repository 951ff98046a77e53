"""From the rollouts of a step to what is trained on: shaped rewards, advantages, and which rollouts are left out.

The order matters, and is this:

1. Groups whose rewards, as the verifier gave them, are all equal have zero variance. Shaping comes later, as a length
   penalty gives an all-wrong group a spread that says nothing about the task.
2. `grpo.reward_shaping` and, with `loss_fn.use_kl_in_reward`, the KL to the reference policy are taken off the reward.
3. Advantages (`grpo.adv_estimator`). Every rollout counts in its group, also one that is not trained on.
4. Left out: completions without a token, zero-variance groups (`grpo.drop_zero_variance_groups`), and truncated
   completions (`grpo.overlong_filtering`). Whitening over the step counts only what is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lora_rl.rollout.types import Rollout, StopReason, build_train_batch, reward_parts

if TYPE_CHECKING:
    from torch import Tensor

    from lora_rl.config import RunConfig
    from lora_rl.policy.group import PolicyGroup


@dataclass(frozen=True)
class LearningSignal:
    """What a step trains on.

    Attributes:
        kept: rollouts that are trained on; none when there is nothing to learn from.
        advantages: of these, same order.
        reason: why there are none; empty otherwise.
        num_groups, num_zero_variance_groups: of all rollouts, by the verifier's rewards.
        metrics: of the shaping, by name without a prefix; empty when nothing shapes.
        old_logprobs: float32 [len(kept), T] of the policy before the update, where they had to be computed anyway.
    """

    kept: list[Rollout]
    advantages: list[float]
    num_groups: int
    num_zero_variance_groups: int
    reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    old_logprobs: np.ndarray | None = None


def learning_signal(rollouts: Sequence[Rollout], config: RunConfig, policy: PolicyGroup) -> LearningSignal:
    """Advantages of the rollouts of a step, and which of them to train on; the order is at the top of the module.

    Args:
        policy: asked for logprobs only when the KL is part of the reward.

    Raises:
        ValueError: a reward is not finite (names the rollout), or the estimator cannot use the groups.
    """
    import torch

    refuse_non_finite(rollouts)
    rewards = torch.tensor([r.reward for r in rollouts], dtype=torch.float32)
    ids = torch.tensor([r.group_id for r in rollouts])
    flat = zero_variance(rollouts, rewards, ids, config)
    groups, flat_groups = len(ids.unique()), len(ids[flat].unique())

    # Members of these groups count in the statistics; of those, the ones below are trained on.
    in_play = ~flat if config.grpo.drop_zero_variance_groups else torch.ones_like(flat)
    has_tokens = torch.tensor([bool(r.completion.token_ids) for r in rollouts])
    truncated = torch.tensor([r.completion.stop_reason is not StopReason.STOP for r in rollouts])
    filtered = in_play & truncated if config.grpo.overlong_filtering else torch.zeros_like(truncated)
    trained = in_play & has_tokens & ~filtered
    metrics: dict[str, float] = {}
    if config.grpo.overlong_filtering:
        metrics["filtered_share"] = float(filtered.float().mean())
    if not trained.any():
        reason = "every completion that differs in reward from its group was truncated or empty"
        reason = reason if in_play.any() else "every group's rewards were equal"
        return LearningSignal([], [], groups, flat_groups, reason, metrics)

    shaped, old_logprobs = rewards, None
    if config.grpo.reward_shaping.enabled:
        penalty = overlong_penalties(rollouts, config)
        shaped, metrics["overlong_penalty"] = shaped + penalty, float(penalty.mean())
    if config.loss_fn.kl_in_reward:
        rows = (in_play & has_tokens).nonzero().flatten().tolist()
        kl, logprobs, metrics["kl"] = kl_of_rollouts([rollouts[i] for i in rows], config, policy)
        penalty = torch.zeros_like(rewards).index_copy(0, torch.tensor(rows), kl)
        shaped = shaped - config.loss_fn.reference_policy_kl_penalty * penalty
        metrics["kl_per_sequence"] = float(kl.mean())
        old_logprobs = logprobs[trained[rows].numpy()]
    if shaped is not rewards:
        metrics["shaped_reward"] = float(shaped[in_play].mean())

    advantages = advantages_of(rollouts, shaped, ids, trained, config)
    kept = trained.nonzero().flatten().tolist()
    if not advantages[kept].any():
        reason = "every group's rewards were equal" if flat.all() else "every advantage was 0"
        return LearningSignal([], [], groups, flat_groups, reason, metrics)
    values = advantages[kept].tolist()
    return LearningSignal([rollouts[i] for i in kept], values, groups, flat_groups, "", metrics, old_logprobs)


def refuse_non_finite(rollouts: Sequence[Rollout]) -> None:
    """Raise ValueError when a verifier gave NaN or an infinity: one such reward would poison its whole group."""
    for rollout in rollouts:
        values = {"reward": rollout.reward} | {f"reward component {n}": v for n, v in rollout.reward_components.items()}
        for name, value in values.items():
            if not math.isfinite(value):
                raise ValueError(
                    f"the {name} of rollout {rollout.sample_index} of group {rollout.group_id} (prompt "
                    f"{rollout.prompt.id}) is {value}, with reason {rollout.reason!r}. A verifier must return a finite "
                    "number, 0.0 for an answer it cannot judge"
                )


def zero_variance(rollouts: Sequence[Rollout], rewards: Tensor, ids: Tensor, config: RunConfig) -> Tensor:
    """[B] bool, True in groups that teach nothing: equal rewards, for GDPO in every component."""
    import torch

    from lora_rl.algorithm import zero_variance_samples

    if config.grpo.adv_estimator.name != "gdpo":
        return zero_variance_samples(rewards, ids)
    parts = [zero_variance_samples(part, ids) for part in components_of(rollouts).values()]
    # Without components there is nothing to judge by; the estimator says so.
    return torch.stack(parts).all(dim=0) if parts else torch.zeros_like(ids, dtype=torch.bool)


def components_of(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """name -> [B] fp32; see `reward_parts`."""
    import torch

    return {name: torch.tensor(values, dtype=torch.float32) for name, values in reward_parts(rollouts).items()}


def component_weights(names: Iterable[str], config: RunConfig) -> dict[str, float]:
    """Weight of each component: that of its verifier."""
    of_verifier = {section.metric: section.weight for section in (config.reward, *config.reward.additional)}
    return {name: of_verifier.get(name.partition("/")[0], 1.0) for name in names}


def advantages_of(
    rollouts: Sequence[Rollout], rewards: Tensor, ids: Tensor, trained: Tensor, config: RunConfig
) -> Tensor:
    """[B] fp32 advantages by the configured estimator, from shaped rewards [B] fp32.

    Args:
        ids: int64 [B], group of each rollout.
        trained: bool [B], what whitening over the step counts.
    """
    import torch

    from lora_rl.algorithm import gdpo_advantages, group_advantages, reinforce_plus_plus_advantages

    grpo = config.grpo
    options = {"normalize": grpo.normalize_rewards, "leave_one_out": grpo.use_leave_one_out_baseline}
    if grpo.adv_estimator.name == "reinforce_plus_plus":
        tokens = torch.tensor([len(r.completion.token_ids) for r in rollouts]) * trained
        return reinforce_plus_plus_advantages(rewards, ids, tokens, minus_baseline=grpo.adv_estimator.minus_baseline)
    if grpo.adv_estimator.name == "gdpo":
        components = components_of(rollouts)
        return gdpo_advantages(components, ids, trained, weights=component_weights(components, config), **options)
    return group_advantages(rewards, ids, **options).advantages


def overlong_penalties(rollouts: Sequence[Rollout], config: RunConfig) -> Tensor:
    """[B] fp32, at most 0: see `lora_rl.algorithm.overlong_penalty`."""
    import torch

    from lora_rl.algorithm import overlong_penalty

    shaping = config.grpo.reward_shaping
    return overlong_penalty(
        torch.tensor([len(r.completion.token_ids) for r in rollouts]),
        max_response_length=shaping.max_response_length or config.policy.generation.max_new_tokens,
        buffer_length=shaping.overlong_buffer_length or 0,
        penalty=shaping.overlong_buffer_penalty or 0.0,
    )


def kl_of_rollouts(
    rollouts: Sequence[Rollout], config: RunConfig, policy: PolicyGroup
) -> tuple[Tensor, np.ndarray, float]:
    """KL of each rollout to the reference policy, under the trainer's own policy as it is before the update.

    Returns:
        fp32 [B] in nats, summed over each completion; float32 [B, T] logprobs of the policy; mean KL per token.
    """
    import torch

    from lora_rl.algorithm import sequence_kl

    batch = build_train_batch(rollouts, [0.0] * len(rollouts))
    logprobs = policy.logprobs(batch)
    reference = policy.logprobs(batch, reference=True)
    time = np.arange(batch.token_ids.shape[1])
    mask = (time >= batch.prompt_lengths[:, None]) & (time < batch.lengths[:, None])
    kl = sequence_kl(
        torch.from_numpy(logprobs),
        torch.from_numpy(reference),
        torch.from_numpy(mask),
        kind=config.loss_fn.reference_policy_kl_type,
        clamp=config.loss_fn.kl_input_clamp_value,
    )
    return kl, logprobs, float(kl.sum()) / int(mask.sum())
