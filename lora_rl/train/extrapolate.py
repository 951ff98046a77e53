"""Jumps ahead along the trajectory of the adapters (NExt): proposed from the past, measured, watched, undone.

    every `interval` steps a snapshot -> enough of them: propose -> gate -> jump -> watch -> keep, or undo

All of a jump happens between two steps. Whatever is pushed to the engines is a new weight version, also the weights
that were before a jump, so that versions never go backwards.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_rl.next.factors import RankOne
from lora_rl.next.gate import Verdict, decide
from lora_rl.next.ledger import Ledger
from lora_rl.next.predictors import Predictor
from lora_rl.next.propose import Proposal, predictors, propose
from lora_rl.next.watch import Outcome, Watch
from lora_rl.track import names
from lora_rl.train.jump_gate import GateRollouts, limits, measure

if TYPE_CHECKING:
    from lora_rl.config import RunConfig
    from lora_rl.lora.peft_io import PeftAdapter
    from lora_rl.policy.state import PolicyState
    from lora_rl.rollout.source import RolloutSource
    from lora_rl.rollout.types import Rollout
    from lora_rl.track import Console, PhaseTimer
    from lora_rl.train.job import Job

PHASE = "extrapolation"
# Seconds for ranks to answer when something has failed: they may be what has.
LAST_WORD_S = 20.0


@dataclass
class Taken:
    """A jump that is watched.

    Attributes:
        adapter, state: of the policy before it.
        watch: the rewards since.
        optimizer_steps: taken since; wasted, if it is undone.
        merged: the jumps that were in the frozen weights then.
        same_layout: whether `state` is of the ranks that run now, so that random generators can be restored.
    """

    adapter: PeftAdapter
    state: PolicyState
    watch: Watch
    optimizer_steps: int = 0
    merged: Sequence[Mapping[str, RankOne]] = ()
    same_layout: bool = True


class Extrapolation:
    """What `grpo.next` adds to the loop.

    Attributes:
        ledger: the costs of the run so far.
        taken: the jump that is watched now.
        origin: step at which the trajectory began.
        since: snapshots since then.
        retry_at: the first of them at which a jump may be proposed.
        rewards: of the last steps.
        trail: the settings with which it is recorded.
    """

    def __init__(
        self,
        job: Job,
        config: RunConfig,
        console: Console,
        timer: PhaseTimer,
        *,
        among: Mapping[str, Predictor] | None = None,
    ) -> None:
        """
        Args:
            among: predictors to choose from; None: those of the configuration.
        """
        self._job, self._config, self._console, self._timer = job, config, console, timer
        self._settings = config.grpo.next
        self._among = predictors(self._settings, config.grpo.seed) if among is None else among
        self.ledger = Ledger()
        self.taken: Taken | None = None
        self.origin = self.since = 0
        self.retry_at = self._settings.snapshots
        self.rewards: deque[float] = deque(maxlen=max(self._settings.watch.patience, 1))
        self.trail = self._trail_settings()
        self._clock = time.perf_counter()
        self._scored = job.policy.scored_tokens

    def start(self, step: int = 0) -> None:
        """The trajectory begins with the weights as they are."""
        self._job.policy.extrapolation("clear")
        self.origin, self.since, self.retry_at = step, 0, self._settings.snapshots
        self.trail = self._trail_settings()

    def settle(self, step: int) -> None:
        """After the state was loaded: a trail of other settings than those of now is not continued."""
        if self.trail != self._trail_settings():
            before = ", ".join(f"grpo.next.{name} {value}" for name, value in self.trail.items())
            self._console.info(f"jumps ahead: the trail was recorded with {before}; a new one begins")
            self.start(step)

    def after_step(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        kept: Sequence[Rollout],
        trained: Mapping[str, float],
        source: RolloutSource,
        *,
        left: int,
    ) -> dict[str, float]:
        """Everything that happens between this step and the next.

        Args:
            rollouts, kept, trained: what the step generated, trained on, and reported.
            source: halted while weights change that no optimizer step has changed.
            left: steps to come. A jump is only proposed if it can be trained on, and watched to the end.

        Returns:
            Metrics of `next/`: the ledger, and what was proposed, measured and decided.
        """
        generated = source.metrics()
        # Groups that dynamic sampling drops count, too: those it keeps have much the same reward whatever the policy.
        reward = generated.get(names.GENERATED_REWARD, statistics.fmean(r.reward for r in rollouts))
        updates = int(trained.get("optimizer_steps", 0))
        self.rewards.append(reward)
        self.ledger.step(
            optimizer_steps=updates,
            generated=int(generated[names.GENERATED_TOKENS]),
            trained=sum(r.length for r in kept),
            scored=self._job.policy.scored_tokens - self._scored,
        )
        began = time.perf_counter()
        found: dict[str, float] = {}
        with self._timer(PHASE):
            if self.taken is not None:
                found |= self._watch(step, reward, updates, source)
            if step > self.origin and (step - self.origin) % self._settings.interval == 0:
                found |= self._snapshot(step, source, left)
        # What the gate scored is booked as its own.
        self._scored = self._job.policy.scored_tokens
        now = time.perf_counter()
        self.ledger.time(now - self._clock, gate=now - began)
        self._clock = now
        return {**found, **self.ledger.metrics()}

    # -- inside ------------------------------------------------------------------------------------------------

    def _trail_settings(self) -> dict[str, int]:
        return {"interval": self._settings.interval, "snapshots": self._settings.snapshots}

    def _watch(self, step: int, reward: float, updates: int, source: RolloutSource) -> dict[str, float]:
        assert self.taken is not None
        self.taken.optimizer_steps += updates
        outcome = self.taken.watch.note(reward)
        if outcome is Outcome.WATCHING:
            return {}
        taken, self.taken = self.taken, None
        before, after = (statistics.fmean(rewards) for rewards in (taken.watch.before, taken.watch.after))
        if outcome is Outcome.KEPT:
            self._console.info(f"jump kept: reward {before:.4f} before it, {after:.4f} since")
            return {"next/kept": 1.0}
        with source.halted():
            self._restore(taken)
            self._push(source)
        self.ledger.rolled_back += 1
        self.ledger.wasted_steps += taken.optimizer_steps
        self._console.warn(
            f"the last jump is undone, with {taken.optimizer_steps} optimizer steps since: reward {before:.4f} before "
            f"it, {after:.4f} since"
        )
        self.rewards.clear()
        self.start(step)
        return {"next/undone": 1.0}

    def _snapshot(self, step: int, source: RolloutSource, left: int) -> dict[str, float]:
        self._job.policy.extrapolation("record")
        self.since += 1
        most = self._settings.max_jumps
        if left < self._settings.steps_after_jump:
            return {}
        if self.taken is not None or self.since < self.retry_at or (most is not None and self.ledger.accepted >= most):
            return {}
        self.ledger.proposed += 1
        policy = self._job.policy
        proposal = propose(
            policy.extrapolation("trajectories"),
            self._among,
            self._settings,
            lambda proposals, at: policy.extrapolation("project", proposals, at),
        )
        found = {f"next/backtest_cos_{name}": test.cosine for name, test in proposal.tests.items()}
        found |= {f"next/backtest_damping_{name}": test.damping for name, test in proposal.tests.items()}
        if proposal.predictor is None:
            tests = ", ".join(f"{name} {test.cosine:+.2f}" for name, test in proposal.tests.items())
            return {**found, **self._refused(f"the back-test supports no prediction (cosines: {tests})")}
        with source.halted():
            return {**found, **self._measured(step, proposal, source)}

    def _measured(self, step: int, proposal: Proposal, source: RolloutSource) -> dict[str, float]:
        """Gate, then jump or stay."""
        adapter, state = self._job.policy.state()
        watch = Watch(list(self.rewards), self._settings.watch.patience, self._settings.watch.tolerance)
        before = Taken(adapter, state, watch, merged=list(self._job.policy.extrapolation("merged")))
        report: dict[str, float] = {}

        def jump(alpha: float) -> float:
            report.update(self._jump(proposal.changes, alpha))
            self._push(source)
            return report["norm"]

        found: dict[str, float] = {}
        alpha, reason = self._settings.alphas[0], "not measured"
        if self._settings.gate.enabled:
            rollouts = GateRollouts(self._job, self._config, self.ledger)
            try:
                without, arms = measure(rollouts, self._settings.alphas, jump, lambda: self._restore(before))
            except BaseException as error:
                # What is kept of a run that ends here must not hold a jump that was only tried.
                self._leave(before, error)
                raise
            verdict = decide(without, arms, limits(self._config))
            alpha, reason = verdict.alpha, verdict.reason
            found |= _described(verdict)
            found |= {f"next/gate_kl_{arm.alpha:g}": arm.kl for arm in arms}
        if alpha == 0.0:
            self._push(source)
            return {**found, **self._refused(reason)}
        norm = jump(alpha)
        self.ledger.accepted += 1
        self._console.info(f"jump of {norm:.2f} of the way so far, by {proposal.predictor}, {reason}")
        self.taken = before if self._settings.watch.patience else None
        self.start(step)
        return {**found, "next/alpha": alpha, "next/norm": norm, "next/dropped": report["dropped"]}

    def _refused(self, reason: str) -> dict[str, float]:
        self.retry_at = self.since + self._settings.retry_after
        self._console.info(f"no jump: {reason}")
        return {"next/alpha": 0.0}

    def _jump(self, changes: Mapping[str, RankOne], alpha: float) -> dict[str, float]:
        self._job.turns.to_trainer()
        return self._job.policy.extrapolation("jump", {name: c.times(alpha) for name, c in changes.items()})

    def _restore(self, before: Taken) -> None:
        self._job.turns.to_trainer()
        self._put_back(before)

    def _put_back(self, before: Taken) -> None:
        self._job.policy.load_state(before.adapter, before.state, same_layout=before.same_layout)
        # Whatever `write_back` is now: the jump may be from before a restart with another configuration.
        self._job.policy.extrapolation("set_merged", before.merged)

    def _leave(self, before: Taken, error: BaseException) -> None:
        """Take a jump back that was being measured. Ranks may be what has failed, and must not be waited for long."""
        if not isinstance(error, KeyboardInterrupt):
            self._job.policy.hurry(LAST_WORD_S)
        try:
            self._job.turns.to_trainer()
        except Exception as another:
            # The adapters are where they always are.
            error.add_note(f"the devices were not handed back: {another}")
        try:
            self._put_back(before)
        except Exception as another:
            error.add_note(f"the jump that was being measured could not be taken back: {another}")

    def _push(self, source: RolloutSource) -> None:
        """Give the engines the policy's weights as a new version, whatever they held before."""
        self._job.turns.to_both()
        source.before_push(self._job.weights.version + 1)
        try:
            self._job.weights.push(after_update=False)
        finally:
            source.after_push()


def _described(verdict: Verdict) -> dict[str, float]:
    gains = {f"next/gate_gain_{j.alpha:g}": j.gain for j in verdict.judged}
    return gains | {f"next/gate_lower_{j.alpha:g}": j.lower for j in verdict.judged}
