"""Engines and ranks on the same devices take turns; what each holds in which phase goes into the record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lora_rl.cluster.memory import GIB, held_memory
from lora_rl.cluster.workers import Worker, wait

if TYPE_CHECKING:
    from lora_rl.rollout.pool import EnginePool


class Turns:
    """Hands the devices to the engines and back.

    With `enabled`, the ranks' frozen base weights leave the device while the engines generate, and the engines' KV
    cache and weights leave it while the ranks train. Otherwise each side keeps what it has.
    """

    def __init__(self, ranks: Sequence[Worker], engines: EnginePool, *, enabled: bool, timeout_s: float) -> None:
        self._ranks, self._engines = list(ranks), engines
        self._enabled, self._timeout = enabled, timeout_s
        self._ledger: dict[str, float] = {}

    def to_engines(self) -> None:
        """Before generating: engines awake, base weights of the ranks away."""
        if self._enabled:
            self._ranks_do("offload", "moving the base weights to host memory")
            self._engines_do("wake", "waking the engines", ["weights", "kv_cache"])

    def to_trainer(self) -> None:
        """Before training: engines asleep, base weights back."""
        if self._enabled:
            self._engines_do("sleep", "putting the engines to sleep")
            self._ranks_do("reload", "moving the base weights to the device")

    def to_both(self, *, generating: bool = False) -> None:
        """Before a push: the weights of both sides, and with `generating` also the engines' KV cache."""
        if self._enabled:
            self._ranks_do("reload", "moving the base weights to the device")
            self._ranks_do("give_back", "freeing what training used")
            parts = ["weights", "kv_cache"] if generating else ["weights"]
            self._engines_do("wake", "waking the engines", parts)

    def note(self, phase: str) -> None:
        """Enter what the processes hold now into the ledger."""
        for side, ask in (("ranks", self._ranks_do), ("engines", self._engines_do)):
            if held := ask("memory", "reading memory use"):
                self._ledger[f"memory/{phase}/{side}_gib"] = max(held) / GIB
        self._ledger[f"memory/{phase}/driver_gib"] = held_memory("cpu") / GIB

    def ledger(self) -> dict[str, float]:
        """`memory/<phase>/ranks_gib`, `.../engines_gib` and `.../driver_gib` of the phases noted since the last call.

        The first two are the largest over the processes of that side: reserved device memory on GPUs, resident memory
        on CPUs. That of this process is resident memory.
        """
        ledger, self._ledger = self._ledger, {}
        return ledger

    def _ranks_do(self, method: str, doing: str) -> list:
        return wait([w.call(method) for w in self._ranks], timeout_s=self._timeout, doing=doing)

    def _engines_do(self, method: str, doing: str, *args: object) -> list:
        return [answer for _, answer in self._engines.ask(method, *args, doing=doing)]
