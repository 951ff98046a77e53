"""The vocabulary of one training step, as data. Start reading here.

prompt           token ids that the policy continues, with the answer a verifier needs
group            the rollouts of one prompt; identified by an explicit `group_id`, never re-derived from tokens
rollout          one sampled completion: token ids, behaviour logprobs, stop reason, weight version
behaviour        the policy that sampled, as the engine computed it (its logprobs are `behaviour_logprobs`)
weight version   counts pushes of weights to the engine; version 0 is what the engine loaded from disk
train batch      the rollouts of one step as padded arrays, with advantages and global token counts
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from lora_rl.rewards import RewardReason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lora_rl.data import Prompt


class StopReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # the end-of-sequence token or a configured stop token / stop string
    LENGTH = "length"  # the token budget ran out: the completion is truncated
    ABORT = "abort"  # the engine gave the request up


@dataclass(frozen=True)
class PromptGroup:
    """One prompt and the identity that ties its rollouts together.

    Attributes:
        group_id: counts the prompts drawn in a run.
        prompt: the prompt.
        attempt: how often its rollouts were given up before; each attempt samples anew.
    """

    group_id: int
    prompt: Prompt
    attempt: int = 0


@dataclass(frozen=True)
class SamplingSettings:
    """How completions are drawn. Field names are vLLM's.

    Attributes:
        temperature: divides the logits before sampling; behaviour logprobs are those of the tempered distribution.
        top_p: nucleus mass in (0, 1]; 1 keeps everything.
        top_k: number of most probable tokens kept; -1 keeps everything.
        max_tokens: most tokens of a completion, the end token included.
        stop_token_ids: tokens that end a completion besides the model's own end token.
        stop_strings: texts that end a completion.
        ignore_eos: go on after the model's end token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class GenerationRequest:
    """Ask the engine for one completion of one prompt.

    Attributes:
        prompt_ids: prompt tokens.
        seed: seed of this request's sampling; equal requests with equal seeds give equal completions.
        cache: requests find keys and values of a common beginning only where both have the same word here.
    """

    prompt_ids: tuple[int, ...]
    seed: int
    cache: str = ""


@dataclass(frozen=True)
class Completion:
    """What the engine answers for one request.

    Attributes:
        token_ids: sampled tokens, the end token included when there is one.
        logprobs: behaviour logprob of each sampled token (natural log, after temperature), same length.
        stop_reason: why it ended.
        weight_version: version of the weights that sampled it; the oldest one when weights changed on the way.
        version_spans: then (weight version, tokens) of each stretch, in order; empty: one version for all tokens.
        cached_prompt_tokens: of the prompt, whose keys and values were those of another request.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason
    weight_version: int
    version_spans: tuple[tuple[int, int], ...] = ()
    cached_prompt_tokens: int = 0

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(weight version, tokens) of each stretch of tokens, in order."""
        return self.version_spans or ((self.weight_version, len(self.token_ids)),)

    @property
    def newest_version(self) -> int:
        """Version of the newest weights that took part."""
        return max(version for version, _ in self.spans)


@dataclass(frozen=True)
class Rollout:
    """One completion together with the group it belongs to and the reward it earned.

    Attributes:
        reward: weighted sum over the verifiers.
        reason: why, by the first of them.
        reward_components: value of each, before its weight.
    """

    group_id: int
    sample_index: int
    prompt: Prompt
    completion: Completion
    text: str
    reward: float
    reason: str
    reward_components: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether the first verifier took the answer for right; what accuracy counts."""
        return self.reason == RewardReason.CORRECT

    @property
    def length(self) -> int:
        """Prompt plus completion tokens."""
        return len(self.prompt.token_ids) + len(self.completion.token_ids)


@dataclass(frozen=True)
class TrainBatch:
    """Rollouts of one optimizer step as right-padded arrays. B sequences, T tokens of the longest.

    Attributes:
        token_ids: int64 [B, T], prompt then completion then padding (0, never looked at).
        lengths: int64 [B], prompt plus completion tokens.
        prompt_lengths: int64 [B].
        behaviour_logprobs: float32 [B, T]; entry t belongs to token t, 0 outside the completion.
        advantages: float32 [B].
        group_ids: int64 [B].
        global_tokens: completion tokens over *all* data-parallel shards of the step.
        global_sequences: sequences over all shards of the step.
    """

    token_ids: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    behaviour_logprobs: np.ndarray
    advantages: np.ndarray
    group_ids: np.ndarray
    global_tokens: int
    global_sequences: int

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens of this shard, padding not counted."""
        return int(self.lengths.sum())

    def minibatch(self, rows: Sequence[int]) -> TrainBatch:
        """Part of the batch as an optimizer step of its own: global counts are those of the named rows."""
        part = self.take(rows)
        tokens = int((part.lengths - part.prompt_lengths).sum())
        return replace(part, global_tokens=tokens, global_sequences=len(part))

    def take(self, indices: Sequence[int]) -> TrainBatch:
        """A shard: the named rows, cut to their own longest sequence; global counts stay those of the whole step."""
        rows = np.asarray(indices, dtype=np.int64)
        width = int(self.lengths[rows].max()) if len(rows) else 0
        return replace(
            self,
            token_ids=self.token_ids[rows, :width],
            lengths=self.lengths[rows],
            prompt_lengths=self.prompt_lengths[rows],
            behaviour_logprobs=self.behaviour_logprobs[rows, :width],
            advantages=self.advantages[rows],
            group_ids=self.group_ids[rows],
        )


def batch_of_sequences(sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> TrainBatch:
    """Given token sequences as a batch whose likelihood is wanted: nothing was sampled, every advantage is 1.

    Args:
        sequences: B sequences of token ids.
        prompt_lengths: tokens of each that are only conditioned on, at least 1.
    """
    lengths = np.array([len(s) for s in sequences], dtype=np.int64)
    prompts = np.array(prompt_lengths, dtype=np.int64)
    token_ids = np.zeros((len(sequences), int(lengths.max())), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        token_ids[row, : len(sequence)] = sequence
    return TrainBatch(
        token_ids=token_ids,
        lengths=lengths,
        prompt_lengths=prompts,
        behaviour_logprobs=np.zeros(token_ids.shape, dtype=np.float32),
        advantages=np.ones(len(sequences), dtype=np.float32),
        group_ids=np.arange(len(sequences)),
        global_tokens=int((lengths - prompts).sum()),
        global_sequences=len(sequences),
    )


def build_train_batch(rollouts: Sequence[Rollout], advantages: Sequence[float]) -> TrainBatch:
    """Pad rollouts into the arrays the policy trains on.

    Args:
        rollouts: B rollouts, any order.
        advantages: B floats, same order.

    Raises:
        ValueError: the two differ in length, a completion is empty (nothing was sampled, nothing can be trained), or
            it does not have one logprob per token.
    """
    if len(rollouts) != len(advantages):
        raise ValueError(f"{len(rollouts)} rollouts but {len(advantages)} advantages")
    empty = [r for r in rollouts if not r.completion.token_ids]
    if empty:
        raise ValueError(f"rollout {empty[0].sample_index} of group {empty[0].group_id} has no completion token")
    torn = [r for r in rollouts if len(r.completion.logprobs) != len(r.completion.token_ids)]
    if torn:
        # NumPy would spread a single logprob over the whole completion.
        raise ValueError(
            f"rollout {torn[0].sample_index} of group {torn[0].group_id} has {len(torn[0].completion.logprobs)} "
            f"logprobs for {len(torn[0].completion.token_ids)} tokens"
        )
    lengths = np.array([r.length for r in rollouts], dtype=np.int64)
    prompt_lengths = np.array([len(r.prompt.token_ids) for r in rollouts], dtype=np.int64)
    width = int(lengths.max()) if len(rollouts) else 0
    token_ids = np.zeros((len(rollouts), width), dtype=np.int64)
    behaviour = np.zeros((len(rollouts), width), dtype=np.float32)
    for row, rollout in enumerate(rollouts):
        start, end = prompt_lengths[row], lengths[row]
        token_ids[row, :start] = rollout.prompt.token_ids
        token_ids[row, start:end] = rollout.completion.token_ids
        behaviour[row, start:end] = rollout.completion.logprobs
    return TrainBatch(
        token_ids=token_ids,
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        behaviour_logprobs=behaviour,
        advantages=np.asarray(advantages, dtype=np.float32),
        group_ids=np.array([r.group_id for r in rollouts], dtype=np.int64),
        global_tokens=int((lengths - prompt_lengths).sum()),
        global_sequences=len(rollouts),
    )


def reward_parts(rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    """The components of the rewards, one value per rollout, by name.

    A verifier that reports two or more parts is there with these; its own value, which is made of them, would count
    them twice. A verifier that gave no verdict on a completion (it was cut off, the time was over) reports no parts:
    all of its parts are 0 there, as its value is.

    Raises:
        ValueError: a verifier reports a part for one completion and not for another, for which it reports other
            parts, or a value that is not 0.
    """
    every = {name for r in rollouts for name in r.reward_components}
    parts_of = Counter(name.partition("/")[0] for name in every if "/" in name)
    names = sorted(name for name in every if parts_of[name] < 2)
    parts: dict[str, list[float]] = {name: [] for name in names}
    for r in rollouts:
        for name in names:
            label, _, part = name.partition("/")
            value = r.reward_components.get(name)
            others = any(other.startswith(f"{label}/") for other in r.reward_components)
            if value is None and part and not others and not r.reward_components.get(label):
                value = 0.0
            if value is None:
                raise ValueError(
                    f"rollout {r.sample_index} of group {r.group_id} has no reward component {name!r}, which others "
                    "have; a verifier must give every component, 0.0 where it does not apply"
                )
            parts[name].append(value)
    return parts
