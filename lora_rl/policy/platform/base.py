"""The record every platform fills in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Platform:
    """What the policy needs to know about the machine it computes on.

    Attributes:
        name: `cpu` or `cuda`.
        device: torch device string of this process.
        backend: torch.distributed backend of the model-parallel groups.
        transformer_engine: whether layers are built from Transformer Engine or from Megatron's local spec.
        provider_overrides: model-config fields that this platform fixes, whatever the model.
    """

    name: str
    device: str
    backend: str
    transformer_engine: bool
    provider_overrides: dict[str, Any] = field(default_factory=dict)
