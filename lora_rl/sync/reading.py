"""Reading a push back out of the shared buffer."""

from __future__ import annotations

import torch

from lora_rl.sync.errors import SyncError
from lora_rl.sync.manifest import Manifest, checksum
from lora_rl.sync.shared_memory import SharedBuffer


def read_tensors(buffer: SharedBuffer, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Copies of a push's tensors, each checked against the trainer's checksum.

    Raises:
        SyncError: bytes that are not what the trainer wrote, naming the tensor.
    """
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
