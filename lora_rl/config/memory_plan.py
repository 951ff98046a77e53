"""How much memory a run needs on each GPU, in each of its phases, before anything is started.

Pure arithmetic (`memory_parts`) over the model's config.json, the configuration and the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lora_rl.config import memory_parts as parts
from lora_rl.config.hardware import device_memory
from lora_rl.config.layout import Layout, engine_batched_tokens
from lora_rl.config.memory_parts import PRECISION_BYTES, Trainer
from lora_rl.config.memory_table import GIB, Holder, Item, MemoryPlan, gib, peak
from lora_rl.config.model_files import ModelFacts, read_model_facts
from lora_rl.config.model_rules import adapted_layers
from lora_rl.config.parameters import Shape, shape_of
from lora_rl.config.schema import RunConfig

# What a process needs on a GPU before it holds a tensor: the CUDA context, NCCL's buffers, libraries, fragmentation.
GPU_PROCESS = int(1.5 * GIB)
# Resident memory of a process on the CPU without weights: imported libraries.
CPU_RANK, CPU_ENGINE = int(1.1 * GIB), int(1.5 * GIB)


def memory_plan(config: RunConfig, layout: Layout) -> MemoryPlan:
    """Plan the memory of a run.

    Phases are generating, training, and the push of weights; where engines and ranks share devices, the push at
    start-up, when the engines' KV cache is there as well.
    """
    facts = read_model_facts(config.policy.model_name)
    shape = shape_of(facts)
    if isinstance(shape, str) or facts is None:
        return MemoryPlan(unknown=str(shape))
    trainer = trainer_of(config, layout, shape, facts)
    limit = device_memory(config, layout.platform)
    rank, engine = _rank(config, layout, shape, trainer), _engine(config, layout, shape, trainer, limit)
    ep = config.policy.megatron_cfg.expert_model_parallel_size
    stage = max(shape.on_stage(s, tp=layout.tp, pp=layout.pp, ep=ep) for s in range(layout.pp))
    weights = stage * trainer.precision
    held, room = engine.weights, int((limit or 0) * config.policy.generation.vllm_cfg.gpu_memory_utilization)
    notes = [engine.capacity, *_host(config, layout, shape, weights, held)]
    mb, utilization = "policy.dynamic_batching.train_mb_tokens", "policy.generation.vllm_cfg.gpu_memory_utilization"
    if layout.platform == "cpu":
        total = layout.world_size * peak(rank) + layout.num_engines * layout.engine_tp * peak(engine.items)
        certain = layout.world_size * weights + layout.num_engines * layout.engine_tp * held
        holders: tuple[Holder, ...] = (
            Holder("each Megatron rank", rank, weights, None, mb),
            Holder("each engine process", engine.items, held, None, utilization),
            Holder("all processes together", (Item.always("memory", total),), certain, limit, mb),
        )
    elif layout.colocated:
        items = (*rank, *engine.items)
        holders = (Holder("each GPU", items, weights + held, limit, f"{utilization} or {mb}"),)
        if limit is not None and held > room:
            holders += (Holder("an engine's share of a GPU", (Item.always("weights", held),), held, room, utilization),)
    else:
        holders = (
            Holder("each GPU of the trainer", rank, weights, limit, mb),
            Holder("each GPU of the engines", engine.items, held, room or None, utilization),
        )
    return MemoryPlan(
        holders,
        shape.total,
        _count_trained(config, shape, trainer),
        tuple(notes),
        tuple(_assumptions(layout, trainer, facts, limit)),
    )


def _count_trained(config: RunConfig, shape: Shape, trainer: Trainer) -> int:
    svd = config.policy.megatron_cfg.peft.svd
    if svd.enabled:
        return parts.singular_values(trainer, svd.mode)
    return sum(shape.adapter(linear, trainer.rank) * count for linear, count in trainer.adapted.items())


def trainer_of(config: RunConfig, layout: Layout, shape: Shape, facts: ModelFacts) -> Trainer:
    """What the formulas need to know of the trainer."""
    policy, peft = config.policy, config.policy.megatron_cfg.peft
    longest, completion = policy.max_total_sequence_length, policy.generation.max_new_tokens
    prompt, sequences = longest - completion, 1
    by_tokens = policy.dynamic_batching.enabled and policy.train_micro_batch_size is None
    if layout.platform == "cpu" and policy.share_prompts is not False and by_tokens:
        sequences = parts.sharing_sequences(
            shape,
            prompt=prompt,
            completion=completion,
            group=config.grpo.num_generations_per_prompt,
            tokens=policy.dynamic_batching.train_mb_tokens,
        )
    row = longest if sequences == 1 else prompt + sequences * (completion - 1)
    tokens = policy.dynamic_batching.train_mb_tokens
    if not policy.dynamic_batching.enabled:
        tokens = (policy.train_micro_batch_size or 1) * longest
    elif policy.train_micro_batch_size is not None:
        tokens = min(tokens, policy.train_micro_batch_size * longest)
    # A step never has more.
    tokens = min(tokens, layout.sequences_per_rank * longest)
    return Trainer(
        tp=layout.tp,
        pp=layout.pp,
        precision=PRECISION_BYTES[policy.precision],
        rank=peft.dim,
        adapted=adapted_layers(facts, peft),
        tokens=tokens,
        length=row,
        completion_share=min(1.0, sequences * completion / row),
        sequence_parallel=policy.megatron_cfg.sequence_parallel,
        recompute=policy.megatron_cfg.activation_checkpointing,
        flash=layout.platform == "cuda",
    )


def _rank(config: RunConfig, layout: Layout, shape: Shape, trainer: Trainer) -> tuple[Item, ...]:
    """The fullest pipeline stage's items."""
    alone = layout.platform == "cuda" and layout.colocated
    ep = config.policy.megatron_cfg.expert_model_parallel_size

    def items(stage: int) -> tuple[Item, ...]:
        base = shape.on_stage(stage, tp=layout.tp, pp=layout.pp, ep=ep) * trainer.precision
        adapters = parts.adapter_parameters(shape, trainer)
        frozen_reference = config.loss_fn.reference_policy_kl_penalty > 0 and config.loss_fn.reference_policy == "start"
        last = stage == layout.pp - 1
        return (
            Item("base weights", 0 if alone else base, base, base),
            *_trained(config, layout, trainer, adapters),
            Item.always("reference adapters, at most", adapters * parts.FLOAT32 if frozen_reference else 0),
            Item("activations", training=parts.activations(shape, trainer, stage)),
            Item("logits and loss", training=parts.loss_bytes(shape, trainer) if last else 0),
            Item("merging and sending", push=_sending(config, layout, shape, trainer)),
            Item.always("process", GPU_PROCESS if layout.platform == "cuda" else CPU_RANK),
        )

    return max((items(stage) for stage in range(layout.pp)), key=peak)


def _trained(config: RunConfig, layout: Layout, trainer: Trainer, adapters: int) -> tuple[Item, ...]:
    """A parameter that is trained has a gradient, and two moments of Adam (Kingma & Ba 2015)."""
    svd = config.policy.megatron_cfg.peft.svd
    if not svd.enabled:
        return (Item.always("adapters, gradients, optimizer", adapters * 4 * parts.FLOAT32),)
    values = parts.singular_values(trainer, svd.mode) // layout.pp
    return (
        Item.always("frozen singular vectors", adapters * parts.FLOAT32),
        Item.always("singular values, gradients, optimizer", values * 4 * parts.FLOAT32),
    )


def _sending(config: RunConfig, layout: Layout, shape: Shape, trainer: Trainer) -> int:
    sync = config.policy.generation.weight_sync
    if sync.mode != "merged":
        # Adapters only, in host memory.
        return 0
    merging = parts.merge_bytes(shape, precision=PRECISION_BYTES[config.engine_precision], adapted=trainer.adapted)
    streamed = layout.platform == "cuda" and sync.transport == "auto"
    return merging + (parts.PACKED_BUFFER * parts.PACKED_BUFFERS if streamed else 0)


@dataclass(frozen=True)
class _Engine:
    items: tuple[Item, ...]
    weights: int
    capacity: str


def _engine(config: RunConfig, layout: Layout, shape: Shape, trainer: Trainer, limit: int | None) -> _Engine:
    """What an engine process holds. On a GPU, vLLM takes its share whole: the KV cache is what is left of it."""
    vllm, mode = config.policy.generation.vllm_cfg, config.policy.generation.weight_sync.mode
    tp, precision = layout.engine_tp, PRECISION_BYTES[config.engine_precision]
    weights = shape.on_stage(0, tp=tp, pp=1) * precision
    adapters = parts.adapter_parameters(shape, trainer) * trainer.tp * trainer.pp * precision // tp
    # Slots for two versions; merging engines hold the factors for the length of a push.
    adapters = {"adapter": 2 * adapters, "adapter_merge": 0, "merged": 0}[mode]
    cuda = layout.platform == "cuda"
    tokens = engine_batched_tokens(config, layout.platform) or parts.ENGINE_TOKENS
    work = parts.engine_activations(shape, tp=tp, precision=precision, tokens=tokens, sequences=vllm.max_num_seqs)
    process, asleep = (GPU_PROCESS if cuda else CPU_ENGINE), cuda and layout.colocated
    per_token = parts.kv_cache_per_token(shape, tp=tp, precision=precision)
    if not cuda:
        cache = vllm.kv_cache_gib * GIB
    else:
        taken = weights + adapters + work + process
        cache = max(0, int((limit or 0) * vllm.gpu_memory_utilization) - taken)
    received = parts.PACKED_BUFFER if cuda and mode == "merged" else 0
    items = (
        Item("engine weights", weights, 0 if asleep else weights, weights),
        Item.always("engine adapters", adapters),
        Item("KV cache", cache, 0 if asleep else cache, cache),
        Item("engine activations", generation=work),
        Item("receiving", push=received),
        Item.always("engine process", process),
    )
    longest = config.engine_max_model_len
    held = cache // per_token
    if cuda and limit is None:
        capacity = f"KV cache: {per_token / 2**10:,.0f} KiB per token and GPU; its size follows from the GPU's memory"
    else:
        capacity = (
            f"KV cache: {per_token / 2**10:,.1f} KiB per token, {held:,} tokens: {held / longest:,.1f} sequences of "
            f"{longest} at once (policy.generation.vllm_cfg.max_num_seqs = {vllm.max_num_seqs})"
        )
    return _Engine(items, weights, capacity)


def _host(config: RunConfig, layout: Layout, shape: Shape, base: int, weights: int) -> Iterator[str]:
    """Main memory of a node that goes beyond its processes."""
    per_node = max(layout.ranks_on)
    if layout.platform == "cuda" and layout.colocated:
        per_gpu = base + weights
        yield f"host memory: {gib(per_node * per_gpu)} GiB per node hold the weights that are away from the GPUs"
    if layout.platform == "cpu" and config.policy.generation.weight_sync.mode == "merged":
        copy = shape.total * PRECISION_BYTES[config.engine_precision]
        yield f"/dev/shm: {gib(copy)} GiB for pushed weights"


def _assumptions(layout: Layout, trainer: Trainer, facts: ModelFacts, limit: int | None) -> Iterator[str]:
    if facts.source == "description":
        yield "the model's sizes are those of a description in this package; its files are not on this machine"
    yield f"microbatches of {trainer.tokens:,} tokens, all of them kept for the backward pass" + (
        " as inputs of layers" if trainer.recompute else ""
    )
    if layout.platform == "cuda":
        yield f"{gib(GPU_PROCESS)} GiB per process for the CUDA context, NCCL and fragmentation"
        yield "flash attention and fused activations of Transformer Engine"
        if limit is None:
            yield "nothing of the GPUs' size; set cluster.gpu_memory_gib"
    else:
        libraries = f"{gib(CPU_RANK)} GiB of libraries per rank, {gib(CPU_ENGINE)} per engine process"
        yield f"{libraries}, of which processes share part"
