"""Arithmetic on padded [B, T] tensors that can hold anything, NaN included, where the mask is False.

Two rules keep padding out of results and gradients:

- Blank the inputs first (`blank_outside`). Selecting at the end is not enough: the backward pass of `where` sends
  a zero gradient into the masked branch, and zero times an infinite local derivative is NaN.
- Never multiply by a mask: 0 * NaN is NaN.
"""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +-20 before exp. e^20 = 4.9e8 is far beyond any usable ratio, and products of two
such ratios still fit fp32."""


def blank_outside(x: Tensor, mask: Tensor) -> Tensor:
    """x where mask is True and 0 elsewhere, in at least fp32 (bf16 log-probabilities lose the ratio)."""
    x = x if x.dtype == torch.float64 else x.float()
    return torch.where(mask, x, 0.0)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of x[B, T] over True positions; a scalar, 0 and still connected to the graph when there are none."""
    return torch.where(mask, x, 0.0).sum()


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio) with the argument clamped to +-LOG_RATIO_LIMIT. NaN stays NaN."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
