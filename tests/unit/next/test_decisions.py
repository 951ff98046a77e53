"""What is done with a proposal: the gate before a jump, the watch after it, the ledger over both."""

from __future__ import annotations

import random
import statistics

import pytest

from lora_rl.next.gate import Limits, Measured, decide, paired_bound
from lora_rl.next.ledger import Ledger
from lora_rl.next.watch import Outcome, Watch

LIMITS = Limits(confidence=0.9, tolerance=0.02, max_kl=0.1, max_length_ratio=1.2, max_entropy_change=0.5, max_norm=1.0)
PROMPTS = 64


def rewards(chance: float, seed: int = 0) -> tuple[float, ...]:
    """0 or 1 per prompt; equal seeds draw alike, so that a higher chance only adds to what is right."""
    generator = random.Random(seed)
    return tuple(float(generator.random() < chance) for _ in range(PROMPTS))


def measured(alpha: float, chance: float, **changes: float) -> Measured:
    return Measured(alpha, rewards(chance), **{"length": 4.0, "entropy": 1.0, **changes})


def test_the_best_alpha_that_gains_is_taken():
    verdict = decide(measured(0, 0.4), [measured(0.5, 0.5), measured(1.0, 0.6), measured(1.5, 0.45)], LIMITS)
    assert verdict.alpha == 1.0
    assert verdict.reason.startswith("alpha 1: reward +0.")
    gain = statistics.fmean(rewards(0.6)) - statistics.fmean(rewards(0.4))
    assert [j.gain for j in verdict.judged][1] == pytest.approx(gain)


@pytest.mark.parametrize(
    ("arm", "reason"),
    [
        (measured(1, 0.3), "mean reward changes by -0."),
        (measured(1, 0.4), "mean reward changes by +0.0000"),
        (measured(1, 0.6, kl=0.2), "KL 0.200 is above 0.1"),
        (measured(1, 0.6, kl=float("nan")), "KL nan"),
        (measured(1, 0.6, length=5.0), "completions are 1.25 times as long"),
        (measured(1, 0.6, length=3.0), "completions are 0.75 times as long"),
        (measured(1, 0.6, entropy=0.2), "entropy changes by -0.800"),
        (measured(1, 0.6, norm=1.5), "it is 1.50 times as long as the way so far"),
    ],
)
def test_every_limit_refuses(arm, reason):
    verdict = decide(measured(0, 0.4), [arm], LIMITS)
    assert verdict.alpha == 0
    assert reason in verdict.reason


def test_a_gain_that_may_be_chance_is_refused():
    base = (0.0,) * 24 + (1.0,) * 40
    other = (1.0,) * 12 + (0.0,) * 12 + (1.0,) * 30 + (0.0,) * 10
    gain, lower = paired_bound([a - b for a, b in zip(other, base, strict=True)], 0.9)
    assert gain == 2 / 64
    assert lower < -0.02
    assert "may fall by" in decide(Measured(0, base, 4.0, 1.0), [Measured(1, other, 4.0, 1.0)], LIMITS).reason


def test_equal_weights_rarely_pass_however_many_alphas_are_tried():
    """Six alphas of no effect with rewards drawn anew: the level is shared, so the chance of any stays at 1 - 0.9."""
    strict = Limits(0.9, 0.0, 1, 9, 9, 9)
    passed = 0
    for trial in range(300):
        arms = [Measured(a, rewards(0.4, seed=10 * trial + a), 4.0, 1.0) for a in range(1, 7)]
        passed += decide(Measured(0, rewards(0.4, seed=10 * trial), 4.0, 1.0), arms, strict).alpha != 0
    assert passed / 300 < 0.14


def test_pairing_sees_a_small_gain_that_the_spread_of_prompts_would_hide():
    base = tuple(i / PROMPTS for i in range(PROMPTS))
    better = tuple(r + 0.02 + 0.01 * (-1) ** i for i, r in enumerate(base))
    differences = [a - b for a, b in zip(better, base, strict=True)]
    gain, lower = paired_bound(differences, 0.95)
    assert gain == pytest.approx(0.02)
    assert lower == pytest.approx(gain - 1.6449 * statistics.stdev(differences) / 8, rel=1e-4)
    assert lower > 0


@pytest.mark.parametrize(
    ("after", "outcomes"),
    [
        ([0.5, 0.52, 0.49, 0.51], ["watching"] * 3 + ["kept"]),
        ([0.1], ["fallen"]),
        ([0.46, 0.46, 0.46, 0.46], ["watching", "watching", "watching", "fallen"]),
        ([0.46, 0.46, 0.55, 0.55], ["watching"] * 3 + ["kept"]),
    ],
)
def test_the_watch_ends_early_only_on_a_clear_fall(after, outcomes):
    watch = Watch(before=[0.42, 0.58, 0.5, 0.5], patience=4, tolerance=0.01)
    said = []
    for reward in after:
        watch = Watch(**watch.state_dict())  # as after a resume
        said.append(watch.note(reward))
    assert said == [Outcome(o) for o in outcomes]


def test_a_single_step_before_decides_nothing_early():
    assert Watch(before=[0.5], patience=2, tolerance=0.0).note(0.0) is Outcome.WATCHING


def test_the_ledger_adds_up():
    ledger = Ledger()
    for _ in range(3):
        ledger.step(optimizer_steps=4, generated=100, trained=160, scored=40)
        ledger.time(2.0)
    ledger.gate(generated=50, scored=0)
    ledger.gate(generated=55, scored=70)
    ledger.time(1.5, gate=1.5)
    assert ledger.optimizer_steps == 12
    assert ledger.tokens == 3 * 300 + 50 + 55 + 70
    assert (ledger.seconds, ledger.gate_seconds) == (7.5, 1.5)
    again = Ledger(**ledger.state_dict())
    assert again.metrics() == ledger.metrics()
    assert again.metrics()["next/tokens"] == ledger.tokens
