"""Trainer side of mode `merged`: adapters merged in float32 on a copy, cast once, written where the engine reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from lora_rl.sync.errors import SyncError
from lora_rl.sync.manifest import Manifest, TensorEntry, checksum
from lora_rl.sync.shared_memory import SharedBuffer, aligned


class MergedSender:
    """Writes pushes into shared memory. Rank 0 of the world sends; the other ranks take part in the gathers."""

    def __init__(
        self, weights: Callable[[], Iterable[tuple[str, torch.Tensor]]], *, is_sender: bool, dtype: torch.dtype
    ) -> None:
        """
        Args:
            weights: starts a fresh pass over the merged Hugging Face tensors; collective over the ranks.
            is_sender: whether this rank writes the buffer.
            dtype: the engine's weight dtype; tensors are cast to it once, here.
        """
        self._weights = weights
        self._is_sender = is_sender
        self._dtype = dtype
        self._buffer: SharedBuffer | None = None
        self._last: Manifest | None = None

    def open(self) -> tuple[str, int] | None:
        """Allocate the buffer for this model's size. Collective.

        Returns:
            (path, bytes) for the engine on the sending rank, None on the others.
        """
        size = 0
        for _, tensor in self._weights():
            size = aligned(size) + tensor.numel() * self._dtype.itemsize
        if not self._is_sender:
            return None
        self._buffer = SharedBuffer.create(size)
        return str(self._buffer.path), len(self._buffer.bytes)

    def close_name(self) -> None:
        """Remove the buffer's file name once every engine worker has mapped it."""
        if self._buffer is not None:
            self._buffer.unlink()

    def send(self, version: int, *, must_differ: bool) -> Manifest | None:
        """Write the weights of `version` into the buffer. Collective.

        Args:
            version: weight version of this push.
            must_differ: an optimizer step lies between this push and the last one.

        Returns:
            The manifest on the sending rank, None on the others.

        Raises:
            SyncError: `must_differ`, but every byte equals the last push: the adapters did not reach the payload.
        """
        weights = self._weights()
        if not self._is_sender:
            for _ in weights:
                continue
            return None
        manifest = Manifest(version, tuple(self._write(weights)))
        if must_differ and self._last is not None and manifest.digest == self._last.digest:
            raise SyncError(
                f"weight version {version} is byte for byte the same as version {self._last.version} although an "
                "optimizer step lies between them: the update did not reach the merged weights (in low precision a "
                "small update can round to nothing; see policy.precision and the learning rate)"
            )
        self._last = manifest
        return manifest

    def _write(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[TensorEntry]:
        if self._buffer is None:
            raise RuntimeError("send before open: there is no buffer to write to")
        offset = 0
        for name, tensor in weights:
            offset = aligned(offset)
            target = self._buffer.view(offset, tuple(tensor.shape), self._dtype)
            target.copy_(tensor)
            nbytes = target.numel() * self._dtype.itemsize
            dtype = str(self._dtype).removeprefix("torch.")
            yield TensorEntry(name, tuple(tensor.shape), dtype, offset, nbytes, checksum(target))
            offset += nbytes
