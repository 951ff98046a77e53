"""The driver's view of the engines: requests spread over them, answers in order, pushes to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_rl.cluster.workers import Worker, wait
from lora_rl.sync.errors import SyncError
from lora_rl.sync.manifest import Manifest, SyncReport, Transfer
from lora_rl.sync.vllm_plugin import backend_for

if TYPE_CHECKING:
    from lora_rl.config import RunConfig
    from lora_rl.config.layout import Layout
    from lora_rl.rollout.engine import EngineSettings
    from lora_rl.rollout.types import Completion, GenerationRequest, SamplingSettings


def start_engines(
    config: RunConfig, layout: Layout, logs: Path, options: Sequence[dict[str, Any]], nodes: Sequence[str] = ()
) -> list[Worker]:
    """Create one actor per engine; returns at once, while the processes start.

    Args:
        logs: folder for `engine_<n>.log`.
        options: Ray options of each engine, see `lora_rl.cluster.placement`.
        nodes: name of the node of each engine, where there are several.
    """
    import ray

    from lora_rl.rollout.actor import EngineActor

    settings = engine_settings(config, layout)
    workers = []
    for index in range(layout.num_engines):
        log = logs / f"engine_{index}.log"
        actor = ray.remote(EngineActor).options(max_restarts=0, **options[index])
        name = f"engine {index}" + (f" on {nodes[index]}" if nodes else "")
        # An actor's current directory is that of its node.
        workers.append(Worker(name, actor.remote(settings, str(log.absolute())), log))
    return workers


def engine_settings(config: RunConfig, layout: Layout) -> EngineSettings:
    """The configuration's engine section, with everything derived filled in."""
    from lora_rl.lora.targets import hf_linears
    from lora_rl.rollout.engine import EngineSettings

    policy, vllm = config.policy, config.policy.generation.vllm_cfg
    peft, native = policy.megatron_cfg.peft, policy.generation.weight_sync.mode == "adapter"
    return EngineSettings(
        model=policy.model_name,
        tokenizer=policy.tokenizer_name,
        platform=layout.platform,
        dtype=config.engine_precision,
        tensor_parallel_size=vllm.tensor_parallel_size,
        max_model_len=config.engine_max_model_len,
        max_num_seqs=vllm.max_num_seqs,
        max_num_batched_tokens=vllm.max_num_batched_tokens,
        enforce_eager=vllm.enforce_eager,
        enable_prefix_caching=vllm.enable_prefix_caching,
        kv_cache_gib=vllm.kv_cache_gib,
        gpu_memory_utilization=vllm.gpu_memory_utilization,
        load_format=vllm.load_format,
        num_threads=layout.threads_per_engine,
        sync_backend=sync_backend(config, layout),
        sleeps=layout.colocated and layout.platform == "cuda",
        seed=config.grpo.seed,
        adapter_rank=peft.dim if native else 0,
        adapter_modules=tuple(hf_linears(peft.target_modules, peft.exclude_modules)) if native else (),
    )


def sync_backend(config: RunConfig, layout: Layout) -> str:
    """See `lora_rl.sync.vllm_plugin.backend_for`."""
    sync = config.policy.generation.weight_sync
    return backend_for(platform=layout.platform, mode=sync.mode, transport=sync.transport, colocated=layout.colocated)


class EnginePool:
    """All engines as one."""

    def __init__(self, workers: Sequence[Worker], *, timeout_s: float) -> None:
        self.workers, self._timeout = list(workers), timeout_s
        self.weight_version = 0
        self._relayed: list[Worker] = []

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSettings) -> list[Completion]:
        """One completion per request, in order. Requests are dealt in contiguous runs, so that the samples of one
        prompt meet on one engine and share its prefix cache.

        Raises:
            WorkerError: an engine failed, died or hung.
            SyncError: a completion was sampled by other weights than the last push.
        """
        size = -(-len(requests) // len(self.workers))
        parts = [list(requests[i : i + size]) for i in range(0, len(requests), size)]
        calls = [w.call("generate", part, sampling) for w, part in zip(self.workers, parts, strict=False)]
        answers = wait(calls, timeout_s=self._timeout, doing="generating")
        completions = [completion for answer in answers for completion in answer]
        wrong = {c.weight_version for c in completions} - {self.weight_version}
        if wrong:
            raise SyncError(f"completions of weight versions {sorted(wrong)}, but {self.weight_version} was pushed")
        return completions

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[list[list[float]]]:
        """For each engine, the logprobs of each sequence's tokens after the first."""
        calls = [w.call("score", list(sequences)) for w in self.workers]
        return wait(calls, timeout_s=self._timeout, doing="scoring the probe prompts")

    def open_transfer(self, transfer: Transfer, host: str, transport: str) -> None:
        """Connect every engine to the trainer's buffer.

        Args:
            transfer: from the sending rank.
            host: Ray node of the sending rank.
            transport: `shared_memory` maps the buffer, `object_store` copies each push through Ray's object store;
                `auto` maps it on the trainer's host and copies elsewhere.

        Raises:
            SyncError: `shared_memory`, but an engine is on another host.
        """
        doing = "start-up: opening the transfer"
        hosts = wait([w.call("host") for w in self.workers], timeout_s=self._timeout, doing=doing)
        elsewhere = [w for w, engine_host in zip(self.workers, hosts, strict=True) if engine_host != host]
        if elsewhere and transport == "shared_memory":
            raise SyncError(
                "policy.generation.weight_sync.transport: shared_memory reaches only the trainer's host, and "
                f"{', '.join(w.name for w in elsewhere)} run elsewhere; use auto or object_store"
            )
        self._relayed = self.workers if transport == "object_store" else elsewhere
        calls = [w.call("open_relay" if w in self._relayed else "open_transfer", transfer) for w in self.workers]
        wait(calls, timeout_s=self._timeout, doing=doing)

    def confirm(self, manifest: Manifest) -> list[SyncReport]:
        """Like `load` for a push that the ranks streamed into the engines themselves."""
        calls = [w.call("confirm_push", manifest.to_dict()) for w in self.workers]
        reports = wait(calls, timeout_s=self._timeout, doing="proving the weights in the engines")
        self.weight_version = manifest.version
        return [report for engine in reports for report in engine]

    @property
    def needs_payload(self) -> bool:
        """Whether `load` must be given the bytes: some engine does not map the trainer's buffer."""
        return bool(self._relayed)

    def load(self, manifest: Manifest, payload: Any = None) -> list[SyncReport]:
        """Load a push into every engine; all of their workers' reports.

        Args:
            payload: Ray reference to the push's bytes, if `needs_payload`.
        """
        push = manifest.to_dict()
        calls = [w.call("load_push", push, *([payload] if w in self._relayed else [])) for w in self.workers]
        reports = wait(calls, timeout_s=self._timeout, doing="loading weights into the engines")
        self.weight_version = manifest.version
        return [report for engine in reports for report in engine]
