"""GPU platform: it reports what is there. With Transformer Engine nothing is patched."""

from __future__ import annotations

import importlib.util
import os

import torch

from lora_rl.policy.platform.base import Platform
from lora_rl.policy.platform.without_te import UNFUSED, import_bridge


def prepare() -> Platform:
    """Select this process's GPU (`LOCAL_RANK`, 0 when unset) and describe it.

    Raises:
        RuntimeError: torch sees no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("cluster.platform=cuda, but torch sees no GPU; use cluster.platform=cpu on this machine")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    if not has_engine:
        import_bridge()
    return Platform(
        name="cuda",
        device=f"cuda:{index}",
        backend="nccl",
        transformer_engine=has_engine,
        provider_overrides={} if has_engine else dict(UNFUSED),
    )
