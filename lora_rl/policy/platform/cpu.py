"""CPU platform: patches with which Megatron-Core and Megatron-Bridge run without CUDA.

Both packages are written for GPUs: they name the device `"cuda"` in literals, keep a CUDA random-number tracker and
assert CUDA tensor types. None of that is essential to their maths. Each function below removes one such assumption
and says why. `prepare` does nothing but report when torch sees a GPU and the caller asked for `cuda`; when the
caller asked for `cpu` on a machine with a GPU the patches apply to this process only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device

from lora_rl.cluster.memory import keep_freed_memory
from lora_rl.policy.platform.base import Platform
from lora_rl.policy.platform.without_te import UNFUSED, import_bridge

# Tensor factories that Megatron calls with `device="cuda"`.
_FACTORIES = (
    "tensor",
    "as_tensor",
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "rand",
    "randn",
    "randint",
    "eye",
)
_LIKE_FACTORIES = ("empty_like", "zeros_like", "ones_like", "full_like")

# Fused kernels exist for CUDA only (or would be compiled by torch.compile at the first call, which takes minutes).
_PROVIDER_OVERRIDES = {
    **UNFUSED,
    "use_cpu_initialization": True,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False,
}

_prepared: Platform | None = None


def prepare(num_threads: int = 1) -> Platform:
    """Patch this process for Megatron on CPU, import Megatron-Bridge, and return the platform record.

    Args:
        num_threads: OpenMP threads for torch in this process.

    Raises:
        RuntimeError: Megatron-Bridge's LoRA layers were imported before the patches were in place.
    """
    global _prepared
    torch.set_num_threads(num_threads)
    keep_freed_memory()
    if _prepared is not None:
        return _prepared
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron was imported before lora_rl.policy.platform.prepare('cpu'); call prepare first, "
            "because Megatron copies the names that have to be patched"
        )
    # Megatron decorates small functions with torch.compile; on CPU that would start a C++ compiler in mid-step.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    _redirect_device_arguments()
    _redirect_current_device()
    _redirect_random_state()
    _silence_streams()
    import_bridge()
    _patch_megatron_core()
    _prepared = Platform(
        name="cpu",
        device="cpu",
        backend="gloo",
        transformer_engine=False,
        provider_overrides=dict(_PROVIDER_OVERRIDES),
    )
    return _prepared


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _redirect_device_arguments() -> None:
    """`torch.zeros(..., device="cuda")`, `x.cuda()`, `x.to("cuda")`: compute on the CPU instead.

    Wrapping the factories costs nothing on any other operation; a `TorchFunctionMode` would do the same but adds
    Python time to every tensor operation of every layer.
    """

    def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

        return wrapped

    # `with torch.device("meta")` recognises factories by identity, from a list it builds at first use; build it from
    # the originals, or models that are initialised on the meta device would silently get uninitialised buffers.
    torch.utils._device._device_constructors()
    for name in (*_FACTORIES, *_LIKE_FACTORIES):
        setattr(torch, name, on_cpu(getattr(torch, name)))

    original_to = torch.Tensor.to

    @functools.wraps(original_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = ("cpu", *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return original_to(self, *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]


def _redirect_current_device() -> None:
    """`device=torch.cuda.current_device()` is how Megatron names "here"; here is the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]


def _redirect_random_state() -> None:
    """Megatron's RNG tracker saves and restores the CUDA generator; on CPU the default generator plays its part.

    The tracker also restores the CPU state after each fork, so both views stay consistent.
    """

    def get_state(device: Any = "cuda") -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_state(state: torch.Tensor, device: Any = "cuda") -> None:
        torch.default_generator.set_state(state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = get_state  # type: ignore[assignment]
        module.set_rng_state = set_state  # type: ignore[assignment]
        module.manual_seed = manual_seed  # type: ignore[assignment]


class _NoStream:
    """Stands in for a CUDA stream: CPU work is ordered by program order, so every wait is already satisfied."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> _NoStream:
        """An event of it, which is waited for as the stream is."""
        return self

    def synchronize(self) -> None: ...


def _silence_streams() -> None:
    """Pipeline communication and the DDP wrapper synchronise streams; there is nothing to wait for on CPU."""
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    torch.cuda.empty_cache = lambda: None  # type: ignore[assignment]
    torch.cuda.current_stream = lambda device=None: _NoStream()  # type: ignore[assignment]
    torch.cuda.default_stream = lambda device=None: _NoStream()  # type: ignore[assignment]
    torch.cuda.Stream = _NoStream  # type: ignore[assignment,misc]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]


def _patch_megatron_core() -> None:
    import megatron.core.optimizer.clip_grads as clip_grads
    import megatron.core.optimizer.optimizer as optimizer
    import megatron.core.tensor_parallel.random as mcore_random

    def set_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.default_generator.set_state(new_state)

    # The tracker restores states through this private function, which ends in a CUDA call.
    mcore_random._set_cuda_rng_state = set_rng_state

    def clip_grad_by_total_norm_fp32(
        parameters: Any, max_norm: float, total_norm: float, use_decoupled_grad: bool = False
    ) -> None:
        coefficient = float(max_norm) / (float(total_norm) + 1.0e-6)
        if coefficient < 1.0:
            name = "decoupled_grad" if use_decoupled_grad else "grad"
            grads = [g for p in parameters if (g := getattr(p, name, None)) is not None]
            if grads:
                torch._foreach_mul_(grads, coefficient)

    # The original asserts `torch.cuda.FloatTensor`; the optimizer module holds its own reference to the function.
    clip_grads.clip_grad_by_total_norm_fp32 = clip_grad_by_total_norm_fp32
    optimizer.clip_grad_by_total_norm_fp32 = clip_grad_by_total_norm_fp32
