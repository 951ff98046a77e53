"""Pushes of an SVD-LoRA policy of which only sigma travels: the singular vectors stay in the buffer engines read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from lora_rl.sync.manifest import LORA_A, LORA_B, LORA_MIXING, LORA_SIGMA, Manifest, TensorEntry
from lora_rl.sync.sender import Push, WeightSender, check_changed
from lora_rl.sync.shared_memory import SharedBuffer, aligned

if TYPE_CHECKING:
    import numpy as np

    from lora_rl.sync.manifest import Transfer


@dataclass(frozen=True)
class SpectralTensors:
    """The frozen part of one adapter; see `lora_rl.lora.svd`.

    Attributes:
        a: float32 [r, in], V^T.
        b: float32 [out, r], U.
        mixing: float32 [r, r], M of mode `factors`; None in the others.
        scale: alpha / r.
    """

    a: torch.Tensor
    b: torch.Tensor
    mixing: torch.Tensor | None
    scale: float


@dataclass
class SigmaSender(WeightSender):
    """Writes the singular vectors once, behind the place of sigma, and from then on only sigma.

    Every manifest lists all tensors with their checksums, so a push proves the whole adapter as a full push does, and
    an engine that comes later finds everything in the buffer.

    Attributes:
        frames: the singular vectors by Hugging Face module; collective, called once for the size and once to write.
        sigmas: the trained numbers by Hugging Face module; collective, called at every push.
    """

    frames: Callable[[], dict[str, SpectralTensors]] = field(kw_only=True)
    sigmas: Callable[[], dict[str, torch.Tensor]] = field(kw_only=True)
    _frames: tuple[TensorEntry, ...] = field(default=(), init=False, repr=False)
    _scales: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _sigma_bytes: int = field(default=0, init=False, repr=False)

    def open(self) -> Transfer | None:
        """Allocate the buffer, and write the singular vectors. Collective; see `WeightSender.open`."""
        frames, sigmas = self.frames(), self.sigmas()
        if not self.is_sender:
            return None
        size = 0
        for _, tensor in _unique(_sigma_tensors(sigmas)):
            size = aligned(size) + tensor.nbytes
        self._sigma_bytes = aligned(size)
        for _, tensor in _unique(_frame_tensors(frames)):
            size = aligned(size) + tensor.nbytes
        self._buffer = SharedBuffer.create(size)
        self._frames = tuple(self._write_all(_frame_tensors(frames), start=self._sigma_bytes))
        self._scales = {name: frame.scale for name, frame in frames.items()}
        names = [name for name, _ in (*_sigma_tensors(sigmas), *_frame_tensors(frames))]
        return self._transfer(names)

    def payload(self, *, changed: bool = False) -> np.ndarray:
        """As in `WeightSender`; what changes between pushes is at the front."""
        whole = super().payload()
        return whole[: self._sigma_bytes] if changed and self._pushes > 1 else whole

    def send(self, version: int, *, must_differ: bool) -> Push | None:
        """See `WeightSender.send`."""
        sigmas = self.sigmas()
        entries = tuple(self._write_all(_sigma_tensors(sigmas)))
        if not self.is_sender:
            return None
        entries += self._frames
        manifest = Manifest(version, entries, self.mode, self._scales, self.rounding, self.seed)
        check_changed(manifest, self._last, must_differ=must_differ)
        return self._sent(manifest, None)


def _sigma_tensors(sigmas: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for module in sorted(sigmas):
        yield module + LORA_SIGMA, sigmas[module]


def _frame_tensors(frames: dict[str, SpectralTensors]) -> Iterator[tuple[str, torch.Tensor]]:
    for module in sorted(frames):
        frame = frames[module]
        yield module + LORA_A, frame.a
        yield module + LORA_B, frame.b
        if frame.mixing is not None:
            yield module + LORA_MIXING, frame.mixing


def _unique(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parts of a fused linear share tensors, which are written once."""
    seen: dict[int, torch.Tensor] = {}
    for name, tensor in tensors:
        if id(tensor) not in seen:
            seen[id(tensor)] = tensor
            yield name, tensor
