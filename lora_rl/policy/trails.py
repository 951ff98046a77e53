"""What an extrapolation sees of an adapter: the matrix whose path is recorded, and how a change of it is made.

For LoRA that is what A and B add to the weight. SVD-LoRA moves only in a few numbers, which every tensor-parallel rank
holds: there it is theta, written as a matrix of one column, whose changes all have rank 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from lora_rl.lora.init import local_slice
from lora_rl.lora.svd import Spectrum, spectrum_of
from lora_rl.lora.targets import adapter_modules
from lora_rl.next.factors import AllReduce, Factors, RankOne
from lora_rl.next.writeback import into_adapter
from lora_rl.policy.trainer import PolicyRank


class Trail(Protocol):
    """One adapter of this rank. Everything but `own` and `part` may be collective over tensor parallelism."""

    @property
    def gated(self) -> bool:
        """Whether rows are those of a gate followed by those of the up projection."""
        ...

    def factors(self) -> Factors:
        """The matrix as it is now, this rank's part in float32: A [r, n'] with all r rows, and B [m', r]."""
        ...

    def own(self, a: torch.Tensor, b: torch.Tensor) -> Factors:
        """This rank's part of whole factors."""
        ...

    def part(self, direction: RankOne) -> RankOne:
        """This rank's entries of whole u and v."""
        ...

    def add(self, change: RankOne, all_reduce: AllReduce) -> float:
        """Make a change, of which `part` was taken, and forget the optimizer's moments of what it touches.

        Returns:
            The share of the squared norm that had to be given up.
        """
        ...


def trails_of(rank: PolicyRank) -> dict[str, Trail]:
    """The adapters of this rank by global module name, sorted."""
    found: dict[str, Trail] = {}
    for name, adapter in sorted(adapter_modules(rank.model.module).items()):
        spectrum = spectrum_of(adapter)
        gated = name.endswith("linear_fc1") and rank.model.module.config.gated_linear_unit
        found[name] = LoraTrail(rank, adapter, gated) if spectrum is None else SpectralTrail(rank, spectrum)
    return found


@dataclass(frozen=True)
class LoraTrail:
    """What A and B add to the weight, with the adapter's scale in B. A jump keeps the rank."""

    rank: PolicyRank
    adapter: torch.nn.Module
    gated: bool

    def factors(self) -> Factors:
        """See `Trail`."""
        rows = self._a.detach().float()
        if _is_split(self._a, 0) and self._tp_size > 1:
            # A linear that is split by its outputs has an A that is split by its rank.
            shards = [torch.empty_like(rows) for _ in range(self._tp_size)]
            dist.all_gather(shards, rows.contiguous(), group=self.rank.tp_group)
            rows = torch.cat(shards)
        return Factors(rows, self._b.detach().float() * self._scale, *self._splits)

    def own(self, a: torch.Tensor, b: torch.Tensor) -> Factors:
        """See `Trail`."""
        if _is_split(self._a, 1):
            a = local_slice(a, self._a, self._tp_rank, gated=False)
        return Factors(a, local_slice(b, self._b, self._tp_rank, gated=self.gated), *self._splits)

    def part(self, direction: RankOne) -> RankOne:
        """See `Trail`."""
        own = self.own(direction.v[None], direction.u[:, None])
        return RankOne(direction.sigma, own.b[:, 0], own.a[0])

    def add(self, change: RankOne, all_reduce: AllReduce) -> float:
        """See `Trail`."""
        now = self.factors()
        # On the host, where proposals are.
        now = Factors(now.a.cpu(), now.b.cpu(), now.a_split, now.b_split)
        new, dropped = into_adapter(now, change, all_reduce)
        rows = new.a.chunk(self._tp_size)[self._tp_rank] if _is_split(self._a, 0) else new.a
        self._a.copy_(rows)
        self._b.copy_(new.b / self._scale)
        return dropped

    @property
    def _a(self) -> torch.nn.Parameter:
        return self.adapter.linear_in.weight

    @property
    def _b(self) -> torch.nn.Parameter:
        return self.adapter.linear_out.weight

    @property
    def _splits(self) -> tuple[bool, bool]:
        alone = self._tp_size == 1
        return not alone and _is_split(self._a, 1), not alone and _is_split(self._b, 0)

    @property
    def _scale(self) -> float:
        return self.rank.model.lora.alpha / self.rank.model.lora.dim

    @property
    def _tp_size(self) -> int:
        return self.rank._parallel.get_tensor_model_parallel_world_size()

    @property
    def _tp_rank(self) -> int:
        return self.rank._parallel.get_tensor_model_parallel_rank()


@dataclass(frozen=True)
class SpectralTrail:
    """Theta of an SVD-LoRA adapter as a column: W = theta [n, 1] times A = 1 [1, 1]. Jumps are exact."""

    rank: PolicyRank
    spectrum: Spectrum
    gated: bool = False

    def factors(self) -> Factors:
        """See `Trail`."""
        theta = self.spectrum.theta.detach().reshape(-1, 1)
        return Factors(theta.new_ones(1, 1), theta)

    def own(self, a: torch.Tensor, b: torch.Tensor) -> Factors:
        """See `Trail`."""
        return Factors(a, b)

    def part(self, direction: RankOne) -> RankOne:
        """See `Trail`."""
        return direction

    def add(self, change: RankOne, all_reduce: AllReduce) -> float:
        """See `Trail`."""
        theta = self.spectrum.theta
        step = change.sigma * float(change.v[0]) * change.u.double()
        theta.copy_((theta.double().cpu() + step.view(theta.shape)).float())
        return 0.0


def _is_split(parameter: torch.nn.Parameter, dim: int) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False)) and parameter.partition_dim == dim
