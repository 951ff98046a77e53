"""The policy-gradient loss of one microbatch, normalised by global counts.

Every microbatch divides by the same counts of the whole update (`Normaliser`), so losses and gradients of
microbatches and data-parallel ranks simply *add* to those of the undivided batch. Whoever reduces gradients across
ranks must therefore sum, not average.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lora_rl.algorithm.importance import importance_weights
from lora_rl.algorithm.kl import kl_per_token
from lora_rl.algorithm.masking import blank_outside, bounded_exp, masked_sum
from lora_rl.algorithm.metrics import MetricSum, Normaliser, metric, mismatch_metrics, policy_metrics
from lora_rl.algorithm.policy_terms import policy_term
from lora_rl.algorithm.settings import LossSettings


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
    """Policy term with KL penalty and importance-sampling correction, for one microbatch.

    With L the policy term of a token (`lora_rl.algorithm.policy_terms`) and w its constant importance weight:

        loss = reduce(w L) + reference_policy_kl_penalty * reduce(KL)

    | reduce                   | formula                                      | source                     |
    | ------------------------ | -------------------------------------------- | -------------------------- |
    | token_level_loss         | sum over tokens / global tokens              | DAPO, arXiv:2503.14476     |
    | not token_level_loss     | sum of sequences' means / global sequences   | GRPO, arXiv:2402.03300     |
    | with constant_length C   | sum over tokens / (global sequences x C)     | Dr. GRPO, arXiv:2503.20783 |

    The KL term is reduced likewise and not importance weighted.

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
    term = policy_term(settings, current, log_ratio, advantage, mask)
    token_loss = term.loss
    metrics = {name: metric(name, masked_sum(values, mask)) for name, values in term.shares.items()}
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

    total = policy_total = _reduce(settings, token_loss, mask)
    if reference_logprobs is not None:
        reference = blank_outside(reference_logprobs, mask).detach()
        kl = kl_per_token(current, reference, settings.reference_policy_kl_type, settings.kl_input_clamp_value)
        metrics["kl"] = metric("kl", masked_sum(kl, mask))
        if settings.reference_policy_kl_penalty != 0:
            total = total + settings.reference_policy_kl_penalty * _reduce(settings, kl, mask)

    metrics |= policy_metrics(log_ratio, ratio, current, old if behaviour is None else behaviour, mask)
    metrics["loss"] = metric("loss", total, by_tokens=settings.divides_by_tokens)
    metrics["policy_loss"] = metric("policy_loss", policy_total, by_tokens=settings.divides_by_tokens)
    metrics["num_unmasked_tokens"] = metric("num_unmasked_tokens", mask.sum())
    metrics["num_valid_samples"] = metric("num_valid_samples", sample_mask.sum())
    if behaviour is not None:
        metrics |= mismatch_metrics(old, behaviour, mask)
    if entropy is not None:
        metrics["entropy"] = metric("entropy", masked_sum(blank_outside(entropy, mask), mask))
    return LossOutput(loss=total / _denominator(settings, normaliser, mask), metrics=metrics)


def _reduce(settings: LossSettings, values: Tensor, mask: Tensor) -> Tensor:
    """Sum of values[B, T], still to be divided by the global count that `_denominator` chooses."""
    if settings.constant_length is not None:
        return masked_sum(values, mask) / settings.constant_length
    if settings.token_level_loss:
        return masked_sum(values, mask)
    sums = torch.where(mask, values, 0.0).sum(dim=1)
    return (sums / mask.sum(dim=1).clamp(min=1)).sum()


def _denominator(settings: LossSettings, normaliser: Normaliser, mask: Tensor) -> float:
    name = "tokens" if settings.divides_by_tokens else "sequences"
    count = getattr(normaliser, name)
    if count > 0:
        return count
    if mask.any():
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
