"""Entry point that vLLM calls in every process it starts (`vllm.general_plugins`)."""

from __future__ import annotations

SHARED_MEMORY = "shared_memory"
# Names in vLLM's registry, by ours.
BACKENDS = {SHARED_MEMORY: "lora_rl_shared_memory", "nccl": "lora_rl_nccl", "ipc": "lora_rl_ipc"}
_CLASSES = {
    SHARED_MEMORY: "SharedMemoryWeightTransferEngine",
    "nccl": "ProvedNCCLEngine",
    "ipc": "ProvedIPCEngine",
}


def register() -> None:
    """Make our backends known to vLLM. Imports nothing heavy: a class loads when it is used."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for ours, name in BACKENDS.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, "lora_rl.sync.receiver", _CLASSES[ours])


def backend_for(*, platform: str, mode: str, transport: str, colocated: bool) -> str:
    """How weights travel: `shared_memory` (which includes Ray's object store across hosts), `nccl` or `ipc`.

    Adapters are small and go through host memory everywhere. Merged weights on GPUs stay on them unless a transport
    through host memory is asked for.
    """
    if platform == "cpu" or mode != "merged" or transport != "auto":
        return SHARED_MEMORY
    return "ipc" if colocated else "nccl"
