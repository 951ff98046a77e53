"""Rules between keys of `grpo` and `loss_fn`: methods that exclude each other, and keys that would do nothing."""

from __future__ import annotations

from collections.abc import Iterator

from lora_rl.config.errors import Violation
from lora_rl.config.schema import RunConfig
from lora_rl.config.schema.grpo import LossConfig

LOSS = "loss_fn"
# Each replaces PPO's clipped ratio by something else.
POLICY_LOSS_KEYS = ("disable_ppo_ratio", "sequence_level_importance_ratios", "use_cispo", "use_sapo")


def one_policy_loss(config: RunConfig) -> Iterator[Violation]:
    """REINFORCE, GSPO, CISPO and SAPO are different policy losses."""
    chosen = [key for key in POLICY_LOSS_KEYS if getattr(config.loss_fn, key)]
    for key in chosen[1:]:
        problem = f"is another policy loss than {LOSS}.{chosen[0]}; there can be one: set one of the two to false"
        yield Violation(f"{LOSS}.{key}", problem, True)


def sequence_ratio_needs_sequence_mean(config: RunConfig) -> Iterator[Violation]:
    """GSPO's objective is a mean over sequences, and so is the correction of its ratio."""
    loss = config.loss_fn
    if not loss.sequence_level_importance_ratios:
        return
    if loss.token_level_loss:
        problem = f"{LOSS}.sequence_level_importance_ratios (GSPO) has one ratio per sequence; set this to false"
        yield Violation(f"{LOSS}.token_level_loss", problem, True)
    if loss.use_importance_sampling_correction and loss.importance_sampling_level == "token":
        problem = f"{LOSS}.sequence_level_importance_ratios (GSPO) has one ratio per sequence; set this to sequence"
        yield Violation(f"{LOSS}.importance_sampling_level", problem, "token")


def constant_length_is_token_level(config: RunConfig) -> Iterator[Violation]:
    """Dr. GRPO gives every token the same weight; a mean over sequences does not."""
    if config.loss_fn.constant_length_loss and not config.loss_fn.token_level_loss:
        problem = (
            f"a mean over sequences weighs tokens unequally; set {LOSS}.token_level_loss to true, or this to false"
        )
        yield Violation(f"{LOSS}.constant_length_loss", problem, True)


def dual_clip_has_a_ratio_to_clip(config: RunConfig) -> Iterator[Violation]:
    """Dual clip bounds the loss of PPO's and GSPO's clipped ratio."""
    loss = config.loss_fn
    if (loss.ratio_clip_c or 0) > 1 and loss.policy_loss not in ("ppo_clip", "gspo"):
        problem = f"has no effect with {loss.policy_loss}, which does not clip that way; set it to null"
        yield Violation(f"{LOSS}.ratio_clip_c", problem, loss.ratio_clip_c)


def sapo_temperatures_are_used(config: RunConfig) -> Iterator[Violation]:
    """A key that would be ignored is refused."""
    for key in ("sapo_tau_pos", "sapo_tau_neg"):
        value, default = getattr(config.loss_fn, key), LossConfig.model_fields[key].default
        if not config.loss_fn.use_sapo and value != default:
            problem = f"has no effect unless {LOSS}.use_sapo is true; leave it at {default}"
            yield Violation(f"{LOSS}.{key}", problem, value)


def reinforce_takes_one_step(config: RunConfig) -> Iterator[Violation]:
    """After the first optimizer step the policy is no longer the one that the batch was sampled from."""
    batch, total = config.policy.train_global_batch_size, config.sequences_per_step
    if config.loss_fn.disable_ppo_ratio and batch is not None and batch < total and total % batch == 0:
        problem = (
            f"without the policy ratio ({LOSS}.disable_ppo_ratio) every optimizer step after a batch's first is "
            f"off-policy with nothing to hold it; use null, which takes all {total} completions in one step"
        )
        yield Violation("policy.train_global_batch_size", problem, batch)


def kl_estimator_fits_its_place(config: RunConfig) -> Iterator[Violation]:
    """k1 works in the reward only, k2 and k3 in the loss only (arXiv:2506.09477)."""
    loss = config.loss_fn
    kind = loss.reference_policy_kl_type
    if loss.use_kl_in_reward and loss.reference_policy_kl_penalty == 0:
        problem = f"has no effect while {LOSS}.reference_policy_kl_penalty is 0; set a penalty, or this to false"
        yield Violation(f"{LOSS}.use_kl_in_reward", problem, True)
    elif loss.kl_in_loss and kind == "k1":
        problem = (
            f"its expected gradient as a loss term is 0; use k2 or k3, or put it in the reward: {LOSS}.use_kl_in_reward"
        )
        yield Violation(f"{LOSS}.reference_policy_kl_type", problem, kind)
    elif loss.kl_in_reward and kind != "k1":
        problem = (
            f"its expected gradient as part of the reward vanishes near the reference policy; use k1, "
            f"or set {LOSS}.use_kl_in_reward to false to put {kind} in the loss"
        )
        yield Violation(f"{LOSS}.reference_policy_kl_type", problem, kind)


def estimator_uses_its_keys(config: RunConfig) -> Iterator[Violation]:
    """Keys of one advantage estimator that another would ignore."""
    grpo = config.grpo
    name = grpo.adv_estimator.name
    if name != "reinforce_plus_plus":
        if not grpo.adv_estimator.minus_baseline:
            problem = f"has no effect with {name}, which always subtracts the group's baseline; leave it at true"
            yield Violation("grpo.adv_estimator.minus_baseline", problem, False)
        return
    if not grpo.normalize_rewards:
        problem = "reinforce_plus_plus always divides by the standard deviation of the step; leave it at true"
        yield Violation("grpo.normalize_rewards", problem, False)
    if grpo.use_leave_one_out_baseline:
        problem = "reinforce_plus_plus has the group's mean as baseline, or none; leave it at false"
        yield Violation("grpo.use_leave_one_out_baseline", problem, True)


def batch_baseline_keeps_constant_groups(config: RunConfig) -> Iterator[Violation]:
    """Against the mean of the step, a group of equal rewards has an advantage; a group of one is such a group."""
    grpo = config.grpo
    estimator = grpo.adv_estimator
    if estimator.name != "reinforce_plus_plus" or estimator.minus_baseline:
        return
    for key in ("drop_zero_variance_groups", "use_dynamic_sampling"):
        if getattr(grpo, key):
            problem = "with reinforce_plus_plus and no baseline, groups of equal rewards teach as much as others"
            yield Violation(f"grpo.{key}", f"{problem}; set it to false", True)


def components_are_not_shaped(config: RunConfig) -> Iterator[Violation]:
    """GDPO normalises the components of the reward; what is added to their sum belongs to none of them."""
    if config.grpo.adv_estimator.name != "gdpo":
        return
    if config.reward.name != "function" and not config.reward.additional:
        problem = "gdpo normalises each of several reward components, and reward.additional is empty; use grpo"
        yield Violation("grpo.adv_estimator.name", problem, "gdpo")
    if config.grpo.reward_shaping.enabled:
        problem = "gdpo normalises each reward component, and the penalty is part of none; set it to false"
        yield Violation("grpo.reward_shaping.enabled", problem, True)
    if config.loss_fn.kl_in_reward:
        problem = "gdpo normalises each reward component, and the KL is part of none; put the KL in the loss"
        yield Violation(f"{LOSS}.use_kl_in_reward", problem, True)


def reward_shaping_is_complete(config: RunConfig) -> Iterator[Violation]:
    """The ramp has a width, a height, and lies within the lengths that completions can have."""
    prefix, shaping = "grpo.reward_shaping", config.grpo.reward_shaping
    if not shaping.enabled:
        return
    buffer, longest = shaping.overlong_buffer_length, config.policy.generation.max_new_tokens
    limit = shaping.max_response_length or longest
    if shaping.overlong_buffer_penalty is None:
        yield Violation(f"{prefix}.overlong_buffer_penalty", "reward shaping needs it; use 1.0, say", None)
    if buffer is None:
        problem = f"reward shaping needs it; a quarter of the longest response is usual: {max(1, limit // 4)}"
        yield Violation(f"{prefix}.overlong_buffer_length", problem, None)
    elif buffer > limit:
        problem = f"must be at most {limit}, the length at which the penalty is full"
        yield Violation(f"{prefix}.overlong_buffer_length", problem, buffer)
    elif limit - buffer >= longest:
        problem = (
            f"the penalty would begin after {limit - buffer} tokens, which no completion exceeds "
            f"(policy.generation.max_new_tokens = {longest}); use at most {longest}"
        )
        yield Violation(f"{prefix}.max_response_length", problem, shaping.max_response_length)


def filtering_leaves_completions(config: RunConfig) -> Iterator[Violation]:
    """With `ignore_eos` every completion runs into the length limit."""
    if config.grpo.overlong_filtering and config.policy.generation.ignore_eos:
        problem = "with policy.generation.ignore_eos every completion is truncated and none is left; set it to false"
        yield Violation("grpo.overlong_filtering", problem, True)


ALGORITHM_RULES = (
    one_policy_loss,
    sequence_ratio_needs_sequence_mean,
    constant_length_is_token_level,
    dual_clip_has_a_ratio_to_clip,
    sapo_temperatures_are_used,
    reinforce_takes_one_step,
    kl_estimator_fits_its_place,
    estimator_uses_its_keys,
    batch_baseline_keeps_constant_groups,
    components_are_not_shaped,
    reward_shaping_is_complete,
    filtering_leaves_completions,
)
