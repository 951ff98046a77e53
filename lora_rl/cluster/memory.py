"""How much memory a process holds."""

from __future__ import annotations

import os
from pathlib import Path

GIB = 2**30


def held_memory(platform: str) -> int:
    """Bytes this process holds: reserved on its GPU by torch, or resident in main memory where there is no GPU.

    Args:
        platform: `cpu` or `cuda`.
    """
    if platform == "cuda":
        import torch

        return torch.cuda.memory_reserved()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
