"""Importance-sampling weights that correct for the engine sampling from a slightly different policy.

The engine's kernels, dtype and (in asynchronous runs) older weights make pi_b differ from the trainer's pi_old.
The loss of each token is multiplied by w = pi_old / pi_b, a constant (no gradient).

| type     | weight                                                                              | source             |
| -------- | ----------------------------------------------------------------------------------- | ------------------ |
| None     | w                                                                                   |                    |
| tis      | min(w, hi)                                                                          | TIS (F. Yao 2025)  |
| icepop   | w if lo <= w <= hi else 0                                                           | IcePop, Ring-1T    |
| seq_mask | w if lo <= geometric mean of the sequence's token ratios <= hi, else 0 for all of it | J. Liu et al. 2025 |

Level "token": w_t = exp(log pi_old_t - log pi_b_t). Level "sequence": one weight for all tokens of a sequence,
exp(sum_t (log pi_old_t - log pi_b_t)): unbiased for the sequence, but its variance grows with the length.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lora_rl.algorithm.masking import blank_outside, bounded_exp

ImportanceLevel = Literal["token", "sequence"]
ImportanceType = Literal["tis", "icepop", "seq_mask"]
IMPORTANCE_LEVELS: tuple[str, ...] = ("token", "sequence")
IMPORTANCE_TYPES: tuple[str, ...] = ("tis", "icepop", "seq_mask")


@dataclass(frozen=True)
class ImportanceWeights:
    """weights: [B, T], no gradient, exactly 0 at masked positions and where a type drops a token.
    out_of_bounds: [B, T] bool, unmasked positions whose weight was clamped or dropped.
    """

    weights: Tensor
    out_of_bounds: Tensor


def truncation_problems(level: str, kind: str | None, upper: float | None, lower: float | None) -> list[str]:
    """What is wrong with this combination, one sentence each; empty when it is valid.

    A bound that the chosen type would ignore is a problem too: it would look set and do nothing.
    """
    problems = []
    if level not in IMPORTANCE_LEVELS:
        problems.append(f"importance_sampling_level = {level!r}: valid are {', '.join(IMPORTANCE_LEVELS)}")
    if kind is not None and kind not in IMPORTANCE_TYPES:
        problems.append(f"importance_sampling_type = {kind!r}: valid are {', '.join(IMPORTANCE_TYPES)}, null")
        return problems

    uses_upper, uses_lower = kind is not None, kind in ("icepop", "seq_mask")
    for name, value, used in (
        ("truncated_importance_sampling_ratio", upper, uses_upper),
        ("truncated_importance_sampling_ratio_min", lower, uses_lower),
    ):
        if used and value is None:
            problems.append(f"{name} is null: importance_sampling_type = {kind!r} needs a positive number")
        elif not used and value is not None:
            problems.append(f"{name} = {value}: importance_sampling_type = {kind!r} does not use it; set it to null")
        elif value is not None and not value > 0:
            problems.append(f"{name} = {value}: must be a positive number")
    if uses_lower and upper is not None and lower is not None and lower > upper:
        problems.append(
            f"truncated_importance_sampling_ratio_min = {lower} is above "
            f"truncated_importance_sampling_ratio = {upper}: nothing would be kept"
        )
    return problems


def importance_weights(
    train_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    *,
    level: ImportanceLevel = "token",
    kind: ImportanceType | None = None,
    upper: float | None = None,
    lower: float | None = None,
) -> ImportanceWeights:
    """Weights pi_old / pi_b of the sampled tokens; the table at the top of the module gives the formulas.

    Log ratios (summed for level "sequence") are clamped to +-20, so a weight is finite whatever the engine
    returned. NaN at an unmasked position is not hidden: the weight, and with it the loss, becomes NaN.

    Args:
        train_logprobs: [B, T] log pi_old from the trainer; detached here. Never the current policy's when the
            batch is updated on more than once: the correction must not move with the updates.
        behaviour_logprobs: [B, T] log pi_b, as sampled (after temperature).
        mask: [B, T] bool, the tokens that are trained on.
        level: "token" or "sequence".
        kind: "tis", "icepop", "seq_mask", or None for no truncation.
        upper: hi of the table, for each kind.
        lower: lo of the table, for icepop and seq_mask.

    Raises:
        ValueError: invalid combination of level, kind and bounds.
    """
    if problems := truncation_problems(level, kind, upper, lower):
        raise ValueError("; ".join(problems))
    with torch.no_grad():
        log_ratio = blank_outside(train_logprobs, mask) - blank_outside(behaviour_logprobs, mask)
        log_ratio_sum = log_ratio.sum(dim=1, keepdim=True)
        weights = bounded_exp(log_ratio if level == "token" else log_ratio_sum.expand_as(log_ratio))

        # Written as "outside", not as "not inside", so that NaN compares False, is kept, and shows.
        if kind is None:
            outside = torch.zeros_like(mask)
        elif kind == "tis":
            outside = weights > upper
            weights = weights.clamp(max=upper)
        elif kind == "icepop":
            outside = (weights < lower) | (weights > upper)
            weights = torch.where(outside, 0.0, weights)
        else:
            length = mask.sum(dim=1, keepdim=True).clamp(min=1)
            geometric_mean = bounded_exp(log_ratio_sum / length)
            outside = ((geometric_mean < lower) | (geometric_mean > upper)).expand_as(mask)
            weights = torch.where(outside, 0.0, weights)
        return ImportanceWeights(weights=torch.where(mask, weights, 0.0), out_of_bounds=outside & mask)
