"""An engine without a model: it answers each request from its seed, some steps later, and fails when it is told to."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from lora_rl.rollout.actor import EngineActor
from lora_rl.rollout.types import Completion, GenerationRequest, SamplingSettings, StopReason
from lora_rl.sync.manifest import Manifest, SyncReport, Transfer
from lora_rl.track.logs import capture_to_file

# First tokens of a prompt that make trouble.
KILLS, HANGS, IS_REFUSED, BREAKS = 1001, 1002, 1003, 1004
STEPS = 3


class TalkingEngine:
    """Stands where `Engine` does. A completion of a request takes `STEPS` steps and holds the seed."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.weight_version = 0
        self._step_s = step_s
        self._running: dict[str, tuple[GenerationRequest, int, int]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def add(self, name: str, request: GenerationRequest, sampling: SamplingSettings) -> None:
        if request.prompt_ids[0] == IS_REFUSED:
            raise ValueError("the prompt is too long")
        assert name not in self._running
        self._running[name] = (request, 0, self.weight_version)

    def step(self) -> list[tuple[str, Completion]]:
        time.sleep(self._step_s)
        ended = []
        for name, (request, steps, version) in list(self._running.items()):
            trouble = request.prompt_ids[0]
            if trouble == KILLS:
                os._exit(1)
            if trouble == HANGS:
                time.sleep(3600)
            if trouble == BREAKS:
                raise RuntimeError("illegal memory access")
            self._running[name] = (request, steps + 1, version)
            if steps + 1 == STEPS:
                del self._running[name]
                tokens = (request.seed % 100, 7)
                spans = () if version == self.weight_version else ((version, 1), (self.weight_version, 1))
                ended.append((name, Completion(tokens, (-0.5, -0.25), StopReason.STOP, version, spans)))
        return ended

    def abort(self, names: Iterable[str]) -> None:
        for name in names:
            self._running.pop(name, None)

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[list[float]]:
        return [[-float(self.weight_version)] * (len(s) - 1) for s in sequences]

    def open_transfer(self, transfer: Transfer) -> None:
        pass

    def load_push(self, manifest: dict[str, Any]) -> list[SyncReport]:
        push = Manifest.from_dict(manifest)
        self.weight_version = push.version
        return [SyncReport(push.version, push.digest, 0, 0)]


class TalkingActor(EngineActor):
    """The real actor around a `TalkingEngine`."""

    def __init__(self, log: str = "", step_s: float = 0.0, build_s: float = 0.0) -> None:
        self._step_s, self._build_s = step_s, build_s
        if log:
            self._log = capture_to_file(log)

    def new_engine(self) -> Any:
        time.sleep(self._build_s)
        return TalkingEngine(self._step_s)

    async def open_relay(self, transfer: Transfer) -> None:
        """Without the buffer, and so without the seconds that importing torch takes."""

    async def load_push(self, manifest: dict[str, Any], payload: Any = None) -> Any:
        return await super().load_push(manifest)

    async def process(self) -> int:
        return os.getpid()
