"""Group-relative advantages (GRPO, RLOO) from explicit group ids."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Rewards of one group closer than this, relative to the largest of them, are the same number up to fp32 rounding.
EQUAL_REWARDS_RTOL = 1e-6


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of a batch and what they were computed from. All tensors are on the rewards' device.

    advantages: [B] fp32.
    baselines: [B] fp32, what was subtracted from each reward.
    stds: [B] fp32, Bessel-corrected standard deviation of the full group, whether or not it was divided by.
    zero_variance: [B] bool, True for each member of a group whose rewards are all equal; its advantages are
        exactly 0 and it teaches nothing.
    num_groups: number of distinct group ids.
    num_zero_variance_groups: how many of these have zero variance.
    """

    advantages: Tensor
    baselines: Tensor
    stds: Tensor
    zero_variance: Tensor
    num_groups: int
    num_zero_variance_groups: int


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    normalize: bool,
    leave_one_out: bool,
    epsilon: float = 1e-6,
) -> GroupAdvantages:
    """Advantage of each rollout against the other rollouts of its group.

        A_i = (r_i - b_i) / (std + epsilon)          the division only if `normalize`

    Baseline b_i: the mean of the group (GRPO, DeepSeekMath, arXiv:2402.03300), or with `leave_one_out` the mean of
    the *other* members (RLOO, arXiv:2402.14740), which does not depend on r_i and so leaves the policy gradient
    unbiased. `normalize=False` is Dr. GRPO (arXiv:2503.20783).

    The std has Bessel's correction (n - 1), as in NeMo-RL, verl and TRL: the GRPO paper writes "std" without
    saying which, and a group is a sample from the policy. It is that of the full group also with `leave_one_out`:
    the std of the others is 0 for the only success of [1, 0, 0, 0], exactly the member that matters most, and
    differs between members, which breaks sum(A) = 0.

    The statistics are taken in fp64 with the mean subtracted first: E[x^2] - E[x]^2 leaves a residue in fp32 that
    the division blows up.

    Args:
        rewards: [B] floating point, finite. What a NaN should count as is the caller's decision.
        group_ids: [B] int64; groups may have any size from 2 on and be interleaved in any order.
        normalize: divide by the group's std.
        leave_one_out: leave each member out of its own baseline.
        epsilon: floor added to the std, in units of reward.

    Raises:
        ValueError: wrong shape or dtype, a non-finite reward (names its index), or a group of one, for which a
            group baseline does not exist.
    """
    inverse, counts, ids = check_rewards(rewards, group_ids)
    lonely = ids[counts == 1]
    if lonely.numel():
        raise ValueError(
            f"group_ids: groups {lonely.tolist()[:10]} have one member ({lonely.numel()} groups in all); a group "
            "baseline needs at least 2 rollouts per group (grpo.num_generations_per_prompt >= 2)"
        )

    values = rewards.double()
    size = counts.double()
    mean = _group_sum(values, inverse, len(ids)) / size
    centred = values - mean[inverse]
    std = (_group_sum(centred.square(), inverse, len(ids)) / (size - 1)).sqrt()

    # r_i - mean of the others = (r_i - mean of all) * n / (n - 1): no second pass, no cancellation.
    advantages = centred * (size / (size - 1))[inverse] if leave_one_out else centred
    baselines = values - advantages
    if normalize:
        advantages = advantages / (std[inverse] + epsilon)

    group_is_flat = _flat_groups(values, inverse, len(ids))
    zero_variance = group_is_flat[inverse]
    # Exactly 0, not the rounding residue of the mean.
    advantages = torch.where(zero_variance, 0.0, advantages)
    return GroupAdvantages(
        advantages=advantages.float(),
        baselines=baselines.float(),
        stds=std[inverse].float(),
        zero_variance=zero_variance,
        num_groups=len(ids),
        num_zero_variance_groups=int(group_is_flat.sum()),
    )


def zero_variance_samples(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """[B] bool, True for members of groups whose rewards are all equal (up to fp32 rounding).

    Dynamic sampling (DAPO, arXiv:2503.14476) keeps the groups that are False here. Pass the reward *before*
    shaping: a length penalty gives an all-wrong group a spread it should not have. A group of one counts as flat.

    Args:
        rewards: [B] floating point, finite.
        group_ids: [B] int64.

    Raises:
        ValueError: as for `group_advantages`, except that groups of one are fine.
    """
    inverse, _, ids = check_rewards(rewards, group_ids)
    return _flat_groups(rewards.double(), inverse, len(ids))[inverse]


def check_rewards(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Validate, then (group position of each sample [B], group sizes [G], group ids [G])."""
    if rewards.ndim != 1 or not rewards.is_floating_point():
        raise ValueError(f"rewards must be floating point of shape [B], got {rewards.dtype} {list(rewards.shape)}")
    if group_ids.shape != rewards.shape or group_ids.dtype != torch.int64:
        raise ValueError(
            f"group_ids must be int64 of the rewards' shape {list(rewards.shape)}, "
            f"got {group_ids.dtype} {list(group_ids.shape)}"
        )
    bad = torch.nonzero(~torch.isfinite(rewards)).flatten().tolist()
    if bad:
        raise ValueError(
            f"rewards[{bad[0]}] = {rewards[bad[0]].item()} (group {group_ids[bad[0]].item()}) is not finite, nor "
            f"are {len(bad) - 1} others; one such reward would poison its whole group"
        )
    ids, inverse, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return inverse, counts, ids


def _group_sum(values: Tensor, inverse: Tensor, num_groups: int) -> Tensor:
    return values.new_zeros(num_groups).index_add_(0, inverse, values)


def _flat_groups(values: Tensor, inverse: Tensor, num_groups: int) -> Tensor:
    """[G] bool by the spread max - min, which is exact where a variance has rounding residue."""

    def extreme(x: Tensor, how: str) -> Tensor:
        return x.new_zeros(num_groups).scatter_reduce(0, inverse, x, how, include_self=False)

    spread = extreme(values, "amax") - extreme(values, "amin")
    return spread <= EQUAL_REWARDS_RTOL * extreme(values.abs(), "amax")
