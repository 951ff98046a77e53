"""Rollouts by hand, and an engine pool that answers from a script: for tests of what happens around the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lora_rl.data import Prompt
from lora_rl.rollout.types import Completion, GenerationRequest, Rollout, SamplingSettings, StopReason


def prompt(name: str = "p", token_ids: tuple[int, ...] = (5, 6), answer: str = "7") -> Prompt:
    return Prompt(id=name, text=name, token_ids=token_ids, answer=answer)


def completion(token_ids: tuple[int, ...], *, stop: StopReason = StopReason.STOP, version: int = 1) -> Completion:
    """Logprobs are -0.5, -1.5, ... so that every position is recognisable."""
    return Completion(token_ids, tuple(-0.5 - n for n in range(len(token_ids))), stop, version)


def rollout(
    group: int, sample: int, reward: float, token_ids: tuple[int, ...] = (8, 9), *, stop: StopReason = StopReason.STOP
) -> Rollout:
    reason = "correct" if reward > 0 else "wrong"
    return Rollout(group, sample, prompt(f"p{group}"), completion(token_ids, stop=stop), "text", reward, reason)


@dataclass
class ScriptedEngines:
    """Stands where `EnginePool` does: `answer(request)` makes each completion; every request is kept."""

    answer: Callable[[GenerationRequest], Completion]
    asked: list[tuple[list[GenerationRequest], SamplingSettings]] = field(default_factory=list)
    weight_version: int = 1
    restarts: int = 0

    def generate(
        self, jobs: Sequence[Sequence[GenerationRequest]], sampling: SamplingSettings
    ) -> list[tuple[Completion, ...]]:
        self.asked.append(([request for job in jobs for request in job], sampling))
        return [tuple(self.answer(request) for request in job) for job in jobs]
