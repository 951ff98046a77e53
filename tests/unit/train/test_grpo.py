"""The verbs of a step, and the loop over scripted completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lora_rl.cluster.workers import WorkerError
from lora_rl.config import RunConfig
from lora_rl.config.schema.grpo import AsyncGRPOConfig
from lora_rl.data import PromptSource, load_tokenizer
from lora_rl.rollout.queue import PromptQueue
from lora_rl.rollout.source import Generator
from lora_rl.rollout.types import (
    Completion,
    GenerationRequest,
    SamplingSettings,
    StopReason,
    TrainBatch,
    build_train_batch,
)
from lora_rl.sync.errors import SyncError
from lora_rl.track import Console, PhaseTimer, RunRecorder, names, read_metrics
from lora_rl.train.grpo import (
    is_stale,
    is_validation_step,
    keep_after,
    minibatches,
    number_of_steps,
    rollout_metrics,
    saving_if_it_fails,
    to_sample,
    tokens_per_phase,
    train,
)
from lora_rl.train.job import Job
from lora_rl.train.learning_signal import learning_signal
from lora_rl.train.resume import Stop
from lora_rl.train.run import described
from lora_rl.train.weights import check_drift, parity_tolerance
from tests.support.configs import tiny_config
from tests.support.rollouts import ScriptedEngines, completion, prompt, rollout


@pytest.fixture(scope="module")
def config(models: dict[str, Path]) -> RunConfig:
    return tiny_config(models["tied"])


def with_grpo(config: RunConfig, **changes: Any) -> RunConfig:
    return config.model_copy(update={"grpo": config.grpo.model_copy(update=changes)})


# Group 0 is half right, group 1 all wrong, group 2 all right.
ROLLOUTS = [
    rollout(g, s, reward) for g, rewards in enumerate([(1, 0), (0, 0), (1, 1)]) for s, reward in enumerate(rewards)
]


@pytest.mark.parametrize(
    ("per_step", "update_size", "kept", "sizes"),
    [(16, 16, 16, [16]), (16, 4, 16, [4] * 4), (16, 4, 10, [2, 3, 3, 2]), (16, 4, 2, [1, 1]), (16, 8, 1, [1])],
)
def test_minibatches_cover_every_row_once(
    models: dict[str, Path], per_step: int, update_size: int, kept: int, sizes: list[int]
) -> None:
    config = tiny_config(models["tied"], f"policy.train_global_batch_size={update_size}")
    assert config.sequences_per_step == per_step
    batch = build_train_batch([rollout(n, 0, 1.0) for n in range(kept)], [1.0] * kept)
    parts = minibatches(batch, config)
    assert [row for part in parts for row in part] == list(range(kept))
    assert sorted(len(p) for p in parts) == sorted(sizes)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_validation_schedule(config: RunConfig) -> None:
    def steps(period: int) -> list[int]:
        return [n for n in range(1, 11) if is_validation_step(n, 10, with_grpo(config, val_period=period))]

    assert steps(4) == [4, 8, 10]
    assert steps(5) == [5, 10]
    assert steps(0) == []
    assert steps(100) == [10]


@pytest.mark.parametrize(
    ("accuracies", "patience", "stale"),
    [
        ([], 1, False),
        ([0.5], 1, False),
        ([0.5, 0.6], 1, False),
        ([0.5, 0.4], 1, True),
        ([0.5, 0.4], 2, False),
        ([0.5, 0.4, 0.5], 2, True),
        ([0.5, 0.4, 0.6, 0.1], 2, False),
        ([0.5, 0.4, 0.3], None, False),
    ],
)
def test_early_stop_counts_validations_since_the_best(
    accuracies: list[float], patience: int | None, stale: bool
) -> None:
    assert is_stale(accuracies, patience) == stale


def test_number_of_steps(config: RunConfig) -> None:
    counts = {
        epochs: number_of_steps(with_grpo(config, max_num_epochs=epochs), prompts=9) for epochs in (None, 1, 2, 99)
    }
    assert counts == {None: 10, 1: 3, 2: 5, 99: 10}


def test_rollout_metrics_count_all_rollouts(config: RunConfig) -> None:
    rollouts = [*ROLLOUTS, rollout(3, 0, 0.0, (4,) * 6, stop=StopReason.LENGTH), rollout(3, 1, 0.0)]
    metrics = rollout_metrics(rollouts, learning_signal(rollouts, config, RecordingPolicy([])))
    assert metrics == {
        "train/reward": 3 / 8,
        "train/reward_std": pytest.approx(np.std([1, 0, 0, 0, 1, 1, 0, 0])),
        "train/response_length": (7 * 2 + 6) / 8,
        "train/truncated_share": 1 / 8,
        "train/zero_variance_share": 3 / 4,
        "reward/correct": 3 / 8,
        "reward/wrong": 5 / 8,
    }
    generated = {names.GENERATED_TOKENS: 20}
    assert tokens_per_phase(generated, rollouts[:2], config) == {"generation": 20, "training": 8}
    asynchronous = with_grpo(config, async_grpo=AsyncGRPOConfig(enabled=True))
    assert tokens_per_phase(generated, rollouts[:2], asynchronous) == {"training": 8}
    sample = to_sample(rollouts[6])
    assert (sample.prompt, sample.expected, sample.reward) == ("p3", "7", 0.0)
    assert "length" in sample.stop_reason


def test_drift_is_an_error_only_where_equality_is_promised(models: dict[str, Path]) -> None:
    check_drift({"token_mult_prob_error": 1.00009}, 1e-4)
    check_drift({"token_mult_prob_error": 9.0}, None)
    check_drift({}, 1e-4)
    for error in (1.0002, float("nan")):
        with pytest.raises(SyncError, match="the engine sampled with other weights"):
            check_drift({"token_mult_prob_error": error}, 1e-4)
    assert parity_tolerance(tiny_config(models["tied"])) == 1e-4
    assert parity_tolerance(tiny_config(models["tied"], "policy.precision=bfloat16")) is None
    assert parity_tolerance(tiny_config(models["tied"], "policy.generation.weight_sync.parity_tolerance=null")) is None


# -- the loop --------------------------------------------------------------------------------------------------------


@dataclass
class RecordingPolicy:
    """Stands where `PolicyGroup` does and keeps what it was asked to train on."""

    order: list[str]
    trained: list[tuple[TrainBatch, list[list[int]]]] = field(default_factory=list)
    moved: bool = True

    def train(
        self, batch: TrainBatch, parts: list[list[int]], *, old_logprobs: np.ndarray | None = None
    ) -> dict[str, float]:
        assert old_logprobs is None
        self.order.append("train")
        self.trained.append((batch, parts))
        return {"loss": 0.25, "token_mult_prob_error": 1.0}


@dataclass
class RecordingWeights:
    """Stands where `WeightSync` does."""

    order: list[str]
    engines: ScriptedEngines
    pushes: list[bool] = field(default_factory=list)
    probed: list[tuple[list[tuple[int, ...]], float | None]] = field(default_factory=list)

    def push(self, *, after_update: bool) -> dict[str, float]:
        self.order.append("push")
        self.pushes.append(after_update)
        self.engines.weight_version = self.version
        return {"sync/version": self.version}

    @property
    def version(self) -> int:
        return 1 + len(self.pushes)

    def check_parity(self, probes: list[tuple[int, ...]], tolerance: float | None) -> float:
        self.order.append("probe")
        self.probed.append((probes, tolerance))
        return 0.125


@dataclass
class RecordingTurns:
    """Stands where `Turns` does."""

    order: list[str]
    ledgers: int = 0

    def to_engines(self) -> None:
        self.order.append("to_engines")

    def to_trainer(self) -> None:
        self.order.append("to_trainer")

    def to_both(self, *, generating: bool = False) -> None:
        self.order.append("to_both generating" if generating else "to_both")

    def note(self, phase: str) -> None:
        self.order.append(f"note {phase}")

    def ledger(self) -> dict[str, float]:
        self.ledgers += 1
        return {"memory/sync/ranks_gib": float(self.ledgers)}


@dataclass
class OrderedEngines(ScriptedEngines):
    """Scripted engines that also enter each batch into the common order."""

    order: list[str] = field(default_factory=list)

    def generate(
        self, jobs: Sequence[Sequence[GenerationRequest]], sampling: SamplingSettings
    ) -> list[tuple[Completion, ...]]:
        self.order.append("generate")
        return super().generate(jobs, sampling)


@dataclass
class Loop:
    policy: RecordingPolicy
    weights: RecordingWeights
    engines: OrderedEngines
    order: list[str]
    records: list[dict[str, Any]]
    output: str


PROBES = [(5, 6, 7), (8, 9)]


def run_loop(config: RunConfig, folder: Path, model: Path, answers: str, *, moved: bool = True) -> Loop:
    """Three steps over prompts whose answer is 7; completion n of the run says the n-th of `answers`."""
    tokenizer = load_tokenizer(model)
    script = iter(answers * 1000)
    order: list[str] = []
    engines = OrderedEngines(
        lambda r: completion((*tokenizer.encode(next(script)), tokenizer.eos_token_id), version=engines.weight_version),
        order=order,
    )
    policy, weights, timer = RecordingPolicy(order, moved=moved), RecordingWeights(order, engines), PhaseTimer()
    job = Job(
        policy=policy,
        engines=engines,
        weights=weights,
        turns=RecordingTurns(order),
        generator=Generator(engines, tokenizer, config.grpo.seed),
        prompts=PromptQueue(PromptSource([prompt(str(n)) for n in range(50)])),
        held_out=[prompt(f"held out {n}") for n in range(6)],
        probes=PROBES,
        identity={},
        start=None,
        facts={"model/parameters": 5.0},
    )
    with (folder / "out.txt").open("w") as stream, RunRecorder(folder) as recorder:
        console = Console("plain", 3, timer=timer, stream=stream)
        with console:
            train(job, config, console, recorder, timer, stop=Stop(saves=False), save=lambda step, record, cursor: None)
    return Loop(policy, weights, engines, order, read_metrics(recorder.path), (folder / "out.txt").read_text())


@pytest.fixture
def short(config: RunConfig) -> RunConfig:
    return with_grpo(config, max_num_steps=3, val_period=2, val_batch_size=4, val_at_start=True)


def test_the_loop_trains_pushes_validates_and_logs(short: RunConfig, models: dict[str, Path], tmp_path: Path) -> None:
    loop = run_loop(short, tmp_path, models["tied"], "78")
    assert [r["step"] for r in loop.records] == [0, 1, 2, 3]
    assert loop.weights.pushes == [True] * 3
    assert [len(batch) for batch, _ in loop.policy.trained] == [16] * 3
    assert [parts for _, parts in loop.policy.trained] == [[list(range(16))]] * 3
    assert [r.get("val/accuracy") for r in loop.records] == [0.5, None, 0.5, 0.5]
    assert loop.records[0]["model/parameters"] == 5
    assert [r["sync/version"] for r in loop.records[1:]] == [2, 3, 4]
    assert all(r["train/reward"] == 0.5 and r["train/loss"] == 0.25 for r in loop.records[1:])
    # Six held-out prompts in batches of four, with the same seeds each time, and nothing cached from before.
    validations = [asked for asked, _ in loop.engines.asked if len(asked) in (4, 2)]
    assert [len(asked) for asked in validations] == [4, 2] * 3
    first, second, third = ([(r.prompt_ids, r.seed) for r in v] for v in validations[::2])
    assert first == second == third
    assert len({request.cache for asked, _ in loop.engines.asked for request in asked}) == len(loop.engines.asked)
    training = [request for asked, _ in loop.engines.asked if len(asked) == 16 for request in asked]
    assert len({request.seed for request in training}) == 48


GENERATION = ["to_engines", "generate", "note generation"]
TRAINING = ["to_trainer", "train", "note training"]
SYNC = ["to_both", "push", "note sync"]
VALIDATION = ["to_engines", "generate", "generate"]
PROBING = ["to_both generating", "push", "probe", "note sync"]


def test_each_side_has_its_turn_before_it_works(short: RunConfig, models: dict[str, Path], tmp_path: Path) -> None:
    step = [*GENERATION, *TRAINING, *SYNC]
    loop = run_loop(short, tmp_path, models["tied"], "78")
    assert loop.order == [*VALIDATION, *step, *step, *VALIDATION, *step, *VALIDATION]
    # The ledger is taken once per step and belongs to it.
    assert [r.get("memory/sync/ranks_gib") for r in loop.records] == [None, 1, 2, 3]


def test_a_step_at_rate_zero_may_push_the_same_weights_again(
    short: RunConfig, models: dict[str, Path], tmp_path: Path
) -> None:
    """A schedule that decays to 0 ends with a step that changes nothing: no reason to call the push broken."""
    loop = run_loop(short, tmp_path, models["tied"], "78", moved=False)
    assert loop.weights.pushes == [False] * 3


def test_probes_follow_their_period(models: dict[str, Path], tmp_path: Path) -> None:
    config = tiny_config(models["tied"], "policy.generation.weight_sync.probe_period=2")
    config = with_grpo(config, max_num_steps=3, val_period=0, val_at_start=False)
    loop = run_loop(config, tmp_path, models["tied"], "78")
    step = [*GENERATION, *TRAINING]
    assert loop.order == [*step, *SYNC, *step, *PROBING, *step, *SYNC]
    assert loop.weights.probed == [(PROBES, 1e-4)]
    assert [r.get("sync/parity") for r in loop.records] == [None, None, 0.125, None]


def test_probes_need_no_update(models: dict[str, Path], tmp_path: Path) -> None:
    """Without an update nothing is pushed, but the engines must still be able to generate."""
    config = tiny_config(models["tied"], "policy.generation.weight_sync.probe_period=3")
    config = with_grpo(config, max_num_steps=3, val_period=0, val_at_start=False)
    loop = run_loop(config, tmp_path, models["tied"], "8")
    idle = [*GENERATION, "to_trainer", "note training"]
    assert loop.order == [*([*idle, "to_both", "note sync"] * 2), *idle, "to_both generating", "probe", "note sync"]
    assert loop.records[3]["sync/parity"] == 0.125


@pytest.mark.parametrize("answers", ["7", "8"])
def test_a_step_without_signal_skips_the_optimizer_and_says_so(
    short: RunConfig, models: dict[str, Path], tmp_path: Path, answers: str
) -> None:
    loop = run_loop(short, tmp_path, models["tied"], answers)
    assert loop.policy.trained == []
    assert loop.weights.pushes == []
    # The console says a warning once and counts its repetitions.
    assert loop.output.count("nothing to learn from, the optimizer step was skipped") == 1
    assert "1 different, 3 in all" in loop.output
    for record in loop.records[1:]:
        assert record["train/zero_variance_share"] == 1.0
        assert "train/loss" not in record
        assert "sync/version" not in record


# -- what is saved when a run fails ------------------------------------------------------------------------------------


class Boom(RuntimeError):
    pass


def saved_when(fails_in: str, *, broken_disk: bool = False) -> tuple[list[tuple[int, dict, dict]], BaseException]:
    """Three steps; the fourth fails before or within it."""
    saves: list[tuple[int, dict, dict]] = []

    def save(step: int, record: dict, cursor: dict) -> None:
        if broken_disk:
            raise OSError("disk full")
        saves.append((step, record, cursor))

    with pytest.raises(Boom) as error, saving_if_it_fails(save) as last:
        for step in (1, 2, 3, 4):
            if step == 4 and fails_in == "generation":
                raise Boom
            last.clear()
            if step == 4 and fails_in == "training":
                raise Boom
            saved = step == 3 and fails_in == "generation after a save"
            last.update(step=step, record={"train/reward": step}, cursor={"drawn": 4 * step}, saved=saved)
            if saved:
                raise Boom
    return saves, error.value


def test_a_run_that_fails_between_two_steps_saves_the_last_one() -> None:
    assert saved_when("generation")[0] == [(3, {"train/reward": 3}, {"drawn": 12})]


@pytest.mark.parametrize("fails_in", ["training", "generation after a save"])
def test_half_a_step_and_what_is_saved_already_are_not(fails_in: str) -> None:
    assert saved_when(fails_in)[0] == []


def test_however_a_run_ends_what_was_trained_is_kept() -> None:
    done: list[Any] = []
    policy: Any = SimpleNamespace(hurry=done.append)
    keep_after(KeyboardInterrupt(), policy, lambda: done.append("kept"))
    keep_after(ValueError("the data are used up"), policy, lambda: done.append("kept"))
    # Ranks that hang would keep the user waiting for what has happened.
    assert done == ["kept", 20.0, "kept"]

    def lost() -> None:
        raise WorkerError("rank 0 died")

    error = WorkerError("rank 0 died first")
    keep_after(error, policy, lost)
    assert described(error) == (
        "WorkerError: rank 0 died first\nwhat was trained could not be kept either: rank 0 died"
    )


def test_a_checkpoint_that_fails_too_does_not_hide_the_cause() -> None:
    saves, error = saved_when("generation", broken_disk=True)
    assert saves == []
    assert error.__notes__ == ["a checkpoint of step 3 could not be written either: disk full"]
