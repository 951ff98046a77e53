"""The Ray actor that hosts one vLLM engine. Imports nothing heavy until it is told to."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lora_rl.cluster.nodes import this_node
from lora_rl.track.logs import capture_to_file

if TYPE_CHECKING:
    import numpy as np

    from lora_rl.rollout.engine import EngineSettings
    from lora_rl.rollout.types import Completion, GenerationRequest, SamplingSettings
    from lora_rl.sync.manifest import Transfer


class EngineActor:
    """One engine; the methods mirror `Engine`."""

    def __init__(self, settings: EngineSettings, log: str) -> None:
        self._log = capture_to_file(log)
        logging.warning("engine for %s, process %d, %s", settings.model, os.getpid(), this_node())
        self._settings = settings
        os.environ["OMP_NUM_THREADS"] = str(settings.num_threads)

    def ping(self) -> bool:
        """Answer when the process is alive and idle."""
        return True

    def build(self) -> None:
        """Import vLLM and load the model."""
        from lora_rl.rollout.engine import Engine

        self.engine = Engine(self._settings)

    def generate(self, requests: list[GenerationRequest], sampling: SamplingSettings) -> list[Completion]:
        """See `Engine.generate`."""
        return self.engine.generate(requests, sampling)

    def score(self, sequences: list[tuple[int, ...]]) -> list[list[float]]:
        """See `Engine.score`."""
        return self.engine.score(sequences)

    def sleep(self) -> None:
        """See `Engine.sleep`."""
        self.engine.sleep()

    def wake(self, parts: list[str]) -> None:
        """See `Engine.wake`."""
        self.engine.wake(parts)

    def memory(self) -> int:
        """See `Engine.memory`."""
        return self.engine.memory()

    def open_transfer(self, transfer: Transfer) -> None:
        """See `Engine.open_transfer`."""
        self.engine.open_transfer(transfer)

    def transfer(self, method: str, *args: Any) -> None:
        """See `Engine.transfer`."""
        self.engine.transfer(method, *args)

    def confirm_push(self, manifest: dict[str, Any]) -> Any:
        """See `Engine.confirm_push`."""
        return self.engine.confirm_push(manifest)

    def open_relay(self, transfer: Transfer) -> None:
        """Like `open_transfer` where the trainer is on another host: its bytes come with each push."""
        from lora_rl.sync.shared_memory import SharedBuffer

        self._relay = SharedBuffer.create(transfer.nbytes)
        try:
            self.engine.open_transfer(replace(transfer, path=str(self._relay.path)))
        finally:
            self._relay.unlink()

    def host(self) -> str:
        """The Ray node this process runs on."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def load_push(self, manifest: dict[str, Any], payload: np.ndarray | None = None) -> Any:
        """See `Engine.load_push`; `payload` is the content of the trainer's buffer where that is on another host."""
        if payload is not None:
            self._relay.bytes.numpy()[:] = payload
        return self.engine.load_push(manifest)
