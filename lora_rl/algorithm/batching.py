"""Cutting a batch into data-parallel shards, rows with shared prompts, and token-budget microbatches.

Plain Python on lengths.

Everything is deterministic in its arguments, so ranks that hold the same lengths agree without communicating.
Indices always refer to positions in the `lengths` given.
"""

from collections.abc import Sequence

# A row of a microbatch: one sequence, or several that share one copy of their prompt.
Row = int | tuple[int, ...]


def padded_tokens(lengths: Sequence[int]) -> int:
    """Tokens a microbatch of these lengths occupies once padded to its longest: count * max. 0 when empty."""
    return len(lengths) * max(lengths, default=0)


def row_length(prompt_length: int, lengths: Sequence[int]) -> int:
    """Positions of a row that holds a prompt once and the completions of all sequences behind it.

    Args:
        prompt_length: tokens of the common prompt.
        lengths: tokens of each sequence, prompt and completion, more than `prompt_length`.
    """
    # Nothing follows the last token of a completion: its own output is never looked at.
    return prompt_length + sum(length - prompt_length - 1 for length in lengths)


def share_prompts(
    groups: Sequence[int],
    prompt_lengths: Sequence[int],
    lengths: Sequence[int],
    *,
    attention_tokens: float,
    max_tokens: int | None = None,
    shards: int = 1,
) -> list[tuple[int, ...]]:
    """Put sequences of the same group into rows that hold their prompt once, as many per row as is cheapest.

    A row of S positions costs S + S^2 / attention_tokens: all its positions meet in the attention, also those of
    different completions, which a mask then hides. So short completions of a long prompt share it all together, long
    ones two by two or not at all. (The idea is that of Prefix Grouper, Liu et al. 2025, arXiv:2506.05433.)

    Args:
        groups: group of each sequence; sequences of a group start with the same prompt.
        prompt_lengths: tokens of each sequence's prompt, at least 1.
        lengths: tokens of each sequence, prompt and completion.
        attention_tokens: positions at which attention costs as much as everything else, > 0.
        max_tokens: no row is longer, unless it holds one sequence only; None: no limit.
        shards: `shard_sequences` will deal the rows to that many ranks; what counts is the one with the most work.

    Returns:
        Indices into the arguments, ascending within a row; every index occurs exactly once. Rows are in the order of
        their first sequences.

    Raises:
        ValueError: sequences of one group have prompts of different lengths, or a sequence has no completion.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
        first = members[group][0]
        if prompt_lengths[index] != prompt_lengths[first]:
            raise ValueError(
                f"sequences {first} and {index} of group {group} have prompts of {prompt_lengths[first]} and "
                f"{prompt_lengths[index]} tokens; a group has one prompt"
            )
        if lengths[index] <= prompt_lengths[index]:
            raise ValueError(f"sequence {index} has no completion: {lengths[index]} tokens, all of them prompt")

    def cut(indices: list[int], size: int) -> list[tuple[int, ...]]:
        return [tuple(indices[start : start + size]) for start in range(0, len(indices), size)]

    def cost(rows: list[tuple[int, ...]]) -> float:
        total = 0.0
        for row in rows:
            positions = row_length(prompt_lengths[row[0]], [lengths[i] for i in row])
            if len(row) > 1 and max_tokens is not None and positions > max_tokens:
                return float("inf")
            total += positions + positions**2 / attention_tokens
        return total

    def shared(most: int) -> list[tuple[int, ...]]:
        rows = []
        for indices in members.values():
            # Sizes that spread the group evenly, the smallest number of rows first: ties go to the most sharing.
            sizes = sorted({-(-len(indices) // count) for count in range(1, len(indices) + 1)}, reverse=True)
            rows += min((cut(indices, size) for size in sizes if size <= most), key=cost)
        return sorted(rows)

    def busiest(rows: list[tuple[int, ...]]) -> float:
        positions = [row_length(prompt_lengths[row[0]], [lengths[i] for i in row]) for row in rows]
        return max(cost([rows[n] for n in shard]) for shard in shard_sequences(positions, shards))

    largest = max(map(len, members.values()), default=1)
    if shards == 1:
        return shared(largest)
    return min((shared(most) for most in range(largest, 0, -1)), key=busiest)


def split_microbatches(
    lengths: Sequence[int], *, max_tokens: int | None = None, max_sequences: int | None = None
) -> list[list[int]]:
    """Group sequences into as few microbatches as the limits allow.

    Longest first, so that neighbours have similar lengths and little is padded, and so that a batch that does not
    fit in memory fails in its first microbatch. Ties keep their order.

    Args:
        lengths: tokens of each sequence (prompt and response), >= 0.
        max_tokens: limit on a microbatch's padded tokens; None: no limit.
        max_sequences: limit on its number of sequences; None: no limit.

    Returns:
        Lists of indices into `lengths`, none empty; [] for no sequences. Every index occurs exactly once.

    Raises:
        ValueError: a limit below 1, a negative length, or one sequence longer than max_tokens (names it).
    """
    for name, limit in (("max_tokens", max_tokens), ("max_sequences", max_sequences)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name} = {limit}: must be at least 1, or None for no limit")
    _check_lengths(lengths)
    for index, length in enumerate(lengths):
        if max_tokens is not None and length > max_tokens:
            raise ValueError(
                f"sequence {index} has {length} tokens, more than the microbatch budget max_tokens = {max_tokens}; "
                "raise the budget or shorten the sequences"
            )

    microbatches: list[list[int]] = []
    for index in _longest_first(lengths):
        if microbatches:
            current = microbatches[-1]
            count = len(current) + 1
            # The first member is the longest, it sets the padded length.
            fits_tokens = max_tokens is None or count * lengths[current[0]] <= max_tokens
            fits_sequences = max_sequences is None or count <= max_sequences
            if fits_tokens and fits_sequences:
                current.append(index)
                continue
        microbatches.append([index])
    return microbatches


def num_microbatches_for_all(
    shards: Sequence[Sequence[int]], *, max_tokens: int | None = None, max_sequences: int | None = None
) -> int:
    """How many microbatches every data-parallel rank must run: as many as the rank that needs the most.

    Ranks that run different numbers deadlock in the collectives of the backward pass.

    Args:
        shards: for each rank, the lengths of its sequences.
        max_tokens, max_sequences: as for `split_microbatches`.

    Returns:
        The common number, at least 1: a rank without data still takes part in every collective.
    """
    needed = [len(split_microbatches(x, max_tokens=max_tokens, max_sequences=max_sequences)) for x in shards]
    return max(needed, default=1) or 1


def pad_microbatches(microbatches: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Append empty microbatches up to `count`, so that this rank takes part in every step of the others.

    Raises:
        ValueError: there are more than `count` already.
    """
    if len(microbatches) > count:
        raise ValueError(f"{len(microbatches)} microbatches do not fit into the agreed number {count}")
    return [list(m) for m in microbatches] + [[] for _ in range(count - len(microbatches))]


def shard_sequences(lengths: Sequence[int], dp: int) -> list[list[int]]:
    """Deal sequences to data-parallel ranks: counts differ by at most 1, tokens by at most the longest sequence.

    Rounds of `dp` sequences, longest first; within a round the rank with the fewest tokens takes the longest.

    Args:
        lengths: tokens of each sequence, >= 0.
        dp: number of shards.

    Returns:
        `dp` ascending lists of indices into `lengths`; every index occurs exactly once. With fewer sequences than
        shards some lists are empty.

    Raises:
        ValueError: dp below 1, or a negative length.
    """
    if dp < 1:
        raise ValueError(f"dp = {dp}: must be at least 1")
    _check_lengths(lengths)
    order = _longest_first(lengths)
    shards: list[list[int]] = [[] for _ in range(dp)]
    tokens = [0] * dp
    for start in range(0, len(order), dp):
        lightest_first = sorted(range(dp), key=lambda rank: (tokens[rank], rank))
        for rank, index in zip(lightest_first, order[start : start + dp], strict=False):
            shards[rank].append(index)
            tokens[rank] += lengths[index]
    return [sorted(shard) for shard in shards]


def _check_lengths(lengths: Sequence[int]) -> None:
    for index, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"lengths[{index}] = {length}: must be >= 0")


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
