"""Low-rank matrices as products of sharded factors: differences, leading singular triplets, inner products.

A tensor-parallel rank holds some rows of B and some columns of A. Everything that a singular value decomposition needs
of them are the Gram matrices B^T B and A A^T, which are small and add up over the ranks; u and v come out as sharded as
B and A. No m x n matrix is ever formed. Gram matrices square the condition number, so they are float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# Adds a tensor up over the tensor-parallel group.
type AllReduce = Callable[[torch.Tensor], torch.Tensor]

# Eigenvalues of a float64 Gram matrix below this share of the largest are rounding.
_FLOOR = 1e-13


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """The all-reduce of a rank that holds everything."""
    return tensor


@dataclass(frozen=True)
class Factors:
    """This rank's part of W = B A, of rank r at most.

    Attributes:
        a: [r, n'], all or some of the n columns.
        b: [m', r], all or some of the m rows.
        a_split, b_split: whether the other ranks of the group hold the rest, rather than the same.
    """

    a: torch.Tensor
    b: torch.Tensor
    a_split: bool = False
    b_split: bool = False

    def gram(self, all_reduce: AllReduce = alone) -> tuple[torch.Tensor, torch.Tensor]:
        """(A A^T, B^T B), float64 [r, r], of the whole matrices. Collective where something is split."""
        a, b = self.a.double(), self.b.double()
        return _summed(a @ a.T, self.a_split, all_reduce), _summed(b.T @ b, self.b_split, all_reduce)


@dataclass(frozen=True)
class RankOne:
    """sigma u v^T; `sigma` may be negative.

    Attributes:
        sigma: float.
        u, v: float64 vectors of length 1, whole or this rank's part.
    """

    sigma: float
    u: torch.Tensor
    v: torch.Tensor

    def times(self, factor: float) -> RankOne:
        """The same direction, `factor` times as far."""
        return RankOne(self.sigma * factor, self.u, self.v)


def difference(later: Factors, earlier: Factors) -> Factors:
    """`later` - `earlier`, of rank 2r: (B - B') A + B' (A - A'), where little cancels if both are close."""
    b = torch.cat([later.b.double() - earlier.b.double(), earlier.b.double()], dim=1)
    a = torch.cat([later.a.double(), later.a.double() - earlier.a.double()])
    return Factors(a, b, later.a_split, later.b_split)


@dataclass(frozen=True)
class Decomposition:
    """W = (B T_b) P diag(sigma) Q (T_a^T A), a singular value decomposition: the outer products are orthonormal.

    Attributes:
        t_a, t_b: float64 [r, k_a], [r, k_b], making an orthonormal basis of A's rows and of B's columns.
        left: P, float64 [k_b, k].
        sigma: float64 [k], descending.
        right: Q, float64 [k, k_a].
    """

    t_a: torch.Tensor
    t_b: torch.Tensor
    left: torch.Tensor
    sigma: torch.Tensor
    right: torch.Tensor


def decompose(factors: Factors, all_reduce: AllReduce = alone) -> Decomposition:
    """The singular values of W, and what makes its singular vectors from B and A. Collective."""
    gram_a, gram_b = factors.gram(all_reduce)
    # A column of B and its row of A are first made equally long. In a difference one of the two can be 1e7 times as
    # long, and what is squared must not drown in rounding.
    ratio = gram_b.diagonal() / gram_a.diagonal()
    share = torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0) ** 0.25
    t_a, r_a = basis(gram_a * torch.outer(share, share))
    t_b, r_b = basis(gram_b / torch.outer(share, share))
    left, sigma, right = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    return Decomposition(share[:, None] * t_a, t_b / share[:, None], left, sigma, right)


def basis(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An orthonormal basis of the columns of X from its Gram matrix X^T X.

    Returns:
        (T, R): X T has orthonormal columns, k of them for rank k, and X = (X T) R. Float64 [r, k] and [k, r].
    """
    values, vectors = torch.linalg.eigh(gram)
    kept = values > _FLOOR * values.max().clamp(min=torch.finfo(torch.float64).tiny)
    roots, vectors = values[kept].sqrt(), vectors[:, kept]
    return vectors / roots, roots[:, None] * vectors.T


def leading(factors: Factors, all_reduce: AllReduce = alone) -> RankOne:
    """The largest singular triplet of W, with u and v sharded as B's rows and A's columns are. Collective.

    A zero matrix has sigma 0 and vectors of zeros.
    """
    d = decompose(factors, all_reduce)
    a, b = factors.a.double(), factors.b.double()
    if not len(d.sigma) or d.sigma[0] == 0:
        return RankOne(0.0, b.new_zeros(len(b)), a.new_zeros(a.shape[1]))
    return RankOne(float(d.sigma[0]), b @ (d.t_b @ d.left[:, 0]), a.T @ (d.t_a @ d.right[0]))


def squared_norm(factors: Factors, all_reduce: AllReduce = alone) -> float:
    """Squared Frobenius norm of W. Collective."""
    gram_a, gram_b = factors.gram(all_reduce)
    return float((gram_a * gram_b).sum())


def product(factors: Factors, direction: RankOne, all_reduce: AllReduce = alone) -> float:
    """Inner product <W, sigma u v^T>; the direction is sharded as `factors` is. Collective."""
    left = _summed(direction.u.double() @ factors.b.double(), factors.b_split, all_reduce)
    right = _summed(factors.a.double() @ direction.v.double(), factors.a_split, all_reduce)
    return direction.sigma * float(left @ right)


def _summed(tensor: torch.Tensor, split: bool, all_reduce: AllReduce) -> torch.Tensor:
    return all_reduce(tensor) if split else tensor
