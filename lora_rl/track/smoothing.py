"""Curves made calmer, for plots and reports."""

import math
from collections.abc import Sequence


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values at each place, of fewer at the beginning; NaN is left out."""
    means = []
    for end in range(1, len(values) + 1):
        finite = [value for value in values[max(end - window, 0) : end] if math.isfinite(value)]
        means.append(math.fsum(finite) / len(finite) if finite else math.nan)
    return means
