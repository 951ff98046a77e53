"""The decision whether a jump is taken: completions of held-out prompts with and without it, prompt by prompt."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """What one set of weights does on the gate's prompts.

    Attributes:
        alpha: length of the jump in units of the proposal; 0 is no jump.
        rewards: mean reward of each prompt, the same prompts and seeds for every alpha.
        length: mean tokens of a completion.
        entropy: mean -log p of the sampled tokens, nats.
        kl: KL divergence per token from the policy without the jump to this one, nats.
        norm: length of the jump as a share of the way that training has come.
    """

    alpha: float
    rewards: tuple[float, ...]
    length: float
    entropy: float
    kl: float = 0.0
    norm: float = 0.0


@dataclass(frozen=True)
class Limits:
    """What a jump must keep to; see `grpo.next.gate` for the meaning of each."""

    confidence: float
    tolerance: float
    max_kl: float
    max_length_ratio: float
    max_entropy_change: float
    max_norm: float


@dataclass(frozen=True)
class Judged:
    """One alpha.

    Attributes:
        gain: mean over prompts of the reward with the jump minus that without.
        lower: confidence bound of it from below.
        problem: why it is not taken; None if it may be.
    """

    alpha: float
    gain: float
    lower: float
    problem: str | None


@dataclass(frozen=True)
class Verdict:
    """The jump that is taken.

    Attributes:
        alpha: 0: none.
        judged: every alpha that was tried.
    """

    alpha: float
    judged: tuple[Judged, ...]

    @property
    def reason(self) -> str:
        """What was wrong with each alpha, or the gain of the one that was taken."""
        if self.alpha:
            taken = next(j for j in self.judged if j.alpha == self.alpha)
            return f"alpha {taken.alpha:g}: reward {taken.gain:+.4f}, at least {taken.lower:+.4f}"
        return "; ".join(f"alpha {j.alpha:g}: {j.problem}" for j in self.judged)


def decide(without: Measured, arms: Sequence[Measured], limits: Limits) -> Verdict:
    """The alpha with the largest mean gain among those that keep to all limits; none where there is none.

    A jump may be taken if its mean gain is positive and the lower confidence bound of the mean paired difference is
    above -tolerance. The bound is normal and one-sided, at a level divided by the number of alphas that are tried
    (Bonferroni), since the best of several looks better than it is.
    """
    level = 1 - (1 - limits.confidence) / max(len(arms), 1)
    judged = tuple(_judge(without, arm, limits, level) for arm in arms)
    able = [j for j in judged if j.problem is None]
    return Verdict(max(able, key=lambda j: j.gain).alpha if able else 0.0, judged)


def paired_bound(differences: Sequence[float], level: float) -> tuple[float, float]:
    """(mean, lower bound of the mean at this one-sided confidence level) by the normal approximation."""
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return mean, mean - statistics.NormalDist().inv_cdf(level) * error


def _judge(without: Measured, arm: Measured, limits: Limits, level: float) -> Judged:
    differences = [a - b for a, b in zip(arm.rewards, without.rewards, strict=True)]
    gain, lower = paired_bound(differences, level)
    entropy, length = arm.entropy - without.entropy, arm.length / max(without.length, 1e-9)
    problems = {
        f"mean reward changes by {gain:+.4f}": not gain > 0,
        f"the reward may fall by {-lower:.4f}, more than {limits.tolerance:g}": not lower > -limits.tolerance,
        f"KL {arm.kl:.3f} is above {limits.max_kl:g}": not arm.kl <= limits.max_kl,
        f"completions are {length:.2f} times as long": not 1 / limits.max_length_ratio
        <= length
        <= limits.max_length_ratio,
        f"entropy changes by {entropy:+.3f}": not abs(entropy) <= limits.max_entropy_change,
        f"it is {arm.norm:.2f} times as long as the way so far": not arm.norm <= limits.max_norm,
    }
    return Judged(arm.alpha, gain, lower, next((text for text, is_so in problems.items() if is_so), None))
