"""Laying sequences out for one forward pass: one per row, or several that share their prompt in a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from lora_rl.algorithm import Row
    from lora_rl.rollout.types import TrainBatch


@dataclass(frozen=True)
class Microbatch:
    """One forward pass, on this rank's device, over G rows of S positions that hold B sequences.

    The loss sees the sequences one by one, B of T positions; without shared prompts G = B and S >= T.

    Attributes:
        sequences: rows of the shard the sequences come from (empty for a microbatch that only keeps ranks in step).
        tokens: int64 [G, S], input of the model, right-padded.
        position_ids: int64 [G, S], position of each token in its sequence.
        hidden: bool [G, 1, S, S], true where position i must not see position j; None: causal attention.
        mask: bool [B, T], true at completion tokens.
        completion: int64 [N, 2], (sequence, position) of each completion token; order within a sequence.
        predictors: int64 [N, 2], (row, position) whose logits predict that token.
        targets: int64 [N], the completion tokens.
    """

    sequences: list[int]
    tokens: torch.Tensor
    position_ids: torch.Tensor
    hidden: torch.Tensor | None
    mask: torch.Tensor
    completion: torch.Tensor
    predictors: torch.Tensor
    targets: torch.Tensor


def lay_out(shard: TrainBatch, rows: Sequence[Row], *, device: Any, multiple: int = 1) -> Microbatch:
    """The named rows of a shard.

    Args:
        rows: sequences, or tuples of sequences with the same prompt; none: a pass over padding.
        multiple: S is a multiple of it.

    Raises:
        ValueError: sequences in a row do not start with the same prompt.
    """
    if any(isinstance(row, tuple) and len(row) > 1 for row in rows):
        return _shared(shard, [row if isinstance(row, tuple) else (row,) for row in rows], device, multiple)
    return _one_each(shard, [row[0] if isinstance(row, tuple) else row for row in rows], device, multiple)


def _one_each(shard: TrainBatch, sequences: list[int], device: Any, multiple: int) -> Microbatch:
    if sequences:
        part = shard.take(sequences)
        # No attention mask: sequences are right-padded and causal, so no completion token can see padding.
        tokens = padded_rows(part.token_ids, _round_up(part.token_ids.shape[1], multiple))
        mask = _completion_mask(part)
    else:
        # Padding tokens with an empty mask: the smallest forward pass that keeps the ranks in step.
        tokens = np.zeros((1, max(2, multiple)), dtype=np.int64)
        mask = np.zeros(tokens.shape, dtype=bool)
    completion = np.argwhere(mask)
    # The logits at position t-1 predict token t.
    predictors = completion - np.array([0, 1])
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    targets = tokens[tuple(completion.T)]
    arrays = (tokens, positions, None, mask, completion, predictors, targets)
    return Microbatch(sequences, *(_on(device, array) for array in arrays))


def _shared(shard: TrainBatch, rows: Sequence[tuple[int, ...]], device: Any, multiple: int) -> Microbatch:
    sequences = [sequence for row in rows for sequence in row]
    part = shard.take(sequences)
    mask = _completion_mask(part)
    # Per row: its tokens, their positions, and the segment of each: 0 the prompt, then the completions.
    laid: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    predictors = []
    number = 0
    for g, row in enumerate(rows):
        prompt = int(part.prompt_lengths[number])
        start = part.token_ids[number, :prompt]
        tokens, positions, segments = [start], [np.arange(prompt)], [np.zeros(prompt, dtype=np.int64)]
        end = prompt
        for segment in range(1, len(row) + 1):
            length = int(part.lengths[number])
            if part.prompt_lengths[number] != prompt or not np.array_equal(part.token_ids[number, :prompt], start):
                raise ValueError(f"sequences {row} of a shard share a row but do not start with the same prompt")
            # Nothing follows the last token: its own output is never looked at.
            inner = part.token_ids[number, prompt : length - 1]
            tokens.append(inner)
            positions.append(np.arange(prompt, length - 1))
            segments.append(np.full(len(inner), segment))
            # The first token of every completion is predicted by the prompt's last one.
            columns = [prompt - 1, *range(end, end + len(inner))]
            predictors.append(np.stack([np.full(len(columns), g), columns], axis=1))
            end += len(inner)
            number += 1
        laid.append((np.concatenate(tokens), np.concatenate(positions), np.concatenate(segments)))
    width = _round_up(max(len(tokens) for tokens, _, _ in laid), multiple)
    tokens, positions, segments = (
        np.stack([np.pad(arrays[i], (0, width - len(arrays[i])), constant_values=blank) for arrays in laid])
        for i, blank in enumerate((0, 0, -1))
    )
    completion = np.argwhere(mask)
    targets = part.token_ids[tuple(completion.T)]
    segment = _on(device, segments)
    seen = (segment[:, None, :] == 0) | (segment[:, None, :] == segment[:, :, None])
    hidden = ~seen.tril()[:, None]
    arrays = (mask, completion, np.concatenate(predictors), targets)
    return Microbatch(
        sequences, _on(device, tokens), _on(device, positions), hidden, *(_on(device, array) for array in arrays)
    )


@contextmanager
def at_positions(model: torch.nn.Module, position_ids: torch.Tensor | None) -> Iterator[None]:
    """Within it, rotary embeddings are those of the given positions instead of 0, 1, 2, ...

    Args:
        model: a Megatron model; with other kinds of positions nothing changes.
        position_ids: int64 [G, S]; None: nothing changes.
    """
    rotary = getattr(model, "rotary_pos_emb", None)
    if position_ids is None or rotary is None:
        yield
        return

    def placed(module: Any, args: Any, embeddings: torch.Tensor) -> torch.Tensor:
        # [S, 1, 1, D] of the positions 0 .. S-1, to [S, G, 1, D].
        return embeddings[position_ids.T, 0]

    handle = rotary.register_forward_hook(placed)
    try:
        yield
    finally:
        handle.remove()


def unable_to_share(model: torch.nn.Module, *, local_attention: bool) -> str | None:
    """Why prompts cannot be shared in this Megatron model; None: they can.

    Args:
        local_attention: its attention is Megatron's own without fused kernels, which takes any mask.
    """
    config = model.config
    kind = getattr(model, "position_embedding_type", None)
    if not local_attention:
        return "fused attention takes no mask of this kind"
    if kind is None:
        return "it is not a plain GPT model, which would say of what kind its positions are"
    if getattr(config, "experimental_attention_variant", None) is not None:
        return f"its attention is {config.experimental_attention_variant}"
    if config.multi_latent_attention:
        return "latent attention places its keys itself"
    if config.window_size is not None:
        return "its attention has a sliding window"
    if kind not in ("rope", "learned_absolute", "none"):
        return f"its positions are of the kind {kind}"
    return None


def attention_tokens(model: torch.nn.Module) -> float:
    """Positions of a row at which attention takes about as long as the linears of a layer.

    Counted are multiplications: 4 h_a S per position against 2 W, with h_a = heads x head size and W weights per layer.
    Unfused attention also writes its scores and reads them again a few times, which takes as long once more.
    """
    config = model.config
    inner = config.num_attention_heads * config.kv_channels
    groups = config.num_query_groups * config.kv_channels
    ffn, experts = config.ffn_hidden_size, 1
    if config.num_moe_experts:
        ffn, experts = config.moe_ffn_hidden_size, config.moe_router_topk
    mlp = (3 if config.gated_linear_unit else 2) * ffn * experts
    weights = config.hidden_size * (2 * inner + 2 * groups + mlp)
    return weights / (4 * inner)


def _completion_mask(part: TrainBatch) -> np.ndarray:
    time = np.arange(part.token_ids.shape[1])
    return (time >= part.prompt_lengths[:, None]) & (time < part.lengths[:, None])


def padded_rows(values: np.ndarray, width: int) -> np.ndarray:
    """[B, T] with zeros behind, up to [B, width]."""
    return np.pad(values, ((0, 0), (0, max(0, width - values.shape[1]))))


def _round_up(width: int, multiple: int) -> int:
    return -(-width // multiple) * multiple


def _on(device: Any, array: np.ndarray | None) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to(device)
