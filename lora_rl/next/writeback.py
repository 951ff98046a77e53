"""Bringing a rank-1 change into the weights: into the adapter, which keeps its rank, or into the base, exactly."""

from __future__ import annotations

import math

import torch

from lora_rl.next.factors import AllReduce, Factors, RankOne, alone, decompose


def into_adapter(factors: Factors, change: RankOne, all_reduce: AllReduce = alone) -> tuple[Factors, float]:
    """The best approximation of W + sigma u v^T that has the rank r of the adapter. Collective.

    The sum has rank r + 1; its smallest singular value is given up (Eckart and Young 1936). Of all pairs of factors of
    the result, A gets rows of equal length and the turn that brings it nearest to the A it replaces (an orthogonal
    Procrustes problem, Schoenemann 1966): further training then sees an A of the same size, in the same coordinates.

    Args:
        factors: of W, with the adapter's scale in B.
        change: sharded as `factors` is.

    Returns:
        New factors of the same shapes in float64, and the share of the sum's squared norm that was given up.
        A change of size 0 returns the factors as they are.
    """
    if change.sigma == 0.0:
        return factors, 0.0
    rank, old_a = len(factors.a), factors.a.double()
    a = torch.cat([old_a, change.v.double()[None]])
    b = torch.cat([factors.b.double(), change.sigma * change.u.double()[:, None]], dim=1)
    d = decompose(Factors(a, b, factors.a_split, factors.b_split), all_reduce)
    kept = min(rank, len(d.sigma))
    # Rows of A that W does not use yet must stay, or they could never train: the whole row space, leading part first.
    rows = _completed(d.right[:kept], rank) @ d.t_a.T @ a
    overlap = rows @ old_a.T
    if factors.a_split:
        overlap = all_reduce(overlap)
    turn_left, _, turn_right = torch.linalg.svd(overlap.T, full_matrices=False)
    turn = turn_left @ turn_right
    squared = old_a.square().sum()
    length = math.sqrt(float(all_reduce(squared) if factors.a_split else squared) / rank)
    spread = torch.zeros(len(b), len(rows), dtype=torch.float64, device=b.device)
    spread[:, :kept] = b @ d.t_b @ (d.left[:, :kept] * d.sigma[:kept])
    new = Factors(length * turn @ rows, spread @ turn.T / length, factors.a_split, factors.b_split)
    total = float(d.sigma.square().sum())
    return new, float(d.sigma[kept:].square().sum()) / total if total else 0.0


def into_weight(weight: torch.Tensor, change: RankOne) -> torch.Tensor:
    """weight + sigma u v^T, added in float32 and cast once; a new tensor.

    Args:
        weight: [m', n'], this rank's part; u and v are the parts for its rows and columns.
    """
    update = change.sigma * torch.outer(change.u, change.v)
    return (weight.float() + update.float().to(weight.device)).to(weight.dtype)


def _completed(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Orthonormal rows [k, d] followed by others of their complement, up to `count` or d."""
    if len(rows) >= count:
        return rows
    whole = torch.linalg.svd(rows, full_matrices=True)[2]
    return torch.cat([rows, whole[len(rows) : count]])
