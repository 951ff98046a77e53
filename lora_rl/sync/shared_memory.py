"""A block of memory that the trainer's sending rank and the engine's workers on the same host both map."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

# Tensors start on cache-line boundaries, so that every dtype can be viewed in place.
ALIGNMENT = 64


def aligned(offset: int) -> int:
    """The next multiple of `ALIGNMENT` at or after `offset`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _memory_directory() -> str:
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


@contextlib.contextmanager
def memory_folder() -> Iterator[Path]:
    """A temporary folder in memory, removed at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="lora_rl_adapter_", dir=_memory_directory()) as folder:
        yield Path(folder)


class SharedBuffer:
    """Bytes in a memory-backed file, mapped once by each side.

    The name can be removed as soon as both sides have mapped it (`unlink`); the memory then goes away with the last
    process that holds it, also when that process is killed.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self.bytes = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)

    @classmethod
    def create(cls, nbytes: int) -> SharedBuffer:
        """Allocate a new block.

        Raises:
            OSError: the memory file system has no room; the message names it and the size.
        """
        directory = _memory_directory()
        descriptor, name = tempfile.mkstemp(prefix="lora_rl_sync_", dir=directory)
        try:
            # Reserves the pages now: without it a full file system would kill the process at the first write.
            os.posix_fallocate(descriptor, 0, max(nbytes, 1))
        except OSError as error:
            os.unlink(name)
            raise OSError(
                error.errno, f"{directory} has no room for {nbytes:,} bytes of weights to synchronise"
            ) from error
        finally:
            os.close(descriptor)
        return cls(Path(name), max(nbytes, 1))

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor stored at a byte offset, sharing the block's memory."""
        count = 1
        for size in shape:
            count *= size
        nbytes = count * dtype.itemsize
        if offset < 0 or offset + nbytes > len(self.bytes):
            raise ValueError(f"bytes {offset}..{offset + nbytes} lie outside the block of {len(self.bytes)} bytes")
        return self.bytes[offset : offset + nbytes].view(dtype).view(shape)

    def unlink(self) -> None:
        """Remove the name; mapped memory stays valid. Safe to repeat."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
