"""Measuring a jump before it is taken: what the engines sample with and without it, on prompts kept for that."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lora_rl.next.gate import Limits, Measured
from lora_rl.next.ledger import Ledger

if TYPE_CHECKING:
    from lora_rl.config import RunConfig
    from lora_rl.rollout.types import Rollout
    from lora_rl.train.job import Job


class GateRollouts:
    """Completions of the gate's prompts under different weights; always the same prompts and seeds.

    Everything it generates and computes is booked in the ledger.
    """

    def __init__(self, job: Job, config: RunConfig, ledger: Ledger) -> None:
        self._job, self._config, self._ledger = job, config, ledger
        self._without: list[Rollout] = []
        self._before = np.zeros(0)

    def without(self) -> Measured:
        """Measure the weights that policy and engines hold, to which every jump is then compared."""
        self._without = self._sample()
        self._before = self._logprobs()
        return self._measured(0.0, self._without)

    def with_jump(self, alpha: float, norm: float) -> Measured:
        """Measure the weights that policy and engines hold after a jump.

        Args:
            norm: length of the jump as a share of the way that training has come.
        """
        log_ratio = self._logprobs() - self._before
        # k3 (Schulman 2020) of the policy without the jump to that with it: never negative, few samples are enough.
        kl = float(np.mean(np.expm1(np.clip(log_ratio, -20.0, 20.0)) - log_ratio))
        return self._measured(alpha, self._sample(), kl=kl, norm=norm)

    def _sample(self) -> list[Rollout]:
        from lora_rl.rollout.source import training_sampling, validation_groups

        gate = self._config.grpo.next.gate
        self._job.turns.to_engines()
        groups = validation_groups(self._job.gate_prompts)
        sampling = training_sampling(self._config)
        scored, refused = self._job.generator.answer(groups, gate.num_generations, sampling, purpose="gate")
        if refused:
            group, problem = refused[0]
            raise ValueError(f"the gate's prompt {group.prompt.id} cannot be generated from: {problem}")
        rollouts = [rollout for group in scored for rollout in group]
        self._ledger.gate(generated=sum(len(r.completion.token_ids) for r in rollouts), scored=0)
        return rollouts

    def _logprobs(self) -> np.ndarray:
        """Logprobs, under the policy as it is, of the tokens sampled without a jump; float64 [tokens]."""
        from lora_rl.rollout.types import build_train_batch

        self._job.turns.to_trainer()
        # One may have ended before its first token.
        sampled_from = [r for r in self._without if r.completion.token_ids]
        if not sampled_from:
            return np.zeros(1)
        batch = build_train_batch(sampled_from, [0.0] * len(sampled_from))
        self._ledger.gate(generated=0, scored=sum(r.length for r in sampled_from))
        logprobs = self._job.policy.logprobs(batch)
        time = np.arange(batch.token_ids.shape[1])
        sampled = (time >= batch.prompt_lengths[:, None]) & (time < batch.lengths[:, None])
        return logprobs[sampled].astype(np.float64)

    def _measured(self, alpha: float, rollouts: Sequence[Rollout], **more: float) -> Measured:
        by_prompt: dict[int, list[float]] = {}
        for rollout in rollouts:
            by_prompt.setdefault(rollout.group_id, []).append(rollout.reward)
        sampled = [logprob for r in rollouts for logprob in r.completion.logprobs]
        return Measured(
            alpha=alpha,
            rewards=tuple(statistics.fmean(by_prompt[group]) for group in sorted(by_prompt)),
            length=len(sampled) / len(rollouts),
            entropy=-statistics.fmean(sampled) if sampled else 0.0,
            **more,
        )


def limits(config: RunConfig) -> Limits:
    """What `grpo.next.gate` demands of a jump."""
    gate = config.grpo.next.gate
    names = ("confidence", "tolerance", "max_kl", "max_length_ratio", "max_entropy_change", "max_norm")
    return Limits(**{name: getattr(gate, name) for name in names})


def measure(
    rollouts: GateRollouts, alphas: Sequence[float], jump: Callable[[float], float], back: Callable[[], None]
) -> tuple[Measured, list[Measured]]:
    """Measure the current weights, then every length of a jump.

    Args:
        jump: makes policy and engines hold the weights with the jump of this alpha, and returns its relative norm.
        back: makes the policy hold the weights without it again.
    """
    without, arms = rollouts.without(), []
    for alpha in alphas:
        norm = jump(alpha)
        arms.append(rollouts.with_jump(alpha, norm))
        back()
    return without, arms
