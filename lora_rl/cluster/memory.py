"""How much memory a process holds."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

GIB = 2**30
# Parameters of glibc's mallopt, and their values: the largest that it allows, and more than a step needs.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD, _TRIM_THRESHOLD = 32 * 2**20, 512 * 2**20


def held_memory(platform: str) -> int:
    """Bytes this process holds: reserved on its GPU by torch, or resident in main memory where there is no GPU.

    Args:
        platform: `cpu` or `cuda`.
    """
    if platform == "cuda":
        import torch

        return torch.cuda.memory_reserved()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def keep_freed_memory() -> None:
    """Have this process use again what it frees, instead of giving it back to the system and asking for it anew.

    Tensors of every step have the same sizes. By default glibc returns large ones to the system, page by page, and each
    page that comes back is filled with zeros first: a tenth of the time of forward passes of small models. At most
    512 MiB are kept. Other C libraries than glibc are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)
