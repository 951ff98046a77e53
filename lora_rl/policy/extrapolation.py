"""One rank's part in extrapolating the adapters: its snapshots, its parts of directions, and the jump itself.

Everything in and out of a rank is whole and independent of the layout, as in `lora_rl.policy.state`; what is kept here
is this rank's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lora_rl.lora.peft_io import PeftAdapter
from lora_rl.next.factors import Factors, RankOne
from lora_rl.next.recorder import Projection, Recorder
from lora_rl.next.trajectory import Trajectory, Triplets
from lora_rl.policy.export import export_peft
from lora_rl.policy.state import forget_moments, whole
from lora_rl.policy.trails import Trail, trails_of
from lora_rl.policy.trainer import PolicyRank

# Whole A [r, n] and B [m, r] of every module, oldest snapshot first; see `lora_rl.policy.trails`.
type Snapshots = list[dict[str, tuple[torch.Tensor, torch.Tensor]]]


class RankExtrapolation:
    """The trajectory of this rank's adapters. All methods are collective: every rank calls them alike."""

    def __init__(self, rank: PolicyRank, *, capacity: int, horizon: int, merge: bool = False) -> None:
        """
        Args:
            capacity: snapshots that are kept.
            horizon: snapshots that are predicted ahead.
            merge: jumps go into the frozen weights instead of the adapters.
        """
        self._rank, self._horizon, self._merge = rank, horizon, merge
        self._recorder = Recorder(capacity)

    def record(self) -> None:
        """Take a snapshot."""
        self._recorder.record(self._current())

    def clear(self) -> None:
        """Forget all snapshots, and take the first of a new trajectory."""
        self._recorder.clear()
        self.record()

    def trajectories(self) -> dict[str, Trajectory] | None:
        """The leading triplets of all changes of every matrix of the model, on rank 0; signs are arbitrary."""
        found = self._recorder.trajectories(self._horizon, self._all_reduce)
        parts = {
            name: [
                self._described(name, t, gated=trail.gated)
                for t in (found[name].total, found[name].last, found[name].future)
            ]
            for name, trail in self._trails().items()
        }
        every = self._gathered(parts)
        if every is None:
            return None
        return {n: Trajectory(*map(_joined, zip(*ranks, strict=True)), self._horizon) for n, ranks in every.items()}

    def project(
        self, proposals: Mapping[str, Sequence[RankOne]], at: Sequence[int]
    ) -> dict[str, list[Projection]] | None:
        """See `Recorder.project`; of the whole model, on rank 0."""
        own = {n: [trail.part(p) for p in proposals[n]] for n, trail in self._trails().items()}
        found = self._gathered(self._recorder.project(own, at, self._horizon, self._all_reduce))
        return None if found is None else {name: ranks[0] for name, ranks in found.items()}

    @torch.no_grad()
    def jump(self, changes: Mapping[str, RankOne]) -> dict[str, float] | None:
        """Add a change to every adapter (`Trail.add`), or to every frozen weight.

        Returns:
            On rank 0: `dropped`, the largest share of an adapter's squared norm that truncation gave up; `norm`, the
            length of the changes as a share of the way from the oldest snapshot.
        """
        dropped = {}
        if self._merge:
            self._rank.merged.set([*self._rank.merged.changes, changes])
        else:
            for name, trail in self._trails().items():
                change = trail.part(changes[name])
                if change.sigma != 0.0:
                    dropped[name] = trail.add(change, self._all_reduce)
            # The same on every rank: those of an optimizer have one count of steps.
            if any(change.sigma != 0.0 for change in changes.values()):
                forget_moments(self._rank)
        way = self._gathered({n: [d] for n, d in self._recorder.distance(self._all_reduce).items()})
        lost = self._gathered({n: [d] for n, d in dropped.items()})
        if way is None or lost is None:
            return None
        come = sum(ranks[0][0] for ranks in way.values())
        length = sum(change.sigma**2 for change in changes.values())
        return {
            "dropped": max((ranks[0][0] for ranks in lost.values()), default=0.0),
            "norm": (length / come) ** 0.5 if come else float("inf"),
        }

    def merged(self) -> list[dict[str, RankOne]]:
        """The jumps that are in the frozen weights, whole."""
        return self._rank.merged.changes

    def set_merged(self, changes: Sequence[Mapping[str, RankOne]]) -> None:
        """Put these jumps, and no others, into the frozen weights."""
        self._rank.merged.set(changes)

    def whole_adapter(self) -> PeftAdapter:
        """The adapters, with what is in the frozen weights as further ranks."""
        return self._rank.merged.onto(export_peft(self._rank.model))

    def snapshots(self) -> Snapshots | None:
        """All snapshots of the whole model, on rank 0."""
        gathered, trails = [], self._trails()
        for snapshot in self._recorder.snapshots:
            parts = {}
            for name, f in snapshot.items():
                a_dim, b_dim = 1 if f.a_split else None, 0 if f.b_split else None
                parts[name] = ((f.a, a_dim, False), (f.b, b_dim, trails[name].gated))
            gathered.append(self._gathered(parts))
        if any(snapshot is None for snapshot in gathered):
            return None
        return [
            {n: tuple(whole(list(x)) for x in zip(*ranks, strict=True)) for n, ranks in s.items()} for s in gathered
        ]

    def load_snapshots(self, snapshots: Snapshots) -> None:
        """Continue from `snapshots`, at any layout."""
        self._recorder.clear()
        trails = self._trails()
        for snapshot in snapshots:
            self._recorder.record({name: trail.own(*snapshot[name]) for name, trail in trails.items()})

    # -- inside ------------------------------------------------------------------------------------------------

    def _trails(self) -> dict[str, Trail]:
        return trails_of(self._rank)

    def _current(self) -> dict[str, Factors]:
        return {name: trail.factors() for name, trail in self._trails().items()}

    def _all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        # Snapshots are on the host; the group may be of devices.
        total = tensor.to(self._rank.platform.device, copy=True)
        dist.all_reduce(total, group=self._rank.tp_group)
        return total.to(tensor.device)

    def _described(self, name: str, triplets: Triplets, *, gated: bool) -> tuple:
        """Triplets with how their vectors are split: (sigma, (u [m', t], dim, gated), (v [n', t], dim, gated))."""
        factors = self._recorder.snapshots[0][name]
        u = (triplets.u.T, 0 if factors.b_split else None, gated)
        return triplets.sigma, u, (triplets.v.T, 0 if factors.a_split else None, False)

    def _gathered(self, mine: dict[str, Any]) -> dict[str, list[Any]] | None:
        """What the tensor-parallel ranks of each module said of it, on rank 0."""
        everyone: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else None  # type: ignore[assignment]
        dist.gather_object(mine if self._rank.dp_rank == 0 else {}, everyone, dst=0)
        if dist.get_rank() != 0:
            return None
        return {
            name: [part[name] for part in everyone if name in part]
            for name in sorted({name for part in everyone for name in part})
        }


def _joined(ranks: Sequence[tuple]) -> Triplets:
    sigma = ranks[0][0]
    u, v = (whole([rank[side] for rank in ranks]).T for side in (1, 2))
    return Triplets(sigma, u.contiguous(), v.contiguous())
