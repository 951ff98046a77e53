"""Pushing weights into a test engine from this process, as the trainer's sending rank does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from lora_rl.rollout.types import TrainBatch
from lora_rl.sync.manifest import Manifest
from lora_rl.sync.sender import MergedSender
from tests.support.engine_process import EngineProcess


class Pusher:
    """One transfer buffer and the sender that writes it; weights are given to each push."""

    def __init__(self, engine: EngineProcess, weights: Mapping[str, np.ndarray]) -> None:
        """Open a buffer of the size of `weights` in both processes."""
        self.engine = engine
        self._weights = dict(weights)
        self.sender = MergedSender(self._tensors, is_sender=True, dtype=torch.float32)
        # Room for an extra tensor.
        self._weights["spare"] = np.zeros(1024, np.float32)
        opened = self.sender.open()
        assert opened is not None
        self.path = Path(opened[0])
        engine.call("open_transfer", *opened)
        self.sender.close_name()

    def write(self, version: int, weights: Mapping[str, np.ndarray]) -> Manifest:
        """Put weights into the buffer, where the engine would read them."""
        self._weights = dict(weights)
        manifest = self.sender.send(version, must_differ=False)
        assert manifest is not None
        return manifest

    def push(self, version: int, weights: Mapping[str, np.ndarray]) -> None:
        """Write and load."""
        self.engine.call("load_push", self.write(version, weights).to_dict())

    def _tensors(self):
        return [(name, torch.from_numpy(value)) for name, value in self._weights.items()]


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
