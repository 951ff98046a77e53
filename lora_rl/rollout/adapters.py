"""Adapters served natively by vLLM: which versions are loaded, and how long each must live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_rl.lora.peft_io import PeftAdapter, write_peft
from lora_rl.sync.errors import SyncError
from lora_rl.sync.manifest import Manifest, SyncReport, Transfer, pair_adapters
from lora_rl.sync.reading import read_push
from lora_rl.sync.shared_memory import SharedBuffer, memory_folder

# Ranks vLLM has kernels for (`vllm.config.lora.MaxLoRARanks`); an adapter is served at the next one up.
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def engine_rank(rank: int) -> int:
    """The rank an engine must be built for to serve adapters of `rank`.

    Raises:
        ValueError: vLLM serves no adapter of that rank.
    """
    for allowed in ENGINE_RANKS:
        if rank <= allowed:
            return allowed
    raise ValueError(
        f"policy.megatron_cfg.peft.dim={rank}: vLLM serves adapters up to rank {ENGINE_RANKS[-1]}; lower it, or use "
        "policy.generation.weight_sync.mode merged or adapter_merge"
    )


class AdapterVersions:
    """Counts requests per adapter version, so that a version is unloaded exactly when nobody needs it any more.

    The newest version always stays. An older one goes when its last request ends.
    """

    def __init__(self, capacity: int) -> None:
        """
        Args:
            capacity: adapters the engine can hold.
        """
        self._capacity = capacity
        self._users: dict[int, int] = {}
        self.current: int | None = None

    @property
    def loaded(self) -> set[int]:
        """Versions that must be in the engine."""
        return set(self._users)

    def publish(self, version: int) -> list[int]:
        """Make `version` the one for new requests.

        Returns:
            Versions to unload.

        Raises:
            SyncError: every place is taken by versions that still have requests.
        """
        if version in self._users:
            raise SyncError(f"adapter version {version} was published twice")
        idle = [v for v, users in self._users.items() if users == 0]
        for old in idle:
            del self._users[old]
        if len(self._users) >= self._capacity:
            raise SyncError(
                f"no room for adapter version {version}: versions {sorted(self._users)} still have requests"
            )
        self._users[version] = 0
        self.current = version
        return idle

    def release(self, version: int) -> list[int]:
        """A request of `version` ended. Returns versions to unload."""
        self._users[version] -= 1
        if self._users[version] == 0 and version != self.current:
            del self._users[version]
            return [version]
        return []

    def acquire(self) -> int:
        """A request starts with the current version; pair with `release`."""
        if self.current is None:
            raise SyncError("no adapter was pushed yet, so there is no version to serve")
        self._users[self.current] += 1
        return self.current


class NativeAdapters:
    """Loads pushes into vLLM as LoRA adapters and names the one each request must use."""

    def __init__(self, llm: Any, capacity: int) -> None:
        self._llm = llm
        self._versions = AdapterVersions(capacity)
        self._requests: dict[int, Any] = {}
        self._buffer: SharedBuffer | None = None
        self._names: set[str] = set()

    def open(self, transfer: Transfer) -> None:
        """Map the trainer's buffer."""
        self._buffer = SharedBuffer(Path(transfer.path), transfer.nbytes)
        self._names = set(transfer.names)

    def load(self, manifest: Manifest, base_model: str) -> SyncReport:
        """Load one push as adapter `manifest.version`.

        vLLM loads adapters from PEFT directories only; this one lives in memory, for the length of the call.

        Raises:
            SyncError: bytes differ from the trainer's, or vLLM does not list the adapter afterwards.
        """
        from vllm.lora.request import LoRARequest

        tensors = read_push(self._buffer, manifest, self._names)
        for old in self._versions.publish(manifest.version):
            self._unload(old)
        adapter = PeftAdapter(pair_adapters(tensors, manifest.scales))
        with memory_folder() as folder:
            path = folder / "adapter"
            write_peft(path, adapter, base_model=base_model)
            request = LoRARequest(f"version {manifest.version}", manifest.version, str(path))
            if not self._llm.llm_engine.add_lora(request):
                raise SyncError(f"vLLM refused adapter version {manifest.version}")
        self._requests[manifest.version] = request
        held = self._llm.llm_engine.list_loras()
        if manifest.version not in held:
            raise SyncError(f"vLLM holds adapter versions {sorted(held)} after the push of version {manifest.version}")
        return SyncReport(manifest.version, manifest.digest, len(tensors), manifest.nbytes)

    def acquire(self) -> Any:
        """The `LoRARequest` for a request that starts now; pair with `release` of its `lora_int_id`."""
        return self._requests[self._versions.acquire()]

    def release(self, version: int) -> None:
        """A request of `version` ended."""
        for old in self._versions.release(version):
            self._unload(old)

    def _unload(self, version: int) -> None:
        self._requests.pop(version, None)
        self._llm.llm_engine.remove_lora(version)
