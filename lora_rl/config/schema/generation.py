"""Section `policy.generation`: sampling, the vLLM engines and how they get new weights."""

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from lora_rl.config.schema.base import Fraction, Precision, Section


class ResourcesConfig(Section):
    """`policy.generation.colocated.resources`: GPUs of engines that do not share those of the trainer."""

    gpus_per_node: PositiveInt | None = Field(
        None,
        description="GPUs reserved for engines on each node that has any; null: one engine, or all of a reserved node.",
    )
    num_nodes: PositiveInt | None = Field(
        None,
        description="How many of cluster.num_nodes are reserved for engines; null: every node has ranks and engines.",
    )


class ColocatedConfig(Section):
    """`policy.generation.colocated`."""

    enabled: bool = Field(True, description="Engines and trainer take turns on the same devices.")
    resources: ResourcesConfig = Field(default_factory=ResourcesConfig)


class WeightSyncConfig(Section):
    """`policy.generation.weight_sync`: bringing new weights into the engines."""

    mode: Literal["merged", "adapter_merge", "adapter"] = Field(
        "merged",
        description="merged: send base + adapter; adapter_merge: send adapters, engines merge; "
        "adapter: engines serve the adapter.",
    )
    transport: Literal["auto", "shared_memory", "object_store"] = Field(
        "auto",
        description="shared_memory: engines map the trainer's buffer; object_store: bytes are copied through Ray; "
        "auto: shared memory for engines on the trainer's host, the object store for others.",
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        "nearest",
        description="Cast of merged weights to the engine's type; stochastic keeps small updates in expectation.",
    )
    min_retention: Fraction | None = Field(
        None, description="Least share of an update that must survive the cast (sync/retention); null: no check."
    )
    on_low_retention: Literal["warn", "stop"] = Field(
        "warn", description="What happens when sync/retention is below min_retention."
    )
    probe_period: NonNegativeInt = Field(
        0, description="Steps between comparisons of trainer and engine logprobs on held-out prompts; 0: at start only."
    )
    parity_tolerance: PositiveFloat | None = Field(
        1e-4, description="Largest mean |engine - trainer| logprob accepted, in nats (float32); null: no check."
    )


class VllmConfig(Section):
    """`policy.generation.vllm_cfg`."""

    precision: Precision | None = Field(None, description="Type of the engine's weights; null: policy.precision.")
    tensor_parallel_size: PositiveInt = Field(1, description="Processes per engine.")
    gpu_memory_utilization: Fraction = Field(0.5, description="Share of each GPU's memory an engine may use.")
    kv_cache_gib: PositiveInt = Field(1, description="KV cache per engine process on the CPU, in GiB.")
    max_model_len: PositiveInt | None = Field(
        None, description="Longest sequence of an engine, in tokens; null: policy.max_total_sequence_length."
    )
    enforce_eager: bool = Field(True, description="No graph capture: quicker start, slower decoding.")
    async_engine: bool = Field(True, description="Serve single requests as they come, not only whole batches.")
    max_num_seqs: PositiveInt = Field(256, description="Sequences an engine decodes at once.")
    max_num_batched_tokens: PositiveInt | None = Field(
        None,
        description="Tokens per engine iteration; null: vLLM's default, on the CPU at least the longest sequence.",
    )
    enable_prefix_caching: bool = Field(True, description="Share the KV cache of common prefixes.")
    block_size: PositiveInt | None = Field(
        None,
        description="Tokens per block of the KV cache; prefixes are shared in whole blocks. null: 32 on the CPU, "
        "vLLM's default on GPUs.",
    )
    num_threads: PositiveInt | None = Field(
        None, description="OpenMP threads per engine process; null: derived from the cores and processes."
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="auto: read the checkpoint; dummy: random weights until the first weight sync."
    )


class GenerationConfig(Section):
    """`policy.generation`."""

    backend: Literal["vllm"] = Field("vllm", description="Inference engine.")
    temperature: NonNegativeFloat = Field(1.0, description="Sampling temperature; the trainer uses the same.")
    top_p: Fraction = Field(1.0, description="Sample from the smallest set with this probability mass; 1: off.")
    top_k: Annotated[int, Ge(-1)] | None = Field(
        None, description="Sample from this many most probable tokens; null, -1 or 0: off."
    )
    max_new_tokens: PositiveInt = Field(1024, description="Longest completion, in tokens.")
    stop_token_ids: list[NonNegativeInt] | None = Field(
        None, description="Token ids that end a completion, besides EOS."
    )
    stop_strings: list[str] | None = Field(None, description="Strings that end a completion.")
    max_attempts: PositiveInt = Field(
        3, description="Times a prompt is generated from, when engines fail over it or its rollouts get too old."
    )
    ignore_eos: bool = Field(False, description="Generate on after EOS, up to max_new_tokens.")
    colocated: ColocatedConfig = Field(default_factory=ColocatedConfig)
    weight_sync: WeightSyncConfig = Field(default_factory=WeightSyncConfig)
    vllm_cfg: VllmConfig = Field(default_factory=VllmConfig)
