"""Supervised fine-tuning on prompts with answers: the same policy, checkpoints and record as GRPO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_rl.data import Prompt, PromptSource, Tokenizer, drop_too_long, fetch_model, load_prompts
from lora_rl.rollout.types import TrainBatch, batch_of_sequences
from lora_rl.track import Console, PhaseTimer, RunRecorder
from lora_rl.train.checkpoint import Checkpoint, CheckpointStore
from lora_rl.train.extrapolate import LAST_WORD_S
from lora_rl.train.grpo import ADAPTER_FOLDER, is_validation_step, keep, keep_adapter, keep_after, number_of_steps
from lora_rl.train.job import Data
from lora_rl.train.resume import Stop, is_save_step, take

if TYPE_CHECKING:
    from lora_rl.config import RunConfig
    from lora_rl.config.layout import Layout
    from lora_rl.lora.peft_io import PeftAdapter
    from lora_rl.policy.group import PolicyGroup


MODEL_FOLDER = "model"


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


def load_examples(config: RunConfig, warn: Callable[[str], None] = lambda _: None) -> Data:
    """Tokenizer, training examples, held-out examples; from `sft.train_path`, or else from the source of `data`.

    Args:
        warn: told what was left out: repeated rows, and examples longer than policy.max_total_sequence_length.

    Raises:
        FileNotFoundError: a file of the model, the tokenizer or the data is missing.
        ValueError: see `lora_rl.data.load_prompts`; an example without an answer; none that fits.
    """
    sft, data = config.sft, config.data
    source: dict[str, Any] = {
        "input_key": sft.prompt_key or data.input_key,
        "output_key": sft.answer_key or data.output_key,
    }
    if sft.train_path is not None:
        source |= {"task": None, "train_path": sft.train_path, "val_path": sft.val_path}
    data = data.model_copy(update=source)
    tokenizer = fetch_model(config.policy)
    train, held_out = load_prompts(data, tokenizer, warn)
    for prompt in (*train, *held_out):
        if not prompt.answer:
            raise ValueError(f"example {prompt.id} has no answer to train on")
    limit = config.policy.max_total_sequence_length
    what = f"policy.max_total_sequence_length, with answer and end token, is {limit}"
    train, held_out = (
        drop_too_long(part, limit, what, warn, length=lambda prompt: len(_tokens(prompt, tokenizer)))
        for part in (train, held_out)
    )
    return Data(tokenizer, PromptSource(train, seed=config.data_seed, shuffle=config.data.shuffle), held_out)


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
    data: Data,
    *,
    stop: Stop,
    store: CheckpointStore | None = None,
    resume: Checkpoint | None = None,
    same: dict[str, Any] | None = None,
) -> None:
    """Start the ranks and train; arguments as in `run_grpo`, `config` from `as_sft`, `data` from `load_examples`.

    Raises:
        WorkerError: a process failed.
        KeyboardInterrupt: a signal asked to stop; with checkpoints, the step was finished and saved.
    """
    with timer("startup"), ExitStack() as opening:
        job = opening.enter_context(_start(config, layout, console, run_dir, data, resume, same or {}))
        stack = opening.pop_all()
    with stack:
        if resume is not None:
            timer.end_step()
        last_step = number_of_steps(config, len(job.prompts))
        console.state.total_steps = last_step
        if resume is None:
            before = validate(job, config, timer) if config.grpo.val_at_start else {}
            console.step(recorder.log(0, job.facts, before, timer.end_step()), [])
        first_step = (resume.step if resume else 0) + 1
        if resume is not None and recorder.earlier and reaches_target(recorder.earlier[-1], config):
            console.info(f"sft.target_answer_probability was reached at step {resume.step}; nothing is left to do")
            first_step = last_step + 1
        try:
            for step in range(first_step, last_step + 1):
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
                is_reached = reaches_target(held_out, config)
                if store is not None and (is_save_step(step, last_step, config) or stop.requested or is_reached):
                    path = store.save(
                        take(job, config, layout, step, record, recorder.path, cursor=job.prompts.state_dict())
                    )
                    console.info(f"checkpoint  {path}")
                if stop.signalled:
                    raise KeyboardInterrupt
                if stop.time_is_up or is_reached:
                    break
        except BaseException as error:
            # Of a whole model there is more to write.
            seconds = LAST_WORD_S * (10 if config.sft.train_all_weights else 1)
            keep_after(error, job.policy, lambda: keep_result(job.policy, config, run_dir), seconds=seconds)
            raise
        keep_result(job.policy, config, run_dir)


def reaches_target(held_out: Mapping[str, float], config: RunConfig) -> bool:
    """Whether a validation reached `sft.target_answer_probability`."""
    target = config.sft.target_answer_probability
    return target is not None and held_out.get("val/answer_probability", 0.0) >= target


def keep_result(policy: PolicyGroup, config: RunConfig, run_dir: Path) -> None:
    """Leave in the run folder what was trained: the adapter, or the whole model."""
    if config.sft.train_all_weights:
        keep(policy.save_model, run_dir / MODEL_FOLDER)
    else:
        keep_adapter(policy, run_dir / ADAPTER_FOLDER)


def validate(job: SftJob, config: RunConfig, timer: PhaseTimer) -> dict[str, float]:
    """How likely the answers of held-out examples are.

    Returns:
        `val/nll`, negative log-likelihood per answer token in nats, and its exponential; `val/answer_probability`, the
        probability that sampling gives exactly the answer and ends, averaged over examples: the expected accuracy of
        sampling at temperature 1.
    """
    examples = job.held_out[: config.grpo.max_val_samples]
    if not examples:
        return {}
    total, tokens, answers = 0.0, 0, 0.0
    with timer("validation"):
        for first in range(0, len(examples), config.grpo.val_batch_size):
            batch = example_batch(examples[first : first + config.grpo.val_batch_size], job.tokenizer)
            per_answer = job.policy.logprobs(batch).sum(axis=1, dtype=np.float64)
            total -= float(per_answer.sum())
            answers += float(np.exp(per_answer).sum())
            tokens += batch.global_tokens
    return {
        "val/nll": total / tokens,
        "val/perplexity": float(np.exp(total / tokens)),
        "val/answer_probability": answers / len(examples),
        "val/samples": len(examples),
    }


def _tokens(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    answer = tokenizer.encode(prompt.answer, add_special_tokens=False)
    return (*prompt.token_ids, *answer, tokenizer.eos_token_id)


@contextmanager
def _start(
    config: RunConfig,
    layout: Layout,
    console: Console,
    run_dir: Path,
    data: Data,
    resume: Checkpoint | None,
    same: dict[str, Any],
) -> Iterator[SftJob]:
    """Ray and the ranks; no engine is needed."""
    from lora_rl.policy.group import PolicyGroup, start_ranks
    from lora_rl.train.job import build_processes, restore_policy, start_adapter
    from lora_rl.train.resources import reserve

    tokenizer, prompts, held_out, _ = data
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
