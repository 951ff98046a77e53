"""From the configuration to the engines' processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_rl.cluster.workers import Worker
from lora_rl.sync.vllm_plugin import backend_for

if TYPE_CHECKING:
    from lora_rl.config import RunConfig
    from lora_rl.config.layout import Layout
    from lora_rl.rollout.engine import EngineSettings


def start_engines(
    config: RunConfig, layout: Layout, logs: Path, options: Sequence[dict[str, Any]], nodes: Sequence[str] = ()
) -> list[Worker]:
    """Create one actor per engine; returns at once, while the processes start.

    Args:
        logs: folder for `engine_<n>.log`.
        options: Ray options of each engine, see `lora_rl.cluster.placement`.
        nodes: name of the node of each engine, where there are several.
    """
    return [
        start_engine(config, layout, logs, options[index], index, nodes[index] if nodes else "")
        for index in range(layout.num_engines)
    ]


def start_engine(
    config: RunConfig, layout: Layout, logs: Path, options: dict[str, Any], index: int, node: str = ""
) -> Worker:
    """Create the actor of engine `index`, also again after it was lost; its log goes on."""
    import ray

    from lora_rl.rollout.actor import EngineActor

    log = logs / f"engine_{index}.log"
    actor = ray.remote(EngineActor).options(max_restarts=0, max_concurrency=64, **options)
    name = f"engine {index}" + (f" on {node}" if node else "")
    # An actor's current directory is that of its node.
    return Worker(name, actor.remote(engine_settings(config, layout), str(log.absolute())), log)


def engine_settings(config: RunConfig, layout: Layout) -> EngineSettings:
    """The configuration's engine section, with everything derived filled in."""
    from lora_rl.config.layout import engine_batched_tokens, engine_block_size
    from lora_rl.lora.targets import hf_linears
    from lora_rl.rollout.engine import EngineSettings

    policy, vllm = config.policy, config.policy.generation.vllm_cfg
    peft, native = policy.megatron_cfg.peft, policy.generation.weight_sync.mode == "adapter"
    updates = config.grpo.async_grpo
    in_flight = updates.enabled and updates.in_flight_weight_updates
    return EngineSettings(
        model=policy.model_name,
        tokenizer=policy.tokenizer_name,
        platform=layout.platform,
        dtype=config.engine_precision,
        tensor_parallel_size=vllm.tensor_parallel_size,
        max_model_len=config.engine_max_model_len,
        max_num_seqs=vllm.max_num_seqs,
        max_num_batched_tokens=engine_batched_tokens(config, layout.platform),
        enforce_eager=vllm.enforce_eager,
        enable_prefix_caching=vllm.enable_prefix_caching,
        block_size=engine_block_size(config, layout.platform),
        kv_cache_gib=vllm.kv_cache_gib,
        gpu_memory_utilization=vllm.gpu_memory_utilization,
        load_format=vllm.load_format,
        num_threads=layout.threads_per_engine,
        sync_backend=sync_backend(config, layout),
        sleeps=layout.colocated and layout.platform == "cuda",
        seed=config.grpo.seed,
        adapter_rank=peft.dim if native else 0,
        adapter_modules=tuple(hf_linears(peft.target_modules, peft.exclude_modules)) if native else (),
        # Requests of every version that is not too old, and a new one.
        max_adapters=updates.max_trajectory_age_steps + 2 if in_flight else 2,
        in_flight_updates=in_flight,
        recompute_kv_cache=in_flight and updates.recompute_kv_cache_after_weight_updates,
    )


def sync_backend(config: RunConfig, layout: Layout) -> str:
    """See `lora_rl.sync.vllm_plugin.backend_for`."""
    sync = config.policy.generation.weight_sync
    return backend_for(platform=layout.platform, mode=sync.mode, transport=sync.transport, colocated=layout.colocated)
