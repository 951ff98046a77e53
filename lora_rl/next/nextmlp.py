"""The learned predictor of NExt: two encoders and a decoder per kind and length of vector.

From "Low-rank Optimization Trajectories Modeling for LLM RLVR Acceleration" (arXiv:2604.11446): the leading triplet of
the next change T_i is decoded from encodings of those of the total change G_i and the last one L_i, separately for u, v
and sigma, with the L1 loss. All matrices whose vectors have the same length share a network.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lora_rl.next.factors import RankOne
from lora_rl.next.trajectory import Trajectory, Triplets


class Net(nn.Module):
    """(total, last) -> next, each [*, length]."""

    def __init__(self, length: int, hidden: int) -> None:
        super().__init__()
        self.of_total = nn.Sequential(nn.Linear(length, hidden), nn.GELU())
        self.of_last = nn.Sequential(nn.Linear(length, hidden), nn.GELU())
        self.decoder = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.GELU(), nn.Linear(hidden, length))

    def forward(self, total: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.cat([self.of_total(total), self.of_last(last)], dim=-1))


@dataclass(frozen=True)
class NextMLP:
    """Trained anew on what is known, whenever it is asked.

    Vectors are scaled to entries of size 1, singular values divided by that of the total change, so that matrices of
    all sizes can share a network and one learning rate.

    Attributes:
        hidden: width of the encodings.
        lr: of Adam.
        epochs: passes over all examples, each one full batch.
        seed: of the starting weights.
    """

    hidden: int
    lr: float
    epochs: int
    seed: int

    def predict(self, known: Mapping[str, Trajectory]) -> dict[str, RankOne]:
        """See `lora_rl.next.predictors.Predictor`.

        Raises:
            ValueError: no snapshot has a known future: there are fewer than k + 2.
        """
        if any(len(t.future) < 2 for t in known.values()):
            raise ValueError("there is no example to learn from: a trajectory needs at least horizon + 2 snapshots")
        us, vs, sigmas = self._vectors(known, "u"), self._vectors(known, "v"), self._sigmas(known)
        return {n: RankOne(sigmas[n], us[n] / us[n].norm(), vs[n] / vs[n].norm()) for n in known}

    def _vectors(self, known: Mapping[str, Trajectory], side: str) -> dict[str, torch.Tensor]:
        by_length: dict[int, list[str]] = defaultdict(list)
        for name in sorted(known):
            by_length[getattr(known[name].total, side).shape[1]].append(name)
        found = {}
        for length, names in by_length.items():
            parts = [[getattr(t, side) * math.sqrt(length) for t in _parts(known[name])] for name in names]
            found |= dict(zip(names, self._learn_and_ask(parts), strict=True))
        return found

    def _sigmas(self, known: Mapping[str, Trajectory]) -> dict[str, float]:
        names, parts, units = sorted(known), [], []
        for name in names:
            total, last, future = _parts(known[name])
            floor = total.sigma.abs().max() * 1e-6 + 1e-300
            unit = total.sigma.abs().clamp(min=floor)
            at = unit[: len(future)]
            grown = torch.cat([torch.ones(1, dtype=torch.float64), unit[1:] / unit[:-1]])
            parts.append([x[:, None] for x in (grown, last.sigma / unit, future.sigma / at)])
            units.append(float(unit[-1]))
        answers = self._learn_and_ask(parts)
        return {name: float(answer) * unit for name, answer, unit in zip(names, answers, units, strict=True)}

    def _learn_and_ask(self, parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """Train on the snapshots whose future is known, and ask for that of the last, for each matrix.

        Args:
            parts: per matrix inputs [c, length] twice, and targets [e, length] of the first e snapshots.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            net = Net(parts[0][0].shape[1], self.hidden)
        total, last, future = (torch.cat([p[i][: len(p[2])] for p in parts]).float() for i in range(3))
        optimizer = torch.optim.Adam(net.parameters(), lr=self.lr)
        # Predictions may be asked for in the middle of a run that switched gradients off.
        with torch.enable_grad():
            for _ in range(self.epochs):
                optimizer.zero_grad()
                nn.functional.l1_loss(net(total, last), future).backward()
                optimizer.step()
        with torch.no_grad():
            asked = net(torch.stack([p[0][-1] for p in parts]).float(), torch.stack([p[1][-1] for p in parts]).float())
        return list(asked.double())


def _parts(t: Trajectory) -> tuple[Triplets, Triplets, Triplets]:
    # G_0 = 0 has no direction: the examples begin with snapshot 1.
    return t.total, t.last, t.future[1:]
