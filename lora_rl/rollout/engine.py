"""One vLLM engine: token ids in, token ids and behaviour logprobs out; weights replaced by versioned pushes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lora_rl.cluster.memory import held_memory
from lora_rl.rollout.adapters import NativeAdapters, engine_rank
from lora_rl.rollout.types import Completion, GenerationRequest, SamplingSettings, StopReason
from lora_rl.sync.errors import SyncError
from lora_rl.sync.manifest import Manifest, SyncReport, Transfer, check_reports
from lora_rl.sync.vllm_plugin import BACKENDS, SHARED_MEMORY, register


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is built from; field names follow `policy.generation.vllm_cfg`.

    Attributes:
        model: local directory or hub id.
        tokenizer: local directory or hub id.
        platform: `cpu` or `cuda`.
        dtype: weight and activation type.
        max_model_len: prompt plus completion tokens.
        kv_cache_gib: size of the KV cache on CPU, in GiB.
        gpu_memory_utilization: share of GPU memory for weights and KV cache.
        num_threads: OpenMP threads (CPU).
        sync_backend: see `lora_rl.sync.vllm_plugin.backend_for`.
        adapter_rank: rank of adapters to serve natively; 0 when weights are merged.
        adapter_modules: last names of the linears that adapters may be on.
        max_adapters: adapter versions that may be loaded at once.
        sleeps: give device memory back while the trainer works (GPU only).
        seed: engine seed; requests carry their own.
    """

    model: str
    tokenizer: str
    platform: str
    dtype: str
    tensor_parallel_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int | None
    enforce_eager: bool
    enable_prefix_caching: bool
    kv_cache_gib: int
    gpu_memory_utilization: float
    load_format: str
    num_threads: int
    seed: int
    sleeps: bool = False
    sync_backend: str = SHARED_MEMORY
    adapter_rank: int = 0
    adapter_modules: tuple[str, ...] = ()
    max_adapters: int = 2


_STOP_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORT}


class Engine:
    """A vLLM `LLM` in this process."""

    def __init__(self, settings: EngineSettings) -> None:
        """Import vLLM and load the model.

        Environment variables that vLLM reads at import are set here, so construct at most one per process and before
        anything imports vLLM.
        """
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # One process instead of two: no second import of vLLM, no message passing per token, and what workers report
        # arrives as it is.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if settings.platform == "cpu":
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
            # Two processes share the cores: pinning threads to cores would put both on the same ones.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            os.environ["OMP_NUM_THREADS"] = str(settings.num_threads)
            if settings.enforce_eager:
                # Small helpers of the sampler are compiled whatever `enforce_eager` says: seconds of C++ compiler.
                os.environ["TORCH_COMPILE_DISABLE"] = "1"
        if Path(settings.model).is_dir():
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import torch

        if settings.platform == "cpu":
            torch.set_num_threads(settings.num_threads)
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        register()
        options: dict[str, Any] = {}
        if settings.max_num_batched_tokens is not None:
            options["max_num_batched_tokens"] = settings.max_num_batched_tokens
        if settings.adapter_rank:
            options |= {"enable_lora": True, "max_lora_rank": engine_rank(settings.adapter_rank)}
            options |= {"lora_target_modules": list(settings.adapter_modules)}
            options |= {"max_loras": settings.max_adapters, "max_cpu_loras": settings.max_adapters}
        if settings.sleeps:
            options["enable_sleep_mode"] = True
        # Left to itself, vLLM would use Ray inside a placement group, one bundle per GPU.
        options["distributed_executor_backend"] = "uni" if settings.tensor_parallel_size == 1 else "mp"
        self.llm = LLM(
            model=settings.model,
            tokenizer=settings.tokenizer,
            dtype=settings.dtype,
            tensor_parallel_size=settings.tensor_parallel_size,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            enforce_eager=settings.enforce_eager,
            enable_prefix_caching=settings.enable_prefix_caching,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            load_format=settings.load_format,
            seed=settings.seed,
            # Behaviour logprobs must be those of the distribution that was sampled from: after the temperature.
            logprobs_mode="processed_logprobs",
            weight_transfer_config=WeightTransferConfig(backend=BACKENDS[settings.sync_backend]),
            worker_extension_cls="lora_rl.sync.receiver.WorkerExtension",
            **options,
        )
        self.weight_version = 0
        self._settings = settings
        self._asleep: set[str] = set()
        self._adapters = NativeAdapters(self.llm, settings.max_adapters) if settings.adapter_rank else None

    # -- generation --------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSettings) -> list[Completion]:
        """One completion per request, in order.

        Raises:
            RuntimeError: the engine returned no logprob for a sampled token.
        """
        from vllm import SamplingParams, TokensPrompt

        prompts = [TokensPrompt(prompt_token_ids=list(r.prompt_ids)) for r in requests]
        params = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                stop_token_ids=list(sampling.stop_token_ids) or None,
                stop=list(sampling.stop_strings) or None,
                ignore_eos=sampling.ignore_eos,
                seed=r.seed,
                logprobs=0,
                detokenize=bool(sampling.stop_strings),
                skip_special_tokens=False,
            )
            for r in requests
        ]
        with self._adapter() as adapter:
            outputs = self.llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
        return [self._completion(output.outputs[0]) for output in outputs]

    def _completion(self, output: Any) -> Completion:
        token_ids = tuple(output.token_ids)
        if output.logprobs is None or len(output.logprobs) != len(token_ids):
            raise RuntimeError(f"vLLM returned {len(output.logprobs or [])} logprobs for {len(token_ids)} tokens")
        logprobs = tuple(position[token].logprob for token, position in zip(token_ids, output.logprobs, strict=True))
        return Completion(token_ids, logprobs, _STOP_REASONS[output.finish_reason], self.weight_version)

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Logprob of each token of each sequence given those before it, at temperature 1; the first token is left out.

        Used to compare trainer and engine on given tokens.
        """
        from vllm import SamplingParams, TokensPrompt

        # The prefix cache would skip computing the logprobs of cached prompt tokens.
        self._reset_prefix_cache()
        params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False, seed=0)
        prompts = [TokensPrompt(prompt_token_ids=list(s)) for s in sequences]
        with self._adapter() as adapter:
            outputs = self.llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
        self._reset_prefix_cache()
        return [
            [position[token].logprob for token, position in zip(s[1:], o.prompt_logprobs[1:], strict=True)]
            for s, o in zip(sequences, outputs, strict=True)
        ]

    # -- memory ------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Move the weights to host memory and drop the KV cache. Safe to repeat."""
        if not self._asleep:
            self.llm.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}

    def wake(self, parts: list[str]) -> None:
        """Bring `weights`, `kv_cache` or both back to the device; what is there already stays."""
        if missing := self._asleep & set(parts):
            self.llm.wake_up(tags=sorted(missing))
            self._asleep -= missing

    def memory(self) -> int:
        """Bytes held by the engine's workers and, where they are processes of their own, by this one; see
        `held_memory`."""
        own = held_memory(self._settings.platform) if self._settings.tensor_parallel_size > 1 else 0
        return own + sum(self.llm.collective_rpc("lora_rl_memory"))

    # -- weights -----------------------------------------------------------------------------------------------

    def open_transfer(self, transfer: Transfer) -> None:
        """Map the trainer's shared buffer in every worker."""
        if self._adapters is not None:
            self._adapters.open(transfer)
        else:
            self.llm.init_weight_transfer_engine({"init_info": asdict(transfer)})

    def load_push(self, manifest: dict[str, Any]) -> list[SyncReport]:
        """Replace the weights by a push and prove it.

        The prefix cache is reset: cached keys and values belong to the old weights.

        Returns:
            One report per worker.

        Raises:
            SyncError: a worker did not load exactly what the manifest says.
        """
        push = Manifest.from_dict(manifest)
        if self._adapters is not None:
            reports = [self._adapters.load(push, self._settings.model)]
            self.llm.update_weight_version(str(push.version))
        else:
            self.llm.start_weight_update()
            self.llm.update_weights({"update_info": {"manifest": manifest}})
            self.llm.finish_weight_update(weight_version=str(push.version))
            reports = self.llm.collective_rpc("lora_rl_sync_report")
        return self._confirm(push, reports)

    def transfer(self, method: str, *args: Any) -> None:
        """One call of vLLM's weight-transfer interface, made by the trainer's rank 0 as it streams weights."""
        getattr(self.llm, method)(*args)

    def confirm_push(self, manifest: dict[str, Any]) -> list[SyncReport]:
        """Prove a push that was streamed with `transfer`; otherwise like `load_push`."""
        push = Manifest.from_dict(manifest)
        reports = self.llm.collective_rpc("lora_rl_sync_report")
        self.llm.update_weight_version(str(push.version))
        return self._confirm(push, [r and replace(r, version=push.version) for r in reports])

    def _confirm(self, push: Manifest, reports: list[SyncReport]) -> list[SyncReport]:
        check_reports(push, reports)
        if (held := self.llm.get_weight_version()) != str(push.version):
            raise SyncError(f"vLLM reports weight version {held!r} after the push of version {push.version}")
        self._reset_prefix_cache()
        self.weight_version = push.version
        return reports

    def _adapter(self) -> AbstractContextManager[Any]:
        """The adapter of the current version for the requests of a block; None when weights are merged."""
        return nullcontext() if self._adapters is None else self._adapters.in_use()

    def _reset_prefix_cache(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise SyncError("vLLM refused to reset its prefix cache; requests were still running")
