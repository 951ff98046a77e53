"""Accuracy of a base model, an adapter or a checkpoint on held-out prompts; needs engines only, no trainer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_rl.algorithm.passk import pass_at_k
from lora_rl.lora.peft_io import CONFIG_FILE, PeftAdapter, read_peft
from lora_rl.track import Console
from lora_rl.train.checkpoint import CHECKPOINT_FILE, CheckpointError, CheckpointStore, verify

if TYPE_CHECKING:
    from lora_rl.config import RunConfig
    from lora_rl.config.layout import Layout
    from lora_rl.rollout.pool import EnginePool
    from lora_rl.rollout.types import Rollout

SAMPLES, SUMMARY = "samples.jsonl", "summary.json"


def find_adapter(path: Path) -> tuple[PeftAdapter, Path]:
    """The adapter in a PEFT directory, in a checkpoint, or in the newest good checkpoint of a folder of them.

    Returns:
        The adapter and the directory it was read from.

    Raises:
        CheckpointError: a checkpoint whose files changed, or nothing of the three.
        ValueError: an adapter with something that is not supported.
    """
    if (path / CONFIG_FILE).is_file():
        return read_peft(path), path
    if (path / CHECKPOINT_FILE).is_file():
        problem = verify(path)
        if problem:
            raise CheckpointError(f"{path}: {problem}")
        return read_peft(path / "adapter"), path / "adapter"
    notes: list[str] = []
    store = CheckpointStore(path, keep=None, higher_is_better=True, warn=notes.append)
    newest = store.newest_name()
    if newest is None:
        found = "; ".join(notes) if notes else "it has no adapter_config.json, checkpoint.json or step_N folder"
        raise CheckpointError(f"{path} is no adapter, checkpoint or folder of checkpoints: {found}")
    return read_peft(path / newest / "adapter"), path / newest / "adapter"


def evaluate(
    config: RunConfig, layout: Layout, console: Console, out: Path, *, adapter: PeftAdapter | None, ks: Sequence[int]
) -> dict[str, Any]:
    """Sample `grpo.val_num_generations` completions of each held-out prompt and score them.

    Prompts, sampling and seeds are those of validation, so the numbers are comparable with a run's `val/accuracy`.

    Args:
        out: folder for samples.jsonl (one line per completion) and summary.json.
        adapter: merged into the base by the engines; None: the base model.
        ks: for pass@k, each at most the number of completions per prompt.

    Returns:
        The summary: `accuracy` (mean@n), `pass@k`, counts and reasons.

    Raises:
        WorkerError, SyncError: an engine failed, or does not hold the adapter.
    """
    from lora_rl.rollout.source import Generator, validation_groups, validation_sampling
    from lora_rl.train.job import load_data, start_scorer

    config, grpo = _merging(config), config.grpo
    data = load_data(config, console.warn)
    tokenizer, prompts = data.tokenizer, data.held_out[: grpo.max_val_samples]
    if not prompts:
        raise ValueError("there are no held-out prompts to evaluate on: set data.val_path or data.validation_split")
    (out / "logs").mkdir(parents=True, exist_ok=True)
    with (
        start_scorer(config, console, out / "logs", prompts) as scorer,
        _engines(config, layout, console, out / "logs", adapter) as engines,
    ):
        generator = Generator(engines, tokenizer, grpo.seed, scorer)
        rollouts: list[Rollout] = []
        problems: list[str] = []
        # Batch by batch: hours of sampling are not lost with the last of them.
        with (out / SAMPLES).open("w", encoding="utf-8") as file:
            for first in range(0, len(prompts), grpo.val_batch_size):
                part = validation_groups(prompts)[first : first + grpo.val_batch_size]
                sampling = validation_sampling(config)
                scored, refused = generator.answer(part, grpo.val_num_generations, sampling, purpose="validation")
                problems += [f"{group.prompt.id}: {problem}" for group, problem in refused]
                done = [r for group in scored for r in group]
                file.writelines(json.dumps(describe(r), ensure_ascii=False) + "\n" for r in done)
                file.flush()
                rollouts += done
    if problems:
        # Not left out: the rest would be the accuracy of another set of prompts.
        raise ValueError(
            f"{len(problems)} of {len(prompts)} prompts cannot be evaluated, such as {problems[0]}; completions of the "
            f"others are in {out / SAMPLES}"
        )
    summary = summarise(rollouts, grpo.val_num_generations, ks)
    (out / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def _merging(config: RunConfig) -> RunConfig:
    """The same with engines that load the model's weights and merge an adapter themselves, whatever mode the run syncs
    in and whatever it loads."""
    generation = config.policy.generation
    sync = generation.weight_sync.model_copy(update={"mode": "adapter_merge"})
    vllm = generation.vllm_cfg.model_copy(update={"load_format": "auto"})
    generation = generation.model_copy(update={"weight_sync": sync, "vllm_cfg": vllm})
    return config.model_copy(update={"policy": config.policy.model_copy(update={"generation": generation})})


def summarise(rollouts: Sequence[Rollout], per_prompt: int, ks: Sequence[int]) -> dict[str, Any]:
    """Accuracy, pass@k, and what the completions were like.

    Args:
        rollouts: `per_prompt` of each prompt, prompt by prompt.
        ks: of pass@k; a completion counts as right when the first verifier says so.
    """
    right = [r.is_right for r in rollouts]
    by_prompt = [sum(right[i : i + per_prompt]) for i in range(0, len(right), per_prompt)]
    reasons = Counter(r.reason for r in rollouts)
    return {
        "prompts": len(by_prompt),
        "completions_per_prompt": per_prompt,
        "accuracy": sum(right) / len(rollouts),
        "reward": sum(r.reward for r in rollouts) / len(rollouts),
        **{f"pass@{k}": sum(pass_at_k(per_prompt, c, k) for c in by_prompt) / len(by_prompt) for k in ks},
        "response_length": sum(len(r.completion.token_ids) for r in rollouts) / len(rollouts),
        "reasons": {reason: count / len(rollouts) for reason, count in sorted(reasons.items())},
    }


def describe(rollout: Rollout) -> dict[str, Any]:
    """One completion as a line of samples.jsonl."""
    return {
        "prompt_id": rollout.prompt.id,
        "sample": rollout.sample_index,
        "prompt": rollout.prompt.text,
        "completion": rollout.text,
        "expected": rollout.prompt.answer,
        "reward": rollout.reward,
        "reason": rollout.reason,
        "reward_components": dict(rollout.reward_components),
        "stop_reason": rollout.completion.stop_reason.value,
        "tokens": len(rollout.completion.token_ids),
        "logprob": sum(rollout.completion.logprobs),
    }


@contextmanager
def _engines(
    config: RunConfig, layout: Layout, console: Console, logs: Path, adapter: PeftAdapter | None
) -> Iterator[EnginePool]:
    """Engines that hold the base model, or base and adapter merged in the workers; stopped at the end."""
    from lora_rl.cluster.workers import wait
    from lora_rl.rollout.launch import start_engines
    from lora_rl.rollout.pool import EnginePool
    from lora_rl.train.resources import reserve

    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        placement = stack.enter_context(reserve(config, layout, console, logs, ranks=False))
        timeout = config.cluster.startup_timeout_s
        with console.startup("vLLM"):
            workers = start_engines(config, layout, logs, placement.engines, placement.engine_nodes)
            wait([w.call("build") for w in workers], timeout_s=timeout, doing="start-up: vLLM")
        pool = EnginePool(workers, timeout_s=config.cluster.step_timeout_s)
        stack.callback(pool.close)
        if adapter is not None:
            with console.startup("adapter"):
                _give(pool, adapter, config)
        yield pool


def _give(pool: EnginePool, adapter: PeftAdapter, config: RunConfig) -> None:
    """Bring an adapter into the engines with the proofs of a push; each worker merges it into the base."""
    import ray
    import torch

    from lora_rl.sync.sender import WeightSender

    sender = WeightSender(
        mode="adapter_merge",
        base=lambda: (),
        adapters=lambda: dict(adapter.tensors),
        is_sender=True,
        dtype=getattr(torch, config.engine_precision),
        rounding=config.policy.generation.weight_sync.rounding,
        seed=config.grpo.seed,
    )
    transfer = sender.open()
    assert transfer is not None
    try:
        pool.open_transfer(transfer, ray.get_runtime_context().get_node_id(), "auto")
    finally:
        sender.close_name()
    push = sender.send(1, must_differ=False)
    assert push is not None
    with pool.pushing():
        pool.load(push.manifest, ray.put(sender.payload()) if pool.needs_payload else None)
