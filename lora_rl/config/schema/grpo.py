"""Sections `grpo` and `loss_fn`: the algorithm."""

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from lora_rl.config.schema.base import Section
from lora_rl.config.schema.next import NextConfig


class AsyncGRPOConfig(Section):
    """`grpo.async_grpo`: generate the next batch while training on this one."""

    enabled: bool = Field(False, description="Generate while training; false: strictly one after the other.")
    max_trajectory_age_steps: NonNegativeInt = Field(
        1, description="Oldest weights, in steps behind the trainer, whose rollouts are still trained on."
    )
    in_flight_weight_updates: bool = Field(
        False, description="Push new weights into running generations instead of waiting for them to end."
    )
    recompute_kv_cache_after_weight_updates: bool = Field(
        False, description="Then compute keys and values of running generations anew, with the new weights."
    )


class AdvEstimatorConfig(Section):
    """`grpo.adv_estimator`: how rewards become advantages."""

    name: Literal["grpo", "reinforce_plus_plus", "gdpo"] = Field(
        "grpo",
        description="grpo: against the completion's group (also RLOO and Dr. GRPO). reinforce_plus_plus: whitened over "
        "the tokens of the step. gdpo: each reward component against the group, then their sum over the step.",
    )
    minus_baseline: bool = Field(
        True, description="reinforce_plus_plus: subtract the group's mean reward before whitening."
    )


class RewardShapingConfig(Section):
    """`grpo.reward_shaping`: DAPO's soft penalty on completions that come near the length limit."""

    enabled: bool = Field(False, description="Subtract the penalty from the reward before advantages are taken.")
    overlong_buffer_length: PositiveInt | None = Field(
        None, description="Width, in tokens, of the ramp on which the penalty grows from 0 to full."
    )
    overlong_buffer_penalty: NonNegativeFloat | None = Field(None, description="The full penalty, in units of reward.")
    max_response_length: PositiveInt | None = Field(
        None, description="Tokens at which the penalty is full; null: policy.generation.max_new_tokens."
    )


class GRPOConfig(Section):
    """`grpo`: batches, advantages, validation, length of the run."""

    num_prompts_per_step: PositiveInt = Field(32, description="Prompts drawn per step.")
    num_generations_per_prompt: PositiveInt = Field(8, description="Completions sampled per prompt: the group size.")
    max_num_steps: PositiveInt = Field(200, description="Steps after which the run ends.")
    max_num_epochs: PositiveInt | None = Field(
        None, description="Passes over the prompts after which the run ends, if earlier; null: no such limit."
    )
    adv_estimator: AdvEstimatorConfig = Field(default_factory=AdvEstimatorConfig)
    normalize_rewards: bool = Field(True, description="Divide advantages by the group's standard deviation.")
    use_leave_one_out_baseline: bool = Field(
        False, description="Baseline of a completion = mean reward of the others of its group (RLOO)."
    )
    drop_zero_variance_groups: bool = Field(
        True,
        description="Do not train on groups whose rewards, before shaping and KL, are all equal: they teach nothing "
        "about the task; the loss normaliser then counts the remaining tokens only.",
    )
    use_dynamic_sampling: bool = Field(
        False, description="Replace groups whose rewards are all equal by others, until there are enough (DAPO)."
    )
    dynamic_sampling_max_gen_batches: PositiveInt = Field(
        10, description="Batches of prompts that may be generated for one step in search of such groups."
    )
    overlong_filtering: bool = Field(
        False,
        description="Do not train on truncated completions; their rewards still count in their group's statistics.",
    )
    reward_shaping: RewardShapingConfig = Field(default_factory=RewardShapingConfig)
    val_period: NonNegativeInt = Field(20, description="Steps between validations; 0: none while training.")
    val_at_start: bool = Field(True, description="Validate once before the first step.")
    max_val_samples: PositiveInt = Field(256, description="Held-out prompts used per validation.")
    val_batch_size: PositiveInt = Field(256, description="Held-out prompts generated at once.")
    val_num_generations: PositiveInt = Field(1, description="Completions sampled per validation prompt.")
    val_temperature: NonNegativeFloat = Field(1.0, description="Sampling temperature in validation; 0: greedy.")
    early_stop_patience: PositiveInt | None = Field(
        None, description="Validations without a new best val/accuracy after which the run ends; null: never."
    )
    seed: NonNegativeInt = Field(42, description="Seed of sampling, adapter initialisation and data order.")
    async_grpo: AsyncGRPOConfig = Field(default_factory=AsyncGRPOConfig)
    next: NextConfig = Field(default_factory=NextConfig)


class LossConfig(Section):
    """`loss_fn`: policy loss, KL penalty, correction for the engine's own probabilities."""

    disable_ppo_ratio: bool = Field(
        False, description="REINFORCE: no policy ratio and no clipping; needs one optimizer step per batch."
    )
    sequence_level_importance_ratios: bool = Field(
        False, description="GSPO: one policy ratio per sequence, the geometric mean of its tokens'."
    )
    use_cispo: bool = Field(False, description="CISPO: clip the weight of a token instead of stopping its gradient.")
    use_sapo: bool = Field(False, description="SAPO: a soft gate on the policy ratio instead of clipping.")
    sapo_tau_pos: PositiveFloat = Field(1.0, description="SAPO: temperature of the gate for positive advantages.")
    sapo_tau_neg: PositiveFloat = Field(
        1.05, description="SAPO: temperature for negative advantages; larger fades out earlier."
    )
    reference_policy_kl_penalty: NonNegativeFloat = Field(
        0.0, description="Coefficient of the KL to the reference policy; 0: no reference forward pass."
    )
    reference_policy: Literal["start", "base"] = Field(
        "start",
        description="Policy that the KL penalty holds on to: the one the run starts from, or the base model.",
    )
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = Field(
        "k3", description="KL estimator (Schulman 2020): k2 or k3 in the loss, k1 in the reward."
    )
    use_kl_in_reward: bool = Field(
        False,
        description="Subtract penalty x KL, summed over the completion, from the reward; false: add it to the loss.",
    )
    kl_input_clamp_value: Annotated[float, Gt(0), Le(80)] = Field(
        20.0, description="Bound on |log reference - log policy| before it is exponentiated, in nats."
    )
    ratio_clip_min: Annotated[float, Ge(0), Le(1)] = Field(
        0.2, description="The policy ratio is clipped below 1 - this; 1: not at all."
    )
    ratio_clip_max: NonNegativeFloat = Field(0.2, description="The policy ratio is clipped above 1 + this.")
    ratio_clip_c: float | None = Field(
        None, description="Dual clip: bound, > 1, on the loss of negative advantages; null: off."
    )
    use_importance_sampling_correction: bool = Field(
        False, description="Weight tokens by trainer probability / engine probability."
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        "token", description="One importance weight per token, or one per sequence."
    )
    importance_sampling_type: Literal["tis", "icepop", "seq_mask"] | None = Field(
        "tis", description="tis clamps weights, icepop drops tokens, seq_mask drops sequences; null: no bounds."
    )
    truncated_importance_sampling_ratio: PositiveFloat | None = Field(
        2.0, description="Upper bound of the importance weight."
    )
    truncated_importance_sampling_ratio_min: PositiveFloat | None = Field(
        0.5, description="Lower bound of the importance weight; used by icepop and seq_mask."
    )
    token_level_loss: bool = Field(True, description="Mean over tokens (DAPO); false: mean over sequences.")
    constant_length_loss: bool = Field(
        False,
        description="Dr. GRPO: sum over tokens / (sequences x policy.generation.max_new_tokens), instead of the mean.",
    )

    @property
    def policy_loss(self) -> Literal["ppo_clip", "gspo", "cispo", "sapo", "reinforce"]:
        """The policy term; the rules refuse more than one of its switches."""
        chosen = {
            "reinforce": self.disable_ppo_ratio,
            "gspo": self.sequence_level_importance_ratios,
            "cispo": self.use_cispo,
            "sapo": self.use_sapo,
        }
        return next((name for name, on in chosen.items() if on), "ppo_clip")

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return self.reference_policy_kl_penalty > 0 and not self.use_kl_in_reward

    @property
    def kl_in_reward(self) -> bool:
        """Whether the reward has a KL term."""
        return self.reference_policy_kl_penalty > 0 and self.use_kl_in_reward

    @property
    def importance_sampling_bounds(self) -> tuple[float | None, float | None]:
        """(lower, upper) bound of the importance weight; None where `importance_sampling_type` uses none."""
        kind = self.importance_sampling_type
        lower = self.truncated_importance_sampling_ratio_min if kind in ("icepop", "seq_mask") else None
        upper = self.truncated_importance_sampling_ratio if kind is not None else None
        return lower, upper
