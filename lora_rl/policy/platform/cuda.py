"""GPU platform: nothing is patched; it only reports what is there."""

from __future__ import annotations

import importlib.util
import os

import torch

from lora_rl.policy.platform.base import Platform


def prepare() -> Platform:
    """Select this process's GPU (`LOCAL_RANK`, 0 when unset) and describe it.

    Raises:
        RuntimeError: torch sees no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("cluster.platform=cuda, but torch sees no GPU; use cluster.platform=cpu on this machine")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return Platform(
        name="cuda",
        device=f"cuda:{index}",
        backend="nccl",
        transformer_engine=importlib.util.find_spec("transformer_engine") is not None,
    )
