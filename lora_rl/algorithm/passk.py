"""pass@k: the chance that at least one of k samples is right."""

from __future__ import annotations

from math import comb


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate from n samples, of which `correct` are right: 1 - C(n - correct, k) / C(n, k).

    Source: Chen et al. 2021, "Evaluating large language models trained on code", arXiv:2107.03374, equation 1.

    Raises:
        ValueError: unless 1 <= k <= n and 0 <= correct <= n.
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@{k} of {n} samples, {correct} correct: needs 1 <= k <= n and 0 <= correct <= n")
    return 1.0 - comb(n - correct, k) / comb(n, k)
