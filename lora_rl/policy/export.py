"""Reading weights out of the policy without touching them, and adapters into it, at any layout."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lora_rl.lora.init import full_shape, local_slice
from lora_rl.lora.merge import AdapterTensors
from lora_rl.lora.peft_io import PeftAdapter
from lora_rl.lora.svd import as_plain_lora
from lora_rl.lora.targets import adapter_modules
from lora_rl.policy.model import PolicyModel

_A, _B = ".lora_A.weight", ".lora_B.weight"


def base_weights(model: PolicyModel, *, cpu: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Full Hugging Face tensors of the base model, adapters left out. Collective: every rank must exhaust it.

    The bridge gathers each tensor into a new one or passes a live one on: read, never write. The iterator is lazy, so
    it must be consumed before the next optimizer step.

    Args:
        cpu: whether to move each tensor to the CPU.

    Yields:
        (name, tensor in the base model's dtype).
    """
    with torch.no_grad():
        for name, tensor in model.bridge.export_hf_weights(
            model.chunks, cpu=cpu, show_progress=False, merge_adapter_weights=False
        ):
            # The bridge marks the weights below an adapter as PEFT would.
            yield name.replace(".base_layer.", "."), tensor


@torch.no_grad()
def adapters(model: PolicyModel) -> dict[str, AdapterTensors]:
    """Copies of the adapters as they are now, whole, by Hugging Face module name. Collective.

    The parts of a fused Megatron linear (query, key, value; gate, up) share their A. An SVD-LoRA adapter becomes the
    plain one that computes the same: A = V^T, B = U C.

    Returns:
        float32 on the CPU.

    Raises:
        RuntimeError: the bridge exported something that is not a pair of LoRA matrices.
    """
    with as_plain_lora(adapter_modules(model.module).values()):
        return raw_adapters(model)


@torch.no_grad()
def raw_adapters(model: PolicyModel) -> dict[str, AdapterTensors]:
    """The same of what `linear_in` and `linear_out` hold: V^T and U where the adapters are SVD-LoRA. Collective."""
    factors: dict[str, dict[str, torch.Tensor]] = {}
    # By address; the original is kept, so that its address is not given to another tensor.
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, tensor in model.bridge.export_adapter_weights(model.chunks, cpu=True, show_progress=False):
        suffix = next((s for s in (_A, _B) if name.endswith(s)), None)
        if suffix is None or tensor.ndim != 2:
            raise RuntimeError(f"Megatron-Bridge exported {name} {list(tensor.shape)}, which is no LoRA matrix")
        # Without parallelism the exported tensor may be the live parameter.
        if suffix == _A:
            if tensor.data_ptr() not in copies:
                copies[tensor.data_ptr()] = (tensor, tensor.detach().float().clone())
            tensor = copies[tensor.data_ptr()][1]
        else:
            tensor = tensor.detach().float().contiguous().clone()
        factors.setdefault(name.removesuffix(suffix), {})[suffix] = tensor
    scale = model.lora.alpha / model.lora.dim
    return {module: AdapterTensors(pair[_A], pair[_B], scale) for module, pair in sorted(factors.items())}


def export_peft(model: PolicyModel) -> PeftAdapter:
    """The current adapters as Hugging Face PEFT knows them. Collective."""
    return PeftAdapter(adapters(model))


def save_model(model: PolicyModel, path: Path, source: Path) -> None:
    """Write the model's weights as a Hugging Face directory, which must not exist yet. Collective; rank 0 writes.

    Args:
        source: the directory it was loaded from; its configuration and tokenizer are copied.
    """
    from huggingface_hub import save_torch_state_dict

    # Cloned: without parallelism an exported tensor may be the live parameter, and tied ones would share memory.
    weights = {name: tensor.detach().clone() for name, tensor in base_weights(model)}
    if torch.distributed.get_rank() != 0:
        return
    path.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copy2(file, path / file.name)
    save_torch_state_dict(weights, path, metadata={"format": "pt"})
    for file in path.glob("*.safetensors"):
        # safetensors lets only the owner read it.
        file.chmod(0o644)


@torch.no_grad()
def import_peft(model: PolicyModel, adapter: PeftAdapter) -> None:
    """Overwrite the policy's adapters, so that it computes what base plus `adapter` compute. Collective.

    A Megatron linear may stand for several Hugging Face modules, and then has one A for all of them. Where theirs are
    equal (as in our own exports) it is taken over; otherwise their As are stacked, and B has one block per module.
    Ranks left over keep their random A, with B = 0: they can still learn.

    Args:
        adapter: the same on every rank.

    Raises:
        ValueError: naming modules that the policy does not adapt, shapes that do not fit, and the rank that would be
            needed where `policy.megatron_cfg.peft.dim` is too small.
    """
    problems: list[str] = []
    used: set[str] = set()
    registry = model.bridge._model_bridge.mapping_registry()
    loaded = []
    for name, module in adapter_modules(model.module).items():
        parts = hf_parts(registry, name)
        used |= set(parts)
        try:
            loaded.append((name, module, _fused(model, name, module, parts, adapter.tensors)))
        except ValueError as error:
            problems.append(str(error))
    everyone = from_all_stages((used, problems))
    used = set().union(*(part for part, _ in everyone))
    problems = [problem for _, found in everyone for problem in found]
    for unknown in sorted(adapter.tensors.keys() - used):
        near = difflib.get_close_matches(unknown, used, n=1)
        problems.append(
            f"the adapter has {unknown}, which policy.megatron_cfg.peft.target_modules does not adapt on this model"
            + (f" (nearest: {near[0]})" if near else "")
        )
    if problems:
        raise ValueError("\n".join(problems))
    for name, module, (a, b) in loaded:
        gated = name.endswith("linear_fc1") and model.module.config.gated_linear_unit
        for linear, full, is_gated in ((module.linear_in, a, False), (module.linear_out, b, gated)):
            linear.weight.copy_(local_slice(full, linear.weight, _tp()[0], gated=is_gated))


def hf_rows(model: PolicyModel, name: str, outputs: int) -> dict[str, torch.Tensor]:
    """The Hugging Face modules of one Megatron linear, with the rows of its whole weight that belong to each.

    Args:
        name: global module name, on any pipeline stage.
        outputs: rows of the whole weight.
    """
    parts = hf_parts(model.bridge._model_bridge.mapping_registry(), name)
    return dict(zip(parts, _rows(model, name, parts, outputs), strict=True))


def _fused(
    model: PolicyModel,
    name: str,
    module: torch.nn.Module,
    parts: list[str],
    tensors: Mapping[str, AdapterTensors],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole A [dim, in] and B [out, dim] of one Megatron linear from its parts' adapters."""
    dim, scale = model.lora.dim, model.lora.alpha / model.lora.dim
    inputs = full_shape(module.linear_in.weight, _tp()[1])[1]
    outputs = full_shape(module.linear_out.weight, _tp()[1])[0]
    rows = dict(zip(parts, _rows(model, name, parts, outputs), strict=True))
    given = {part: tensors[part] for part in parts if part in tensors}
    for part, t in given.items():
        if (t.b.shape[0], t.a.shape[1]) != (len(rows[part]), inputs):
            raise ValueError(
                f"{part}: an adapter with A {list(t.a.shape)} and B {list(t.b.shape)} does not fit a "
                f"{len(rows[part])} x {inputs} matrix"
            )
    shared = len({t.a.data_ptr() for t in given.values()}) == 1 or all(
        t.a.equal(next(iter(given.values())).a) for t in given.values()
    )
    needed = max((t.rank for t in given.values()), default=0) if shared else sum(t.rank for t in given.values())
    if needed > dim:
        raise ValueError(
            f"policy.megatron_cfg.peft.dim: {dim} is too small for the adapter: {', '.join(given)} "
            f"need{'s' if len(given) == 1 else ' together'} rank {needed}"
        )
    a = whole_a(module)
    b = torch.zeros(outputs, dim)
    start = 0
    for part, t in given.items():
        columns = slice(start, start + t.rank)
        a[columns] = t.a
        # Exactly as given where the scales agree.
        b[rows[part], columns] = t.b if t.scale == scale else t.b * (t.scale / scale)
        start += 0 if shared else t.rank
    return a, b


def _rows(model: PolicyModel, name: str, parts: list[str], outputs: int) -> list[torch.Tensor]:
    """Which rows of a fused Megatron matrix belong to each part, in the part's order."""
    every = torch.arange(outputs)
    if len(parts) == 1:
        return [every]
    if name.endswith("linear_qkv"):
        from megatron.bridge.models.conversion.param_mapping import split_qkv_weights

        by_part = split_qkv_weights(model.module.config, every[:, None], feature_dim=1)
        order = {"q_proj": 0, "k_proj": 1, "v_proj": 2}
        return [by_part[order[part.rsplit(".", 1)[-1]]].reshape(-1) for part in parts]
    if name.endswith("linear_fc1") and len(parts) == 2:
        halves = dict(zip(("gate_proj", "up_proj"), every.chunk(2), strict=True))
        return [halves[part.rsplit(".", 1)[-1]] for part in parts]
    raise ValueError(f"no rule to split {name} into {', '.join(parts)}")


def hf_parts(registry: Any, name: str) -> list[str]:
    """Hugging Face modules that one Megatron linear stands for."""
    mapping = registry.megatron_to_hf_lookup(f"{name}.weight")
    if mapping is None:
        raise ValueError(f"Megatron-Bridge knows no Hugging Face name for {name}")
    names = [mapping.hf_param] if isinstance(mapping.hf_param, str) else list(mapping.hf_param.values())
    return [n.removesuffix(".weight") for n in names]


def whole_a(module: torch.nn.Module) -> torch.Tensor:
    """A [dim, in] of one adapter, put together from its tensor-parallel shards, as a copy. Collective."""
    weight = module.linear_in.weight
    size = _tp()[1]
    if size == 1 or not getattr(weight, "tensor_model_parallel", False):
        return weight.detach().float().clone()
    from megatron.core import parallel_state

    shards = [torch.empty_like(weight) for _ in range(size)]
    torch.distributed.all_gather(
        shards, weight.detach().contiguous(), group=parallel_state.get_tensor_model_parallel_group()
    )
    return torch.cat(shards, dim=weight.partition_dim).float()


def from_all_stages(value: Any) -> list[Any]:
    """A value of each pipeline stage, on every one of them. Collective."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    values: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def _tp() -> tuple[int, int]:
    from megatron.core import parallel_state

    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
