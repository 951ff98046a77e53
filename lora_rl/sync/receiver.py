"""Engine side: a vLLM weight-transfer backend that reads pushes from shared memory and proves what it loaded.

Runs inside each vLLM worker. vLLM drives it through its own RL interface: `init_weight_transfer_engine` once, then per
push `start_weight_update`, `update_weights`, `finish_weight_update`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from lora_rl.sync.errors import SyncError
from lora_rl.sync.manifest import Manifest, SyncReport, TensorEntry, check_names, checksum
from lora_rl.sync.shared_memory import SharedBuffer

TIED_OUTPUT = "lm_head.weight"


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Where the trainer writes: path and size in bytes of the shared buffer."""

    path: str
    nbytes: int


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """One push: `Manifest.to_dict()`."""

    manifest: dict[str, Any]


class SharedMemoryWeightTransferEngine(WeightTransferEngine[SharedMemoryInit, SharedMemoryUpdate]):
    """Reads full Hugging Face tensors from shared memory into this worker's (possibly sharded, repacked) model."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffer: SharedBuffer | None = None
        self.report: SyncReport | None = None
        self._expected = checkpoint_names(self.model_config.model)

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        """Map the trainer's buffer."""
        self._buffer = SharedBuffer(Path(init_info.path), init_info.nbytes)

    def start_weight_update(self) -> None:
        """Linear weights are repacked after loading (CPU) or fused; vLLM restores the loadable form by layer."""
        self.report = None
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Like the base class's, without its accelerator synchronisation, which fails on CPU."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        """Load one push.

        Raises:
            SyncError: missing, unexpected or repeated names; bytes that differ from the trainer's checksum; model
                parameters that no tensor reached.
        """
        manifest = Manifest.from_dict(update_info.manifest)
        names = [entry.name for entry in manifest.entries]
        # A tied output layer is the embedding: it may be named or not, and vLLM does not load it separately.
        optional = {TIED_OUTPUT} if self._tied() else set()
        if self._expected is not None:
            check_names(names, self._expected, optional=optional)
        parameters = {name for name, _ in self.model.named_parameters()}
        seen: list[TensorEntry] = []
        loaded = self.model.load_weights(self._tensors(manifest, seen))
        if loaded is not None and (untouched := sorted(parameters - set(loaded) - optional)):
            raise SyncError(f"{len(untouched)} engine parameters got no pushed tensor: {', '.join(untouched[:4])}")
        echo = Manifest(manifest.version, tuple(seen))
        self.report = SyncReport(manifest.version, echo.digest, len(seen), echo.nbytes)

    def _tensors(self, manifest: Manifest, seen: list[TensorEntry]) -> Iterator[tuple[str, torch.Tensor]]:
        if self._buffer is None:
            raise SyncError("a push arrived before init_weight_transfer_engine")
        tied = self._tied()
        for entry in manifest.entries:
            tensor = self._buffer.view(entry.offset, entry.shape, getattr(torch, entry.dtype))
            found = checksum(tensor)
            if found != entry.checksum:
                raise SyncError(
                    f"{entry.name}: checksum {found:08x} in the engine, {entry.checksum:08x} in the trainer; "
                    "the buffer changed between writing and reading"
                )
            seen.append(entry)
            if tied and entry.name == TIED_OUTPUT:
                continue  # the engine has one tensor for both ends
            # vLLM keeps what it is given until a layer is complete, and the buffer is reused by the next push.
            yield entry.name, tensor.clone()

    def finish_weight_update(self) -> None:
        """Repack the reloaded layers."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self._tied():
            # A tied output layer shares the embedding's tensor, which was just replaced, but on CPU it multiplies
            # with a packed copy that nothing above has refreshed.
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Unmap the buffer."""
        self._buffer = None

    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))


class WorkerExtension:
    """Methods added to vLLM's worker class, reachable through `collective_rpc`."""

    def lora_rl_sync_report(self) -> SyncReport | None:
        """What this worker loaded in the last push; None before the first."""
        return self.weight_transfer_engine.report  # type: ignore[attr-defined]


def checkpoint_names(model: str) -> set[str] | None:
    """Tensor names of a local safetensors checkpoint; None when the model is not a local directory."""
    files = sorted(Path(model).glob("*.safetensors"))
    if not files:
        return None
    names: set[str] = set()
    for file in files:
        with safe_open(str(file), framework="pt") as handle:
            names.update(handle.keys())
    return names
