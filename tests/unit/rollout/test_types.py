"""Rollouts as padded arrays, and cutting those."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lora_rl.rollout.types import Rollout, StopReason, TrainBatch, build_train_batch
from tests.support.rollouts import completion, prompt, rollout


def make(*rows: tuple[tuple[int, ...], tuple[int, ...]]) -> TrainBatch:
    rollouts = [
        Rollout(10 + n // 2, n % 2, prompt(token_ids=p), completion(c), "", 0.0, "wrong")
        for n, (p, c) in enumerate(rows)
    ]
    return build_train_batch(rollouts, [float(n) for n in range(len(rows))])


BATCH = make(((5, 6), (7, 8, 2)), ((5,), (9,)), ((5, 6, 7, 8), (2,)))


def test_prompt_completion_padding() -> None:
    assert BATCH.token_ids.tolist() == [[5, 6, 7, 8, 2], [5, 9, 0, 0, 0], [5, 6, 7, 8, 2]]
    assert BATCH.token_ids.dtype == BATCH.lengths.dtype == np.int64
    assert BATCH.lengths.tolist() == [5, 2, 5]
    assert BATCH.prompt_lengths.tolist() == [2, 1, 4]
    assert BATCH.behaviour_logprobs.tolist() == [[0, 0, -0.5, -1.5, -2.5], [0, -0.5, 0, 0, 0], [0, 0, 0, 0, -0.5]]
    assert BATCH.behaviour_logprobs.dtype == BATCH.advantages.dtype == np.float32
    assert BATCH.advantages.tolist() == [0, 1, 2]
    assert BATCH.group_ids.tolist() == [10, 10, 11]
    assert (BATCH.global_tokens, BATCH.global_sequences, BATCH.num_tokens, len(BATCH)) == (5, 3, 12, 3)


def test_shards_are_narrower_and_keep_the_global_counts() -> None:
    shard = BATCH.take([1])
    assert shard.token_ids.tolist() == [[5, 9]]
    assert shard.behaviour_logprobs.tolist() == [[0, -0.5]]
    assert shard.advantages.tolist() == [1]
    assert (shard.global_tokens, shard.global_sequences, len(shard)) == (5, 3, 1)
    assert BATCH.take([2, 0]).lengths.tolist() == [5, 5]
    assert BATCH.take([2, 0]).prompt_lengths.tolist() == [4, 2]


def test_minibatches_count_themselves() -> None:
    part = BATCH.minibatch([1, 2])
    assert (part.global_tokens, part.global_sequences) == (2, 2)
    whole = BATCH.minibatch([0, 1, 2])
    assert (whole.global_tokens, whole.global_sequences) == (BATCH.global_tokens, BATCH.global_sequences)


def test_an_empty_shard() -> None:
    empty = BATCH.take([])
    assert empty.token_ids.shape == (0, 0)
    assert (len(empty), empty.num_tokens, empty.global_tokens) == (0, 0, 5)


def test_end_tokens_equal_to_padding_stay_trained() -> None:
    """Masks come from lengths: with pad == eos == 0, or a 0 in the middle, nothing is lost and nothing is added."""
    batch = make(((5, 0), (0, 9, 0)), ((5,), (9,)))
    assert batch.token_ids.tolist() == [[5, 0, 0, 9, 0], [5, 9, 0, 0, 0]]
    assert batch.global_tokens == 4
    assert batch.lengths.tolist() == [5, 2]
    assert batch.take([0]).behaviour_logprobs.tolist() == [[0, 0, -0.5, -1.5, -2.5]]


def test_what_cannot_be_trained_on_is_refused() -> None:
    good = rollout(3, 1, 1.0)
    with pytest.raises(ValueError, match="2 rollouts but 1 advantages"):
        build_train_batch([good, good], [1.0])
    empty = dataclasses.replace(good, completion=completion(()))
    with pytest.raises(ValueError, match="rollout 1 of group 3 has no completion token"):
        build_train_batch([good, empty], [1.0, 1.0])
    torn = dataclasses.replace(good.completion, logprobs=(-1.0,))
    with pytest.raises(ValueError, match="rollout 1 of group 3 has 1 logprobs for 2 tokens"):
        build_train_batch([dataclasses.replace(good, completion=torn)], [1.0])


def test_no_rollouts() -> None:
    batch = build_train_batch([], [])
    assert (batch.token_ids.shape, batch.global_tokens) == ((0, 0), 0)


def test_stop_reasons_read_as_words() -> None:
    assert [str(reason) for reason in StopReason] == ["stop", "length", "abort"]
