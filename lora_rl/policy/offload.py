"""Moving the frozen base weights out of the device while the engines generate."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class FrozenWeights:
    """The frozen parameters of a policy, which Megatron's DDP buffers do not hold and so nobody else moves.

    Adapters, their gradients and optimizer state are small and stay: they are exported and saved at any time. That
    includes singular vectors, which SVD-LoRA does not train.
    """

    def __init__(self, chunks: Iterable[torch.nn.Module]) -> None:
        # Tied weights are one parameter.
        unique = {
            id(p): p
            for chunk in chunks
            for name, p in chunk.named_parameters()
            if not p.requires_grad and ".adapter." not in name
        }
        self._parameters = list(unique.values())
        self._host: list[torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that `offload` frees on the device; 0 while they are away."""
        return sum(p.data.numel() * p.data.element_size() for p in self._parameters)

    @property
    def on_device(self) -> bool:
        """Whether the weights are where the model computes."""
        return self._host is None

    @torch.no_grad()
    def offload(self) -> None:
        """Copy every frozen parameter to host memory and free its device memory. Safe to repeat.

        Until `reload`, the model cannot compute or be exported.
        """
        if self._host is not None:
            return
        self._host = []
        for parameter in self._parameters:
            on_gpu = parameter.data.is_cuda
            copy = torch.empty_like(parameter.data, device="cpu", pin_memory=on_gpu)
            copy.copy_(parameter.data, non_blocking=on_gpu)
            self._host.append(copy)
        if self._parameters and self._parameters[0].is_cuda:
            torch.cuda.synchronize()
        for parameter in self._parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        if self._parameters and self._parameters[0].is_cuda:
            torch.cuda.empty_cache()

    @torch.no_grad()
    def reload(self) -> None:
        """Bring the parameters back, bit for bit. Safe to repeat."""
        if self._host is None:
            return
        for parameter, copy in zip(self._parameters, self._host, strict=True):
            parameter.data = copy.to(parameter.device, non_blocking=True)
        if self._parameters and self._parameters[0].is_cuda:
            torch.cuda.synchronize()
        self._host = None
