"""Starting values of adapters that do not depend on how the model is split over ranks.

Megatron initialises a sharded linear from a per-rank random stream, so a run on two tensor-parallel ranks would start
from other adapters than a run on one. Here each adapter's full A and B are drawn from a generator seeded by the run's
seed and the module's global name, and every rank keeps its slice.
"""

from __future__ import annotations

import hashlib
import math

import torch

from lora_rl.lora.targets import adapter_modules

A_INITS = ("xavier", "kaiming", "normal", "uniform")
B_INITS = ("zero", "normal", "xavier", "kaiming", "uniform")


def full_shape(parameter: torch.nn.Parameter, tp_size: int) -> tuple[int, ...]:
    """Shape of the unsharded tensor that a tensor-parallel parameter is a slice of."""
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= tp_size
    return tuple(shape)


def local_slice(full: torch.Tensor, parameter: torch.nn.Parameter, tp_rank: int, *, gated: bool) -> torch.Tensor:
    """This rank's part of a full matrix, by the parameter's partition dimension.

    Args:
        gated: the rows are those of a gate followed by those of the up projection; each rank holds a part of both.
    """
    if not getattr(parameter, "tensor_model_parallel", False):
        return full
    dim = parameter.partition_dim
    size = parameter.shape[dim]
    if gated and dim == 0:
        half = size // 2
        return torch.cat([part.narrow(0, tp_rank * half, half) for part in full.chunk(2)])
    return full.narrow(dim, tp_rank * size, size)


def draw(name: str, shape: tuple[int, ...], method: str, seed: int) -> torch.Tensor:
    """The full starting matrix of one adapter factor.

    Args:
        name: global name of the factor; together with `seed` it determines every value.
        shape: (out, in).
        method: `zero`; `xavier` N(0, 2/(in+out)) (Glorot and Bengio 2010); `kaiming` U(+-1/sqrt(in)), as PEFT starts A
            (He et al. 2015 with a = sqrt(5)); `normal` N(0, 0.02^2); `uniform` U(+-sqrt(6/(in+out))).
        seed: the run's seed.

    Returns:
        float32 [out, in] on the CPU.

    Raises:
        ValueError: unknown method.
    """
    rows, columns = shape
    if method == "zero":
        return torch.zeros(rows, columns)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if method == "xavier":
        return torch.randn(rows, columns, generator=generator) * math.sqrt(2.0 / (rows + columns))
    if method == "normal":
        return torch.randn(rows, columns, generator=generator) * 0.02
    if method == "kaiming":
        bound = 1.0 / math.sqrt(columns)
    elif method == "uniform":
        bound = math.sqrt(6.0 / (rows + columns))
    else:
        raise ValueError(f"unknown adapter initialisation {method!r}; valid are {sorted({*A_INITS, *B_INITS})}")
    return (torch.rand(rows, columns, generator=generator) * 2.0 - 1.0) * bound


def initialise_adapters(
    model: torch.nn.Module, *, a_method: str, b_method: str, seed: int, tp_rank: int, tp_size: int
) -> None:
    """Overwrite every adapter of a model chunk with layout-independent starting values, in place.

    Args:
        model: one Megatron model chunk with LoRA layers.
        a_method, b_method: see `draw`; B = `zero` makes the adapted model equal the base model at the start.
        seed: the run's seed.
        tp_rank, tp_size: this rank's place in its tensor-parallel group.
    """
    with torch.no_grad():
        for name, adapter in adapter_modules(model).items():
            for part, method in (("linear_in", a_method), ("linear_out", b_method)):
                parameter = getattr(adapter, part).weight
                full = draw(f"{name}.{part}", full_shape(parameter, tp_size), method, seed)
                gated = part == "linear_out" and name.endswith("linear_fc1") and model.config.gated_linear_unit
                parameter.copy_(local_slice(full, parameter, tp_rank, gated=gated))
