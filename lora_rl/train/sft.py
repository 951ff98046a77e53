"""Supervised fine-tuning of adapters on prompts with answers: the same policy, checkpoints and record as GRPO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_rl.data import Prompt, PromptSource, Tokenizer, load_tokenizer
from lora_rl.data.jsonl import jsonl_prompts
from lora_rl.rollout.types import TrainBatch, batch_of_sequences
from lora_rl.track import Console, PhaseTimer, RunRecorder
from lora_rl.train.checkpoint import Checkpoint, CheckpointStore
from lora_rl.train.grpo import ADAPTER_FOLDER, is_validation_step, keep_adapter, number_of_steps
from lora_rl.train.resume import Stop, is_save_step, take

if TYPE_CHECKING:
    from lora_rl.config import RunConfig
    from lora_rl.config.layout import Layout
    from lora_rl.lora.peft_io import PeftAdapter
    from lora_rl.policy.group import PolicyGroup


@dataclass(frozen=True)
class SftJob:
    """Everything the loop works with; see `lora_rl.train.job.Job` for the fields of the same name."""

    policy: PolicyGroup
    tokenizer: Tokenizer
    prompts: PromptSource
    held_out: list[Prompt]
    identity: dict[str, Any]
    start: PeftAdapter | None
    facts: dict[str, float]


def load_examples(config: RunConfig) -> tuple[Tokenizer, PromptSource, list[Prompt]]:
    """Tokenizer, training examples, held-out examples; from `sft.train_path`, or else the built-in task.

    Raises:
        ValueError: an example does not fit into policy.max_total_sequence_length, or is in both parts.
    """
    from lora_rl.train.job import load_data

    sft = config.sft
    if sft.train_path is None:
        tokenizer, prompts, held_out = load_data(config)
    else:
        tokenizer = load_tokenizer(config.policy.tokenizer_name)
        keys = {"prompt_key": sft.prompt_key, "answer_key": sft.answer_key}
        train = jsonl_prompts(Path(sft.train_path), tokenizer, **keys)
        held_out = [] if sft.val_path is None else jsonl_prompts(Path(sft.val_path), tokenizer, **keys)
        prompts = PromptSource(train, seed=config.data_seed, shuffle=config.data.shuffle)
    shared = {p.id for p in prompts.prompts} & {p.id for p in held_out}
    if shared:
        raise ValueError(f"{len(shared)} held-out examples are also trained on, such as {sorted(shared)[0]}")
    limit = config.policy.max_total_sequence_length
    for prompt in (*prompts.prompts, *held_out):
        if (length := len(_tokens(prompt, tokenizer))) > limit:
            raise ValueError(
                f"example {prompt.id} ({prompt.text[:40]!r}) has {length} tokens with its answer, more than "
                f"policy.max_total_sequence_length = {limit}"
            )
    return tokenizer, prompts, held_out


def example_batch(examples: Sequence[Prompt], tokenizer: Tokenizer) -> TrainBatch:
    """Prompt, answer and end token of each example; answer and end token are trained on."""
    sequences = [_tokens(e, tokenizer) for e in examples]
    return batch_of_sequences(sequences, [len(e.token_ids) for e in examples])


def run_sft(
    config: RunConfig,
    layout: Layout,
    console: Console,
    recorder: RunRecorder,
    timer: PhaseTimer,
    run_dir: Path,
    *,
    stop: Stop,
    store: CheckpointStore | None = None,
    resume: Checkpoint | None = None,
    same: dict[str, Any] | None = None,
) -> None:
    """Start the ranks and train; arguments as in `run_grpo`, `config` from `as_sft`.

    Raises:
        WorkerError: a process failed.
        KeyboardInterrupt: a signal asked to stop; with checkpoints, the step was finished and saved.
    """
    with timer("startup"), ExitStack() as opening:
        job = opening.enter_context(_start(config, layout, console, run_dir, resume, same or {}))
        stack = opening.pop_all()
    with stack:
        if resume is not None:
            timer.end_step()
        last_step = number_of_steps(config, len(job.prompts))
        console.state.total_steps = last_step
        if resume is None:
            console.step(recorder.log(0, job.facts, validate(job, config, timer), timer.end_step()), [])
        try:
            for step in range((resume.step if resume else 0) + 1, last_step + 1):
                with timer("training"):
                    batch = example_batch(job.prompts.next_batch(config.sft.batch_size), job.tokenizer)
                    trained = job.policy.train_supervised(batch)
                held_out = validate(job, config, timer) if is_validation_step(step, last_step, config) else {}
                record = recorder.log(
                    step,
                    {f"train/{name}": value for name, value in trained.items()},
                    held_out,
                    timer.end_step(tokens={"training": int(batch.lengths.sum())}),
                )
                console.step(record, [])
                if store is not None and (is_save_step(step, last_step, config) or stop.requested):
                    path = store.save(take(job, config, layout, step, record, recorder.path))
                    console.info(f"checkpoint  {path}")
                if stop.signalled:
                    raise KeyboardInterrupt
                if stop.time_is_up:
                    break
        except KeyboardInterrupt:
            keep_adapter(job.policy, run_dir / ADAPTER_FOLDER)
            raise
        keep_adapter(job.policy, run_dir / ADAPTER_FOLDER)


def validate(job: SftJob, config: RunConfig, timer: PhaseTimer) -> dict[str, float]:
    """`val/nll`: negative log-likelihood per answer token of held-out examples, in nats; and its exponential."""
    examples = job.held_out[: config.grpo.max_val_samples]
    if not examples:
        return {}
    total, tokens = 0.0, 0
    with timer("validation"):
        for first in range(0, len(examples), config.grpo.val_batch_size):
            batch = example_batch(examples[first : first + config.grpo.val_batch_size], job.tokenizer)
            total -= float(job.policy.logprobs(batch).sum(dtype=np.float64))
            tokens += batch.global_tokens
    return {"val/nll": total / tokens, "val/perplexity": float(np.exp(total / tokens)), "val/samples": len(examples)}


def _tokens(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    answer = tokenizer.encode(prompt.answer, add_special_tokens=False)
    return (*prompt.token_ids, *answer, tokenizer.eos_token_id)


@contextmanager
def _start(
    config: RunConfig,
    layout: Layout,
    console: Console,
    run_dir: Path,
    resume: Checkpoint | None,
    same: dict[str, Any],
) -> Iterator[SftJob]:
    """Ray and the ranks; no engine is needed."""
    from lora_rl.policy.group import PolicyGroup, start_ranks
    from lora_rl.train.job import build_processes, restore_policy, start_adapter
    from lora_rl.train.resources import reserve

    tokenizer, prompts, held_out = load_examples(config)
    if resume is not None:
        prompts.load_state_dict(resume.cursor)
    start = resume.start if resume is not None else start_adapter(config)
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        placement = stack.enter_context(reserve(config, layout, console, logs, engines=False))
        ranks = start_ranks(config, layout, logs, placement.ranks, placement.rank_nodes)
        description = build_processes(config, console, [], ranks, start)
        policy = PolicyGroup(config, layout, ranks)
        if resume is not None:
            with console.startup(f"checkpoint of step {resume.step}"):
                restore_policy(resume, policy, layout)
        facts = {f"model/{key}": value for key, value in description.items()}
        yield SftJob(policy, tokenizer, prompts, held_out, same, start, facts)
