"""What predictors see of a matrix: leading singular triplets of its global, local and future changes, signs aligned.

W_0 ... W_c are snapshots, `interval` optimizer batches apart. G_i = W_i - W_0 is where training has come to,
L_i = W_i - W_{i-1} what it did last, T_i = W_{i+k} - W_i what it did next: what is to be predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lora_rl.next.factors import RankOne


@dataclass(frozen=True)
class Triplets:
    """A sequence of rank-1 matrices sigma_i u_i v_i^T.

    Attributes:
        sigma: float64 [t].
        u, v: float64 [t, m], [t, n].
    """

    sigma: torch.Tensor
    u: torch.Tensor
    v: torch.Tensor

    def __len__(self) -> int:
        return len(self.sigma)

    def __getitem__(self, index: slice) -> Triplets:
        return Triplets(self.sigma[index], self.u[index], self.v[index])

    def at(self, index: int) -> RankOne:
        """One of them."""
        return RankOne(float(self.sigma[index]), self.u[index], self.v[index])

    @staticmethod
    def of(triplets: list[RankOne]) -> Triplets:
        """A sequence of at least one."""
        return Triplets(
            torch.tensor([t.sigma for t in triplets], dtype=torch.float64),
            torch.stack([t.u for t in triplets]),
            torch.stack([t.v for t in triplets]),
        )


@dataclass(frozen=True)
class Trajectory:
    """One matrix over the snapshots 0..c.

    Attributes:
        total: of G_1 ... G_c.
        last: of L_1 ... L_c.
        future: of T_0 ... T_{c-k}; empty while c < k.
        horizon: k.
    """

    total: Triplets
    last: Triplets
    future: Triplets
    horizon: int

    @property
    def count(self) -> int:
        """c, the index of the last snapshot."""
        return len(self.total)

    def until(self, snapshot: int) -> Trajectory:
        """What was known when this snapshot was taken."""
        return Trajectory(
            self.total[:snapshot],
            self.last[:snapshot],
            self.future[: max(snapshot - self.horizon + 1, 0)],
            self.horizon,
        )


def aligned(trajectory: Trajectory) -> Trajectory:
    """The same matrices with vectors whose signs do not jump.

    A singular value decomposition leaves the sign of each (u, v) open. The total's u is chained by a non-negative
    cosine to the one before, and v flipped with it; the first has its largest entry positive. Vectors of `last` and
    `future` follow those of the total at the same snapshot, each for itself, and what that changes goes into sigma. A
    predictor that learnt from unaligned vectors could step backwards.
    """
    total = _chained(trajectory.total)
    after = [max(i - 1, 0) for i in range(len(trajectory.future))]
    return Trajectory(
        total,
        _like(trajectory.last, total.u, total.v),
        _like(trajectory.future, total.u[after], total.v[after]),
        trajectory.horizon,
    )


def _chained(triplets: Triplets) -> Triplets:
    signs, before = [], None
    for u in triplets.u:
        own = u[u.abs().argmax()] if before is None else u @ before
        sign = -1.0 if own < 0 else 1.0
        signs.append(sign)
        before = sign * u
    column = torch.tensor(signs, dtype=torch.float64)[:, None]
    return Triplets(triplets.sigma, triplets.u * column, triplets.v * column)


def _like(triplets: Triplets, u: torch.Tensor, v: torch.Tensor) -> Triplets:
    if not len(triplets):
        return triplets
    sign_u, sign_v = (
        torch.where((own * given).sum(1) < 0, -1.0, 1.0).double() for own, given in ((triplets.u, u), (triplets.v, v))
    )
    return Triplets(triplets.sigma * sign_u * sign_v, triplets.u * sign_u[:, None], triplets.v * sign_v[:, None])
