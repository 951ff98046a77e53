"""Bringing a job up: Ray, engines and ranks side by side, first weights, parity check; and down again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_rl.cluster.workers import Worker, wait
from lora_rl.config.layout import platform_of
from lora_rl.data import PromptSource, Tokenizer, addition_prompts, load_tokenizer
from lora_rl.train.resources import reserve

if TYPE_CHECKING:
    from lora_rl.config import RunConfig
    from lora_rl.config.layout import Layout
    from lora_rl.data import Prompt
    from lora_rl.lora.peft_io import PeftAdapter
    from lora_rl.policy.group import PolicyGroup
    from lora_rl.rollout.pool import EnginePool
    from lora_rl.rollout.source import Generator
    from lora_rl.track import Console
    from lora_rl.train.checkpoint import Checkpoint
    from lora_rl.train.turns import Turns
    from lora_rl.train.weights import WeightSync

_PARITY_PROBES = 8


@dataclass(frozen=True)
class Job:
    """Everything the loop works with.

    Attributes:
        policy, engines, weights: the two sides and what connects them; the engines hold weight version 1.
        turns: hands the devices from one side to the other, and keeps the memory ledger.
        generator: samples and scores.
        prompts: training prompts, with the cursor.
        held_out: validation prompts, disjoint from `prompts`.
        probes: token sequences on which trainer and engines are compared.
        identity: see `lora_rl.train.resume.identity`.
        start: the adapter the run started from.
        facts: numbers about the model and the start, as metrics of step 0.
    """

    policy: PolicyGroup
    engines: EnginePool
    weights: WeightSync
    turns: Turns
    generator: Generator
    prompts: PromptSource
    held_out: list[Prompt]
    probes: list[tuple[int, ...]]
    identity: dict[str, Any]
    start: PeftAdapter | None
    facts: dict[str, float]


def load_data(config: RunConfig) -> tuple[Tokenizer, PromptSource, list[Prompt]]:
    """Tokenizer, training prompts and held-out prompts.

    Raises:
        FileNotFoundError: the tokenizer's files are missing.
        ValueError: a prompt leaves no room for a completion.
    """
    tokenizer = load_tokenizer(config.policy.tokenizer_name)
    task = config.data.addition
    train, held_out = addition_prompts(tokenizer, task.digits, task.held_out_pairs, task.split_seed)
    room = config.engine_max_model_len - config.policy.generation.max_new_tokens
    for prompt in (*train, *held_out):
        if len(prompt.token_ids) > room:
            raise ValueError(
                f"prompt {prompt.id} has {len(prompt.token_ids)} tokens, but policy.max_total_sequence_length "
                f"{config.engine_max_model_len} minus policy.generation.max_new_tokens leaves {room}"
            )
    return tokenizer, PromptSource(train, seed=config.data_seed, shuffle=config.data.shuffle), held_out


@contextmanager
def start_job(
    config: RunConfig,
    layout: Layout,
    console: Console,
    run_dir: Path,
    resume: Checkpoint | None = None,
    same: dict[str, Any] | None = None,
) -> Iterator[Job]:
    """Start every process, load the model on both sides, push the first weights; stop everything at the end.

    The two expensive starts, vLLM's and Megatron's, overlap.

    Args:
        resume: a checkpoint to continue from, checked to fit the configuration.
        same: what checkpoints record as the run's identity, see `lora_rl.train.resume.identity`.

    Raises:
        WorkerError: a process could not be started.
        SyncError: trainer and engine do not compute the same.
    """
    tokenizer, prompts, held_out = load_data(config)
    if resume is not None:
        prompts.load_state_dict(resume.cursor)
    start = resume.start if resume is not None else start_adapter(config)
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        placement = stack.enter_context(reserve(config, layout, console, logs))
        from lora_rl.rollout.pool import EnginePool, start_engines, sync_backend
        from lora_rl.sync.vllm_plugin import SHARED_MEMORY

        engine_workers = start_engines(config, layout, logs, placement.engines, placement.engine_nodes)
        from lora_rl.policy.group import PolicyGroup, start_ranks

        rank_workers = start_ranks(config, layout, logs, placement.ranks, placement.rank_nodes)
        description = build_processes(config, console, engine_workers, rank_workers, start)

        from lora_rl.rollout.source import Generator
        from lora_rl.train.turns import Turns
        from lora_rl.train.weights import WeightSync, parity_tolerance

        policy = PolicyGroup(config, layout, rank_workers)
        engines = EnginePool(engine_workers, timeout_s=config.cluster.step_timeout_s)
        weights = WeightSync(
            policy,
            engines,
            config.policy.generation.weight_sync,
            console.warn,
            streamed=sync_backend(config, layout) != SHARED_MEMORY,
        )
        if resume is not None:
            with console.startup(f"checkpoint of step {resume.step}"):
                restore_policy(resume, policy, layout)
            weights.resume(resume.weight_version, resume.payload_digest)
        with console.startup("weights") as task:
            task.update("opening the transfer")
            backend = sync_backend(config, layout)
            if backend == SHARED_MEMORY:
                transfer, host = policy.open_transfer()
                try:
                    engines.open_transfer(transfer, host, config.policy.generation.weight_sync.transport)
                finally:
                    # Whatever happens now, no file is left behind.
                    policy.close_transfer_name()
            else:
                policy.open_stream(backend, engine_workers)
            task.update("first push")
            facts = weights.push(after_update=False)
            probes = [p.token_ids + tokenizer.encode(p.answer) for p in held_out[:_PARITY_PROBES]]
            tolerance = parity_tolerance(config)
            if tolerance is not None:
                task.update("comparing logprobs of trainer and engine")
                facts["sync/parity"] = weights.check_parity(probes, tolerance)
        yield Job(
            policy=policy,
            engines=engines,
            weights=weights,
            turns=Turns(
                rank_workers,
                engine_workers,
                enabled=layout.colocated and layout.platform == "cuda",
                timeout_s=config.cluster.step_timeout_s,
            ),
            generator=Generator(engines, tokenizer, config.grpo.seed),
            prompts=prompts,
            held_out=held_out,
            probes=probes,
            start=start,
            identity=same or {},
            facts={**facts, **{f"model/{k}": v for k, v in description.items()}},
        )


def start_adapter(config: RunConfig) -> PeftAdapter | None:
    """The adapter of `policy.megatron_cfg.peft.adapter_path`.

    Raises:
        ValueError: it has something that is not supported.
    """
    path = config.policy.megatron_cfg.peft.adapter_path
    if path is None:
        return None
    from lora_rl.lora.peft_io import read_peft

    return read_peft(Path(path))


def restore_policy(resume: Checkpoint, policy: PolicyGroup, layout: Layout) -> None:
    """Give the ranks the adapters and the training state of a checkpoint."""
    from lora_rl.policy.state import PolicyState

    state = PolicyState(resume.moments, resume.counters, resume.flags, resume.random)
    same = resume.layout == {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}
    policy.load_state(resume.adapter, state, same_layout=same)


def build_processes(
    config: RunConfig, console: Console, engines: list[Worker], ranks: list[Worker], adapter: PeftAdapter | None
) -> dict[str, float]:
    """Let engines (if any) and ranks import and load side by side.

    Args:
        adapter: what the run starts from.

    Returns:
        `parameters` and `trainable`, summed over one model replica.
    """
    timeout = config.cluster.startup_timeout_s
    engine_task = console.startup("vLLM engines" if len(engines) > 1 else "vLLM engine") if engines else None
    rank_task = console.startup("Megatron ranks" if len(ranks) > 1 else "Megatron rank")
    if engine_task is not None:
        engine_task.update("importing vLLM, loading the model")
    rank_task.update("importing Megatron")
    left = {worker.name for worker in engines}

    def on_done(worker: Worker) -> None:
        left.discard(worker.name)
        if engine_task is not None and worker in engines and not left:
            engine_task.done()

    engine_calls = [worker.call("build") for worker in engines]
    steps: list[tuple[str, Callable[[], list[Any]]]] = [
        ("importing Megatron", lambda: [w.call("import_stack") for w in ranks]),
        ("meeting the other ranks", lambda: [ranks[0].call("open_rendezvous")]),
    ]
    try:
        answers: list[Any] = []
        for doing, start in steps:
            rank_task.update(doing)
            answers = wait(start(), timeout_s=timeout, doing=f"start-up: {doing}", on_done=on_done)
        if config.policy.generation.colocated.enabled and platform_of(config) == "cuda":
            # vLLM measures what is free on a device while it loads: nobody may move then.
            wait(engine_calls, timeout_s=timeout, doing="start-up: vLLM", on_done=on_done)
        rank_task.update("building the model")
        calls = [w.call("build", answers[0], adapter) for w in ranks]
        described = wait(calls, timeout_s=timeout, doing="start-up: building the model", on_done=on_done)
        rank_task.done()
        wait(engine_calls, timeout_s=timeout, doing="start-up: vLLM", on_done=on_done)
    except BaseException as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        rank_task.fail(reason)
        if engine_task is not None:
            engine_task.fail(reason)
        raise
    replicas = len(ranks) // (
        config.policy.megatron_cfg.tensor_model_parallel_size * config.policy.megatron_cfg.pipeline_model_parallel_size
    )
    return {key: sum(d[key] for d in described) / replicas for key in ("parameters", "trainable")}
