"""Reading merged weights out of the policy without touching them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lora_rl.policy.model import PolicyModel


def base_weights(model: PolicyModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Full Hugging Face tensors of the base model, adapters left out. Collective: every rank must exhaust it.

    The bridge gathers each tensor into a new one or passes a live one on: read, never write. The iterator is lazy, so
    it must be consumed before the next optimizer step.

    Yields:
        (name, tensor on the CPU in the base model's dtype).
    """
    with torch.no_grad():
        yield from model.bridge.export_hf_weights(
            model.chunks, cpu=True, show_progress=False, merge_adapter_weights=False
        )
