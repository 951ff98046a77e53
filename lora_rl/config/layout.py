"""The processes a configuration asks for, and the counts that follow from it."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lora_rl.config.errors import ConfigError, Violation
from lora_rl.config.model_files import read_model_facts
from lora_rl.config.schema import RunConfig

PlatformName = Literal["cpu", "cuda"]

# Below this width a matrix product is too small to share among many OpenMP threads, or with others on the same cores.
_MIN_HIDDEN_SIZE_FOR_THREADS = 512
_MAX_THREADS_IF_TINY = 2
# On a GPU the CPU threads only feed the device.
_MAX_THREADS_WITH_GPU = 8
_MAX_RANKS_LISTED = 32
# vLLM's own choice for offline generation on CPUs.
_BATCHED_TOKENS_ON_CPU = 4096
# vLLM's attention for the CPU takes multiples of it.
BLOCK_ON_CPU = 32


@dataclass(frozen=True)
class Layout:
    """Processes and batch sizes of a run.

    Attributes:
        platform: where ranks and engines compute.
        tp, pp, dp: tensor-, pipeline- and data-parallel sizes; world_size = tp x dp x pp.
        world_size: Megatron ranks, one process each.
        num_engines: vLLM engines.
        ranks_on, engines_on: Megatron ranks and engines of each node. Both are numbered node by node, so that the
            ranks of a tensor-parallel group, which are neighbours, are on one node.
        engine_tp: processes per engine.
        sequences_per_step: completions sampled per step.
        optimizer_steps_per_batch: optimizer steps on each of those batches.
        sequences_per_rank: sequences of one optimizer step on each data-parallel rank.
        threads_per_rank, threads_per_engine: OpenMP threads of each Megatron rank and of each engine process.
        colocated: engines and ranks take turns on the same devices.
    """

    platform: PlatformName
    tp: int
    pp: int
    dp: int
    world_size: int
    num_engines: int
    ranks_on: tuple[int, ...]
    engines_on: tuple[int, ...]
    engine_tp: int
    sequences_per_step: int
    optimizer_steps_per_batch: int
    sequences_per_rank: int
    threads_per_rank: int
    threads_per_engine: int
    colocated: bool

    @property
    def num_gpus(self) -> int:
        """GPUs the whole job uses; 0 on the CPU."""
        if self.platform == "cpu":
            return 0
        return self.world_size if self.colocated else self.world_size + self.num_engines * self.engine_tp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(tp, pp, dp) indices of a Megatron rank, in the order tp-dp-pp with tp fastest."""
        tp_index = rank % self.tp
        dp_index = rank // self.tp % self.dp
        return tp_index, rank // (self.tp * self.dp), dp_index

    def describe(self, *, engines: bool = True) -> str:
        """The processes and derived counts, several lines for a reader.

        Args:
            engines: whether the job has any.
        """
        lines = [
            f"platform: {self.platform}",
            f"Megatron: {_count(self.world_size, 'rank')} = tp {self.tp} x pp {self.pp} x dp {self.dp}, "
            f"{_count(self.threads_per_rank, 'thread')} each",
        ]
        listed = self.world_size if self.world_size <= 2 * _MAX_RANKS_LISTED else _MAX_RANKS_LISTED
        rank_nodes = [node for node, ranks in enumerate(self.ranks_on) for _ in range(ranks)]
        for rank in range(listed):
            tp_index, pp_index, dp_index = self.coordinates(rank)
            where = f", node {rank_nodes[rank]}" if len(self.ranks_on) > 1 else ""
            lines.append(f"  rank {rank}: tp {tp_index}, pp {pp_index}, dp {dp_index}{where}")
        if listed < self.world_size:
            lines.append(f"  ... and {self.world_size - listed} more ranks")
        if engines:
            lines += [
                f"vLLM: {_count(self.num_engines, 'engine')} of tp {self.engine_tp}, "
                f"{_count(self.threads_per_engine, 'thread')} per process, "
                + ("taking turns with the ranks" if self.colocated else "on resources of their own"),
                *self._describe_nodes(),
            ]
        lines += [
            f"each step: {_count(self.sequences_per_step, 'sequence')}, "
            f"{_count(self.optimizer_steps_per_batch, 'optimizer step')}, "
            f"{self.sequences_per_rank} sequences per data-parallel rank in each",
        ]
        return "\n".join(lines)

    def _describe_nodes(self) -> list[str]:
        if len(self.ranks_on) == 1:
            return []
        shares: dict[tuple[int, int], list[int]] = {}
        for node, share in enumerate(zip(self.ranks_on, self.engines_on, strict=True)):
            shares.setdefault(share, []).append(node)
        return [
            f"{_count(len(nodes), 'node')} ({nodes[0]}{f' to {nodes[-1]}' if len(nodes) > 1 else ''}): "
            + " and ".join(_count(n, noun) for n, noun in ((ranks, "rank"), (engines, "engine")) if n)
            + (" each" if len(nodes) > 1 else "")
            for (ranks, engines), nodes in shares.items()
        ]


def derive_layout(config: RunConfig, *, platform: PlatformName | None = None, cores: int | None = None) -> Layout:
    """Work out the processes of a run.

    Args:
        config: a configuration that `load_config` accepted.
        platform: overrides `cluster.platform`.
        cores: CPU cores per node; overrides `cluster.num_cpus` and what this machine has.

    Raises:
        ConfigError: the configuration does not fit, which happens when `platform` is not the one it was checked for.
    """
    platform = platform or platform_of(config)
    if violations := list(layout_violations(config, platform)):
        raise ConfigError(violations)
    cores = cores or config.cluster.num_cpus or available_cores()
    megatron, vllm = config.policy.megatron_cfg, config.policy.generation.vllm_cfg
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    per_node = ranks_per_node(config, platform)
    # The last nodes are the engines'.
    own, nodes = engine_nodes(config), config.cluster.num_nodes
    ranks_on = (per_node,) * (nodes - own) + (0,) * own
    engines = _engines_per_node(config, platform, _gpus_per_node(config, platform))
    engines_on = (0,) * (nodes - own) + (engines,) * own if own else (engines,) * nodes
    world_size = sum(ranks_on)
    dp = world_size // (tp * pp)
    engine_tp = vllm.tensor_parallel_size
    # Generating while training, both sides use the cores at once; otherwise they take turns, and each may use all.
    at_once = config.grpo.async_grpo.enabled and not own
    engine_processes = max(1, engines * engine_tp)
    processes = per_node + engine_processes if at_once else 0
    most = _most_threads(config, platform)
    return Layout(
        platform=platform,
        tp=tp,
        pp=pp,
        dp=dp,
        world_size=world_size,
        num_engines=sum(engines_on),
        ranks_on=ranks_on,
        engines_on=engines_on,
        engine_tp=engine_tp,
        sequences_per_step=config.sequences_per_step,
        optimizer_steps_per_batch=config.sequences_per_step // config.train_global_batch_size,
        sequences_per_rank=config.train_global_batch_size // dp,
        threads_per_rank=megatron.num_threads or _threads(cores, processes or per_node, most),
        threads_per_engine=vllm.num_threads or _threads(cores, processes or engine_processes, most),
        colocated=config.policy.generation.colocated.enabled,
    )


def engine_batched_tokens(config: RunConfig, platform: PlatformName) -> int | None:
    """Tokens of one iteration of an engine; None leaves it to vLLM.

    On the CPU no prompt is split over iterations, so that one has to hold the longest sequence.
    """
    asked = config.policy.generation.vllm_cfg.max_num_batched_tokens
    if asked is not None or platform == "cuda":
        return asked
    return max(_BATCHED_TOKENS_ON_CPU, config.engine_max_model_len)


def engine_block_size(config: RunConfig, platform: PlatformName) -> int | None:
    """Tokens per block of the KV cache; None leaves it to vLLM.

    On the CPU that would be 128, and a prompt that is shorter would be computed anew for each of its completions.
    """
    asked = config.policy.generation.vllm_cfg.block_size
    return BLOCK_ON_CPU if asked is None and platform == "cpu" else asked


def engine_nodes(config: RunConfig) -> int:
    """Nodes that only engines use; 0 where engines and ranks are on the same nodes."""
    generation, nodes = config.policy.generation, config.cluster.num_nodes
    return 0 if generation.colocated.enabled or nodes == 1 else generation.colocated.resources.num_nodes or 0


def _gpus_per_node(config: RunConfig, platform: PlatformName) -> int:
    """Devices of a node, whatever uses them; on the CPU the ranks."""
    if platform == "cuda":
        return config.cluster.gpus_per_node or count_gpus()
    megatron = config.policy.megatron_cfg
    one_replica = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
    return config.cluster.gpus_per_node or one_replica


def _engines_per_node(config: RunConfig, platform: PlatformName, gpus: int) -> int:
    """Engines on each node that has any."""
    generation = config.policy.generation
    engine_tp = generation.vllm_cfg.tensor_parallel_size
    if not generation.colocated.enabled:
        # Nodes of their own are used whole, where that is a number of devices.
        whole = gpus if platform == "cuda" and engine_nodes(config) else engine_tp
        return (generation.colocated.resources.gpus_per_node or whole) // engine_tp
    # On the CPU one engine per node: a second one would take the same cores and its own copy of the weights.
    return 1 if platform == "cpu" else gpus // engine_tp


def layout_violations(config: RunConfig, platform: PlatformName) -> Iterator[Violation]:
    """What keeps the ranks from dividing evenly, and the batch from dividing over them."""
    megatron, generation = config.policy.megatron_cfg, config.policy.generation
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    own_nodes, gpus = engine_nodes(config), _gpus_per_node(config, platform)
    if own_nodes >= config.cluster.num_nodes:
        # Reported by its own rule.
        return
    per_node, nodes = ranks_per_node(config, platform), config.cluster.num_nodes - own_nodes
    world_size = per_node * nodes
    own, engine_tp = generation.colocated.resources.gpus_per_node, generation.vllm_cfg.tensor_parallel_size
    own_key = "policy.generation.colocated.resources.gpus_per_node"
    if own is not None and own % engine_tp:
        problem = f"must be a multiple of policy.generation.vllm_cfg.tensor_parallel_size = {engine_tp}"
        yield Violation(own_key, problem, own)
        return
    if platform == "cuda" and own_nodes and (own or engine_tp) > gpus > 0:
        key = own_key if own else "policy.generation.vllm_cfg.tensor_parallel_size"
        yield Violation(key, f"an engine is on one node, which has {gpus} GPUs; lower it", own or engine_tp)
        return
    if world_size == 0 and not generation.colocated.enabled and gpus > 0:
        key, value = "policy.generation.vllm_cfg.tensor_parallel_size", engine_tp
        if own is not None:
            key, value = own_key, own
        had = config.cluster.gpus_per_node
        found = f"cluster.gpus_per_node = {had}" if had else f"the {_count(gpus, 'GPU')} of this machine"
        problem = f"leaves no GPU of {found} for the trainer; lower it, or let them take turns (colocated.enabled)"
        yield Violation(key, problem, value)
        return
    if world_size == 0:
        problem = "no GPU was found on this machine; set it to the GPUs per node, or cluster.platform to cpu"
        yield Violation("cluster.gpus_per_node", problem, config.cluster.gpus_per_node)
        return
    if world_size % (tp * pp):
        yield Violation(
            "cluster.gpus_per_node",
            f"gpus_per_node x cluster.num_nodes = {per_node} x {nodes} = {world_size} ranks are not a multiple of "
            f"tensor_model_parallel_size x pipeline_model_parallel_size = {tp} x {pp} = {tp * pp}; "
            f"set it to a multiple, or lower tp or pp",
            config.cluster.gpus_per_node,
        )
        return
    if per_node % tp:
        yield Violation(
            "policy.megatron_cfg.tensor_model_parallel_size",
            f"a tensor-parallel group must be on one node, and a node has {_count(per_node, 'rank')}; use a divisor of "
            f"{per_node}",
            tp,
        )
        return
    if platform == "cuda" and generation.colocated.enabled and per_node % engine_tp:
        yield Violation(
            "policy.generation.vllm_cfg.tensor_parallel_size",
            f"the {per_node} GPUs of a node are not a multiple of it; use a divisor of {per_node}",
            engine_tp,
        )
    dp, batch = world_size // (tp * pp), config.train_global_batch_size
    if batch % dp:
        yield Violation(
            "policy.train_global_batch_size",
            f"{batch} sequences do not divide over {dp} data-parallel ranks; use a multiple of {dp}",
            config.policy.train_global_batch_size,
        )
    micro = config.policy.train_micro_batch_size
    if not config.policy.dynamic_batching.enabled and micro and batch % (dp * micro):
        yield Violation(
            "policy.train_micro_batch_size",
            f"the {batch // dp} sequences of a rank are not a multiple of it; use a divisor of {batch // dp}",
            micro,
        )


def ranks_per_node(config: RunConfig, platform: PlatformName) -> int:
    """Megatron ranks on each node that has any.

    On the CPU `cluster.gpus_per_node`, or tp x pp. On CUDA the node's GPUs, less those that engines have to themselves.
    """
    gpus, generation = _gpus_per_node(config, platform), config.policy.generation
    if platform == "cpu" or generation.colocated.enabled or engine_nodes(config):
        return gpus
    return max(0, gpus - _engines_per_node(config, platform, gpus) * generation.vllm_cfg.tensor_parallel_size)


def platform_of(config: RunConfig) -> PlatformName:
    """`cluster.platform`, with `auto` looked up on this machine."""
    if config.cluster.platform != "auto":
        return config.cluster.platform
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") is not None and count_gpus() == 0
    return "cuda" if not hidden and (_gpu_devices() or shutil.which("nvidia-smi")) else "cpu"


def count_gpus() -> int:
    """NVIDIA GPUs this process may use, without loading a driver library."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(_gpu_devices())
    return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])


def available_cores() -> int:
    """CPU cores this process may use: its affinity, or the container's quota if that is less."""
    cores = len(os.sched_getaffinity(0))
    quota_file = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: "<quota us | max> <period us>"
    if quota_file.is_file():
        quota, period = quota_file.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _gpu_devices() -> list[Path]:
    return list(Path("/dev").glob("nvidia[0-9]*"))


def _threads(cores: int, processes: int, most: float) -> int:
    return int(max(1, min(cores // processes, most)))


def _most_threads(config: RunConfig, platform: PlatformName) -> float:
    """Of a process: what is of use to it, and not more than `OMP_NUM_THREADS` in the environment, if it is there."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    most = float(asked) if asked.isdecimal() and int(asked) > 0 else math.inf
    if platform == "cuda":
        return min(most, _MAX_THREADS_WITH_GPU)
    return min(most, _MAX_THREADS_IF_TINY) if _is_tiny(config) else most


def _is_tiny(config: RunConfig) -> bool:
    facts = read_model_facts(config.policy.model_name)
    return facts is not None and (facts.hidden_size or math.inf) < _MIN_HIDDEN_SIZE_FOR_THREADS


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
