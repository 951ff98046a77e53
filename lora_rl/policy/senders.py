"""Which sender a configuration asks for, connected to a policy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from lora_rl.policy import spectral
from lora_rl.policy.export import adapters, base_weights
from lora_rl.policy.model import PolicyModel
from lora_rl.sync.sender import WeightSender
from lora_rl.sync.spectral import SigmaSender

if TYPE_CHECKING:
    from lora_rl.config import RunConfig


def make_sender(config: RunConfig, model: PolicyModel, *, is_sender: bool) -> WeightSender:
    """The sender of pushes through host memory, not opened yet; on every rank."""
    sync, svd = config.policy.generation.weight_sync, config.policy.megatron_cfg.peft.svd
    kind, more = WeightSender, {}
    if svd.enabled and svd.sigma_only_sync and sync.mode != "merged":
        kind = SigmaSender
        more = {"frames": partial(spectral.frames, model), "sigmas": partial(spectral.sigmas, model)}
    return kind(
        mode=sync.mode,
        base=partial(base_weights, model),
        adapters=partial(adapters, model),
        is_sender=is_sender,
        dtype=getattr(torch, config.engine_precision),
        rounding=sync.rounding,
        seed=config.grpo.seed,
        **more,
    )
