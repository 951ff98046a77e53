"""GRPO: the loop. One step reads top to bottom as the algorithm does."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_rl.track import Console, PhaseTimer, RunRecorder, Sample, names
from lora_rl.train.checkpoint import Checkpoint, CheckpointStore
from lora_rl.train.extrapolate import LAST_WORD_S, Extrapolation
from lora_rl.train.extrapolation_state import load_extrapolation, save_extrapolation
from lora_rl.train.job import Data, Job, start_job
from lora_rl.train.learning_signal import LearningSignal, learning_signal
from lora_rl.train.resume import Stop, is_save_step, take
from lora_rl.train.rollout_log import FILE_NAME as ROLLOUTS
from lora_rl.train.rollout_log import RolloutLog
from lora_rl.train.validation_log import ValidationLog, open_validation_log

if TYPE_CHECKING:
    from lora_rl.config import RunConfig
    from lora_rl.config.layout import Layout
    from lora_rl.policy.group import PolicyGroup
    from lora_rl.rollout.source import RolloutSource
    from lora_rl.rollout.types import Rollout, TrainBatch

ADAPTER_FOLDER = "adapter"


def run_grpo(
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
    """Start the job and train for `grpo.max_num_steps` steps.

    Args:
        data: see `load_data`.
        stop: asked at the end of each step.
        store: where checkpoints go; None: none are written.
        resume: what to continue from.
        same: the run's identity for its checkpoints.

    Raises:
        WorkerError, SyncError: see `lora_rl.train.job` and `lora_rl.train.weights`.
    """
    with ExitStack() as stack:
        with timer("startup"):
            job = stack.enter_context(start_job(config, layout, console, run_dir, data, resume, same))
        if resume is not None:
            # The start-up of this process belongs to no step.
            timer.end_step()
        extrapolation = extrapolation_of(job, config, console, timer, resume)

        def save(step: int, record: dict[str, float], cursor: dict[str, Any]) -> None:
            if store is not None:
                metric = config.checkpointing.metric_name
                if metric is not None and metric not in record:
                    measured = ", ".join(sorted(n for n in record if n.startswith("val/"))) or "no val/ metric"
                    console.warn(
                        f"checkpointing.metric_name {metric} was not recorded when saving; there was {measured}"
                    )
                more = {"version": job.weights.version, "payload": job.weights.payload}
                if extrapolation is not None:
                    more["extrapolation"] = save_extrapolation(extrapolation, job.policy)
                path = store.save(take(job, config, layout, step, record, recorder.path, cursor=cursor, **more))
                console.info(f"checkpoint  {path}")

        try:
            done = resume.step if resume else None
            log = RolloutLog(run_dir / ROLLOUTS if config.logger.log_rollouts else None, done)
            more = {"rollout_log": log, "validation_log": open_validation_log(config, run_dir, done)}
            more["extrapolation"] = extrapolation
            train(job, config, console, recorder, timer, stop=stop, save=save, done=done, **more)
        except BaseException as error:
            keep_after(error, job.policy, lambda: keep_adapter(job.policy, run_dir / ADAPTER_FOLDER))
            raise
        keep_adapter(job.policy, run_dir / ADAPTER_FOLDER)


def keep_adapter(policy: PolicyGroup, path: Path) -> None:
    """Leave the adapter in the run folder, in place of that of an earlier start."""
    keep(policy.save_adapter, path)


def keep_after(
    error: BaseException, policy: PolicyGroup, keep_result: Callable[[], None], *, seconds: float = LAST_WORD_S
) -> None:
    """Whatever was trained so far is the user's, however the run ends; a rank in mid-step saves after it.

    Args:
        error: what ends the run. If ranks are lost, too, it gets a note.
        keep_result: leaves what was trained in the run folder.
        seconds: that ranks have for it, unless the user ends the run: they may be what has failed.
    """
    if isinstance(error, KeyboardInterrupt):
        keep_result()
        return
    policy.hurry(seconds)
    try:
        keep_result()
    except Exception as another:
        error.add_note(f"what was trained could not be kept either: {another}")


def keep(save: Callable[[Path], None], path: Path) -> None:
    """Write a folder beside its old version, and only then replace that."""
    fresh, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    save(fresh)
    if path.exists():
        path.rename(old)
    fresh.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def train(
    job: Job,
    config: RunConfig,
    console: Console,
    recorder: RunRecorder,
    timer: PhaseTimer,
    *,
    stop: Stop,
    save: Callable[[int, dict[str, float], dict[str, Any]], None],
    done: int | None = None,
    rollout_log: RolloutLog | None = None,
    extrapolation: Extrapolation | None = None,
    validation_log: ValidationLog | None = None,
) -> None:
    """The training loop over a started job.

    Args:
        save: writes a checkpoint after a step, given its record and the state of the prompts' order.
        done: steps of an earlier start that this one continues; None: a new run.
        rollout_log, validation_log: where completions are written; None: nowhere.
        extrapolation: jumps ahead between steps; None: never.

    Raises:
        KeyboardInterrupt: a signal asked to stop; the step was finished and saved.
    """
    from lora_rl.rollout.types import build_train_batch
    from lora_rl.train.weights import check_drift, parity_tolerance

    validation_log = validation_log or ValidationLog()
    console.state.total_steps = last_step = number_of_steps(config, len(job.prompts.prompts))
    if done is None:
        before, samples = validate(job, config, timer, validation_log, 0) if config.grpo.val_at_start else ({}, [])
        console.step(recorder.log(0, job.facts, before, timer.end_step()), samples)

    if done and is_stale(console.state.history[names.ACCURACY], config.grpo.early_stop_patience):
        console.info(f"no better accuracy in {config.grpo.early_stop_patience} validations: this run had stopped early")
        return
    source = rollout_source(job, config, console.warn, steps=last_step - (done or 0))
    with closing(source), saving_if_it_fails(save) as last:
        for step in range((done or 0) + 1, last_step + 1):
            with timer("generation"):
                job.turns.to_engines()
                rollouts = source.next_step(step)
                generated = source.metrics()
                job.turns.note("generation")
            last.clear()
            with timer("training"):
                job.turns.to_trainer()
                signal = learning_signal(rollouts, config, job.policy)
                kept = signal.kept
                trained: dict[str, float] = {}
                if kept:
                    batch = build_train_batch(kept, signal.advantages)
                    trained = job.policy.train(batch, minibatches(batch, config), old_logprobs=signal.old_logprobs)
                if is_on_policy(rollouts, job.weights.version):
                    check_drift(trained, parity_tolerance(config))
                job.turns.note("training")
            with timer("sync"):
                probing = is_probe_step(step, config)
                job.turns.to_both(generating=probing)
                synced = push(job, source) if kept else {}
                if probing:
                    synced["sync/parity"] = job.weights.check_parity(job.probes, parity_tolerance(config))
                job.turns.note("sync")
            jumped: dict[str, float] = {}
            if extrapolation is not None:
                jumped = extrapolation.after_step(step, rollouts, kept, trained, source, left=last_step - step)
            validated, held_out_samples = {}, []
            if is_validation_step(step, last_step, config):
                validated, held_out_samples = validate(job, config, timer, validation_log, step)
            if not kept:
                console.warn(f"{signal.reason}: nothing to learn from, the optimizer step was skipped")
            record = recorder.log(
                step,
                rollout_metrics(rollouts, signal),
                generated,
                {f"train/{name}": value for name, value in {**trained, **signal.metrics}.items()},
                synced,
                jumped,
                validated,
                job.turns.ledger(),
                timer.end_step(tokens=tokens_per_phase(generated, kept, config)),
            )
            if rollout_log is not None:
                used = {(r.group_id, r.sample_index): a for r, a in zip(kept, signal.advantages, strict=True)}
                rollout_log.write(step, rollouts, used)
            console.step(record, held_out_samples or [to_sample(r) for r in rollouts])
            stale = is_stale(console.state.history[names.ACCURACY], config.grpo.early_stop_patience)
            last.update(step=step, record=record, cursor=source.state_dict(), saved=False)
            if is_save_step(step, last_step, config) or stop.requested or (validated and stale):
                save(step, record, last["cursor"])
                last["saved"] = True
            if stop.signalled:
                raise KeyboardInterrupt
            if stop.time_is_up:
                console.info("checkpointing.checkpoint_must_save_by is reached; the same command continues this run")
                return
            if validated and stale:
                console.info(f"no better accuracy in {config.grpo.early_stop_patience} validations: stopping early")
                return


@contextmanager
def saving_if_it_fails(
    save: Callable[[int, dict[str, float], dict[str, Any]], None],
) -> Iterator[dict[str, Any]]:
    """When the run fails between two steps, as when all engines are lost, save the last one before the error goes on.

    Yields:
        Where the loop keeps `step`, `record`, `cursor` and whether it is `saved`; empty within a step, whose half
        cannot be saved.
    """
    last: dict[str, Any] = {}
    try:
        yield last
    except Exception as error:
        if last and not last["saved"]:
            try:
                save(last["step"], last["record"], last["cursor"])
            except Exception as another:
                # The run's own error is the one to tell.
                error.add_note(f"a checkpoint of step {last['step']} could not be written either: {another}")
        raise


def extrapolation_of(
    job: Job, config: RunConfig, console: Console, timer: PhaseTimer, resume: Checkpoint | None
) -> Extrapolation | None:
    """What `grpo.next` asks for, at its start or as a checkpoint left it; None where it is off."""
    if not config.grpo.next.enabled:
        return None
    extrapolation = Extrapolation(job, config, console, timer)
    if resume is not None and resume.extrapolation is not None:
        load_extrapolation(extrapolation, resume.extrapolation, job.policy)
        extrapolation.settle(resume.step)
    else:
        extrapolation.start(resume.step if resume is not None else 0)
    return extrapolation


# -- the verbs of a step -------------------------------------------------------------------------------------------


def rollout_source(job: Job, config: RunConfig, warn: Callable[[str], None], *, steps: int) -> RolloutSource:
    """Where the batches come from: generated on demand, or while training."""
    from lora_rl.rollout.async_source import AsyncRolloutSource
    from lora_rl.rollout.source import SyncRolloutSource

    if config.grpo.async_grpo.enabled:
        return AsyncRolloutSource(job.generator, job.prompts, config, warn, steps=steps)
    return SyncRolloutSource(job.generator, job.prompts, config, warn)


def push(job: Job, source: RolloutSource) -> dict[str, float]:
    """Give the engines the new weights, at a moment that suits what they are doing."""
    source.before_push(job.weights.version + 1)
    try:
        return job.weights.push(after_update=job.policy.moved)
    finally:
        source.after_push()


def is_on_policy(rollouts: Sequence[Rollout], version: int) -> bool:
    """Whether all tokens were sampled by the weights that are trained on."""
    return all(r.completion.weight_version == version for r in rollouts)


def minibatches(batch: TrainBatch, config: RunConfig) -> list[list[int]]:
    """Rows of each optimizer step: as many steps as configured, of equal size as far as dropped groups allow."""
    count = min(config.sequences_per_step // config.train_global_batch_size, len(batch))
    bounds = [round(i * len(batch) / count) for i in range(count + 1)]
    return [list(range(a, b)) for a, b in pairwise(bounds)]


def number_of_steps(config: RunConfig, prompts: int) -> int:
    """`grpo.max_num_steps`, or fewer when `grpo.max_num_epochs` passes over the prompts end earlier."""
    grpo = config.grpo
    if grpo.max_num_epochs is None:
        return grpo.max_num_steps
    return min(grpo.max_num_steps, math.ceil(grpo.max_num_epochs * prompts / grpo.num_prompts_per_step))


def is_validation_step(step: int, last_step: int, config: RunConfig) -> bool:
    """Every `val_period` steps, and after the last."""
    period = config.grpo.val_period
    return period > 0 and (step % period == 0 or step == last_step)


def is_stale(accuracies: Sequence[float], patience: int | None) -> bool:
    """Whether the best of the validations so far is at least `patience` validations ago."""
    if patience is None or not accuracies:
        return False
    best = max(range(len(accuracies)), key=lambda n: (accuracies[n], -n))
    return len(accuracies) - 1 - best >= patience


def is_probe_step(step: int, config: RunConfig) -> bool:
    """Every `weight_sync.probe_period` steps trainer and engines are compared on the probe prompts."""
    period = config.policy.generation.weight_sync.probe_period
    return period > 0 and step % period == 0


def validate(
    job: Job, config: RunConfig, timer: PhaseTimer, log: ValidationLog, step: int
) -> tuple[dict[str, float], list[Sample]]:
    """Accuracy on held-out prompts; the same prompts and seeds every time, so that runs of a job are comparable."""
    from lora_rl.rollout.source import validation_groups, validation_sampling

    grpo = config.grpo
    groups = validation_groups(job.held_out[: grpo.max_val_samples])
    sampling = validation_sampling(config)
    rollouts: list[Rollout] = []
    left_out = 0
    with timer("validation"):
        job.turns.to_engines()
        for first in range(0, len(groups), grpo.val_batch_size):
            part = groups[first : first + grpo.val_batch_size]
            scored, refused = job.generator.answer(part, grpo.val_num_generations, sampling, purpose="validation")
            rollouts += [r for group in scored for r in group]
            left_out += len(refused)
    if not rollouts:
        raise ValueError(f"none of the {left_out} validation prompts can be generated from: {refused[0][1]}")
    log.write(step, rollouts)
    metrics = {
        "val/accuracy": sum(r.is_right for r in rollouts) / len(rollouts),
        "val/reward": sum(r.reward for r in rollouts) / len(rollouts),
        "val/samples": len(rollouts),
        "val/left_out_prompts": left_out,
        "val/response_length": sum(len(r.completion.token_ids) for r in rollouts) / len(rollouts),
    }
    return metrics, [to_sample(r) for r in rollouts[:: max(1, len(rollouts) // 8)]]


# -- what is reported ----------------------------------------------------------------------------------------------


def rollout_metrics(rollouts: Sequence[Rollout], signal: LearningSignal) -> dict[str, float]:
    """Rewards, lengths and reasons over all rollouts of the step; with dynamic sampling, over the groups it kept."""
    import numpy as np

    rewards = np.array([r.reward for r in rollouts])
    lengths = np.array([len(r.completion.token_ids) for r in rollouts])
    reasons = Counter(r.reason for r in rollouts)
    components: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.reward_components.items():
            components.setdefault(name, []).append(value)
    truncated = sum(r.completion.stop_reason == "length" for r in rollouts)
    return {
        "train/reward": float(rewards.mean()),
        "train/reward_std": float(rewards.std()),
        "train/response_length": float(lengths.mean()),
        "train/truncated_share": truncated / len(rollouts),
        "train/zero_variance_share": signal.num_zero_variance_groups / signal.num_groups,
        **{f"reward/{reason}": count / len(rollouts) for reason, count in sorted(reasons.items())},
        **{f"reward/{name}": sum(values) / len(values) for name, values in sorted(components.items())},
    }


def tokens_per_phase(generated: Mapping[str, float], kept: Sequence[Rollout], config: RunConfig) -> dict[str, float]:
    """Tokens generated, and tokens (prompts included) the trainer ran over.

    Args:
        generated: metrics of the rollout source.
        kept: rollouts that were trained on.

    Generating while training takes place in no phase of its own.
    """
    training = {"training": sum(r.length for r in kept)}
    if config.grpo.async_grpo.enabled:
        return training
    return {"generation": generated[names.GENERATED_TOKENS], **training}


def to_sample(rollout: Rollout) -> Sample:
    """A rollout as the console shows it."""
    return Sample(
        prompt=rollout.prompt.text,
        completion=rollout.text,
        expected=rollout.prompt.answer,
        reward=rollout.reward,
        stop_reason=rollout.completion.stop_reason.value,
    )
