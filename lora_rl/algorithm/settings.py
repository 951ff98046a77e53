"""What the loss can be set to, and which combinations make no sense."""

import math
from dataclasses import dataclass
from typing import Literal

from lora_rl.algorithm.importance import ImportanceLevel, ImportanceType, truncation_problems
from lora_rl.algorithm.kl import KL_TYPES, KLType

PolicyLossKind = Literal["ppo_clip", "gspo", "cispo", "sapo", "reinforce"]
POLICY_LOSSES: tuple[str, ...] = ("ppo_clip", "gspo", "cispo", "sapo", "reinforce")


@dataclass(frozen=True)
class LossSettings:
    """The `loss_fn` section of the configuration.

    policy_loss: the policy term, see `lora_rl.algorithm.policy_terms`.
    reference_policy_kl_penalty: factor beta of the KL term; 0 switches it off and no reference is needed.
    reference_policy_kl_type: k2 or k3, see `lora_rl.algorithm.kl`; k1 only for the metric, as its gradient is noise.
    kl_input_clamp_value: bound on |log pi_ref - log pi|.
    ratio_clip_min, ratio_clip_max: the ratio is clipped to [1 - min, 1 + max] (DAPO's asymmetric bounds) by
        ppo_clip, gspo and cispo; the others do not look at them.
    ratio_clip_c: dual clip (arXiv:1912.09729): the loss of a token with A < 0 is at most -A c. None: off.
    sapo_tau_pos, sapo_tau_neg: temperatures of sapo's gate for A > 0 and A <= 0; larger is closer to on-policy only.
    use_importance_sampling_correction: weight each token by pi_old / pi_b, see `lora_rl.algorithm.importance`.
    importance_sampling_level: token or sequence.
    importance_sampling_type: tis, icepop, seq_mask, or None for untruncated weights.
    truncated_importance_sampling_ratio: upper bound, for every type.
    truncated_importance_sampling_ratio_min: lower bound, for icepop and seq_mask.
    token_level_loss: True: mean over all tokens of the update. False: mean over sequences of each sequence's
        token mean, as in the GRPO paper.
    constant_length: Dr. GRPO (arXiv:2503.20783): the sum over tokens is divided by sequences x this length instead,
        so that neither long nor short responses weigh less per token. None: off.

    Raises:
        ValueError: lists every invalid value and unusable combination.
    """

    policy_loss: PolicyLossKind = "ppo_clip"
    reference_policy_kl_penalty: float = 0.01
    reference_policy_kl_type: KLType = "k3"
    kl_input_clamp_value: float = 20.0
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    use_importance_sampling_correction: bool = False
    importance_sampling_level: ImportanceLevel = "token"
    importance_sampling_type: ImportanceType | None = None
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    token_level_loss: bool = True
    constant_length: int | None = None

    @property
    def divides_by_tokens(self) -> bool:
        """Whether the loss is divided by the global number of tokens; else by that of sequences."""
        return self.token_level_loss and self.constant_length is None

    def __post_init__(self):
        problems = [*self._value_problems(), *self._combination_problems(), *self._correction_problems()]
        if problems:
            raise ValueError("loss_fn: " + "; ".join(problems))

    def _value_problems(self) -> list[str]:
        problems = []
        if self.policy_loss not in POLICY_LOSSES:
            problems.append(f"policy_loss = {self.policy_loss!r}: valid are {', '.join(POLICY_LOSSES)}")
        if not (self.reference_policy_kl_penalty >= 0 and math.isfinite(self.reference_policy_kl_penalty)):
            problems.append(f"reference_policy_kl_penalty = {self.reference_policy_kl_penalty}: must be >= 0")
        if self.reference_policy_kl_type not in KL_TYPES:
            problems.append(
                f"reference_policy_kl_type = {self.reference_policy_kl_type!r}: valid are {', '.join(KL_TYPES)}"
            )
        if not 0 < self.kl_input_clamp_value <= 80:
            problems.append(
                f"kl_input_clamp_value = {self.kl_input_clamp_value}: must be in (0, 80], exp overflows fp32 at 88"
            )
        if not 0 <= self.ratio_clip_min <= 1:
            problems.append(f"ratio_clip_min = {self.ratio_clip_min}: must be in [0, 1]")
        if not self.ratio_clip_max >= 0:
            problems.append(f"ratio_clip_max = {self.ratio_clip_max}: must be >= 0")
        if self.ratio_clip_c is not None and not self.ratio_clip_c > 1:
            problems.append(f"ratio_clip_c = {self.ratio_clip_c}: must be above 1 (3 is usual), or null for off")
        for name in ("sapo_tau_pos", "sapo_tau_neg"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                problems.append(f"{name} = {value}: must be a positive number")
        if self.constant_length is not None and not self.constant_length >= 1:
            problems.append(f"constant_length = {self.constant_length}: must be at least 1 token, or None")
        return problems

    def _combination_problems(self) -> list[str]:
        problems = []
        if self.reference_policy_kl_penalty > 0 and self.reference_policy_kl_type == "k1":
            problems.append(
                "reference_policy_kl_type = 'k1': its expected gradient as a loss term is 0, so it would only add "
                "noise; use k2 or k3 in the loss, or k1 in the reward"
            )
        if self.ratio_clip_c is not None and self.policy_loss not in ("ppo_clip", "gspo"):
            problems.append(
                f"ratio_clip_c = {self.ratio_clip_c} has no effect with {self.policy_loss}, whose ratio is bounded "
                "otherwise or not there; set it to null"
            )
        if self.policy_loss == "gspo" and self.token_level_loss:
            problems.append(
                "token_level_loss = True: gspo has one ratio per sequence and is a mean over sequences; set it to False"
            )
        if self.constant_length is not None and not self.token_level_loss:
            problems.append(
                f"constant_length = {self.constant_length} gives every token the same weight, which the mean over "
                "sequences of token_level_loss = False does not; choose one of the two"
            )
        return problems

    def _correction_problems(self) -> list[str]:
        if self.use_importance_sampling_correction:
            problems = truncation_problems(
                self.importance_sampling_level,
                self.importance_sampling_type,
                self.truncated_importance_sampling_ratio,
                self.truncated_importance_sampling_ratio_min,
            )
            if self.policy_loss == "gspo" and self.importance_sampling_level == "token":
                problems.append(
                    "importance_sampling_level = 'token': gspo's ratio is one per sequence, and so must be its "
                    "correction; set it to 'sequence'"
                )
            return problems
        names = (
            "importance_sampling_type",
            "truncated_importance_sampling_ratio",
            "truncated_importance_sampling_ratio_min",
        )
        return [
            f"{name} = {getattr(self, name)!r} has no effect: "
            "use_importance_sampling_correction is false; set that to true or this to null"
            for name in names
            if getattr(self, name) is not None
        ]
