"""Where a step's rollouts come from. The loop knows only `RolloutSource`."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from lora_rl.rewards import Scorer, ScoreRequest
from lora_rl.rollout.queue import PromptQueue
from lora_rl.rollout.seats import JobRefused
from lora_rl.rollout.types import (
    Completion,
    GenerationRequest,
    PromptGroup,
    Rollout,
    SamplingSettings,
    StopReason,
    reward_parts,
)
from lora_rl.sync.errors import SyncError
from lora_rl.track import names

if TYPE_CHECKING:
    from lora_rl.config import RunConfig
    from lora_rl.data import Prompt, Tokenizer
    from lora_rl.rollout.pool import EnginePool


class RolloutSource(Protocol):
    """Delivers whole groups of scored rollouts, one list per step."""

    def next_step(self, step: int) -> list[Rollout]:
        """The rollouts to train on in this step, group by group in the order of their ids."""
        ...

    def before_push(self, version: int) -> None:
        """The engines are about to be given this weight version; afterwards, `after_push`."""
        ...

    def after_push(self) -> None:
        """The engines hold the new weights."""
        ...

    def halted(self) -> AbstractContextManager[None]:
        """Nothing is generated for training within the block, and what was so far and is not trained on is given up.

        For weights that no optimizer step has led to; `before_push` and `after_push` may be called inside.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """What there is to say about the groups of the last step: `names.GENERATED_TOKENS` and others of `rollout/`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What continues the order of prompts when the run does, see `PromptQueue`."""
        ...

    def close(self) -> None:
        """No more steps will be asked for."""
        ...


@dataclass
class Generator:
    """Samples completions of prompts and scores them.

    Attributes:
        engines: who samples.
        tokenizer: turns completions into the text the verifier reads.
        seed: the run's seed; with the purpose, the group and the sample it seeds every request.
        scorer: scores; started, if its verifiers need that.
    """

    engines: EnginePool
    tokenizer: Tokenizer
    seed: int
    scorer: Scorer = field(default_factory=Scorer)
    _rounds: Iterator[int] = field(default_factory=count, init=False, repr=False)

    def new_cache(self) -> str:
        """A word for `requests` that no requests had before.

        What an earlier round left in the cache is not found: a resumed run would not find it either, and what is read
        there and what is computed differ in the last bits.
        """
        return f"round {next(self._rounds)}"

    def requests(
        self, group: PromptGroup, per_prompt: int, *, purpose: str, cache: str = ""
    ) -> list[GenerationRequest]:
        """The requests of one group. Equal arguments give equal requests.

        Args:
            purpose: distinguishes streams of random numbers, such as `train` and `validation`.
            cache: see `GenerationRequest`.
        """
        if group.attempt:
            purpose = f"{purpose} again {group.attempt}"
        return [
            GenerationRequest(group.prompt.token_ids, request_seed(self.seed, purpose, group.group_id, sample), cache)
            for sample in range(per_prompt)
        ]

    def score(
        self, answered: Sequence[tuple[PromptGroup, Sequence[Completion]]], sampling: SamplingSettings
    ) -> list[list[Rollout]]:
        """The rollouts of each group, with rewards.

        Args:
            sampling: what the completions were sampled with.
        """
        flat = [(group, sample, c) for group, completions in answered for sample, c in enumerate(completions)]
        texts = [self.tokenizer.decode(c.token_ids) for _, _, c in flat]
        scores = self.scorer.score(
            [
                ScoreRequest(
                    completion=without_end(text, completion, self.tokenizer, sampling),
                    answer=group.prompt.answer,
                    truncated=completion.stop_reason is not StopReason.STOP,
                    prompt=group.prompt.text,
                    metadata=group.prompt.metadata,
                )
                for (group, _, completion), text in zip(flat, texts, strict=True)
            ]
        )
        rollouts = iter(
            Rollout(g.group_id, sample, g.prompt, completion, text, score.value, score.reason.value, score.components)
            for (g, sample, completion), text, score in zip(flat, texts, scores, strict=True)
        )
        return [[next(rollouts) for _ in completions] for _, completions in answered]

    def answer(
        self, groups: Sequence[PromptGroup], per_prompt: int, sampling: SamplingSettings, *, purpose: str
    ) -> tuple[list[list[Rollout]], list[tuple[PromptGroup, JobRefused]]]:
        """Scored rollouts of the groups, sampled with the current weights, and the groups that no engine can do.

        Equal arguments and weights give equal rollouts, whatever the number of engines, but for ties within rounding:
        which prompts find a common beginning in an engine's cache depends on which meet there.

        Raises:
            SyncError: a completion was sampled by other weights than those of the last push.
            WorkerError: see `EnginePool.generate`.
        """
        cache = self.new_cache()
        jobs = [self.requests(group, per_prompt, purpose=purpose, cache=cache) for group in groups]
        answered, refused = [], []
        for group, result in zip(groups, self.engines.generate(jobs, sampling), strict=True):
            if isinstance(result, JobRefused):
                refused.append((group, result))
            else:
                answered.append((group, result))
        version = self.engines.weight_version
        for group, completions in answered:
            check_versions(group, completions, oldest=version, newest=version)
        return self.score(answered, sampling), refused


def without_end(text: str, completion: Completion, tokenizer: Tokenizer, sampling: SamplingSettings) -> str:
    """A completion's text as a verifier reads it: without the end token, stop token or stop string that ended it."""
    last = completion.token_ids[-1] if completion.token_ids else None
    if completion.stop_reason is StopReason.STOP and last is not None:
        if last in tokenizer.end_token_ids or last in sampling.stop_token_ids:
            return text.removesuffix(tokenizer.decode((last,)))
        # vLLM looks at the text after each token: the first occurrence is the one that ended it.
        ends = [place for stop in sampling.stop_strings if (place := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text
    return text.removesuffix(tokenizer.eos_token)


def check_versions(group: PromptGroup, completions: Sequence[Completion], *, oldest: int, newest: int) -> None:
    """Refuse completions that were sampled by weights they cannot have been sampled by.

    Raises:
        SyncError: naming the group and the versions.
    """
    for completion in completions:
        if not oldest <= completion.weight_version <= completion.newest_version <= newest:
            found = ", ".join(f"{tokens} tokens by {version}" for version, tokens in completion.spans)
            allowed = f"{newest}" if oldest == newest else f"{oldest} to {newest}"
            raise SyncError(
                f"group {group.group_id} has a completion of another weight version than {allowed}, which was pushed: "
                f"{found}"
            )


def is_informative(rollouts: Sequence[Rollout], *, by_component: bool = False) -> bool:
    """Whether the rewards of a group, before any shaping, differ, so that it teaches something.

    Args:
        by_component: whether it is enough that one component of the reward differs.
    """
    import torch

    from lora_rl.algorithm import zero_variance_samples

    parts = list(reward_parts(rollouts).values()) if by_component else [[r.reward for r in rollouts]]
    one_group = torch.zeros(len(rollouts), dtype=torch.int64)
    return not all(
        zero_variance_samples(torch.tensor(values, dtype=torch.float32), one_group).all() for values in parts
    )


class DynamicSampling:
    """The bound on how much is generated for one step in search of groups that teach something (DAPO,
    arXiv:2503.14476).

    Groups whose rewards are all equal are dropped and others generated instead.
    """

    def __init__(self, config: RunConfig) -> None:
        grpo = config.grpo
        self.enabled = grpo.use_dynamic_sampling
        self._rounds = grpo.dynamic_sampling_max_gen_batches
        self._limit = grpo.dynamic_sampling_max_gen_batches * grpo.num_prompts_per_step
        self._wanted = grpo.num_prompts_per_step
        self._by_component = grpo.adv_estimator.name == "gdpo"
        self.kept = self.generated = self.tokens = 0
        self._rewards: list[float] = []

    def keep(self, rollouts: Sequence[Rollout]) -> bool:
        """Whether to train on a group.

        Raises:
            ValueError: as many groups as allowed were generated for this step, and too few of them vary.
        """
        self.generated += 1
        self.tokens += sum(len(r.completion.token_ids) for r in rollouts)
        self._rewards.append(statistics.fmean(r.reward for r in rollouts))
        if not self.enabled or is_informative(rollouts, by_component=self._by_component):
            self.kept += 1
            return True
        self.check_bound()
        return False

    def check_bound(self) -> None:
        """Before more is generated for this step.

        Raises:
            ValueError: see `keep`.
        """
        if self.enabled and self.generated >= self._limit and self.kept < self._wanted:
            raise ValueError(
                f"grpo.dynamic_sampling_max_gen_batches: {self._rounds} batches were generated and only {self.kept} of "
                f"{self.generated} groups have different rewards, {self._wanted} are needed: the prompts are all too "
                "easy or too hard for this model. Use other prompts, more completions per prompt, or raise the bound"
            )

    def forget(self, count: int) -> None:
        """As many groups that were kept are given up; others take their place, and are counted instead."""
        self.kept, self.generated = max(self.kept - count, 0), max(self.generated - count, 0)

    def forget_rewards(self) -> None:
        """Rewards so far say nothing of the weights from here on."""
        self._rewards = []

    def start_step(self) -> dict[str, float]:
        """Count anew; what was counted for the last step."""
        counted = {names.GENERATED_TOKENS: self.tokens}
        if self.enabled:
            counted["rollout/generated_groups"] = self.generated
            counted["rollout/kept_share"] = self.kept / max(self.generated, 1)
            if self._rewards:
                counted[names.GENERATED_REWARD] = statistics.fmean(self._rewards)
        self.kept = self.generated = self.tokens = 0
        self.forget_rewards()
        return counted


@dataclass
class SyncRolloutSource:
    """Generates each step's rollouts with the current weights, when the loop asks for them."""

    generator: Generator
    queue: PromptQueue
    config: RunConfig
    warn: Callable[[str], None]

    def __post_init__(self) -> None:
        self._filter = DynamicSampling(self.config)
        self._refusals = Refusals(self.queue, self.config, self.warn)
        self._metrics: dict[str, float] = {}

    def next_step(self, step: int) -> list[Rollout]:
        """Draw prompts and sample a group of completions for each, until there are enough groups to train on."""
        grpo, kept = self.config.grpo, []
        while (missing := grpo.num_prompts_per_step - len(kept)) > 0:
            self._filter.check_bound()
            groups = self.queue.draw(missing)
            sampling = training_sampling(self.config)
            scored, refused = self.generator.answer(groups, grpo.num_generations_per_prompt, sampling, purpose="train")
            kept += [rollouts for rollouts in scored if self._filter.keep(rollouts)]
            for group, problem in refused:
                self._refusals.note(group, problem)
        self._metrics = {
            "rollout/refused_groups": self._refusals.count,
            "rollout/engine_restarts": self.generator.engines.restarts,
            **self._filter.start_step(),
        }
        kept.sort(key=lambda rollouts: rollouts[0].group_id)
        return [rollout for rollouts in kept for rollout in rollouts]

    def before_push(self, version: int) -> None:
        """Nothing runs."""

    def after_push(self) -> None:
        """Nothing runs."""

    def halted(self) -> AbstractContextManager[None]:
        """Nothing runs."""
        return nullcontext()

    def metrics(self) -> dict[str, float]:
        """See `RolloutSource.metrics`."""
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        """See `RolloutSource.state_dict`."""
        return self.queue.state_dict()

    def close(self) -> None:
        """Nothing runs."""


class Refusals:
    """Prompts that no engine can do: left out, told, counted; when they become the rule, the run ends."""

    def __init__(self, queue: PromptQueue, config: RunConfig, warn: Callable[[str], None]) -> None:
        self._queue, self._least, self._warn = queue, config.grpo.num_prompts_per_step, warn
        self.count = 0

    def note(self, group: PromptGroup, problem: Exception) -> None:
        """Leave a prompt out.

        Raises:
            ValueError: most of the prompts drawn so far were left out, and at least as many as a step has.
        """
        self.count += 1
        self._warn(f"prompt {group.prompt.id} is left out: {problem}")
        if self.count >= self._least and 2 * self.count > self._queue.drawn:
            raise ValueError(
                f"{self.count} of {self._queue.drawn} prompts could not be generated from; the last, "
                f"{group.prompt.id}: {problem}"
            )


def training_sampling(config: RunConfig) -> SamplingSettings:
    """How training rollouts are sampled."""
    generation = config.policy.generation
    return _sampling(config, generation.temperature, generation.top_p, generation.top_k or -1)


def validation_sampling(config: RunConfig) -> SamplingSettings:
    """How validation samples: at its own temperature, from the whole distribution."""
    return _sampling(config, config.grpo.val_temperature, 1.0, -1)


def _sampling(config: RunConfig, temperature: float, top_p: float, top_k: int) -> SamplingSettings:
    generation = config.policy.generation
    return SamplingSettings(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=generation.max_new_tokens,
        stop_token_ids=tuple(generation.stop_token_ids or ()),
        stop_strings=tuple(generation.stop_strings or ()),
        ignore_eos=generation.ignore_eos,
    )


def request_seed(seed: int, purpose: str, group: int, sample: int) -> int:
    """A 63-bit seed for one request; different arguments give unrelated seeds."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{group}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def validation_groups(prompts: Sequence[Prompt]) -> list[PromptGroup]:
    """Held-out prompts as groups, numbered from 0."""
    return [PromptGroup(i, prompt) for i, prompt in enumerate(prompts)]
