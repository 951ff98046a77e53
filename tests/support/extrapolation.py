"""A job around one real Megatron rank whose "training" walks along a given path and whose reward is known.

Everything of an extrapolation is real - snapshots, back-test, gate, watch, adapters, optimizer state - except who
moves the weights and what completions say: a reward that falls with the distance of the weights from a target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from io import StringIO
from types import SimpleNamespace
from typing import Any

import numpy as np

from lora_rl.track import names
from tests.support.lab import LARGE_B, fingerprint, new_rank, scale, started_rank
from tests.support.rollouts import prompt, rollout

PROMPTS = 16


class LocalPolicy:
    """The methods of `PolicyGroup` that an extrapolation calls, on the rank in this process."""

    def __init__(self, config: Any) -> None:
        from lora_rl.policy.extrapolation import RankExtrapolation

        self.config = config
        svd, section = config.policy.megatron_cfg.peft.svd.enabled, config.grpo.next
        self.rank = started_rank(config) if svd else new_rank(config, b_std=LARGE_B)
        self._extrapolation = RankExtrapolation(
            self.rank,
            capacity=section.snapshots + 1,
            horizon=section.horizon,
            merge=section.write_back == "merge",
        )
        self.layout = SimpleNamespace(tp=1, pp=1, dp=1)
        self.scored_tokens = 0
        self.gradient_step(0)
        self._start = {n: tuple(w.detach().clone() for w in pair) for n, pair in self._weights().items()}

    def extrapolation(self, method: str, *args: Any) -> Any:
        return getattr(self._extrapolation, method)(*args)

    def state(self) -> tuple[Any, Any]:
        from lora_rl.policy.export import export_peft
        from lora_rl.policy.state import gather_state

        return export_peft(self.rank.model), gather_state(self.rank)

    def load_state(self, adapter: Any, state: Any, *, same_layout: bool) -> None:
        from lora_rl.policy.export import import_peft
        from lora_rl.policy.state import load_state

        if not state.svd:
            import_peft(self.rank.model, adapter)
        load_state(self.rank, state, with_random=same_layout)

    def logprobs(self, batch: Any) -> np.ndarray:
        self.scored_tokens += int(batch.lengths.sum())
        return self.rank.logprobs(batch, [list(range(len(batch)))])

    def gradient_step(self, seed: int) -> None:
        """A real optimizer step, so that there are moments to come back to."""
        from tests.support.batches import make_batch, one_microbatch

        batch = make_batch(seed)
        shards, cuts = one_microbatch(batch, 1)
        self.rank.train_step(shards[0], cuts[0])

    def walk(self, share: float) -> None:
        """Put the weights at this share of their way, along which the first column of every B doubles in length."""
        import torch

        share -= self._merged_share()
        with torch.no_grad():
            for name, (a, b) in self._weights().items():
                a.copy_(self._start[name][0])
                b.copy_(self._start[name][1])
                b[:, 0] += share * self._start[name][1][:, 0]

    def progress(self) -> float:
        """Where the weights are on that way, whatever brought them there: <W - W_0, W_1 - W_0> over its square."""
        inner = total = 0.0
        for name, (a, b) in self._weights().items():
            start_a, start_b = (x.double() for x in self._start[name])
            way = start_b[:, :1] @ start_a[:1]
            inner += float(((b.detach().double() @ a.detach().double() - start_b @ start_a) * way).sum())
            total += float((way**2).sum())
        return inner / total + self._merged_share()

    def _merged_share(self) -> float:
        """What jumps in the frozen weights have done of the way."""
        inner = total = 0.0
        for name, (a, b) in self._start.items():
            way = scale(self.config) * b[:, :1].double() @ a[:1].double()
            inner += sum(float(j[name].sigma * j[name].u @ way @ j[name].v) for j in self.rank.merged.changes)
            total += float((way**2).sum())
        return inner / total

    def _weights(self) -> dict[str, tuple[Any, Any]]:
        from lora_rl.lora.targets import adapter_modules

        modules = adapter_modules(self.rank.model.module).items()
        return {name: (m.linear_in.weight, m.linear_out.weight) for name, m in modules}


class SpectralPolicy(LocalPolicy):
    """The same with SVD-LoRA; on the way every singular value doubles."""

    def walk(self, share: float) -> None:
        """See `LocalPolicy`."""
        for spectrum, start in self._spectra():
            spectrum.theta.data.copy_(start + share * spectrum.sigma_ref)

    def progress(self) -> float:
        """See `LocalPolicy`."""
        pairs = [((s.theta.detach() - start).double(), s.sigma_ref.double()) for s, start in self._spectra()]
        return sum(float((done * way).sum()) for done, way in pairs) / sum(float((way**2).sum()) for _, way in pairs)

    def _spectra(self) -> list[tuple[Any, Any]]:
        from lora_rl.policy.spectral import spectra

        return [(spectrum, self._start[name][0]) for name, _, spectrum in spectra(self.rank.model)]

    def _weights(self) -> dict[str, tuple[Any, ...]]:
        from lora_rl.policy.spectral import spectra

        return {name: (spectrum.theta,) for name, _, spectrum in spectra(self.rank.model)}


@dataclass
class Versions:
    """Stands where `WeightSync` does."""

    version: int = 1
    pushed: list[float] = field(default_factory=list)
    policy: Any = None

    def push(self, *, after_update: bool) -> dict[str, float]:
        self.version += 1
        self.pushed.append(self.policy.progress())
        return {}


class Turns:
    """Stands where `Turns` does; each side keeps what it has."""

    def to_engines(self) -> None: ...
    def to_trainer(self) -> None: ...
    def to_both(self, *, generating: bool = False) -> None: ...


@dataclass
class KnownRewards:
    """Stands where `Generator` does: the share of right answers is the progress of the weights that were pushed."""

    weights: Versions
    asked: list[list[tuple[int, int]]] = field(default_factory=list)

    def answer(self, groups: Sequence[Any], per_prompt: int, sampling: Any, *, purpose: str) -> tuple[list, list]:
        assert purpose == "gate"
        self.asked.append([(g.group_id, s) for g in groups for s in range(per_prompt)])
        right = max(0.0, min(1.0, self.weights.pushed[-1]))
        return [
            [rollout(g.group_id, s, right + 0.01 * math.cos(g.group_id + s)) for s in range(per_prompt)] for g in groups
        ], []


@dataclass
class RecordedSource:
    """A source that notes when it was halted and pushed to.

    Attributes:
        reward: of everything it generated, as dynamic sampling tells it.
    """

    events: list[str] = field(default_factory=list)
    reward: float | None = None

    def halted(self) -> AbstractContextManager[None]:
        self.events.append("halted")
        return nullcontext()

    def before_push(self, version: int) -> None:
        self.events.append(f"push {version}")

    def after_push(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        told = {} if self.reward is None else {names.GENERATED_REWARD: self.reward}
        return {names.GENERATED_TOKENS: 16.0, **told}


class Life:
    """A job whose step s brings the weights to the share 1 - exp(-s / 12) of the way."""

    def __init__(self, config: Any, *, poison: float = 1.0) -> None:
        from lora_rl.next.predictors import Saturating
        from lora_rl.track import Console, PhaseTimer
        from lora_rl.train.extrapolate import Extrapolation

        class Poisoned:
            def predict(self, known: Any) -> Any:
                return {n: p.times(poison) for n, p in Saturating().predict(known).items()}

        kind = SpectralPolicy if config.policy.megatron_cfg.peft.svd.enabled else LocalPolicy
        self.policy = kind(config)
        self.weights = Versions(policy=self.policy)
        self.generator = KnownRewards(self.weights)
        self.source = RecordedSource()
        self.out = StringIO()
        self.job: Any = SimpleNamespace(
            identity={},
            start=None,
            policy=self.policy,
            weights=self.weights,
            turns=Turns(),
            generator=self.generator,
            gate_prompts=[prompt(str(n)) for n in range(PROMPTS)],
        )
        console = Console("plain", 30, stream=self.out)
        self.extrapolation = Extrapolation(self.job, config, console, PhaseTimer(), among={"poisoned": Poisoned()})

    def step(self, number: int, *, left: int = 100, dropping: bool = False) -> dict[str, float]:
        """One step: the rest of the way shrinks by the same factor, wherever the weights are.

        Args:
            left: steps to come.
            dropping: as with dynamic sampling, the groups that are kept are half right whatever the weights.
        """
        reward = max(0.0, min(1.0, self.policy.progress()))
        if dropping:
            self.source.reward, reward = reward, 0.5
        share = self.policy.progress()
        self.policy.gradient_step(number)
        self.policy.walk(1 - (1 - share) * math.exp(-1 / 12))
        self.weights.push(after_update=True)
        done = [rollout(n, s, reward) for n in range(4) for s in range(2)]
        return self.extrapolation.after_step(number, done, done, {"optimizer_steps": 1.0}, self.source, left=left)


def picture(policy: LocalPolicy) -> dict[str, Any]:
    """Everything that a way back must bring back."""
    adapter, state = policy.state()
    return {
        "adapter": {f"{n}.{k}": getattr(t, k).clone() for n, t in adapter.tensors.items() for k in "ab"},
        "moments": state.moments,
        "svd": state.svd,
        "random": state.random,
        "counters": state.counters,
        "weights": fingerprint(policy.rank),
    }


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two pictures are the same bit for bit."""
    return all(one[key] == other[key] for key in ("counters", "weights")) and all(
        one[part].keys() == other[part].keys() and all(t.equal(other[part][k]) for k, t in one[part].items())
        for part in ("adapter", "moments", "svd", "random")
    )
