"""One vLLM engine: token ids in, token ids and behaviour logprobs out; weights replaced by versioned pushes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any

from lora_rl.cluster.memory import held_memory, keep_freed_memory
from lora_rl.cluster.threads import keep_float32, set_threads
from lora_rl.config.model_files import find_folder, folder_or_id
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
        max_num_batched_tokens: of one iteration, at least max_model_len on the CPU; None: vLLM's default.
        block_size: tokens per block of the KV cache; None: vLLM's default.
        kv_cache_gib: size of the KV cache on CPU, in GiB.
        gpu_memory_utilization: share of GPU memory for weights and KV cache.
        num_threads: OpenMP threads (CPU).
        sync_backend: see `lora_rl.sync.vllm_plugin.backend_for`.
        adapter_rank: rank of adapters to serve natively; 0 when weights are merged.
        adapter_modules: last names of the linears that adapters may be on.
        max_adapters: adapter versions that may be loaded at once.
        in_flight_updates: weights may be replaced while requests run; each token's weight version is then recorded.
        recompute_kv_cache: then also compute the keys and values of running requests anew, with the new weights.
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
    block_size: int | None
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
    in_flight_updates: bool = False
    recompute_kv_cache: bool = False


_STOP_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORT}


def set_environment(settings: EngineSettings) -> None:
    """Set the environment variables that vLLM and OpenMP read at import. Call before anything imports either."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # One process instead of two: no second import of vLLM, no message passing per token, and what workers report
    # arrives as it is.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if settings.platform == "cuda" and settings.dtype == "float32":
        keep_float32()
    if settings.platform == "cpu":
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
        # Two processes share the cores: pinning threads to cores would put both on the same ones.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        set_threads(settings.num_threads)
        keep_freed_memory()
        if settings.enforce_eager:
            # Small helpers of the sampler are compiled whatever `enforce_eager` says: seconds of C++ compiler.
            os.environ["TORCH_COMPILE_DISABLE"] = "1"
    if find_folder(settings.model) is not None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Engine:
    """A vLLM `LLM` in this process."""

    def __init__(self, settings: EngineSettings) -> None:
        """Import vLLM and load the model.

        It sets the environment of the process, so construct at most one per process and before anything imports vLLM.
        """
        set_environment(settings)
        import torch

        if settings.platform == "cpu":
            torch.set_num_threads(settings.num_threads)
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        register()
        options: dict[str, Any] = {}
        if settings.max_num_batched_tokens is not None:
            options["max_num_batched_tokens"] = settings.max_num_batched_tokens
        if settings.platform == "cpu":
            # What is sampled after a part of a prompt is thrown away, and vLLM then takes the request's random numbers
            # back, which torch's generators for the CPU cannot do: no prompt is split.
            options["enable_chunked_prefill"] = False
        if settings.block_size is not None:
            options["block_size"] = settings.block_size
        if settings.adapter_rank:
            options |= {"enable_lora": True, "max_lora_rank": engine_rank(settings.adapter_rank)}
            options |= {"lora_target_modules": list(settings.adapter_modules)}
            options |= {"max_loras": settings.max_adapters, "max_cpu_loras": settings.max_adapters}
        if settings.sleeps:
            options["enable_sleep_mode"] = True
        if settings.in_flight_updates:
            # A push comes between two steps; no token may then be on its way from the old weights.
            options["async_scheduling"] = False
        # Left to itself, vLLM would use Ray inside a placement group, one bundle per GPU.
        options["distributed_executor_backend"] = "uni" if settings.tensor_parallel_size == 1 else "mp"
        self.llm = LLM(
            model=folder_or_id(settings.model),
            tokenizer=folder_or_id(settings.tokenizer, "tokenizer"),
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
            worker_extension_cls="lora_rl.rollout.worker.SamplingWorkerExtension",
            **options,
        )
        if settings.platform == "cpu":
            self.llm.collective_rpc("lora_rl_sample_by_inversion")
        self.weight_version = 0
        self._settings = settings
        self._asleep: set[str] = set()
        self._adapters = NativeAdapters(self.llm, settings.max_adapters) if settings.adapter_rank else None
        self._running: dict[str, _Running] = {}
        self._ended: list[tuple[str, Completion]] = []
        self._numbers = count()

    # -- generation --------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSettings) -> list[Completion]:
        """One completion per request, in order.

        Raises:
            ValueError: vLLM refuses a request, such as one whose prompt is too long; none is left running.
            RuntimeError: the engine returned no logprob for a sampled token, or requests of `add` are running.
        """
        if self.busy:
            raise RuntimeError("generate works alone; other requests are running")
        names = [str(n) for n in range(len(requests))]
        try:
            for name, request in zip(names, requests, strict=True):
                self.add(name, request, sampling)
        except BaseException:
            self.abort(names)
            raise
        done: dict[str, Completion] = {}
        while self.busy:
            done.update(self.step())
        return [done[name] for name in names]

    @property
    def busy(self) -> bool:
        """Whether requests are running, or have ended without `step` having said so."""
        return bool(self._running or self._ended)

    def add(self, name: str, request: GenerationRequest, sampling: SamplingSettings) -> None:
        """Start a request; `step` drives it.

        Args:
            name: of the request, unique among those that run.

        Raises:
            ValueError: vLLM refuses it.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        tracked = self._settings.in_flight_updates and self._adapters is None
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids) or None,
            stop=list(sampling.stop_strings) or None,
            ignore_eos=sampling.ignore_eos,
            seed=request.seed,
            logprobs=0,
            detokenize=bool(sampling.stop_strings),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.DELTA if tracked else RequestOutputKind.FINAL_ONLY,
            # vLLM need not copy deeply what is this request's own: that took 8 % of the time of short generations.
            skip_clone=True,
        )
        self._start(name, request.prompt_ids, params, request.cache)

    def _start(
        self, name: str, tokens: Sequence[int], params: Any, cache: str = "", *, is_probe: bool = False
    ) -> _Running:
        if self._asleep:
            raise RuntimeError(f"the engine's {' and '.join(sorted(self._asleep))} sleep: wake them to generate")
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        if is_probe:
            params.output_kind = RequestOutputKind.FINAL_ONLY
        # Keys and values cached under one weight version are never found by requests of another.
        prompt = tokens_input(list(tokens), cache_salt=f"version {self.weight_version} {cache}")
        adapter = None if self._adapters is None else self._adapters.acquire()
        # vLLM may still know an aborted request of the same name.
        vllm_name = f"{next(self._numbers)} {name}"
        running = _Running(self.weight_version, None if adapter is None else adapter.lora_int_id, vllm_name, is_probe)
        try:
            self.llm.llm_engine.add_request(vllm_name, prompt, params, lora_request=adapter)
        except BaseException:
            self._release(running)
            raise
        self._running[name] = running
        return running

    def step(self) -> list[tuple[str, Completion]]:
        """One token for each request that fits; names and completions of those that ended since the last call."""
        if self._running:
            self._advance()
        ended, self._ended = self._ended, []
        return ended

    def _advance(self) -> None:
        for output in self.llm.llm_engine.step():
            name = output.request_id.split(" ", 1)[1]
            running = self._running.get(name)
            if running is None or running.vllm_name != output.request_id:
                continue
            if running.is_probe:
                running.prompt_logprobs = output.prompt_logprobs
            else:
                running.take(output.outputs[0], self.weight_version)
            running.cached = max(running.cached, output.num_cached_tokens or 0)
            if output.finished:
                del self._running[name]
                self._release(running)
                if not running.is_probe:
                    self._ended.append((name, running.completion(_STOP_REASONS[output.outputs[0].finish_reason])))

    def abort(self, names: Iterable[str]) -> None:
        """End requests without an answer; unknown names are ignored."""
        names = set(names)
        self._ended = [(name, completion) for name, completion in self._ended if name not in names]
        found = [self._running.pop(name) for name in names if name in self._running]
        self.llm.llm_engine.abort_request([running.vllm_name for running in found])
        for running in found:
            self._release(running)

    def _release(self, running: _Running) -> None:
        if self._adapters is not None and running.adapter is not None:
            self._adapters.release(running.adapter)

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Logprob of each token of each sequence given those before it, at temperature 1; the first token is left out.

        Used to compare trainer and engine on given tokens. Requests that run go on meanwhile.
        """
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=1.0,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            seed=0,
            # It would leave out the logprobs of cached prompt tokens.
            skip_reading_prefix_cache=True,
        )
        probes = [self._start(f"probe {n}", s, params, is_probe=True) for n, s in enumerate(sequences)]
        while any(probe.prompt_logprobs is None for probe in probes):
            self._advance()
        return [
            [position[token].logprob for token, position in zip(s[1:], probe.prompt_logprobs[1:], strict=True)]
            for s, probe in zip(sequences, probes, strict=True)
        ]

    # -- memory ------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Move the weights to host memory and drop the KV cache. Safe to repeat."""
        if self._asleep != {"weights", "kv_cache"}:
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
        return own + sum(self.llm.collective_rpc("lora_rl_memory", args=(sorted(self._asleep),)))

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
        self._refuse_while_busy()
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
        self._refuse_while_busy()
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
        self._forget_old_keys_and_values()
        self.weight_version = push.version
        return reports

    def _forget_old_keys_and_values(self) -> None:
        """Requests that run keep theirs, unless they are to be recomputed; nobody else finds them, see `add`."""
        recompute = self._settings.recompute_kv_cache and self._adapters is None
        freed = self.llm.llm_engine.reset_prefix_cache(reset_running_requests=recompute)
        if not freed and (recompute or not self.busy):
            raise SyncError("vLLM refused to reset its prefix cache; requests were still running")

    def _refuse_while_busy(self) -> None:
        if "weights" in self._asleep:
            raise SyncError("the engine's weights sleep: wake them before they are replaced")
        if self._running and self._adapters is None and not self._settings.in_flight_updates:
            raise SyncError(
                f"{len(self._running)} requests are running, and their weights may not change: set "
                "grpo.async_grpo.in_flight_weight_updates, or wait for them"
            )


@dataclass
class _Running:
    """A request under way: what was sampled so far, and by which weights."""

    version: int
    adapter: int | None
    vllm_name: str
    is_probe: bool = False
    prompt_logprobs: Any = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)
    cached: int = 0

    def take(self, output: Any, engine_version: int) -> None:
        """Add the tokens of one step (or of all)."""
        tokens = list(output.token_ids)
        if output.logprobs is None or len(output.logprobs) != len(tokens):
            raise RuntimeError(f"vLLM returned {len(output.logprobs or [])} logprobs for {len(tokens)} tokens")
        self.token_ids += tokens
        self.logprobs += [position[token].logprob for token, position in zip(tokens, output.logprobs, strict=True)]
        # An adapter is the request's own, whatever is pushed meanwhile.
        version = engine_version if self.adapter is None else self.version
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][1] += len(tokens)
        elif tokens or not self.spans:
            self.spans.append([version, len(tokens)])

    def completion(self, stop_reason: StopReason) -> Completion:
        """The answer."""
        spans = tuple((version, tokens) for version, tokens in self.spans if tokens) or ((self.version, 0),)
        oldest = min(version for version, _ in spans)
        mixed = len(spans) > 1
        parts = tuple(self.token_ids), tuple(self.logprobs)
        return Completion(*parts, stop_reason, oldest, spans if mixed else (), self.cached)
