"""Predicting the next change of a low-rank trajectory without learning: a line, a saturating curve, or neither.

Each predicts, for every matrix, the change over the next `horizon` snapshots as one rank-1 matrix. `scale` and `random`
are null models: what only stretches the way so far, or goes anywhere at all, shows what prediction must beat.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol

import torch

from lora_rl.next.factors import RankOne
from lora_rl.next.trajectory import Trajectory, Triplets

# Directions of a trajectory's own space that a curve is fitted in.
_SUBSPACE = 3
_TIME_CONSTANTS = 25


class Predictor(Protocol):
    """Proposes the change over the next `horizon` snapshots."""

    def predict(self, known: Mapping[str, Trajectory]) -> dict[str, RankOne]:
        """The change of every matrix after its last known snapshot; trajectories are whole and aligned."""
        ...


class Scale:
    """Null model: the way so far goes on at its mean speed, (k/c) G_c."""

    def predict(self, known: Mapping[str, Trajectory]) -> dict[str, RankOne]:
        """See `Predictor`."""
        return {name: t.total.at(-1).times(t.horizon / t.count) for name, t in known.items()}


class Random:
    """Null model: the norm of `Scale`, in a direction drawn from the seed and the module's name."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def predict(self, known: Mapping[str, Trajectory]) -> dict[str, RankOne]:
        """See `Predictor`."""
        proposals = {}
        for name, scaled in Scale().predict(known).items():
            digest = hashlib.sha256(f"{self._seed}:{known[name].count}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            u, v = (torch.randn(len(x), generator=generator, dtype=torch.float64) for x in (scaled.u, scaled.v))
            proposals[name] = RankOne(scaled.sigma, u / u.norm(), v / v.norm())
        return proposals


class Linear:
    """The slope of the least-squares line through G_0 = 0, G_1 ... G_c, for k more snapshots."""

    def predict(self, known: Mapping[str, Trajectory]) -> dict[str, RankOne]:
        """See `Predictor`."""
        return {name: combined(t.total, t.horizon * _slope(t.count)) for name, t in known.items()}


class Saturating:
    """Curves a + b (1 - exp(-t / tau)) through the coordinates of G_0 ... G_c in the leading directions of their span.

    Training that learns something slows down. The directions are those of the temporal Gram matrix <G_i, G_j>, at most
    three; tau is the one of a logarithmic grid, up to nearly straight lines, that fits a coordinate best.
    """

    def predict(self, known: Mapping[str, Trajectory]) -> dict[str, RankOne]:
        """See `Predictor`."""
        return {name: combined(t.total, self._weights(t)) for name, t in known.items()}

    def _weights(self, trajectory: Trajectory) -> torch.Tensor:
        total, count = trajectory.total, trajectory.count
        gram = (total.u @ total.u.T) * (total.v @ total.v.T) * torch.outer(total.sigma, total.sigma)
        values, vectors = torch.linalg.eigh(gram)
        kept = [i for i in range(count)[::-1][:_SUBSPACE] if values[i] > 1e-12 * values[-1]]
        weights = torch.zeros(count, dtype=torch.float64)
        for i in kept:
            coordinate = torch.cat([torch.zeros(1, dtype=torch.float64), values[i].sqrt() * vectors[:, i]])
            # The direction itself is sum_j vectors[j, i] / sqrt(value) G_j.
            weights += _saturating_step(coordinate, trajectory.horizon) / values[i].sqrt() * vectors[:, i]
        return weights


def combined(triplets: Triplets, weights: torch.Tensor) -> RankOne:
    """The largest singular triplet of sum_i weights_i sigma_i u_i v_i^T.

    Args:
        weights: float64 [t].
    """
    q_u, r_u = torch.linalg.qr(triplets.u.T)
    q_v, r_v = torch.linalg.qr(triplets.v.T)
    left, sigma, right = torch.linalg.svd(r_u @ torch.diag(weights * triplets.sigma) @ r_v.T)
    return RankOne(float(sigma[0]), q_u @ left[:, 0], q_v @ right[0])


def _slope(count: int) -> torch.Tensor:
    """Weights that give the least-squares slope of values at 0, 1, ... count, the first of which is 0."""
    time = torch.arange(count + 1, dtype=torch.float64)
    centred = time - time.mean()
    return (centred / centred.square().sum())[1:]


def _saturating_step(values: torch.Tensor, horizon: int) -> float:
    """Growth from t = c to c + horizon of the best curve a + b (1 - exp(-t / tau)) through values at t = 0 ... c."""
    last = len(values) - 1
    time = torch.arange(last + 1, dtype=torch.float64)
    taus = torch.logspace(-0.3, torch.tensor(8.0 * last).log10().item(), _TIME_CONSTANTS, dtype=torch.float64)
    curves = 1 - torch.exp(-time / taus[:, None])
    centred, target = curves - curves.mean(1, keepdim=True), values - values.mean()
    b = (centred @ target) / centred.square().sum(1)
    errors = (target - b[:, None] * centred).square().sum(1)
    best = int(errors.argmin())
    tau = float(taus[best])
    end = torch.tensor([-last / tau, -(last + horizon) / tau], dtype=torch.float64).exp()
    return float(b[best] * (end[0] - end[1]))
