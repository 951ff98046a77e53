"""Pushing weights into a test engine from this process, as the trainer's sending rank does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from lora_rl.lora.merge import AdapterTensors
from lora_rl.rollout.types import TrainBatch
from lora_rl.sync.manifest import LORA_A, LORA_B, Manifest, SyncMode, Transfer
from lora_rl.sync.sender import WeightSender
from lora_rl.sync.shared_memory import SharedBuffer
from tests.support.engine_process import EngineProcess
from tests.support.lab import Recorded

ROOM = 1 << 16


class Pusher:
    """One transfer buffer, mapped by an engine, and the senders that write it."""

    def __init__(self, engine: EngineProcess, names: Mapping[str, object] | tuple[str, ...], nbytes: int) -> None:
        """
        Args:
            names: what every push must consist of.
            nbytes: largest payload; there is room for a little more, so that a test can send too much.
        """
        self.engine = engine
        self.buffer = SharedBuffer.create(nbytes + ROOM)
        engine.call("open_transfer", Transfer(str(self.buffer.path), nbytes + ROOM, tuple(names)))
        self.buffer.unlink()
        self._version = 0

    @classmethod
    def for_weights(cls, engine: EngineProcess, weights: Mapping[str, np.ndarray]) -> Pusher:
        """For pushes of full weights."""
        return cls(engine, weights, sum(w.nbytes + 64 for w in weights.values()))

    @classmethod
    def for_recorded(cls, engine: EngineProcess, recorded: Recorded) -> Pusher:
        """For replays of such a push."""
        names = [entry["name"] for entry in recorded.manifest["entries"]]
        return cls(engine, tuple(names), len(recorded.payload))

    def write(self, version: int, weights: Mapping[str, np.ndarray]) -> Manifest:
        """Put full weights into the buffer, where the engine would read them."""
        return self._send(version, "merged", weights, {})

    def write_adapters(self, version: int, mode: SyncMode, adapters: Mapping[str, AdapterTensors]) -> Manifest:
        """Put adapters into the buffer."""
        return self._send(version, mode, {}, dict(adapters))

    def _send(
        self, version: int, mode: SyncMode, base: Mapping[str, np.ndarray], adapters: dict[str, AdapterTensors]
    ) -> Manifest:
        sender = WeightSender(
            mode=mode,
            base=lambda: [(name, torch.from_numpy(value)) for name, value in base.items()],
            adapters=lambda: adapters,
            is_sender=True,
            dtype=torch.float32,
        )
        sender._buffer = self.buffer
        push = sender.send(version, must_differ=False)
        assert push is not None
        return push.manifest

    def push(self, version: int, weights: Mapping[str, np.ndarray]) -> None:
        """Write full weights and load them."""
        self.engine.call("load_push", self.write(version, weights).to_dict())

    def put(self, recorded: Recorded, version: int) -> dict:
        """Put a recorded push into the buffer; its manifest, with another version."""
        self.buffer.bytes.numpy()[: len(recorded.payload)] = np.frombuffer(recorded.payload, np.uint8)
        return replace(Manifest.from_dict(recorded.manifest), version=version).to_dict()

    def replay(self, recorded: Recorded, version: int) -> None:
        """Load a recorded push."""
        self.engine.call("load_push", self.put(recorded, version))


def adapter_names(modules: Mapping[str, object]) -> tuple[str, ...]:
    """Names of the tensors of a push of adapters."""
    return tuple(f"{module}{suffix}" for module in modules for suffix in (LORA_A, LORA_B))


def score_error(scores: list[list[float]], batch: TrainBatch, logprobs: np.ndarray) -> float:
    """Largest |difference| on completion tokens between the engine's scores and logprobs [B, T]."""
    worst = 0.0
    for row, line in enumerate(scores):
        start, end = int(batch.prompt_lengths[row]), int(batch.lengths[row])
        worst = max(worst, float(np.abs(np.asarray(line[start - 1 :]) - logprobs[row, start:end]).max()))
    return worst


def sequences(batch: TrainBatch) -> list[tuple[int, ...]]:
    """The batch's token ids without padding."""
    return [tuple(batch.token_ids[row, :length].tolist()) for row, length in enumerate(batch.lengths)]
