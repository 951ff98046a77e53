"""Training metrics as sums that add up over microbatches, data-parallel ranks and updates.

A microbatch reports a sum together with the name of the count it is to be divided by; the division happens once,
with the global count, so the logged number does not depend on how the batch was cut up. `METRICS` says for every
name what it means and what divides it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lora_rl.algorithm.kl import kl_per_token
from lora_rl.algorithm.masking import bounded_exp, masked_sum

MetricNormaliser = Literal["tokens", "sequences", "sum", "max", "min"]
"""tokens, sequences: add up, then divide by that global count. sum: add up. max, min: take the extreme."""


@dataclass(frozen=True)
class Normaliser:
    """Global counts of one optimizer update: over all its microbatches and data-parallel ranks.

    tokens: T, number of tokens trained on.
    sequences: N, number of sequences with sample_mask True (an empty response counts).

    Raises:
        ValueError: a count is negative or not finite.
    """

    tokens: float
    sequences: float

    def __post_init__(self):
        for name in ("tokens", "sequences"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"Normaliser.{name} = {value}: must be a finite count >= 0")

    @classmethod
    def count(cls, token_mask: Tensor, sample_mask: Tensor) -> "Normaliser":
        """Counts of token_mask[B, T] and sample_mask[B], both bool; add those of all shards for the global ones."""
        return cls(tokens=float((token_mask & sample_mask[:, None]).sum()), sequences=float(sample_mask.sum()))

    def __add__(self, other: "Normaliser") -> "Normaliser":
        return Normaliser(self.tokens + other.tokens, self.sequences + other.sequences)


@dataclass(frozen=True)
class MetricSum:
    """One metric of a part of the batch: an undivided sum (or an extreme), and what divides it.

    value: scalar, detached from the graph. A part without data holds 0, or -inf for max and inf for min.
    """

    value: Tensor | float
    normaliser: MetricNormaliser


@dataclass(frozen=True)
class MetricInfo:
    """normaliser: None where it follows the reduction of the loss (`LossSettings.divides_by_tokens`)."""

    normaliser: MetricNormaliser | None
    meaning: str


METRICS: dict[str, MetricInfo] = {
    "loss": MetricInfo(None, "what is minimised: policy_loss + reference_policy_kl_penalty * KL"),
    "policy_loss": MetricInfo(None, "policy term with importance weights, without the KL term"),
    "kl": MetricInfo("tokens", "KL(pi || pi_ref) by the configured estimator, without the penalty factor; nats"),
    "entropy": MetricInfo("tokens", "entropy of the current policy over the vocabulary; nats"),
    "approx_entropy": MetricInfo(
        "tokens", "entropy from the sampled tokens only: -(pi / pi_b) log pi, or with pi_old if pi_b is unknown; nats"
    ),
    "probs_ratio": MetricInfo("tokens", "pi / pi_old; exactly 1 in the first update of a batch"),
    "probs_ratio_min": MetricInfo("min", "smallest pi / pi_old of any token"),
    "probs_ratio_max": MetricInfo("max", "largest pi / pi_old of any token"),
    "clip_fraction_low": MetricInfo(
        "tokens",
        "share with A < 0 and ratio < 1 - ratio_clip_min: no gradient; gspo: by the ratio of the token's sequence; "
        "cispo: whatever A, the weight is clipped and the gradient stays",
    ),
    "clip_fraction_high": MetricInfo(
        "tokens", "share with A > 0 and ratio > 1 + ratio_clip_max: no gradient; gspo and cispo as for the low share"
    ),
    "clip_fraction_dual": MetricInfo("tokens", "share with A < 0 and ratio > ratio_clip_c: no gradient"),
    "soft_gate": MetricInfo("tokens", "sapo: share of the gradient that the gate lets through; 1 when on-policy"),
    "token_mult_prob_error": MetricInfo(
        "tokens", "exp|log pi_b - log pi_old|: 1 when engine and trainer agree, 1.05 is 5 % apart on the typical token"
    ),
    "gen_kl_error": MetricInfo("tokens", "k3 estimate of KL(pi_b || pi_old), engine against trainer; nats"),
    "sampling_importance_ratio": MetricInfo(
        "tokens", "pi_old / pi_b before any truncation; its expectation is 1 if pi_b is what was sampled from"
    ),
    "is_oob_ratio": MetricInfo("tokens", "share whose importance weight was clamped or dropped"),
    "num_unmasked_tokens": MetricInfo("sum", "tokens trained on"),
    "num_valid_samples": MetricInfo("sum", "sequences trained on"),
}


def metric(name: str, value: Tensor, *, by_tokens: bool = True) -> MetricSum:
    """A MetricSum with the normaliser that `METRICS` declares; detached, so that it holds no graph alive."""
    normaliser = METRICS[name].normaliser or ("tokens" if by_tokens else "sequences")
    return MetricSum(value.detach(), normaliser)


def policy_metrics(
    log_ratio: Tensor, ratio: Tensor, logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor
) -> dict[str, MetricSum]:
    """How far the current policy is from the one before the update, and its sampled entropy.

    Args:
        log_ratio: [B, T] log pi - log pi_old, blanked at masked positions.
        ratio: [B, T] its (clamped) exp.
        logprobs: [B, T] log pi, blanked.
        sampler_logprobs: [B, T] log pi_b, or log pi_old where pi_b is unknown, blanked.
        mask: [B, T] bool.
    """
    with torch.no_grad():
        entropy_terms = -bounded_exp(logprobs - sampler_logprobs) * logprobs
        infinity = torch.full((1,), math.inf, dtype=ratio.dtype, device=ratio.device)
        # The appended identity makes the extreme of nothing well defined.
        smallest = torch.cat([torch.where(mask, ratio, math.inf).flatten(), infinity]).min()
        largest = torch.cat([torch.where(mask, ratio, -math.inf).flatten(), -infinity]).max()
        return {
            "probs_ratio": metric("probs_ratio", masked_sum(ratio, mask)),
            "probs_ratio_min": metric("probs_ratio_min", smallest),
            "probs_ratio_max": metric("probs_ratio_max", largest),
            "approx_entropy": metric("approx_entropy", masked_sum(entropy_terms, mask)),
        }


def mismatch_metrics(old_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> dict[str, MetricSum]:
    """How far the engine that sampled is from the trainer, on the same tokens.

    Measured against pi_old, not the current policy: later updates of a batch move pi on purpose, and that must not
    look like an engine that holds the wrong weights.

    Args:
        old_logprobs: [B, T] log pi_old, blanked at masked positions.
        behaviour_logprobs: [B, T] log pi_b, blanked.
        mask: [B, T] bool.
    """
    with torch.no_grad():
        difference = old_logprobs - behaviour_logprobs
        return {
            "token_mult_prob_error": metric("token_mult_prob_error", masked_sum(bounded_exp(difference.abs()), mask)),
            "gen_kl_error": metric(
                "gen_kl_error", masked_sum(kl_per_token(behaviour_logprobs, old_logprobs, "k3"), mask)
            ),
            "sampling_importance_ratio": metric("sampling_importance_ratio", masked_sum(bounded_exp(difference), mask)),
        }


def merge(parts: Iterable[Mapping[str, MetricSum]]) -> dict[str, MetricSum]:
    """Combine the metrics of microbatches, data-parallel ranks or updates; {} for no parts. Order is irrelevant.

    Parts must be disjoint: one rank of each tensor- or pipeline-parallel group, or tokens are counted twice.

    Raises:
        ValueError: the parts report different metrics, or one metric with different normalisers. A sum that some
            parts left out would be divided by a count that includes them.
    """
    merged: dict[str, MetricSum] = {}
    for index, part in enumerate(parts):
        if index == 0:
            merged = dict(part)
            continue
        if part.keys() != merged.keys():
            differing = ", ".join(sorted(part.keys() ^ merged.keys()))
            raise ValueError(f"part {index} reports other metrics than part 0; in only one of them: {differing}")
        for name, new in part.items():
            merged[name] = _combine(name, merged[name], new)
    return merged


def as_floats(metrics: Mapping[str, MetricSum]) -> dict[str, MetricSum]:
    """The same metrics with Python floats, to send to another process. Synchronises with the device."""
    return {name: MetricSum(float(m.value), m.normaliser) for name, m in metrics.items()}


def finalise(metrics: Mapping[str, MetricSum], normaliser: Normaliser) -> dict[str, float]:
    """Divide merged metrics by the global counts.

    A mean (or extreme) over nothing has no value and is left out, rather than reported as 0. NaN is reported.

    Args:
        metrics: merged over the whole of what `normaliser` counts.
        normaliser: the counts given to the loss; their sum when several updates were merged.

    Raises:
        ValueError: num_unmasked_tokens is not normaliser.tokens, so parts are missing or counted twice.
    """
    counted = metrics.get("num_unmasked_tokens")
    if counted is not None and not math.isclose(float(counted.value), normaliser.tokens, rel_tol=1e-6):
        raise ValueError(
            f"the merged metrics cover {float(counted.value):.0f} tokens but the normaliser says "
            f"{normaliser.tokens:.0f}: parts are missing or were merged twice"
        )
    counts = {"tokens": normaliser.tokens, "sequences": normaliser.sequences}
    final: dict[str, float] = {}
    for name, m in metrics.items():
        value = float(m.value)
        if m.normaliser in counts:
            if counts[m.normaliser] > 0:
                final[name] = value / counts[m.normaliser]
        elif m.normaliser == "sum" or not math.isinf(value):
            final[name] = value
    return final


def _combine(name: str, a: MetricSum, b: MetricSum) -> MetricSum:
    if a.normaliser != b.normaliser:
        raise ValueError(f"metric {name!r} has normaliser {a.normaliser!r} in one part, {b.normaliser!r} in another")
    if a.normaliser not in ("max", "min"):
        return MetricSum(a.value + b.value, a.normaliser)
    # torch's extremes propagate NaN; Python's max() drops it depending on the order.
    extreme = torch.maximum if a.normaliser == "max" else torch.minimum
    return MetricSum(extreme(torch.as_tensor(a.value), torch.as_tensor(b.value)), a.normaliser)
