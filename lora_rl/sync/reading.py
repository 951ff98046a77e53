"""Reading a push back out of the shared buffer."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lora_rl.sync.errors import SyncError
from lora_rl.sync.manifest import Manifest, check_names, checksum
from lora_rl.sync.shared_memory import SharedBuffer


def read_push(buffer: SharedBuffer | None, manifest: Manifest, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Copies of a push's tensors (the next push reuses the buffer), each checked against the trainer's checksum.

    Args:
        buffer: None when no transfer was opened.
        names: what the push must consist of.

    Raises:
        SyncError: missing, unexpected or repeated names; bytes that are not what the trainer wrote.
    """
    if buffer is None:
        raise SyncError(f"the push of weight version {manifest.version} arrived before the transfer was opened")
    check_names([entry.name for entry in manifest.entries], names)
    tensors = {}
    for entry in manifest.entries:
        tensor = buffer.view(entry.offset, entry.shape, getattr(torch, entry.dtype)).clone()
        if (found := checksum(tensor)) != entry.checksum:
            raise SyncError(
                f"{entry.name}: checksum {found:08x} in the engine, {entry.checksum:08x} in the trainer; "
                "the buffer changed between writing and reading"
            )
        tensors[entry.name] = tensor
    return tensors
