"""The snapshots of one rank: its parts of every adapter, at equal intervals, in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lora_rl.next.factors import AllReduce, Factors, RankOne, alone, difference, leading, product, squared_norm
from lora_rl.next.trajectory import Trajectory, Triplets

type Snapshot = dict[str, Factors]
# Inner product of a proposal with what training did next, and the squared norm of that.
type Projection = tuple[float, float]


class Recorder:
    """The newest snapshots, at most `capacity`; the oldest is the origin that changes are measured from.

    Attributes:
        snapshots: of the adapters of this rank by global module name, oldest first; float32 on the host, never from
            merged low-precision weights, in which small changes are lost.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.snapshots: list[Snapshot] = []

    def record(self, factors: Snapshot) -> None:
        """Keep copies of the adapters as they are."""
        own = {n: Factors(_copy(f.a), _copy(f.b), f.a_split, f.b_split) for n, f in factors.items()}
        self.snapshots = [*self.snapshots, own][-self._capacity :]

    def clear(self) -> None:
        """Forget all: the trajectory has been left."""
        self.snapshots = []

    def trajectories(self, horizon: int, all_reduce: AllReduce = alone) -> dict[str, Trajectory]:
        """The leading triplets of all changes of every matrix; vectors are sharded, signs arbitrary. Collective.

        Args:
            horizon: snapshots that are looked ahead.

        Raises:
            ValueError: there are fewer than two snapshots.
        """
        if len(self.snapshots) < 2:
            raise ValueError(f"a trajectory needs at least 2 snapshots, there are {len(self.snapshots)}")
        last = len(self.snapshots) - 1

        def triplets(name: str, pairs: Sequence[tuple[int, int]]) -> Triplets:
            return Triplets.of([leading(self._change(name, later, earlier), all_reduce) for later, earlier in pairs])

        found = {}
        for name in sorted(self.snapshots[0]):
            total = triplets(name, [(i, 0) for i in range(1, last + 1)])
            local = triplets(name, [(i, i - 1) for i in range(1, last + 1)])
            ahead = [(i + horizon, i) for i in range(last - horizon + 1)]
            found[name] = Trajectory(total, local, triplets(name, ahead) if ahead else total[:0], horizon)
        return found

    def project(
        self, proposals: Mapping[str, Sequence[RankOne]], at: Sequence[int], horizon: int, all_reduce: AllReduce = alone
    ) -> dict[str, list[Projection]]:
        """How proposals made at earlier snapshots compare with what training then did, all of it. Collective.

        Args:
            proposals: of every matrix, one for each snapshot of `at`, sharded as the matrix is.
            at: snapshots at which they were made.
        """
        return {
            name: [
                (product(ahead, proposal, all_reduce), squared_norm(ahead, all_reduce))
                for proposal, i in zip(proposals[name], at, strict=True)
                for ahead in [self._change(name, i + horizon, i)]
            ]
            for name in sorted(self.snapshots[0])
        }

    def distance(self, all_reduce: AllReduce = alone) -> dict[str, float]:
        """Squared norm, by matrix, of the way from the oldest snapshot to the newest. Collective."""
        last = len(self.snapshots) - 1
        return {n: squared_norm(self._change(n, last, 0), all_reduce) for n in sorted(self.snapshots[0])}

    def _change(self, name: str, later: int, earlier: int) -> Factors:
        return difference(self.snapshots[later][name], self.snapshots[earlier][name])


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float().cpu().clone()
