"""Entry point that vLLM calls in every process it starts (`vllm.general_plugins`)."""

from __future__ import annotations

SHARED_MEMORY_BACKEND = "lora_rl_shared_memory"


def register() -> None:
    """Make the shared-memory backend known to vLLM. Imports nothing heavy: the class loads when it is used."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if SHARED_MEMORY_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            SHARED_MEMORY_BACKEND, "lora_rl.sync.receiver", "SharedMemoryWeightTransferEngine"
        )
