import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_rl.algorithm import (
    num_microbatches_for_all,
    pad_microbatches,
    padded_tokens,
    row_length,
    shard_sequences,
    share_prompts,
    split_microbatches,
)

lengths_strategy = st.lists(st.integers(0, 50), max_size=24)


@given(
    lengths=lengths_strategy, max_tokens=st.none() | st.integers(50, 200), max_sequences=st.none() | st.integers(1, 6)
)
@settings(max_examples=100, deadline=None)
def test_every_sequence_once_within_the_limits(lengths, max_tokens, max_sequences):
    microbatches = split_microbatches(lengths, max_tokens=max_tokens, max_sequences=max_sequences)

    assert sorted(i for m in microbatches for i in m) == list(range(len(lengths)))
    for microbatch in microbatches:
        assert microbatch
        assert max_sequences is None or len(microbatch) <= max_sequences
        assert max_tokens is None or padded_tokens([lengths[i] for i in microbatch]) <= max_tokens
    assert microbatches == split_microbatches(tuple(lengths), max_tokens=max_tokens, max_sequences=max_sequences)


def test_neighbours_in_length_share_a_microbatch():
    lengths = [10, 100, 12, 98, 11, 99]
    assert split_microbatches(lengths, max_tokens=300) == [[1, 5, 3], [2, 4, 0]]


def test_budget_counts_padding():
    assert split_microbatches([6, 1, 1], max_tokens=12) == [[0, 1], [2]]
    assert padded_tokens([6, 1]) == 12


def test_no_limit_is_one_microbatch_and_no_sequence_is_none():
    assert split_microbatches([3, 1, 2]) == [[0, 2, 1]]
    assert split_microbatches([], max_tokens=5) == []


def test_a_sequence_above_the_budget_is_an_error_naming_it():
    with pytest.raises(ValueError, match=r"sequence 2 has 9 tokens.*max_tokens = 8"):
        split_microbatches([1, 8, 9], max_tokens=8)


@pytest.mark.parametrize(
    ("lengths", "limits", "message"),
    [
        ([1], {"max_tokens": 0}, "max_tokens = 0"),
        ([1], {"max_sequences": 0}, "max_sequences = 0"),
        ([1, -2], {}, r"lengths\[1\] = -2"),
    ],
)
def test_bad_arguments_are_refused(lengths, limits, message):
    with pytest.raises(ValueError, match=message):
        split_microbatches(lengths, **limits)


def test_ranks_with_different_lengths_agree_on_one_number():
    shards = [[5, 5, 5], [2, 2], []]
    count = num_microbatches_for_all(shards, max_tokens=5)
    assert count == 3
    padded = [pad_microbatches(split_microbatches(s, max_tokens=5), count) for s in shards]
    assert padded == [[[0], [1], [2]], [[0, 1], [], []], [[], [], []]]


def test_ranks_without_any_data_still_run_one_microbatch():
    assert num_microbatches_for_all([[], []]) == 1
    assert pad_microbatches([], 1) == [[]]


def test_padding_never_drops_a_microbatch():
    with pytest.raises(ValueError, match="2 microbatches do not fit"):
        pad_microbatches([[0], [1]], 1)


@given(lengths=lengths_strategy, dp=st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_shards_hold_every_sequence_once_and_are_balanced(lengths, dp):
    shards = shard_sequences(lengths, dp)

    assert len(shards) == dp
    assert sorted(i for s in shards for i in s) == list(range(len(lengths)))
    assert all(s == sorted(s) for s in shards)
    counts = [len(s) for s in shards]
    assert max(counts) - min(counts) <= 1
    tokens = [sum(lengths[i] for i in s) for s in shards]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)
    assert shards == shard_sequences(tuple(lengths), dp)


def test_long_and_short_sequences_are_mixed():
    lengths = [10, 5, 5, 0]
    assert shard_sequences(lengths, 2) == [[0, 3], [1, 2]]


def test_shard_count_below_one_is_refused():
    with pytest.raises(ValueError, match="dp = 0"):
        shard_sequences([1], 0)


@given(
    groups=st.lists(st.tuples(st.integers(1, 300), st.lists(st.integers(1, 300), min_size=1, max_size=8)), max_size=6),
    attention_tokens=st.floats(1, 1e5),
    max_tokens=st.integers(700, 2000),
)
@settings(max_examples=150, deadline=None)
def test_shared_rows_hold_every_sequence_once_and_cost_least(groups, attention_tokens, max_tokens):
    ids = [g for g, (_, completions) in enumerate(groups) for _ in completions]
    prompts = [prompt for prompt, completions in groups for _ in completions]
    lengths = [prompt + c for prompt, completions in groups for c in completions]
    rows = share_prompts(ids, prompts, lengths, attention_tokens=attention_tokens, max_tokens=max_tokens)

    def cost(rows):
        sizes = [row_length(prompts[row[0]], [lengths[i] for i in row]) for row in rows]
        return sum(s + s * s / attention_tokens for s in sizes)

    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(len({ids[i] for i in row}) == 1 and row == tuple(sorted(row)) for row in rows)
    assert all(row_length(prompts[row[0]], [lengths[i] for i in row]) <= max_tokens for row in rows)
    assert cost(rows) <= cost([(i,) for i in range(len(lengths))]) * (1 + 1e-9)


def test_short_completions_share_their_prompt_and_long_ones_do_not():
    ids = [0, 0, 0, 0, 1, 1, 1, 1]
    prompts = [100] * 8
    lengths = [110] * 4 + [1100] * 4
    rows = share_prompts(ids, prompts, lengths, attention_tokens=1000)
    assert rows == [(0, 1, 2, 3), (4,), (5,), (6,), (7,)]
    assert row_length(100, [110] * 4) == 100 + 4 * 9
    # Where attention is cheap they do.
    assert share_prompts(ids, prompts, lengths, attention_tokens=1e6) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    # A budget holds.
    assert share_prompts(ids[:4], prompts[:4], lengths[:4], attention_tokens=1000, max_tokens=120) == [(0, 1), (2, 3)]


@given(
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    prompt=st.integers(1, 2000),
    completion=st.integers(1, 600),
    dp=st.integers(2, 4),
)
@settings(max_examples=100, deadline=None)
def test_sharing_makes_no_rank_busier(sizes, prompt, completion, dp):
    ids = [g for g, size in enumerate(sizes) for _ in range(size)]
    prompts, lengths = [prompt] * len(ids), [prompt + completion] * len(ids)

    def busiest(rows):
        positions = [row_length(prompt, [prompt + completion] * len(row)) for row in rows]
        return max(sum(positions[n] + positions[n] ** 2 / 4000 for n in s) for s in shard_sequences(positions, dp))

    rows = share_prompts(ids, prompts, lengths, attention_tokens=4000, shards=dp)
    assert sorted(i for row in rows for i in row) == list(range(len(ids)))
    assert busiest(rows) <= busiest([(i,) for i in range(len(ids))]) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("prompts", "lengths", "message"),
    [([2, 3], [5, 5], "sequences 0 and 1 of group 7 have prompts of 2 and 3"), ([2, 2], [5, 2], "sequence 1 has no")],
)
def test_what_cannot_share_a_row_is_named(prompts, lengths, message):
    with pytest.raises(ValueError, match=message):
        share_prompts([7, 7], prompts, lengths, attention_tokens=100)
