"""Bytes of what ranks and engines hold, one formula each, from the sizes of the model alone.

N is the number of tokens of a microbatch, T the length of a row, p the bytes of a value in the base's precision,
h, q, kv, f, V the widths of `Shape`, r the rank of the adapters, k the experts a token goes through. Nothing here is a
measurement; `tests/unit/policy/test_memory_plan.py` compares with what real ranks hold, on CPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lora_rl.config.parameters import Shape

PRECISION_BYTES = {"float32": 4, "bfloat16": 2}
FLOAT32 = 4
# vLLM's `DEFAULT_PACKED_BUFFER_SIZE_BYTES` and `DEFAULT_PACKED_NUM_BUFFERS`.
PACKED_BUFFER, PACKED_BUFFERS = 2**30, 2
# vLLM's `max_num_batched_tokens` for offline generation on GPUs with 70 GiB and more; 8192 on smaller ones.
ENGINE_TOKENS = 16384


@dataclass(frozen=True)
class Trainer:
    """What the bytes of a rank depend on besides the model.

    Attributes:
        tp, pp: sizes of the layout.
        precision: bytes of a value of the base model and of activations.
        rank: r of the adapters.
        adapted: how many layers have an adapter on each linear, by its Megatron name.
        tokens: of a microbatch, padding included: N.
        length: of a padded row of a microbatch: T.
        completion_share: of the positions, those whose logits are used.
        sequence_parallel: norms, and what lies between layers, are split over tp ranks.
        recompute: keep the inputs of layers only, and compute the rest again.
        flash: attention that never holds a matrix of scores, and a fused activation (Transformer Engine); else
            Megatron's local layers.
    """

    tp: int
    pp: int
    precision: int
    rank: int
    adapted: dict[str, int]
    tokens: int
    length: int
    completion_share: float
    sequence_parallel: bool
    recompute: bool
    flash: bool

    @property
    def between_parts(self) -> int:
        """Ranks that share what lies between layers."""
        return self.tp if self.sequence_parallel else 1


def sharing_sequences(shape: Shape, *, prompt: int, completion: int, group: int, tokens: int) -> int:
    """Sequences of the longest kind that train behind one copy of their prompt: as many as `share_prompts` in
    `lora_rl.algorithm.batching` puts into a row of at most `tokens`.

    That module is not used here because its package imports torch, which a dry run does without.
    """
    weights = sum(i * o * (shape.active_experts if copies > 1 else 1) for i, o, copies in shape.linears.values())
    attention_tokens = weights / (4 * shape.q)

    def cost(size: int) -> float:
        full, rest = divmod(group, size)
        rows = [prompt + size * (completion - 1)] * full + ([prompt + rest * (completion - 1)] if rest else [])
        return sum(positions + positions**2 / attention_tokens for positions in rows)

    sizes = {math.ceil(group / count) for count in range(1, group + 1)}
    fitting = [size for size in sorted(sizes, reverse=True) if prompt + size * (completion - 1) <= tokens]
    return min(fitting, key=cost, default=1)


def adapter_parameters(shape: Shape, trainer: Trainer) -> int:
    """Adapter parameters of a rank, on the stage with its even share of layers: A and B are split over tp ranks alike
    (`ParallelLinearAdapter` of Megatron-Bridge), and are float32."""
    total = sum(count * shape.adapter(linear, trainer.rank) for linear, count in trainer.adapted.items())
    return total // (trainer.tp * trainer.pp)


def singular_values(trainer: Trainer, mode: str) -> int:
    """Numbers that SVD-LoRA trains in the whole model: per linear r in mode product, 2 r in factors, r x r in core.
    Each rank has those of its stage."""
    per_linear = {"product": trainer.rank, "factors": 2 * trainer.rank, "core": trainer.rank**2}[mode]
    return per_linear * sum(trainer.adapted.values())


def layer_activations(shape: Shape, trainer: Trainer) -> int:
    """Bytes that one layer keeps of a microbatch for its backward pass.

    After section 4 of Korthikanti et al. 2022 (arXiv:2205.05198), for a frozen base: a frozen linear keeps no input,
    only its adapter does, in float32. Counted are the inputs of two norms; what attention keeps (queries, keys and
    values, also before their norms where there are such; its output; with Megatron's local layers keys and values as
    wide as all heads, and the scores, one per pair of positions and head); what the gated activation keeps; and for
    adapters their input and the r values between A and B.
    """
    p, tp, n = trainer.precision, trainer.tp, trainer.tokens
    h, q, kv, r, k = shape.hidden, shape.q // tp, shape.kv // tp, trainer.rank, shape.active_experts
    f = shape.ffn * k // tp
    norms = 2 * h // trainer.between_parts
    if shape.experts:
        # Tokens are copied to their experts, and each expert's answer is kept for its weight.
        norms += 2 * k * h
    # What the norms of queries and keys are taken of; all three lie in one tensor.
    attention = q + 2 * kv + q if shape.qk_norm else 0
    if trainer.flash:
        attention += q + 2 * kv + q
        activation = 2 * f
    else:
        attention += 3 * q + shape.heads // tp * trainer.length
        activation = 4 * f
    # With sequence parallelism adapters keep their part of the tokens and gather the others once more, unless layers
    # are computed again as a whole.
    own = h if trainer.recompute else h // trainer.between_parts
    inputs = {"linear_qkv": own, "linear_proj": q, "linear_fc1": own * k, "linear_fc2": f}
    between = {"linear_qkv": r, "linear_proj": r, "linear_fc1": r * k, "linear_fc2": r * k}
    adapters = sum((inputs[name] + between[name]) * count for name, count in trainer.adapted.items()) // shape.layers
    return n * (p * (norms + attention + activation) + FLOAT32 * adapters)


def activations(shape: Shape, trainer: Trainer, stage: int) -> int:
    """Bytes of activations on a rank of a pipeline stage.

    Stage s of pp holds pp - s microbatches at once (1F1B, Narayanan et al. 2021, arXiv:2104.04473). With recomputation
    of whole layers, a microbatch keeps one input per layer, and one layer at a time is there in full.
    """
    layers, in_flight = shape.layers // trainer.pp, trainer.pp - stage
    one = layer_activations(shape, trainer)
    if trainer.recompute:
        between = trainer.tokens * shape.hidden * trainer.precision // trainer.between_parts
        return layers * in_flight * between + one
    return layers * in_flight * one


def loss_bytes(shape: Shape, trainer: Trainer) -> int:
    """Bytes around the logits on the last stage: all of them in p, and of the completions' a copy in p and four in
    float32 (`lora_rl.policy.logprobs`: shifted, exponentials, their product, the gradient)."""
    rows = trainer.precision + trainer.completion_share * (trainer.precision + 4 * FLOAT32)
    return int(trainer.tokens * shape.vocab // trainer.tp * rows)


def kv_cache_per_token(shape: Shape, *, tp: int, precision: int) -> int:
    """Bytes of keys and values of one token on one engine process: 2 x layers x heads x head_dim x p. A head is not
    split: with more processes than key-value heads each still has one."""
    return 2 * shape.layers * max(1, shape.kv_heads // tp) * shape.head_dim * precision


def engine_activations(shape: Shape, *, tp: int, precision: int, tokens: int, sequences: int) -> int:
    """Bytes that vLLM needs for one iteration, roughly: input, residual, queries, keys, values and both halves of the
    gated activation of one layer for all its tokens, and the logits of all sequences, in p and three times in float32
    for sampling."""
    k = shape.active_experts
    one = 3 * shape.hidden * max(1, k) + 2 * (shape.q + 2 * shape.kv) // tp + 3 * shape.ffn * k // tp
    return tokens * one * precision + sequences * shape.vocab * (precision + 3 * FLOAT32)


def merge_bytes(shape: Shape, *, precision: int, adapted: dict[str, int]) -> int:
    """Bytes that merging takes at once on a rank: the largest tensor, whole, as it is and in the engine's type; and of
    the largest adapted linear a float32 copy, the update, and their sum."""
    sizes = [i * o for name, (i, o, _) in shape.linears.items() if adapted.get(name)]
    return 2 * precision * max(shape.embedding(), *sizes, 0) + 3 * FLOAT32 * max(sizes, default=0)
