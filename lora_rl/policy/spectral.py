"""SVD-LoRA in the policy: from an imported adapter to frozen singular vectors, and what a push of sigma needs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from lora_rl.lora.svd import ALONE, Decomposition, Shards, Spectrum, SvdMode, decompose, spectrum_of
from lora_rl.lora.targets import adapter_modules
from lora_rl.policy.export import from_all_stages, hf_parts, raw_adapters, whole_a
from lora_rl.policy.model import PolicyModel
from lora_rl.sync.spectral import SpectralTensors


def spectra(model: PolicyModel) -> Iterator[tuple[str, torch.nn.Module, Spectrum]]:
    """(global name of the linear, adapter, its spectrum) of this rank's SVD-LoRA adapters."""
    for name, adapter in adapter_modules(model.module).items():
        spectrum = spectrum_of(adapter)
        if spectrum is not None:
            yield name, adapter, spectrum


@torch.no_grad()
def decompose_adapters(model: PolicyModel, mode: SvdMode) -> None:
    """Replace the A and B that the adapters hold by V^T, U and the spectrum, which compute the same. Collective.

    Only r x r matrices travel between tensor-parallel ranks, and the rows of A where they are spread over the rank
    dimension. Data-parallel replicas take the result of their first one.

    Raises:
        ValueError: naming linears on which the adapter is 0.
    """
    from megatron.core import parallel_state

    everywhere = _tensor_parallel()
    found: list[tuple[torch.nn.Module, Spectrum, Decomposition]] = []
    empty = []
    for name, adapter, spectrum in spectra(model):
        a_spread = _partition(adapter.linear_in.weight) == 1
        a = adapter.linear_in.weight if a_spread else whole_a(adapter)
        parts = decompose(
            a, adapter.linear_out.weight, mode, a_shards=everywhere if a_spread else ALONE, b_shards=everywhere
        )
        if parts is None:
            empty.append(name)
        else:
            found.append((adapter, spectrum, parts))
    # One stage that gives up alone would leave the others waiting for it.
    if empty := sorted(name for names in from_all_stages(empty) for name in names):
        raise ValueError(
            f"policy.megatron_cfg.peft.svd needs a trained adapter, but the one in adapter_path is 0 on {len(empty)} "
            f"linears ({', '.join(empty[:4])}): it has no singular vectors there. Train it first, or leave them out of "
            "policy.megatron_cfg.peft.target_modules"
        )
    group = parallel_state.get_data_parallel_group()
    for adapter, spectrum, parts in found:
        weight = adapter.linear_in.weight
        v = parts.v.T
        if _partition(weight) == 0:
            v = v.chunk(parallel_state.get_tensor_model_parallel_world_size())[everywhere.rank]
        weight.copy_(v)
        adapter.linear_out.weight.copy_(parts.u)
        spectrum.start_from(parts)
        if group.size() > 1:
            for tensor in (weight, adapter.linear_out.weight, spectrum.sigma_ref, spectrum.mixing):
                dist.broadcast(tensor.data, dist.get_global_rank(group, 0), group=group)


@torch.no_grad()
def frames(model: PolicyModel) -> dict[str, SpectralTensors]:
    """V^T, U and M of every adapter, whole, by Hugging Face module name, float32 on the CPU. Collective."""
    mixings = _by_hf_module(model, lambda s: s.mixing if s.mode == "factors" else None)
    return {
        module: SpectralTensors(tensors.a, tensors.b, mixings[module], tensors.scale)
        for module, tensors in raw_adapters(model).items()
    }


@torch.no_grad()
def sigmas(model: PolicyModel) -> dict[str, torch.Tensor]:
    """The trained numbers of every adapter by Hugging Face module name, float32 on the CPU. Collective.

    The parts of a fused Megatron linear share one tensor.
    """
    return {name: sigma for name, sigma in _by_hf_module(model, lambda s: s.sigma).items() if sigma is not None}


def _by_hf_module(model: PolicyModel, value: object) -> dict[str, torch.Tensor | None]:
    registry = model.bridge._model_bridge.mapping_registry()
    mine = []
    for name, _, spectrum in spectra(model):
        tensor = value(spectrum)  # type: ignore[operator]
        mine.append((hf_parts(registry, name), None if tensor is None else tensor.detach().float().cpu().clone()))
    return {part: tensor for stage in from_all_stages(mine) for parts, tensor in stage for part in parts}


def _partition(weight: torch.nn.Parameter) -> int | None:
    """Along which dimension a parameter is spread over tensor-parallel ranks."""
    return weight.partition_dim if getattr(weight, "tensor_model_parallel", False) else None


def _tensor_parallel() -> Shards:
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return ALONE

    def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor, group=group)
        return parts

    return Shards(parallel_state.get_tensor_model_parallel_rank(), gather)
