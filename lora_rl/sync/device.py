"""Merged weights from GPU to GPU, through vLLM's own `nccl` and `ipc` engines, with the same proof as on the CPU.

vLLM's trainer-side engine drives the transfer: it streams tensors in small packed buffers, so no second copy of the
model is ever held. What is added here is the source that merges while it streams and notes a checksum of each tensor,
and the client that reaches our engine actors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerWeightTransferEngine, WeightSource

from lora_rl.lora.merge import Fidelity, Rounding
from lora_rl.sync.manifest import Manifest, TensorEntry, checksum
from lora_rl.sync.sender import Adapters, BaseWeights, Push, check_changed, merged_tensors


class MergedSource(WeightSource):
    """The merged tensors of one version at a time; iterating is collective over the ranks."""

    def __init__(
        self, base: BaseWeights, adapters: Adapters, *, dtype: torch.dtype, rounding: Rounding, seed: int
    ) -> None:
        self._base, self._adapters = base, adapters
        self._dtype, self.rounding, self.seed = dtype, rounding, seed
        self._metadata: list[ParamMeta] | None = None
        self.version = 0
        self.entries: list[TensorEntry] = []
        self.parts: list[Fidelity] = []

    def metadata(self) -> list[ParamMeta]:
        """Names, types and shapes, from one pass over the base weights at the first call."""
        if self._metadata is None:
            self._metadata = [ParamMeta(name, self._dtype, tuple(t.shape)) for name, t in self._base()]
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.entries, self.parts = [], []
        tensors = merged_tensors(
            self._base(),
            self._adapters(),
            self.parts,
            version=self.version,
            dtype=self._dtype,
            rounding=self.rounding,
            seed=self.seed,
        )
        for name, tensor in tensors:
            self.entries.append(entry_of(name, tensor))
            yield name, tensor


def entry_of(name: str, tensor: torch.Tensor) -> TensorEntry:
    """A manifest entry of a tensor that travels by itself: it has no place in a buffer."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    nbytes = tensor.numel() * tensor.dtype.itemsize
    return TensorEntry(name, tuple(tensor.shape), dtype, 0, nbytes, checksum(tensor))


@dataclass
class DeviceSender:
    """Sends full merged tensors straight into the engines' workers. All ranks take part; rank 0 drives.

    Attributes:
        source: what is sent.
        is_sender: whether this rank drives.
        engine: vLLM's trainer-side engine, after `open`.
    """

    source: MergedSource
    is_sender: bool
    engine: TrainerWeightTransferEngine[Any] | None = None
    _last: Manifest | None = field(default=None, init=False, repr=False)

    def open(self, backend: str, rank: int, client: EngineClient, *, address: str, port: int) -> None:
        """Connect to the engines. Collective.

        Args:
            backend: `nccl` between devices of their own, `ipc` where ranks and engines share devices.
            rank: of this process among the Megatron ranks.
            client: reaches the engines; used on rank 0 only.
            address, port: where rank 0 waits for the workers (`nccl`).
        """
        if backend == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import (
                NCCLTrainerInitInfo,
                NCCLTrainerWeightTransferEngine,
            )

            info: Any = NCCLTrainerInitInfo(address, port, 1 + client.num_workers, rank=rank)
            self.engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=self.source)
        elif backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine
            from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES

            # A tensor must fit into the buffer as a whole, and an embedding may be larger than the default.
            largest = max(math.prod(m.shape) * m.dtype.itemsize for m in self.source.metadata())
            size = max(DEFAULT_PACKED_BUFFER_SIZE_BYTES, largest)
            info = IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=size, rank=rank)
            self.engine = IPCTrainerWeightTransferEngine.trainer_init(info, client=client, source=self.source)
        else:
            raise ValueError(f"unknown backend {backend!r}; valid are nccl and ipc")

    def send(self, version: int, *, must_differ: bool) -> Push | None:
        """Stream the weights of `version` into the engines; they have loaded them when it returns. Collective.

        Returns:
            The push on the sending rank, None on the others.

        Raises:
            SyncError: nothing changed although it should have.
        """
        if self.engine is None:
            raise RuntimeError("send before open: no engine is connected")
        self.source.version = version
        if torch.cuda.is_available():
            # vLLM reads the weights on streams of its own, and does not wait for the one that the update is on.
            torch.cuda.synchronize()
        self.engine.send_weights()
        if not self.is_sender:
            return None
        # Entries that share offset 0 would count as one; number them.
        entries = tuple(replace(entry, offset=index) for index, entry in enumerate(self.source.entries))
        manifest = Manifest(version, entries, rounding=self.source.rounding, seed=self.source.seed)
        check_changed(manifest, self._last, must_differ=must_differ)
        self._last = manifest
        return Push(manifest, sum(self.source.parts, Fidelity.zero()), manifest.nbytes)


@dataclass(frozen=True)
class EngineClient:
    """vLLM's weight-sync control plane over our engine actors; see `vllm...base.VLLMWeightSyncClient`.

    Attributes:
        handles: the engine actors.
        workers_per_engine: tensor-parallel size of an engine.
        get: waits for Ray references (`ray.get`).
    """

    handles: Sequence[Any]
    workers_per_engine: int
    get: Callable[[list[Any]], Any]

    @property
    def num_workers(self) -> int:
        """Workers of all engines."""
        return len(self.handles) * self.workers_per_engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each engine's workers follow those of the one before, after the trainer's rank 0."""
        calls = []
        for index, handle in enumerate(self.handles):
            place = {}
            if "rank_offset" in init_info:
                place["rank_offset"] = init_info["rank_offset"] + index * self.workers_per_engine
            calls.append(handle.transfer.remote("init_weight_transfer_engine", {"init_info": {**init_info, **place}}))
        self.get(calls)

    def start_weight_update(self) -> None:
        """Every engine prepares its layers."""
        self.get([h.transfer.remote("start_weight_update") for h in self.handles])

    def update_weights(self, update_info: Any) -> None:
        """Every engine receives."""
        self.get([h.transfer.remote("update_weights", {"update_info": update_info}) for h in self.handles])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Every engine repacks its layers; the version is set when the proof was checked."""
        self.get([h.transfer.remote("finish_weight_update") for h in self.handles])
