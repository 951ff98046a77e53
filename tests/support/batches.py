"""Train batches with random tokens, and ways to cut them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lora_rl.algorithm import num_microbatches_for_all, pad_microbatches, shard_sequences, split_microbatches
from lora_rl.rollout.types import TrainBatch


def make_batch(seed: int, *, sequences: int = 12, vocab_size: int = 264, advantages: bool = True) -> TrainBatch:
    """Random prompts of 2-6 and completions of 1-7 tokens, advantages N(0, 1), behaviour logprobs around -5."""
    rng = np.random.default_rng(seed)
    prompt_lengths = rng.integers(2, 7, sequences)
    lengths = prompt_lengths + rng.integers(1, 8, sequences)
    width = int(lengths.max())
    time = np.arange(width)
    inside = time < lengths[:, None]
    completion = inside & (time >= prompt_lengths[:, None])
    return TrainBatch(
        token_ids=np.where(inside, rng.integers(3, vocab_size, (sequences, width)), 0),
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        behaviour_logprobs=np.where(completion, rng.normal(-5, 0.3, (sequences, width)), 0).astype(np.float32),
        advantages=(rng.normal(size=sequences) if advantages else np.zeros(sequences)).astype(np.float32),
        group_ids=np.arange(sequences) // 4,
        global_tokens=int(completion.sum()),
        global_sequences=sequences,
    )


def make_groups(seed: int, *, groups: int = 4, size: int = 3, vocab_size: int = 264) -> TrainBatch:
    """As `make_batch`, but the sequences of a group start with the same prompt."""
    batch = make_batch(seed, sequences=groups * size, vocab_size=vocab_size)
    first = np.arange(len(batch)) // size * size
    completions = batch.lengths - batch.prompt_lengths
    prompts = batch.prompt_lengths[first]
    lengths = prompts + completions
    token_ids, behaviour = (np.zeros((len(batch), int(lengths.max())), dtype=t) for t in (np.int64, np.float32))
    for row, (old, new, count) in enumerate(zip(batch.prompt_lengths, prompts, completions, strict=True)):
        token_ids[row, :new] = batch.token_ids[first[row], :new]
        token_ids[row, new : new + count] = batch.token_ids[row, old : old + count]
        behaviour[row, new : new + count] = batch.behaviour_logprobs[row, old : old + count]
    return replace(
        batch,
        token_ids=token_ids,
        behaviour_logprobs=behaviour,
        lengths=lengths,
        prompt_lengths=prompts,
        group_ids=np.arange(len(batch)) // size,
    )


def one_microbatch(
    batch: TrainBatch, dp: int, max_tokens: int | None = None
) -> tuple[list[TrainBatch], list[list[list[int]]]]:
    """Every shard as a single microbatch in its own order."""
    shards = [batch.take(rows) for rows in shard_sequences(batch.lengths.tolist(), dp)]
    return shards, [[list(range(len(shard)))] for shard in shards]


def token_budget(batch: TrainBatch, dp: int, max_tokens: int | None) -> tuple[list[TrainBatch], list[list[list[int]]]]:
    """Shards cut into microbatches of at most `max_tokens` padded tokens, equally many on every shard."""
    shards = [batch.take(rows) for rows in shard_sequences(batch.lengths.tolist(), dp)]
    count = num_microbatches_for_all([s.lengths.tolist() for s in shards], max_tokens=max_tokens)
    cut = [split_microbatches(s.lengths.tolist(), max_tokens=max_tokens) for s in shards]
    return shards, [pad_microbatches(c, count) for c in cut]
