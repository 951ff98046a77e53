"""One rank's part in extrapolating the adapters: its snapshots, its parts of directions, and the jump itself.

Everything in and out of a rank is whole and independent of the layout, as in `lora_rl.policy.state`; what is kept here
is this rank's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lora_rl.lora.init import local_slice
from lora_rl.lora.peft_io import PeftAdapter
from lora_rl.lora.targets import adapter_modules
from lora_rl.next.factors import Factors, RankOne
from lora_rl.next.recorder import Projection, Recorder
from lora_rl.next.trajectory import Trajectory, Triplets
from lora_rl.next.writeback import into_adapter
from lora_rl.policy.export import export_peft
from lora_rl.policy.state import state_of, whole
from lora_rl.policy.trainer import PolicyRank

# Whole A [r, n] and B [m, r] of every module, the adapter's scale in B, oldest snapshot first.
type Snapshots = list[dict[str, tuple[torch.Tensor, torch.Tensor]]]


def effective_factors(rank: PolicyRank, adapter: torch.nn.Module) -> Factors:
    """What an adapter adds to its linear, as this rank's part of two factors. Collective over tensor parallelism.

    Returns:
        float32 A [r, n'] with all r rows, and B [m', r] with the adapter's scale in it.
    """
    a, b = adapter.linear_in.weight, adapter.linear_out.weight
    rows = a.detach().float()
    if _is_split(a, 0) and _tp_size(rank) > 1:
        # A linear that is split by its outputs has an A that is split by its rank.
        shards = [torch.empty_like(rows) for _ in range(_tp_size(rank))]
        dist.all_gather(shards, rows.contiguous(), group=rank.tp_group)
        rows = torch.cat(shards)
    alone = _tp_size(rank) == 1
    scaled = b.detach().float() * _scale(rank)
    return Factors(rows, scaled, a_split=not alone and _is_split(a, 1), b_split=not alone and _is_split(b, 0))


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
        parts = {name: (t.total, t.last, t.future) for name, t in found.items()}
        every = self._gathered({n: [self._described(n, triplets) for triplets in p] for n, p in parts.items()})
        if every is None:
            return None
        return {n: Trajectory(*map(_joined, zip(*ranks, strict=True)), self._horizon) for n, ranks in every.items()}

    def project(
        self, proposals: Mapping[str, Sequence[RankOne]], at: Sequence[int]
    ) -> dict[str, list[Projection]] | None:
        """See `Recorder.project`; of the whole model, on rank 0."""
        own = {n: [self._part(n, p) for p in proposals[n]] for n in self._adapters()}
        found = self._gathered(self._recorder.project(own, at, self._horizon, self._all_reduce))
        return None if found is None else {name: ranks[0] for name, ranks in found.items()}

    @torch.no_grad()
    def jump(self, changes: Mapping[str, RankOne]) -> dict[str, float] | None:
        """Add a change to every adapter, which keeps its rank, and forget the moments of what was touched; or to every
        frozen weight.

        Returns:
            On rank 0: `dropped`, the largest share of an adapter's squared norm that truncation gave up; `norm`, the
            length of the changes as a share of the way from the oldest snapshot.
        """
        dropped = {}
        if self._merge:
            self._rank.merged.set([*self._rank.merged.changes, changes])
        for name, adapter in () if self._merge else self._adapters().items():
            change = self._part(name, changes[name])
            if change.sigma == 0.0:
                continue
            new, dropped[name] = into_adapter(effective_factors(self._rank, adapter), change, self._all_reduce)
            a, b = adapter.linear_in.weight, adapter.linear_out.weight
            rows = new.a.chunk(_tp_size(self._rank))[self._tp_rank] if _is_split(a, 0) else new.a
            a.copy_(rows)
            b.copy_(new.b / _scale(self._rank))
            self._forget_moments(a, b)
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
        gathered = []
        for snapshot in self._recorder.snapshots:
            parts = {}
            for name, f in snapshot.items():
                a_dim, b_dim = 1 if f.a_split else None, 0 if f.b_split else None
                parts[name] = ((f.a, a_dim, False), (f.b, b_dim, self._gated(name)))
            gathered.append(self._gathered(parts))
        if any(snapshot is None for snapshot in gathered):
            return None
        return [
            {n: tuple(whole(list(x)) for x in zip(*ranks, strict=True)) for n, ranks in s.items()} for s in gathered
        ]

    def load_snapshots(self, snapshots: Snapshots) -> None:
        """Continue from `snapshots`, at any layout."""
        self._recorder.clear()
        now = self._current()
        for snapshot in snapshots:
            own = {}
            for name, adapter in self._adapters().items():
                a, b = snapshot[name]
                if now[name].a_split:
                    a = local_slice(a, adapter.linear_in.weight, self._tp_rank, gated=False)
                b = local_slice(b, adapter.linear_out.weight, self._tp_rank, gated=self._gated(name))
                own[name] = Factors(a, b, now[name].a_split, now[name].b_split)
            self._recorder.record(own)

    # -- inside ------------------------------------------------------------------------------------------------

    @property
    def _tp_rank(self) -> int:
        return self._rank._parallel.get_tensor_model_parallel_rank()

    def _adapters(self) -> dict[str, torch.nn.Module]:
        return dict(sorted(adapter_modules(self._rank.model.module).items()))

    def _current(self) -> dict[str, Factors]:
        return {name: effective_factors(self._rank, adapter) for name, adapter in self._adapters().items()}

    def _gated(self, name: str) -> bool:
        return name.endswith("linear_fc1") and self._rank.model.module.config.gated_linear_unit

    def _all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        # Snapshots are on the host; the group may be of devices.
        total = tensor.to(self._rank.platform.device, copy=True)
        dist.all_reduce(total, group=self._rank.tp_group)
        return total.to(tensor.device)

    def _part(self, name: str, direction: RankOne) -> RankOne:
        """This rank's entries of u and v."""
        adapter = self._adapters()[name]
        a, b = adapter.linear_in.weight, adapter.linear_out.weight
        u = local_slice(direction.u[:, None], b, self._tp_rank, gated=self._gated(name))[:, 0]
        v = local_slice(direction.v[None], a, self._tp_rank, gated=False)[0] if _is_split(a, 1) else direction.v
        return RankOne(direction.sigma, u, v)

    def _described(self, name: str, triplets: Triplets) -> tuple:
        """Triplets with how their vectors are split: (sigma, (u [m', t], dim, gated), (v [n', t], dim, gated))."""
        factors = self._recorder.snapshots[0][name]
        u = (triplets.u.T, 0 if factors.b_split else None, self._gated(name))
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

    def _forget_moments(self, *parameters: torch.nn.Parameter) -> None:
        for parameter in parameters:
            for value in state_of(self._rank, parameter, create=False).values():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    value.zero_()


def _joined(ranks: Sequence[tuple]) -> Triplets:
    sigma = ranks[0][0]
    u, v = (whole([rank[side] for rank in ranks]).T for side in (1, 2))
    return Triplets(sigma, u.contiguous(), v.contiguous())


def _is_split(parameter: torch.nn.Parameter, dim: int) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False)) and parameter.partition_dim == dim


def _tp_size(rank: PolicyRank) -> int:
    return rank._parallel.get_tensor_model_parallel_world_size()


def _scale(rank: PolicyRank) -> float:
    return rank.model.lora.alpha / rank.model.lora.dim
