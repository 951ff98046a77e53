"""Engine side: a vLLM weight-transfer backend that reads pushes from shared memory and proves what it loaded.

Runs inside each vLLM worker. vLLM drives it through its own RL interface: `init_weight_transfer_engine` once, then per
push `start_weight_update`, `update_weights`, `finish_weight_update`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from lora_rl.cluster.memory import held_memory
from lora_rl.config.model_files import weight_files
from lora_rl.lora.merge import Fidelity, merge, seed_for
from lora_rl.sync.device import entry_of
from lora_rl.sync.errors import SyncError
from lora_rl.sync.manifest import Manifest, SyncReport, check_names, pair_adapters
from lora_rl.sync.reading import read_push
from lora_rl.sync.shared_memory import SharedBuffer

TIED_OUTPUT = "lm_head.weight"


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Path and size in bytes of the shared buffer, and the names every push must consist of."""

    path: str
    nbytes: int
    names: list[str]


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
        self._names: set[str] = set()
        self.report: SyncReport | None = None
        self._checkpoint = Checkpoint.open(self.model_config.model)
        self._reloaded: list[torch.nn.Module] = []

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        """Map the trainer's buffer."""
        self._buffer = SharedBuffer(Path(init_info.path), init_info.nbytes)
        self._names = set(init_info.names)

    def start_weight_update(self) -> None:
        """Nothing yet: which layers are replaced is only known from the manifest."""
        self.report = None
        self._reloaded = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Like the base class's, without its accelerator synchronisation, which fails on CPU."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        """Load one push: full tensors (`merged`), or adapters merged here into the checkpoint's (`adapter_merge`).

        Raises:
            SyncError: missing, unexpected or repeated names; bytes that differ from the trainer's checksum; model
                parameters that should have been replaced and were not.
        """
        manifest = Manifest.from_dict(update_info.manifest)
        tensors = read_push(self._buffer, manifest, self._names)
        parts: list[Fidelity] = []
        if manifest.mode == "merged":
            self._replace_all(tensors)
        elif manifest.mode == "adapter_merge":
            self._merge_here(manifest, tensors, parts)
        else:
            raise SyncError(f"a push of mode {manifest.mode!r} does not replace weights")
        self.report = SyncReport(
            manifest.version,
            manifest.digest,
            len(tensors),
            manifest.nbytes,
            sum(parts, Fidelity.zero()) if manifest.mode == "adapter_merge" else None,
        )

    def finish_weight_update(self) -> None:
        """Repack the reloaded layers."""
        for module in self._reloaded:
            finalize_layerwise_reload(module, self.model_config)
        if self._tied() and self.model in self._reloaded:
            # A tied output layer shares the embedding's tensor, which was just replaced, but on CPU it multiplies
            # with a packed copy that nothing above has refreshed.
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

    def _replace_all(self, tensors: dict[str, torch.Tensor]) -> None:
        # A tied output layer is the embedding: it may be named or not, and vLLM does not load it separately.
        optional = {TIED_OUTPUT} if self._tied() else set()
        if self._checkpoint is not None:
            check_names(tensors, self._checkpoint.names, optional=optional)
        self._reload(self.model)
        self._load(tensors, {n for n, _ in self.model.named_parameters()} - optional, skip=optional)

    def _merge_here(self, manifest: Manifest, tensors: dict[str, torch.Tensor], parts: list[Fidelity]) -> None:
        """Merge in float32 into the checkpoint's tensors, and replace exactly the engine modules that changed.

        A fused engine module (qkv_proj, gate_up_proj) is replaced as a whole, so the parts of it that have no
        adapter, and all biases, come along from the checkpoint.
        """
        if self._checkpoint is None:
            raise SyncError("mode adapter_merge reads the base weights from a local safetensors checkpoint")
        adapters = pair_adapters({n: t.to(self.device) for n, t in tensors.items()}, manifest.scales)
        targets = fused_targets(adapters, getattr(self.model, "packed_modules_mapping", {}))
        replaced: dict[str, torch.Tensor] = {}
        for module in sorted({part for target in targets.values() for part in target}):
            name = f"{module}.weight"
            base = self._checkpoint.read(name).to(self.device)
            seed = seed_for(manifest.version, name, manifest.seed)
            dtype = self.model_config.dtype
            replaced[name], part = merge(base, adapters.get(module), dtype=dtype, rounding=manifest.rounding, seed=seed)
            parts.append(part)
            if f"{module}.bias" in self._checkpoint.names:
                replaced[f"{module}.bias"] = self._checkpoint.read(f"{module}.bias")
        expected = set()
        for target in targets:
            engine_module = self.model.get_submodule(target)
            expected |= {f"{target}.{name}" for name, _ in engine_module.named_parameters()}
            self._reload(engine_module)
        self._load(replaced, expected)

    def _reload(self, module: torch.nn.Module) -> None:
        """Linear weights are fused, sharded or repacked after loading; vLLM restores the loadable form by layer."""
        initialize_layerwise_reload(module)
        self._reloaded.append(module)

    def _load(self, tensors: dict[str, torch.Tensor], expected: set[str], skip: set[str] = frozenset()) -> None:
        loaded = self.model.load_weights((name, t) for name, t in tensors.items() if name not in skip)
        if loaded is not None and (untouched := sorted(expected - set(loaded))):
            raise SyncError(f"{len(untouched)} engine parameters got no pushed tensor: {', '.join(untouched[:4])}")

    def shutdown(self) -> None:
        """Unmap the buffer."""
        self._buffer = None

    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))


class _Proved:
    """Adds the proof to one of vLLM's own engines: what was loaded is noted on its way into the model."""

    report: SyncReport | None = None

    def start_weight_update(self) -> None:
        """Forget the last push."""
        self.report, self._entries = None, []
        super().start_weight_update()  # type: ignore[misc]

    def receive_weights(self, update_info: Any) -> None:
        """Load the tensors of this call, and note names, shapes, types and checksums."""
        model = self.model  # type: ignore[attr-defined]
        load = model.load_weights

        def noting(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            def passed_on() -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in weights:
                    self._entries.append(entry_of(name, tensor))
                    yield name, tensor

            return load(passed_on())

        model.load_weights = noting
        try:
            super().receive_weights(update_info)  # type: ignore[misc]
        finally:
            del model.load_weights

    def finish_weight_update(self) -> None:
        """Repack, and make the report; the version is not known here and stays -1."""
        super().finish_weight_update()  # type: ignore[misc]
        entries = tuple(replace(entry, offset=index) for index, entry in enumerate(self._entries))
        push = Manifest(-1, entries)
        self.report = SyncReport(-1, push.digest, len(entries), push.nbytes)


class ProvedNCCLEngine(_Proved, NCCLWeightTransferEngine):
    """vLLM's `nccl` engine with proof."""


class ProvedIPCEngine(_Proved, IPCWeightTransferEngine):
    """vLLM's `ipc` engine with proof."""


class WorkerExtension:
    """Methods added to vLLM's worker class, reachable through `collective_rpc`."""

    def lora_rl_sync_report(self) -> SyncReport | None:
        """What this worker loaded in the last push; None before the first."""
        return self.weight_transfer_engine.report  # type: ignore[attr-defined]

    def lora_rl_memory(self, asleep: list[str]) -> int:
        """Bytes this worker holds, see `held_memory`.

        Args:
            asleep: parts of the engine that sleep; torch counts their memory, which the device has back.
        """
        if self.device.type == "cpu":  # type: ignore[attr-defined]
            return held_memory("cpu")
        held = held_memory("cuda")
        if asleep:
            from vllm.device_allocator.cumem import CuMemAllocator

            every = CuMemAllocator.get_instance().pointer_to_data.values()
            held -= sum(data.handle[1] for data in every if data.tag in asleep)
        return held


class Checkpoint:
    """A local safetensors checkpoint, memory-mapped: names are known at once, tensors are read when asked for."""

    def __init__(self, folder: Path, files: list[Path]) -> None:
        self._folder = folder
        self._files = {}
        for file in files:
            handle = safe_open(str(file), framework="pt")
            self._files.update(dict.fromkeys(handle.keys(), handle))

    @classmethod
    def open(cls, model: str) -> Checkpoint | None:
        """The checkpoint in a directory; None when there is none (a hub id, dummy weights)."""
        files = [Path(model) / name for name in weight_files(Path(model))]
        return cls(Path(model), files) if all(file.is_file() for file in files) else None

    @property
    def names(self) -> set[str]:
        """Tensor names."""
        return set(self._files)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, mapped from the file.

        Raises:
            SyncError: the checkpoint has no such tensor.
        """
        if name not in self._files:
            raise SyncError(f"the engine's checkpoint {self._folder} has no tensor {name}")
        return self._files[name].get_tensor(name)


def fused_targets(modules: Iterable[str], packed: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Engine modules to replace, each with all Hugging Face modules it is made of.

    Args:
        modules: Hugging Face module names that have an adapter.
        packed: vLLM's `packed_modules_mapping`, such as {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.
    """
    whole = {part: (fused, parts) for fused, parts in packed.items() for part in parts}
    targets: dict[str, list[str]] = {}
    for module in modules:
        prefix, _, last = module.rpartition(".")
        fused, parts = whole.get(last, (last, [last]))
        targets[f"{prefix}.{fused}"] = [f"{prefix}.{part}" for part in parts]
    return targets
