"""The clipped policy-gradient loss of one microbatch, normalised by global counts.

Every microbatch divides by the same counts of the whole update (`Normaliser`), so losses and gradients of
microbatches and data-parallel ranks simply *add* to those of the undivided batch. Whoever reduces gradients across
ranks must therefore sum, not average.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_rl.algorithm.importance import (
    ImportanceLevel,
    ImportanceType,
    importance_weights,
    truncation_problems,
)
from lora_rl.algorithm.kl import KL_TYPES, KLType, kl_per_token
from lora_rl.algorithm.masking import blank_outside, bounded_exp, masked_sum
from lora_rl.algorithm.metrics import MetricSum, Normaliser, metric, mismatch_metrics, policy_metrics


@dataclass(frozen=True)
class LossSettings:
    """The `loss_fn` section of the configuration.

    reference_policy_kl_penalty: factor beta of the KL term; 0 switches it off and no reference is needed.
    reference_policy_kl_type: k1, k2 or k3, see `lora_rl.algorithm.kl` (k1 has no effect in expectation).
    kl_input_clamp_value: bound on |log pi_ref - log pi|.
    ratio_clip_min, ratio_clip_max: the ratio is clipped to [1 - min, 1 + max] (DAPO's asymmetric bounds).
    ratio_clip_c: dual clip (arXiv:1912.09729): the loss of a token with A < 0 is at most -A c. None: off.
    use_importance_sampling_correction: weight each token by pi_old / pi_b, see `lora_rl.algorithm.importance`.
    importance_sampling_level: token or sequence.
    importance_sampling_type: tis, icepop, seq_mask, or None for untruncated weights.
    truncated_importance_sampling_ratio: upper bound, for every type.
    truncated_importance_sampling_ratio_min: lower bound, for icepop and seq_mask.
    token_level_loss: True: mean over all tokens of the update. False: mean over sequences of each sequence's
        token mean, as in the GRPO paper.

    Raises:
        ValueError: lists every invalid value and unusable combination.
    """

    reference_policy_kl_penalty: float = 0.01
    reference_policy_kl_type: KLType = "k3"
    kl_input_clamp_value: float = 20.0
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    use_importance_sampling_correction: bool = False
    importance_sampling_level: ImportanceLevel = "token"
    importance_sampling_type: ImportanceType | None = None
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    token_level_loss: bool = True

    def __post_init__(self):
        problems = []
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
        if self.use_importance_sampling_correction:
            problems += truncation_problems(
                self.importance_sampling_level,
                self.importance_sampling_type,
                self.truncated_importance_sampling_ratio,
                self.truncated_importance_sampling_ratio_min,
            )
        else:
            for name in (
                "importance_sampling_type",
                "truncated_importance_sampling_ratio",
                "truncated_importance_sampling_ratio_min",
            ):
                if getattr(self, name) is not None:
                    problems.append(
                        f"{name} = {getattr(self, name)!r} has no effect: "
                        "use_importance_sampling_correction is false; set that to true or this to null"
                    )
        if problems:
            raise ValueError("loss_fn: " + "; ".join(problems))


@dataclass(frozen=True)
class LossOutput:
    """loss: scalar to call backward on. metrics: undivided sums, see `lora_rl.algorithm.metrics.METRICS`."""

    loss: Tensor
    metrics: dict[str, MetricSum]


def policy_loss(
    settings: LossSettings,
    *,
    logprobs: Tensor,
    advantages: Tensor,
    token_mask: Tensor,
    sample_mask: Tensor,
    normaliser: Normaliser,
    old_logprobs: Tensor | None = None,
    behaviour_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> LossOutput:
    """PPO-clip loss with KL penalty and importance-sampling correction, for one microbatch.

    Per token, with rho = pi / pi_old, A the sequence's advantage and w the constant importance weight:

        L = max(-A rho, -A clip(rho, 1 - ratio_clip_min, 1 + ratio_clip_max))      PPO, arXiv:1707.06347
        L = min(L, -A ratio_clip_c)  where A < 0                                   dual clip, arXiv:1912.09729
        loss = reduce(w L) + reference_policy_kl_penalty * reduce(KL)

    with reduce = sum over tokens / global tokens, or sum over sequences of the sequence's token mean / global
    sequences. The KL term is not importance weighted.

    All [B, T] tensors are aligned: position t of each belongs to the same sampled token. Values at masked
    positions are never read; they may be NaN. A NaN at an unmasked position makes the loss NaN. A microbatch
    without a single trained token (also B = 0) has loss 0, connected to the graph with zero gradient.

    Args:
        settings: the loss configuration.
        logprobs: [B, T] log pi of the sampled tokens under the current weights, with graph.
        advantages: [B].
        token_mask: [B, T] bool, True for response tokens; never derived from token ids (eos may equal pad).
        sample_mask: [B] bool, False drops the whole sequence.
        normaliser: global counts of this update.
        old_logprobs: [B, T] log pi_old, fixed while the batch is reused. None only when each batch gets one
            update: then pi_old is pi itself, detached, and no separate forward pass is needed. With a second
            update None would hold the ratio at 1 and clipping would never act.
        behaviour_logprobs: [B, T] log pi_b, after temperature. Required by the importance-sampling correction;
            otherwise used for metrics.
        reference_logprobs: [B, T] log pi_ref. Required when the KL penalty is not 0; otherwise used for the
            `kl` metric.
        entropy: [B, T] entropy of pi at each position, in nats; a metric only.

    Raises:
        ValueError: shapes or dtypes disagree, a required input is missing, or a normaliser count is 0 although
            this microbatch has tokens.
    """
    _check_inputs(
        settings, logprobs, advantages, token_mask, sample_mask,
        old_logprobs=old_logprobs, behaviour_logprobs=behaviour_logprobs,
        reference_logprobs=reference_logprobs, entropy=entropy,
    )  # fmt: skip
    mask = token_mask & sample_mask[:, None]
    current = blank_outside(logprobs, mask)
    old = blank_outside(logprobs if old_logprobs is None else old_logprobs, mask).detach()
    behaviour = None if behaviour_logprobs is None else blank_outside(behaviour_logprobs, mask)
    advantage = blank_outside(advantages, sample_mask).detach()[:, None]

    log_ratio = current - old
    ratio = bounded_exp(log_ratio)
    token_loss, metrics = _clipped_loss(settings, ratio, advantage, mask)
    if settings.use_importance_sampling_correction:
        importance = importance_weights(
            old,
            behaviour,
            mask,
            level=settings.importance_sampling_level,
            kind=settings.importance_sampling_type,
            upper=settings.truncated_importance_sampling_ratio,
            lower=settings.truncated_importance_sampling_ratio_min,
        )
        token_loss = importance.weights * token_loss
        metrics["is_oob_ratio"] = metric("is_oob_ratio", masked_sum(importance.out_of_bounds.float(), mask))

    token_level = settings.token_level_loss
    total = policy_total = _reduce(token_loss, mask, token_level)
    if reference_logprobs is not None:
        reference = blank_outside(reference_logprobs, mask).detach()
        kl = kl_per_token(current, reference, settings.reference_policy_kl_type, settings.kl_input_clamp_value)
        metrics["kl"] = metric("kl", masked_sum(kl, mask))
        if settings.reference_policy_kl_penalty != 0:
            total = total + settings.reference_policy_kl_penalty * _reduce(kl, mask, token_level)

    metrics |= policy_metrics(log_ratio, ratio, current, old if behaviour is None else behaviour, mask)
    metrics["loss"] = metric("loss", total, token_level_loss=token_level)
    metrics["policy_loss"] = metric("policy_loss", policy_total, token_level_loss=token_level)
    metrics["num_unmasked_tokens"] = metric("num_unmasked_tokens", mask.sum())
    metrics["num_valid_samples"] = metric("num_valid_samples", sample_mask.sum())
    if behaviour is not None:
        metrics |= mismatch_metrics(old, behaviour, mask)
    if entropy is not None:
        metrics["entropy"] = metric("entropy", masked_sum(blank_outside(entropy, mask), mask))
    return LossOutput(loss=total / _denominator(normaliser, mask, token_level), metrics=metrics)


def _clipped_loss(
    settings: LossSettings, ratio: Tensor, advantage: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, MetricSum]]:
    """Per-token loss [B, T] of ratio [B, T] and advantage [B, 1], and the shares of clipped tokens."""
    low, high = 1 - settings.ratio_clip_min, 1 + settings.ratio_clip_max
    token_loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))
    clipped = {
        "clip_fraction_low": (advantage < 0) & (ratio < low),
        "clip_fraction_high": (advantage > 0) & (ratio > high),
    }
    if settings.ratio_clip_c is not None:
        bound = -advantage * settings.ratio_clip_c
        token_loss = torch.where(advantage < 0, torch.minimum(token_loss, bound), token_loss)
        clipped["clip_fraction_dual"] = (advantage < 0) & (ratio > settings.ratio_clip_c)
    return token_loss, {name: metric(name, masked_sum(which.float(), mask)) for name, which in clipped.items()}


def _reduce(values: Tensor, mask: Tensor, token_level: bool) -> Tensor:
    """Undivided sum over tokens, or over sequences of their token means."""
    if token_level:
        return masked_sum(values, mask)
    sums = torch.where(mask, values, 0.0).sum(dim=1)
    return (sums / mask.sum(dim=1).clamp(min=1)).sum()


def _denominator(normaliser: Normaliser, mask: Tensor, token_level: bool) -> float:
    count = normaliser.tokens if token_level else normaliser.sequences
    if count > 0:
        return count
    if mask.any():
        name = "tokens" if token_level else "sequences"
        raise ValueError(
            f"normaliser.{name} = {count} but this microbatch has {int(mask.sum())} trained tokens; "
            "the normaliser must count the whole global batch"
        )
    return 1.0


def _check_inputs(
    settings: LossSettings,
    logprobs: Tensor,
    advantages: Tensor,
    token_mask: Tensor,
    sample_mask: Tensor,
    **optional: Tensor | None,
) -> None:
    if logprobs.ndim != 2:
        raise ValueError(f"logprobs must have shape [B, T], got {list(logprobs.shape)}")
    per_token = {"token_mask": token_mask} | {name: x for name, x in optional.items() if x is not None}
    per_sequence = {"advantages": advantages, "sample_mask": sample_mask}
    for tensors, shape in ((per_token, logprobs.shape), (per_sequence, logprobs.shape[:1])):
        for name, tensor in tensors.items():
            # Broadcasting would silently train on the wrong numbers.
            if tensor.shape != shape:
                raise ValueError(f"{name} must have shape {list(shape)} like logprobs, got {list(tensor.shape)}")
    for name, m in (("token_mask", token_mask), ("sample_mask", sample_mask)):
        if m.dtype != torch.bool:
            raise ValueError(f"{name} must be bool, got {m.dtype}")
    if settings.use_importance_sampling_correction and optional["behaviour_logprobs"] is None:
        raise ValueError("behaviour_logprobs is None but loss_fn.use_importance_sampling_correction is true")
    if settings.reference_policy_kl_penalty != 0 and optional["reference_logprobs"] is None:
        raise ValueError(
            "reference_logprobs is None but loss_fn.reference_policy_kl_penalty is "
            f"{settings.reference_policy_kl_penalty}"
        )
