"""Where a step's rollouts come from. The loop knows only `RolloutSource`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from lora_rl.rewards import Scorer, ScoreRequest
from lora_rl.rollout.types import GenerationRequest, PromptGroup, Rollout, SamplingSettings, StopReason

if TYPE_CHECKING:
    from lora_rl.config import RunConfig
    from lora_rl.data import Prompt, PromptSource, Tokenizer
    from lora_rl.rollout.pool import EnginePool


class RolloutSource(Protocol):
    """Delivers whole groups of scored rollouts, one list per step."""

    def next_step(self, step: int) -> list[Rollout]:
        """The rollouts to train on in this step."""
        ...


@dataclass
class Generator:
    """Samples completions of prompts and scores them.

    Attributes:
        engines: who samples.
        tokenizer: turns completions into the text the verifier reads.
        seed: the run's seed; with the purpose, the step and the place in the batch it seeds every request.
        scorer: scores; started, if its verifiers need that.
    """

    engines: EnginePool
    tokenizer: Tokenizer
    seed: int
    scorer: Scorer = field(default_factory=Scorer)

    def rollouts(
        self, groups: Sequence[PromptGroup], per_prompt: int, sampling: SamplingSettings, *, purpose: str
    ) -> list[Rollout]:
        """`per_prompt` scored rollouts of each group's prompt, group by group.

        Equal arguments and weights give equal rollouts, whatever the number of engines.

        Args:
            purpose: distinguishes streams of random numbers, such as `step 12` and `validation`.
        """
        requests = [
            GenerationRequest(group.prompt.token_ids, request_seed(self.seed, purpose, position, sample))
            for position, group in enumerate(groups)
            for sample in range(per_prompt)
        ]
        completions = self.engines.generate(requests, sampling)
        owners = [(group, sample) for group in groups for sample in range(per_prompt)]
        texts = [self.tokenizer.decode(c.token_ids) for c in completions]
        scores = self.scorer.score(
            [
                ScoreRequest(
                    completion=text.removesuffix(self.tokenizer.eos_token),
                    answer=group.prompt.answer,
                    truncated=completion.stop_reason is not StopReason.STOP,
                    prompt=group.prompt.text,
                    metadata=group.prompt.metadata,
                )
                for (group, _), completion, text in zip(owners, completions, texts, strict=True)
            ]
        )
        return [
            Rollout(g.group_id, sample, g.prompt, completion, text, score.value, score.reason.value, score.components)
            for (g, sample), completion, text, score in zip(owners, completions, texts, scores, strict=True)
        ]


@dataclass
class SyncRolloutSource:
    """Generates each step's rollouts with the current weights, when the loop asks for them."""

    generator: Generator
    prompts: PromptSource
    config: RunConfig

    def next_step(self, step: int) -> list[Rollout]:
        """Draw the next prompts and sample a group of completions for each."""
        grpo = self.config.grpo
        prompts = self.prompts.next_batch(grpo.num_prompts_per_step)
        first = step * grpo.num_prompts_per_step
        groups = [PromptGroup(first + i, prompt) for i, prompt in enumerate(prompts)]
        return self.generator.rollouts(
            groups, grpo.num_generations_per_prompt, training_sampling(self.config), purpose=f"step {step}"
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


def request_seed(seed: int, purpose: str, position: int, sample: int) -> int:
    """A 63-bit seed for one request; different arguments give unrelated seeds."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{position}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def validation_groups(prompts: Sequence[Prompt]) -> list[PromptGroup]:
    """Held-out prompts as groups, numbered from 0."""
    return [PromptGroup(i, prompt) for i, prompt in enumerate(prompts)]
