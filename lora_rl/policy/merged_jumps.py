"""Jumps that were added to the frozen weights of one rank, and what the weights were before them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lora_rl.lora.init import local_slice
from lora_rl.lora.peft_io import PeftAdapter
from lora_rl.lora.targets import adapter_modules, global_name, layer_numbers
from lora_rl.next.factors import RankOne
from lora_rl.next.writeback import into_weight

if TYPE_CHECKING:
    from lora_rl.policy.model import PolicyModel


class MergedJumps:
    """Sums of rank-1 changes, by module, in the weights below the adapters.

    Every weight is made from its original, so that going back is exact and nothing is rounded twice.

    Attributes:
        changes: one mapping per jump, of whole vectors of all modules of the model, oldest first.
    """

    def __init__(self, model: PolicyModel) -> None:
        self._model = model
        self.changes: list[dict[str, RankOne]] = []
        self._originals: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def set(self, changes: Sequence[Mapping[str, RankOne]]) -> None:
        """Make the frozen weights the original ones plus these changes. Any other module stays as it is."""
        from megatron.core import parallel_state

        if not changes and not self.changes:
            return
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.changes = [dict(jump) for jump in changes]
        for name, weight in self._weights().items():
            if name not in self._originals:
                self._originals[name] = weight.detach().cpu().clone()
            gated = name.endswith("linear_fc1") and self._model.module.config.gated_linear_unit
            columns = getattr(weight, "tensor_model_parallel", False) and weight.partition_dim == 1
            total = self._originals[name].float()
            for jump in self.changes:
                change = jump[name]
                # A linear that is split by its inputs has all rows, and the other way round.
                u = change.u if columns else local_slice(change.u[:, None], weight, tp_rank, gated=gated)[:, 0]
                v = local_slice(change.v[None], weight, tp_rank, gated=False)[0] if columns else change.v
                total = into_weight(total, RankOne(change.sigma, u, v))
            weight.copy_(total)

    @contextmanager
    def without(self) -> Iterator[None]:
        """The original weights, for the reference policy."""
        changes = self.changes
        if not changes:
            yield
            return
        try:
            self.set([])
            yield
        finally:
            self.set(changes)

    def onto(self, adapter: PeftAdapter) -> PeftAdapter:
        """An adapter of higher rank that gives, on the original base, what the policy computes."""
        from lora_rl.policy.export import hf_rows

        tensors = dict(adapter.tensors)
        for jump in self.changes:
            for name, change in jump.items():
                row = change.v.float()[None]
                for part, rows in hf_rows(self._model, name, len(change.u)).items():
                    old = tensors[part]
                    column = (change.sigma / old.scale * change.u[rows]).float()[:, None]
                    tensors[part] = replace(old, a=torch.cat([old.a, row]), b=torch.cat([old.b, column], dim=1))
        return PeftAdapter(tensors, adapter.base_model_name_or_path)

    def _weights(self) -> dict[str, torch.nn.Parameter]:
        """The weight below every adapter of this rank, by global module name."""
        module = self._model.module
        numbers, wanted = layer_numbers(module), adapter_modules(module).keys()
        return {
            name: linear.to_wrap.weight
            for path, linear in module.named_modules()
            if hasattr(linear, "to_wrap") and (name := global_name(path, numbers)) in wanted
        }


def without_jumps(adapter: PeftAdapter, count: int) -> PeftAdapter:
    """The inverse of `MergedJumps.onto`: the adapter less its last `count` ranks."""
    if not count:
        return adapter
    cut = {
        n: replace(t, a=t.a[:-count].contiguous(), b=t.b[:, :-count].contiguous()) for n, t in adapter.tensors.items()
    }
    return PeftAdapter(cut, adapter.base_model_name_or_path)
