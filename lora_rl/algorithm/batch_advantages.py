"""Advantages standardised over the whole batch: REINFORCE++ and GDPO."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lora_rl.algorithm.advantages import EQUAL_REWARDS_RTOL, check_rewards, group_advantages


def reinforce_plus_plus_advantages(
    rewards: Tensor, group_ids: Tensor, tokens: Tensor, *, minus_baseline: bool, epsilon: float = 1e-6
) -> Tensor:
    """Rewards whitened over the tokens of the batch (REINFORCE++, arXiv:2501.03262).

        a_i = r_i, or r_i - mean of its group if `minus_baseline`      ("REINFORCE++-baseline" in the paper)
        A_i = (a_i - mean) / (std + epsilon)

    mean and std run over all trained tokens of the batch, so a sequence counts once per token, as in OpenRLHF and
    NeMo-RL; std has no Bessel correction. Without `minus_baseline` groups play no part: a prompt that is always
    answered right is still reinforced, more so than one that rarely is.

    Args:
        rewards: [B] floating point, finite.
        group_ids: [B] int64; only looked at with `minus_baseline`.
        tokens: [B] number of tokens each sequence is trained on; 0 leaves it out of mean and std, but not out of
            its group's mean.
        minus_baseline: subtract the group's mean first.
        epsilon: floor added to the std, in units of reward.

    Returns:
        [B] fp32; exactly 0 where tokens is 0, and everywhere when all a_i are equal.

    Raises:
        ValueError: as for `group_advantages` (a group of one only with `minus_baseline`), or `tokens` is negative or
            of another shape.
    """
    if minus_baseline:
        values = group_advantages(rewards, group_ids, normalize=False, leave_one_out=False).advantages.double()
    else:
        check_rewards(rewards, group_ids)
        values = rewards.double()
    return _standardise(values, tokens, epsilon, scale=rewards.double().abs().amax() if len(rewards) else 0.0)


def gdpo_advantages(
    components: Mapping[str, Tensor],
    group_ids: Tensor,
    trained: Tensor,
    *,
    normalize: bool,
    leave_one_out: bool,
    weights: Mapping[str, float] | None = None,
    epsilon: float = 1e-6,
) -> Tensor:
    """Each component of the reward normalised within its group, then their sum over the batch (GDPO, arXiv:2601.05242).

        a_i = sum over components of weight * (r_i - baseline) / (std of the group + epsilon)
        A_i = (a_i - mean) / (std + epsilon)        over the trained sequences of the batch

    Normalising the sum instead, as GRPO does, gives the same advantage to rollouts that earned different components.

    Args:
        components: at least two of name -> [B] floating point, finite.
        group_ids: [B] int64.
        trained: [B] bool; False leaves a sequence out of the batch's mean and std, but not out of its group.
        normalize, leave_one_out: of each component, see `group_advantages`.
        weights: name -> weight of the component, 1 where it is not named.
        epsilon: floor added to each std.

    Returns:
        [B] fp32; exactly 0 where `trained` is False, and everywhere when all a_i are equal.

    Raises:
        ValueError: fewer than two components, or as for `group_advantages` (names the component).
    """
    if len(components) < 2:
        raise ValueError(
            f"GDPO needs at least 2 reward components, got {len(components)} ({', '.join(components) or 'none'}); "
            "with one it is GRPO: set grpo.adv_estimator.name to grpo"
        )
    total = torch.zeros(group_ids.shape, dtype=torch.float64, device=group_ids.device)
    for name, rewards in components.items():
        try:
            part = group_advantages(
                rewards, group_ids, normalize=normalize, leave_one_out=leave_one_out, epsilon=epsilon
            )
        except ValueError as error:
            raise ValueError(f"reward component {name!r}: {error}") from error
        total += (weights or {}).get(name, 1.0) * part.advantages.double()
    return _standardise(total, trained, epsilon, scale=total.abs().amax() if len(total) else 0.0)


def _standardise(values: Tensor, weights: Tensor, epsilon: float, *, scale: Tensor | float) -> Tensor:
    """(values - weighted mean) / (weighted std + epsilon) in fp32; 0 where the weight is 0.

    Args:
        scale: magnitude that differences are compared with; below its rounding error all values are the same.
    """
    if weights.shape != values.shape or bool((weights < 0).any()):
        raise ValueError(f"weights must be >= 0 and of shape {list(values.shape)}, got {weights.tolist()[:10]}")
    used = weights > 0
    if not bool(used.any()):
        return torch.zeros_like(values, dtype=torch.float32)
    chosen = values[used]
    if bool(chosen.amax() - chosen.amin() <= EQUAL_REWARDS_RTOL * scale):
        # Exactly 0, not the rounding residue of the mean blown up by the division.
        return torch.zeros_like(values, dtype=torch.float32)
    share = weights.double() / weights.double().sum()
    centred = values - (share * values).sum()
    std = (share * centred.square()).sum().sqrt()
    return torch.where(used, centred / (std + epsilon), 0.0).float()
