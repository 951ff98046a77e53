"""Bringing a job up: Ray, engines and ranks side by side, first weights, parity check; and down again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lora_rl.cluster.nodes import is_alive
from lora_rl.cluster.workers import Worker, wait
from lora_rl.config.layout import platform_of
from lora_rl.data import Prompt, PromptSource, Tokenizer, drop_too_long, fetch_model, load_prompts
from lora_rl.rewards import Scorer
from lora_rl.rollout.queue import PromptQueue
from lora_rl.train.resources import reserve

if TYPE_CHECKING:
    from lora_rl.config import RunConfig
    from lora_rl.config.layout import Layout
    from lora_rl.lora.peft_io import PeftAdapter
    from lora_rl.policy.group import PolicyGroup
    from lora_rl.rollout.pool import EnginePool
    from lora_rl.rollout.source import Generator
    from lora_rl.track import Console
    from lora_rl.train.checkpoint import Checkpoint
    from lora_rl.train.turns import Turns
    from lora_rl.train.weights import WeightSync

_PARITY_PROBES = 8


class Data(NamedTuple):
    """What a job works on. No prompt is in two of the three.

    Attributes:
        tokenizer: of the policy.
        prompts: training prompts in their order.
        held_out: validation prompts.
        gate: prompts on which jumps are measured, see `grpo.next.gate`.
    """

    tokenizer: Tokenizer
    prompts: PromptSource
    held_out: list[Prompt]
    gate: Sequence[Prompt] = ()


@dataclass(frozen=True)
class Job:
    """Everything the loop works with.

    Attributes:
        policy, engines, weights: the two sides and what connects them; the engines hold weight version 1.
        turns: hands the devices from one side to the other, and keeps the memory ledger.
        generator: samples and scores.
        prompts: training prompts in the order they are drawn.
        held_out: validation prompts, disjoint from `prompts`.
        probes: token sequences on which trainer and engines are compared.
        identity: see `lora_rl.train.resume.identity`.
        start: the adapter the run started from.
        gate_prompts: see `Data.gate`.
        facts: numbers about the model and the start, as metrics of step 0.
    """

    policy: PolicyGroup
    engines: EnginePool
    weights: WeightSync
    turns: Turns
    generator: Generator
    prompts: PromptQueue
    held_out: list[Prompt]
    probes: list[tuple[int, ...]]
    identity: dict[str, Any]
    start: PeftAdapter | None
    facts: dict[str, float]
    gate_prompts: Sequence[Prompt] = field(default_factory=list)


def load_data(config: RunConfig, warn: Callable[[str], None] = lambda _: None) -> Data:
    """Tokenizer and prompts; prompts that leave no room for a completion are left out.

    Args:
        warn: told what was left out, and what else is unusual about the data.

    Raises:
        FileNotFoundError: a file of the model, the tokenizer or the data is missing.
        ValueError: see `lora_rl.data.load_prompts`; no prompt leaves room; nothing to validate on; too few
            prompts to set some aside for the gate.
    """
    grpo, new = config.grpo, config.policy.generation.max_new_tokens
    tokenizer = fetch_model(config.policy)
    train, held_out = load_prompts(config.data, tokenizer, warn)
    longest = min(config.policy.max_total_sequence_length, config.engine_max_model_len)
    what = f"policy.max_total_sequence_length {longest} - policy.generation.max_new_tokens {new}"
    train = drop_too_long(train, longest - new, what, warn)
    held_out = drop_too_long(held_out, longest - new, what, warn)
    if not held_out and (grpo.val_at_start or grpo.val_period):
        raise ValueError(
            "there are no held-out prompts: set data.val_path or data.validation_split, or switch validation off "
            "with grpo.val_at_start=false and grpo.val_period=0"
        )
    train, gate = set_aside(train, config)
    if len(train) < grpo.num_prompts_per_step:
        warn(
            f"{len(train)} training prompts are fewer than grpo.num_prompts_per_step = {grpo.num_prompts_per_step}: "
            "every step sees some of them more than once"
        )
    return Data(tokenizer, PromptSource(train, seed=config.data_seed, shuffle=config.data.shuffle), held_out, gate)


def probes_of(prompts: Sequence[Prompt], tokenizer: Tokenizer, config: RunConfig) -> list[tuple[int, ...]]:
    """Prompts with their answers behind them, as far as both the trainer and an engine, which has to sample a token
    behind each, can take them."""
    longest = min(config.policy.max_total_sequence_length, config.engine_max_model_len) - 1
    whole = [p.token_ids + tokenizer.encode(p.answer, add_special_tokens=False) for p in prompts]
    return [tokens[:longest] for tokens in whole]


def set_aside(prompts: Sequence[Prompt], config: RunConfig) -> tuple[list[Prompt], list[Prompt]]:
    """(training prompts, gate's prompts): some prompts, chosen by the data's seed, are kept for `grpo.next.gate`.

    Raises:
        ValueError: that would be more than half of them.
    """
    section, count = config.grpo.next, config.grpo.next.gate.num_prompts
    if not (section.enabled and section.gate.enabled):
        return list(prompts), []
    if 2 * count > len(prompts):
        raise ValueError(
            f"grpo.next.gate.num_prompts: {count} of {len(prompts)} training prompts would be set aside for the gate; "
            f"use at most {len(prompts) // 2}, or more prompts"
        )
    chosen = set(random.Random(f"gate, seed {config.data_seed}").sample(range(len(prompts)), count))
    # The same text with another answer is the same prompt.
    texts = {prompts[n].text for n in chosen}
    return (
        [prompt for prompt in prompts if prompt.text not in texts],
        [prompt for n, prompt in enumerate(prompts) if n in chosen],
    )


@contextmanager
def start_job(
    config: RunConfig,
    layout: Layout,
    console: Console,
    run_dir: Path,
    data: Data,
    resume: Checkpoint | None = None,
    same: dict[str, Any] | None = None,
) -> Iterator[Job]:
    """Start every process, load the model on both sides, push the first weights; stop everything at the end.

    The two expensive starts, vLLM's and Megatron's, overlap.

    Args:
        data: see `load_data`.
        resume: a checkpoint to continue from, checked to fit the configuration.
        same: what checkpoints record as the run's identity, see `lora_rl.train.resume.identity`.

    Raises:
        WorkerError: a process could not be started.
        SyncError: trainer and engine do not compute the same.
    """
    tokenizer, prompts, held_out, gate = data
    queue = PromptQueue(prompts)
    if resume is not None:
        queue.load_state_dict(resume.cursor)
    start = resume.start if resume is not None else start_adapter(config)
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        scorer = stack.enter_context(start_scorer(config, console, logs, [*prompts.prompts, *held_out, *gate]))
        placement = stack.enter_context(reserve(config, layout, console, logs))
        from lora_rl.rollout.launch import start_engine, start_engines, sync_backend
        from lora_rl.rollout.pool import EnginePool, Supervision
        from lora_rl.sync.vllm_plugin import SHARED_MEMORY

        engine_workers = start_engines(config, layout, logs, placement.engines, placement.engine_nodes)
        from lora_rl.policy.group import PolicyGroup, start_ranks

        rank_workers = start_ranks(config, layout, logs, placement.ranks, placement.rank_nodes)
        description = build_processes(config, console, engine_workers, rank_workers, start)

        from lora_rl.rollout.source import Generator
        from lora_rl.train.turns import Turns
        from lora_rl.train.weights import WeightSync, parity_tolerance

        policy = PolicyGroup(config, layout, rank_workers)
        streamed = sync_backend(config, layout) != SHARED_MEMORY
        together = layout.colocated and layout.platform == "cuda"

        def relaunch(index: int) -> Worker:
            node = placement.engine_nodes[index] if placement.engine_nodes else ""
            return start_engine(config, layout, logs, placement.engines[index], index, node)

        def has_place(index: int) -> bool:
            return not placement.engine_nodes or is_alive(placement.engine_nodes[index])

        engines = EnginePool(
            engine_workers,
            timeout_s=config.cluster.step_timeout_s,
            supervision=Supervision(
                # An engine that streams weights from the ranks' devices, or takes turns with them, cannot come back
                # by itself.
                relaunch=None if streamed or together or not config.cluster.max_engine_restarts else relaunch,
                has_place=has_place,
                max_restarts=config.cluster.max_engine_restarts,
                max_attempts=config.policy.generation.max_attempts,
                heartbeat_s=config.cluster.heartbeat_timeout_s,
                startup_s=config.cluster.startup_timeout_s,
                warn=console.warn,
            ),
        )
        stack.callback(engines.close)
        weights = WeightSync(
            policy,
            engines,
            config.policy.generation.weight_sync,
            console.warn,
            streamed=streamed,
        )
        if resume is not None:
            with console.startup(f"checkpoint of step {resume.step}"):
                restore_policy(resume, policy, layout)
            weights.resume(resume.weight_version, resume.payload_digest)
        with console.startup("weights") as task:
            task.update("opening the transfer")
            if not streamed:
                transfer, host = policy.open_transfer()
                try:
                    transport = config.policy.generation.weight_sync.transport
                    engines.open_transfer(transfer, host, transport, policy.payload)
                finally:
                    # Whatever happens now, no file is left behind.
                    policy.close_transfer_name()
            else:
                policy.open_stream(sync_backend(config, layout), engine_workers)
            task.update("first push")
            facts = weights.push(after_update=False)
            probes = probes_of((held_out or prompts.prompts)[:_PARITY_PROBES], tokenizer, config)
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
                engines,
                enabled=together,
                timeout_s=config.cluster.step_timeout_s,
            ),
            generator=Generator(engines, tokenizer, config.grpo.seed, scorer),
            prompts=queue,
            held_out=held_out,
            probes=probes,
            start=start,
            identity=same or {},
            gate_prompts=gate,
            facts={**facts, **{f"model/{k}": v for k, v in description.items()}},
        )


def start_scorer(config: RunConfig, console: Console, logs: Path, prompts: Sequence[Prompt]) -> Scorer:
    """A scorer whose workers are ready, after a check that it can use the answers of all prompts.

    Raises:
        RewardError: a worker could not be started, or naming the prompt whose answer cannot be used.
    """
    scorer = Scorer(
        config.reward, startup_timeout_s=config.cluster.startup_timeout_s, log_file=logs / "reward-workers.log"
    )
    if not scorer.needs_workers:
        scorer.check(prompts)
        return scorer
    try:
        with console.startup("reward workers") as task:
            task.update("importing verifiers")
            scorer.start()
            scorer.wait_ready()
            task.update("checking answers")
            scorer.check(prompts)
    except BaseException:
        scorer.close()
        raise
    return scorer


def start_adapter(config: RunConfig) -> PeftAdapter | None:
    """The adapter of `policy.megatron_cfg.peft.adapter_path`.

    Raises:
        ValueError: it has something that is not supported, or nothing that SVD-LoRA could start from.
    """
    path = config.policy.megatron_cfg.peft.adapter_path
    if path is None:
        return None
    from lora_rl.lora.peft_io import read_peft

    adapter = read_peft(Path(path))
    svd = config.policy.megatron_cfg.peft.svd
    if svd.enabled and not any(bool(t.b.count_nonzero()) for t in adapter.tensors.values()):
        raise ValueError(
            f"policy.megatron_cfg.peft.svd needs a trained adapter, but every B in {path} is 0; train it first, with "
            "run_sft.py for example"
        )
    return adapter


def restore_policy(resume: Checkpoint, policy: PolicyGroup, layout: Layout) -> None:
    """Give the ranks the adapters and the training state of a checkpoint."""
    from lora_rl.policy.merged_jumps import without_jumps
    from lora_rl.policy.state import PolicyState
    from lora_rl.train.extrapolation_state import merged_jumps

    state = PolicyState(resume.moments, resume.counters, resume.flags, resume.random, resume.svd)
    same = resume.layout == {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}
    jumps = merged_jumps(resume.extrapolation) if resume.extrapolation is not None else []
    policy.load_state(without_jumps(resume.adapter, len(jumps)), state, same_layout=same)
    if jumps:
        policy.extrapolation("set_merged", jumps)


def build_processes(
    config: RunConfig, console: Console, engines: list[Worker], ranks: list[Worker], adapter: PeftAdapter | None
) -> dict[str, float]:
    """Let engines (if any) and ranks import and load side by side.

    Args:
        adapter: what the run starts from.

    Returns:
        `parameters` and `trainable`, and with SVD-LoRA `directions`, summed over one model replica.
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
    return model_sizes(described, replicas, console.warn)


def model_sizes(described: Sequence[Mapping[str, int]], replicas: int, warn: Callable[[str], None]) -> dict[str, float]:
    """What the ranks say of their parts of the model (`PolicyRank.describe`), summed over one replica.

    Args:
        warn: told of singular values that SVD-LoRA cannot train.
    """
    keys = [key for key in ("parameters", "trainable", "directions") if key in described[0]]
    sizes = {key: sum(d[key] for d in described) / replicas for key in keys}
    if sizes.get("directions", sizes["trainable"]) < sizes["trainable"]:
        warn(
            f"the starting adapter has only {sizes['directions']:.0f} of the {sizes['trainable']:.0f} singular values "
            "of its rank; the others are 0 and stay so. A smaller policy.megatron_cfg.peft.dim leaves them out"
        )
    return sizes
