"""Trainer side: writes each push where the engines read it, with the proof of what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from lora_rl.lora.merge import AdapterTensors, Fidelity, Rounding, merge, seed_for
from lora_rl.sync.errors import SyncError
from lora_rl.sync.manifest import LORA_A, LORA_B, Manifest, SyncMode, TensorEntry, Transfer, checksum
from lora_rl.sync.shared_memory import SharedBuffer, aligned

BaseWeights = Callable[[], Iterable[tuple[str, torch.Tensor]]]
Adapters = Callable[[], dict[str, AdapterTensors]]


@dataclass(frozen=True)
class Push:
    """What the sending rank reports of one push.

    Attributes:
        manifest: what the engines must echo.
        fidelity: what the cast delivered of the update; None where the engines merge and measure it.
        sent_bytes: payload that differs from the last push; the rest did not have to travel.
    """

    manifest: Manifest
    fidelity: Fidelity | None
    sent_bytes: int


@dataclass
class WeightSender:
    """Writes pushes into shared memory. Rank 0 of the world sends; the other ranks take part in the gathers.

    Live weights are only read: the bridge gathers them into new tensors, the merge happens on a float32 copy.

    Attributes:
        mode: `merged` sends full Hugging Face tensors, the others only A and B.
        base: starts a fresh pass over the base model's Hugging Face tensors; collective over the ranks.
        adapters: float32 copies of the adapters by Hugging Face module name; collective over the ranks.
        is_sender: whether this rank writes the buffer.
        dtype: the engine's weight type; merged tensors are cast to it once, here.
        rounding: of that cast.
        seed: of stochastic rounding.
    """

    mode: SyncMode
    base: BaseWeights
    adapters: Adapters
    is_sender: bool
    dtype: torch.dtype
    rounding: Rounding = "nearest"
    seed: int = 0
    _buffer: SharedBuffer | None = field(default=None, init=False, repr=False)
    _last: Manifest | None = field(default=None, init=False, repr=False)
    _pushes: int = field(default=0, init=False, repr=False)

    def open(self) -> Transfer | None:
        """Allocate the buffer for this model's size. Collective.

        Returns:
            What the engines must know, on the sending rank; None on the others.
        """
        size, names = 0, []
        for name, tensor, dtype in self._plain_tensors():
            size = aligned(size) + tensor.numel() * dtype.itemsize
            names.append(name)
        if not self.is_sender:
            return None
        self._buffer = SharedBuffer.create(size)
        return self._transfer(names)

    def close_name(self) -> None:
        """Remove the buffer's file name once every engine worker has mapped it."""
        if self._buffer is not None:
            self._buffer.unlink()

    def payload(self, *, changed: bool = False) -> np.ndarray:
        """The buffer's bytes, uint8, shared and not copied: read before the next push.

        Args:
            changed: for a reader that has the payload of the push before the last one: the front of the buffer up to
                where the last push may have changed it. Here that is all of it.
        """
        if self._buffer is None:
            raise RuntimeError("there is no payload before open")
        return self._buffer.bytes.numpy()

    def send(self, version: int, *, must_differ: bool) -> Push | None:
        """Write the weights of `version` into the buffer. Collective; everything is read before it returns.

        Args:
            version: weight version of this push.
            must_differ: an optimizer step lies between this push and the last one.

        Returns:
            The push on the sending rank, None on the others.

        Raises:
            SyncError: `must_differ`, but every byte equals the last push: the adapters did not reach the payload.
        """
        adapters = self.adapters()
        parts: list[Fidelity] = []
        merging = self.mode == "merged"
        tensors: Iterable[tuple[str, torch.Tensor]] = _factors(adapters)
        if merging:
            tensors = merged_tensors(
                self.base(),
                adapters,
                parts,
                version=version,
                dtype=self.dtype,
                rounding=self.rounding,
                seed=self.seed,
                merging_here=self.is_sender,
            )
        entries = tuple(self._write_all(tensors))
        if not self.is_sender:
            return None
        scales = {} if merging else {name: adapter.scale for name, adapter in adapters.items()}
        manifest = Manifest(version, entries, self.mode, scales, self.rounding, self.seed)
        check_changed(manifest, self._last, must_differ=must_differ)
        return self._sent(manifest, sum(parts, Fidelity.zero()) if merging else None)

    def _transfer(self, names: Iterable[str]) -> Transfer:
        assert self._buffer is not None
        return Transfer(str(self._buffer.path), len(self._buffer.bytes), tuple(names))

    def _sent(self, manifest: Manifest, fidelity: Fidelity | None) -> Push:
        known = set() if self._last is None else set(self._last.entries)
        sent = {entry.offset: entry.nbytes for entry in manifest.entries if entry not in known}
        self._last = manifest
        self._pushes += 1
        return Push(manifest, fidelity, sum(sent.values()))

    def _write_all(self, tensors: Iterable[tuple[str, torch.Tensor]], start: int = 0) -> Iterator[TensorEntry]:
        """Exhaust the tensors on every rank, and write them on the sending one, from offset `start` on.

        Parts of a fused linear share their A: the same tensor given again is not written again.
        """
        offset = start
        written: dict[int, tuple[torch.Tensor, TensorEntry]] = {}
        for name, tensor in tensors:
            if not self.is_sender:
                continue
            if (same := written.get(id(tensor))) is not None:
                yield replace(same[1], name=name)
                continue
            entry = self._write(name, tensor, aligned(offset))
            offset = entry.offset + entry.nbytes
            if self.mode != "merged":
                # Kept, so that its identity is not given to another tensor.
                written[id(tensor)] = (tensor, entry)
            yield entry

    def _plain_tensors(self) -> Iterator[tuple[str, torch.Tensor, torch.dtype]]:
        if self.mode == "merged":
            yield from ((name, tensor, self.dtype) for name, tensor in self.base())
        else:
            yield from ((name, tensor, torch.float32) for name, tensor in _factors(self.adapters()))

    def _write(self, name: str, tensor: torch.Tensor, offset: int) -> TensorEntry:
        if self._buffer is None:
            raise RuntimeError("send before open: there is no buffer to write to")
        target = self._buffer.view(offset, tuple(tensor.shape), tensor.dtype)
        target.copy_(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        nbytes = tensor.numel() * tensor.dtype.itemsize
        return TensorEntry(name, tuple(tensor.shape), dtype, offset, nbytes, checksum(target))


def merged_tensors(
    base: Iterable[tuple[str, torch.Tensor]],
    adapters: dict[str, AdapterTensors],
    parts: list[Fidelity],
    *,
    version: int,
    dtype: torch.dtype,
    rounding: Rounding,
    seed: int,
    merging_here: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Base tensors in the engine's type, with the adapters merged into those that have one.

    Args:
        base: Hugging Face names and tensors, exhausted whatever `merging_here` says.
        parts: receives the fidelity of each tensor.
        merging_here: False on ranks that only take part in the gathers; they get the base tensors.

    Raises:
        SyncError: an adapter is on a module that the base model does not have.
    """
    unused = set(adapters)
    for name, tensor in base:
        module = name.removesuffix(".weight")
        unused.discard(module)
        if merging_here:
            own_seed = seed_for(version, name, seed)
            adapter = adapters.get(module)
            if adapter is not None and adapter.a.device != tensor.device:
                adapter = replace(adapter, a=adapter.a.to(tensor.device), b=adapter.b.to(tensor.device))
            tensor, part = merge(tensor, adapter, dtype=dtype, rounding=rounding, seed=own_seed)
            parts.append(part)
        yield name, tensor
    if unused:
        raise SyncError(f"adapters on modules the base model does not have: {', '.join(sorted(unused))}")


def check_changed(manifest: Manifest, last: Manifest | None, *, must_differ: bool) -> None:
    """Refuse a push that equals the last one although an optimizer step lies between them.

    Raises:
        SyncError: it does.
    """
    if must_differ and last is not None and manifest.digest == last.digest:
        raise SyncError(
            f"weight version {manifest.version} is byte for byte the same as version {last.version} although "
            "an optimizer step lies between them: the update did not reach the payload (in low precision a small "
            "update can round to nothing; see policy.generation.weight_sync.rounding and the learning rate)"
        )


def _factors(adapters: dict[str, AdapterTensors]) -> Iterator[tuple[str, torch.Tensor]]:
    for module in sorted(adapters):
        yield module + LORA_A, adapters[module].a
        yield module + LORA_B, adapters[module].b
