"""Generating while training, over engines whose every answer the test decides on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from lora_rl.cluster.workers import WorkerError
from lora_rl.config import RunConfig
from lora_rl.data import PromptSource, Tokenizer, load_tokenizer
from lora_rl.rollout.async_source import AsyncRolloutSource
from lora_rl.rollout.queue import PromptQueue
from lora_rl.rollout.seats import JobRefused
from lora_rl.rollout.source import Generator, SyncRolloutSource
from lora_rl.rollout.types import Completion, GenerationRequest, Rollout, SamplingSettings, StopReason
from lora_rl.sync.errors import SyncError
from tests.support.configs import tiny_config
from tests.support.rollouts import prompt

PER_STEP = 4


class Decided:
    """Stands where `EnginePool` does: jobs stay open until the test answers them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.weight_version, self.restarts, self.seats = 1, 0, [None]
        self.open: dict[int, tuple[list[GenerationRequest], Future[Any], int]] = {}
        self.submitted: list[tuple[int, ...]] = []
        self.failure: Exception | None = None
        self._tokenizer, self._lock, self._count = tokenizer, threading.Lock(), 0

    def submit(self, jobs: Sequence[Sequence[GenerationRequest]], sampling: SamplingSettings) -> list[Future[Any]]:
        with self._lock:
            futures = []
            for job in jobs:
                future: Future[Any] = Future()
                self.open[self._count] = (list(job), future, self.weight_version)
                self.submitted.append(tuple(r.seed for r in job))
                futures.append(future)
                self._count += 1
            return futures

    def generate(self, jobs: Any, sampling: SamplingSettings) -> list[Any]:
        futures = self.submit(jobs, sampling)
        self.answer_all()
        return [f.exception() or f.result() for f in futures]

    def abort(self, futures: Sequence[Future[Any]]) -> None:
        with self._lock:
            self.open = {n: o for n, o in self.open.items() if o[1] not in futures}
        for future in futures:
            future.cancel()

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def restart_clock(self) -> None:
        pass

    def idle_seconds(self) -> float:
        return 0.0

    # -- for the test --

    def answer(self, number: int, *, version: int | None = None, texts: str = "78") -> None:
        """Answer a job: sample s says the s-th of `texts`, over and over; half of them are right."""
        requests, future, started = self.open.pop(number)
        version = started if version is None else version
        completions = []
        for s in range(len(requests)):
            tokens = (*self._tokenizer.encode(texts[s % len(texts)]), self._tokenizer.eos_token_id)
            completions.append(Completion(tokens, (-0.5,) * len(tokens), StopReason.STOP, version))
        future.set_result(tuple(completions))

    def answer_all(self, **options: Any) -> None:
        for number in list(self.open):
            self.answer(number, **options)

    def refuse(self, number: int) -> None:
        self.open.pop(number)[1].set_exception(JobRefused("too long"))


@pytest.fixture
def tokenizer(models: dict[str, Path]) -> Tokenizer:
    return load_tokenizer(models["tied"])


@pytest.fixture
def new(
    models: dict[str, Path], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[AsyncRolloutSource, Decided]]]:
    """`new(age, *overrides)`: a source over 40 prompts, four groups of four per step."""
    sources = []
    # Several threads would score in an order of their own.
    monkeypatch.setattr("lora_rl.rollout.async_source._SCORERS", 1)

    def make(age: int, *overrides: str, steps: int = 100, in_flight: bool = True) -> tuple[AsyncRolloutSource, Decided]:
        config = new_config(models["tied"], age, *overrides, in_flight=in_flight)
        engines = Decided(tokenizer)
        queue = PromptQueue(PromptSource([prompt(str(n)) for n in range(40)], shuffle=False))
        warnings: list[str] = []
        source = AsyncRolloutSource(Generator(engines, tokenizer, 0), queue, config, warnings.append, steps=steps)
        source.warnings = warnings
        sources.append(source)
        return source, engines

    yield make
    for source in sources:
        source.close()


def new_config(model: Path, age: int, *overrides: str, in_flight: bool = True) -> RunConfig:
    return tiny_config(
        model,
        "grpo.async_grpo.enabled=true",
        f"grpo.async_grpo.max_trajectory_age_steps={age}",
        f"grpo.async_grpo.in_flight_weight_updates={str(in_flight).lower()}",
        "loss_fn.use_importance_sampling_correction=true",
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.gpus_per_node=1",
        *overrides,
    )


class Step:
    """`source.next_step` in a thread of its own."""

    def __init__(self, source: AsyncRolloutSource) -> None:
        self.error: BaseException | None = None
        self.rollouts: list[Rollout] = []

        def run() -> None:
            try:
                self.rollouts = source.next_step(0)
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def groups(self) -> list[int]:
        self._thread.join(10)
        assert self.done
        if self.error is not None:
            raise self.error
        return sorted({r.group_id for r in self.rollouts})


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def settled(engines: Decided, count: int) -> None:
    """So many jobs are open, and stay."""
    until(lambda: len(engines.open) == count)
    time.sleep(0.05)
    assert len(engines.open) == count


def push(source: AsyncRolloutSource, engines: Decided) -> None:
    source.before_push(engines.weight_version + 1)
    engines.weight_version += 1
    source.after_push()


@pytest.mark.parametrize("age", [0, 1, 2])
def test_what_may_be_started_follows_from_the_age(new: Callable[..., Any], age: int) -> None:
    source, engines = new(age)
    step = Step(source)
    # While the trainer waits: this batch, and those it will be young enough for.
    settled(engines, (age + 1) * PER_STEP)
    engines.answer_all()
    assert step.groups() == [0, 1, 2, 3]
    # While it trains, what is finished counts against the same bound.
    time.sleep(0.1)
    assert len(engines.submitted) == (age + 1) * PER_STEP
    push(source, engines)
    if age:
        settled(engines, 0)
        # Waiting again opens room for one more batch.
        step = Step(source)
        assert step.groups() == [4, 5, 6, 7]
        assert source.metrics()["rollout/age_mean"] == 1
        settled(engines, PER_STEP)


def test_groups_are_whole_and_carry_their_prompt(new: Callable[..., Any]) -> None:
    source, engines = new(1)
    step = Step(source)
    settled(engines, 8)
    for number in (5, 0, 7, 2):
        engines.answer(number)
    # Those started first among the finished ones, though others came first.
    assert step.groups() == [0, 2, 5, 7]
    assert [(r.group_id, r.sample_index, r.prompt.id) for r in step.rollouts] == [
        (g, s, str(g)) for g in (0, 2, 5, 7) for s in range(4)
    ]
    assert [r.reward for r in step.rollouts] == [1, 0, 1, 0] * 4


def test_every_prompt_is_trained_on_exactly_once_whatever_the_order(new: Callable[..., Any]) -> None:
    import random

    source, engines = new(2)
    rng, seen = random.Random(0), []
    for _ in range(8):
        step = Step(source)
        while not step.done:
            # The longer it runs the likelier; some are overtaken often.
            for number in list(engines.open):
                if rng.random() < 0.3:
                    engines.answer(number)
            time.sleep(0.005)
        seen += step.groups()
        versions = {r.completion.weight_version for r in step.rollouts}
        assert max(versions) <= engines.weight_version <= min(versions) + 2
        push(source, engines)
    assert len(seen) == len(set(seen)) == 32


def test_a_straggler_is_overtaken_and_given_up_when_it_is_too_old(new: Callable[..., Any]) -> None:
    source, engines = new(1)
    step = Step(source)
    settled(engines, 8)
    for number in range(1, 5):
        engines.answer(number)
    assert step.groups() == [1, 2, 3, 4]
    push(source, engines)
    # Version 2: the straggler of version 1 may still be used.
    step = Step(source)
    until(lambda: len(engines.open) > 4)
    for number in [n for n in engines.open if n != 0]:
        engines.answer(number)
    assert step.groups() == [5, 6, 7, 8]
    assert 0 in engines.open
    straggler = engines.open[0][1]
    push(source, engines)
    # Version 3: not any more. The same prompt is sampled anew.
    assert straggler.cancelled()
    step = Step(source)
    until(lambda: bool(engines.open))
    engines.answer_all()
    until(lambda: step.done or bool(engines.open))
    engines.answer_all()
    assert step.groups()[0] == 0
    again = next(r for r in step.rollouts if r.group_id == 0)
    assert again.prompt.id == "0"
    assert again.completion.weight_version >= 2
    assert source.metrics()["rollout/stale_groups"] == 1


def test_without_in_flight_updates_a_push_waits_for_what_runs(new: Callable[..., Any]) -> None:
    source, engines = new(1, in_flight=False)
    step = Step(source)
    settled(engines, 8)
    for number in range(4):
        engines.answer(number)
    step.groups()
    pushed = threading.Event()
    thread = threading.Thread(target=lambda: (source.before_push(2), pushed.set()))
    thread.start()
    assert not pushed.wait(0.2)
    engines.answer_all()
    assert pushed.wait(5)
    # Nothing new is started on weights that are being replaced.
    time.sleep(0.05)
    assert engines.open == {}
    engines.weight_version = 2
    source.after_push()
    assert Step(source).groups() == [4, 5, 6, 7]


@pytest.mark.parametrize("version", [0, 3])
def test_a_group_of_a_version_that_was_not_pushed_is_refused(new: Callable[..., Any], version: int) -> None:
    source, engines = new(1)
    engines.weight_version = 2
    step = Step(source)
    settled(engines, 8)
    engines.answer(2, version=version)
    with pytest.raises(
        SyncError, match=rf"group 2 has a completion of another weight version than 1 to 2.*by {version}"
    ):
        step.groups()


def test_a_group_that_is_too_old_is_never_trained_on(new: Callable[..., Any]) -> None:
    """An engine that lags behind without saying so: its tokens carry the version that sampled them."""
    source, engines = new(1)
    engines.weight_version = 5
    step = Step(source)
    settled(engines, 8)
    engines.answer(0, version=3)
    for number in range(1, 5):
        engines.answer(number)
    assert step.groups() == [1, 2, 3, 4]
    assert source.metrics()["rollout/stale_groups"] == 1
    # Its prompt comes again.
    push(source, engines)
    step = Step(source)
    until(lambda: len(engines.open) > 3)
    engines.answer_all()
    assert 0 in step.groups()


def test_a_prompt_that_is_always_too_old_is_left_out(new: Callable[..., Any]) -> None:
    source, engines = new(0, "policy.generation.max_attempts=2")
    engines.weight_version = 5
    step = Step(source)
    settled(engines, 4)
    engines.answer(0, version=4)
    for number in range(1, 4):
        engines.answer(number)
    settled(engines, 1)
    engines.answer(4, version=4)
    settled(engines, 1)
    engines.answer(5)
    assert step.groups() == [1, 2, 3, 4]
    assert source.metrics()["rollout/refused_groups"] == 1
    [warning] = source.warnings
    assert warning.startswith("prompt 0 is left out: its rollouts were 2 times older")


def test_a_refused_prompt_is_replaced_and_counted(new: Callable[..., Any]) -> None:
    source, engines = new(0)
    step = Step(source)
    settled(engines, 4)
    engines.refuse(1)
    for number in (0, 2, 3):
        engines.answer(number)
    settled(engines, 1)
    engines.answer_all()
    assert step.groups() == [0, 2, 3, 4]
    assert source.metrics()["rollout/refused_groups"] == 1
    assert source.warnings == ["prompt 1 is left out: too long"]


def test_prompts_that_are_all_refused_end_the_run(new: Callable[..., Any]) -> None:
    source, engines = new(0)
    step = Step(source)
    settled(engines, 4)
    for number in list(engines.open):
        engines.refuse(number)
    with pytest.raises(ValueError, match="4 of 4 prompts could not be generated from; the last, 3: too long"):
        step.groups()


def test_lost_engines_end_the_wait(new: Callable[..., Any]) -> None:
    source, engines = new(1)
    step = Step(source)
    settled(engines, 8)
    engines.failure = WorkerError("engine 0 died")
    with pytest.raises(WorkerError, match="engine 0 died"):
        step.groups()


def test_what_scoring_raises_ends_the_wait(new: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    source, engines = new(1)

    def broken(answered: Any, sampling: Any) -> Any:
        raise ValueError("the answer '4x' is not an integer")

    monkeypatch.setattr(source._generator, "score", broken)
    step = Step(source)
    settled(engines, 8)
    engines.answer(3)
    with pytest.raises(ValueError, match="'4x' is not an integer"):
        step.groups()


def test_a_reward_that_never_comes_ends_the_wait(new: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    source, engines = new(1, "cluster.step_timeout_s=0.5")
    forever = threading.Event()
    monkeypatch.setattr(source._generator, "score", lambda answered, sampling: forever.wait(20))
    step = Step(source)
    settled(engines, 8)
    engines.answer(3)
    with pytest.raises(WorkerError, match="no reward for a completion of prompt 3 within"):
        step.groups()
    forever.set()


def test_nothing_is_generated_beyond_the_last_step(new: Callable[..., Any]) -> None:
    source, engines = new(2, steps=2)
    step = Step(source)
    settled(engines, 2 * PER_STEP)
    engines.answer_all()
    step.groups()
    push(source, engines)
    Step(source).groups()
    push(source, engines)
    time.sleep(0.1)
    assert len(engines.submitted) == 8


def test_what_was_not_trained_on_is_drawn_again_after_a_restart(new: Callable[..., Any]) -> None:
    source, engines = new(1)
    step = Step(source)
    settled(engines, 8)
    for number in (0, 1, 3, 4, 6):
        engines.answer(number)
    assert step.groups() == [0, 1, 3, 4]
    until(lambda: not source._scoring)
    state = source.state_dict()
    resumed, engines_after = new(1)
    resumed._queue.load_state_dict(state)
    step = Step(resumed)
    settled(engines_after, 8)
    engines_after.answer_all()
    # Running (2, 5, 7) and buffered (6), with the requests they had before.
    assert step.groups() == [2, 5, 6, 7]
    assert engines_after.submitted[:4] == [engines.submitted[n] for n in (2, 5, 6, 7)]
    assert resumed.state_dict()["drawn"] == 12


def test_halting_gives_up_everything_and_loses_nothing(new: Callable[..., Any]) -> None:
    """Three versions are pushed between two steps; what is trained on afterwards is of the last, and not old."""
    source, engines = new(1)
    step = Step(source)
    settled(engines, 8)
    for number in (0, 1, 2, 4, 6):
        engines.answer(number)
    assert step.groups() == [0, 1, 2, 4]
    push(source, engines)
    until(lambda: not source._scoring)
    running = [engines.open[n][1] for n in (3, 5, 7)]
    with source.halted():
        assert all(future.cancelled() for future in running)
        for _ in range(3):
            push(source, engines)
            time.sleep(0.05)
            assert not engines.open
        state = source.state_dict()
    step = Step(source)
    settled(engines, 8)
    engines.answer_all()
    # Running (3, 5, 7) and buffered (6) first, with the requests they had before.
    assert step.groups() == [3, 5, 6, 7]
    assert engines.submitted[8:12] == [engines.submitted[n] for n in (3, 5, 6, 7)]
    assert {r.completion.weight_version for r in step.rollouts} == {5}
    metrics = source.metrics()
    assert (metrics["rollout/age_max"], metrics["rollout/dropped_groups"], metrics["rollout/stale_groups"]) == (0, 4, 0)
    # A checkpoint within would draw them again, too.
    assert [number for number, *_ in state["open"]] == [3, 5, 6, 7]


def sync_source(model: Path, tokenizer: Tokenizer, *overrides: str) -> tuple[SyncRolloutSource, Decided]:
    engines = Decided(tokenizer)
    queue = PromptQueue(PromptSource([prompt(str(n)) for n in range(40)], shuffle=False))
    return SyncRolloutSource(Generator(engines, tokenizer, 0), queue, tiny_config(model, *overrides), print), engines


def test_age_zero_asks_for_the_same_as_a_synchronous_run(
    new: Callable[..., Any], models: dict[str, Path], tokenizer: Tokenizer
) -> None:
    dynamic = "grpo.use_dynamic_sampling=true"
    source, engines = new(0, dynamic)
    other, other_engines = sync_source(models["tied"], tokenizer, dynamic)
    texts = iter(["78", "7", "8", "78", "7", "78", "78"] * 100)
    other_texts = iter(["78", "7", "8", "78", "7", "78", "78"] * 100)
    other_engines.answer_all = lambda: [
        other_engines.answer(n, texts=next(other_texts)) for n in list(other_engines.open)
    ]
    for _ in range(3):
        step = Step(source)
        while not step.done:
            ready = sorted(engines.open)
            time.sleep(0.02)
            if ready and sorted(engines.open) == ready:
                for number in ready:
                    engines.answer(number, texts=next(texts))
        groups = step.groups()
        rollouts = other.next_step(0)
        assert sorted({r.group_id for r in rollouts}) == groups
        assert [(r.group_id, r.prompt.id, r.text) for r in rollouts] == [
            (r.group_id, r.prompt.id, r.text) for r in step.rollouts
        ]
        push(source, engines)
        other_engines.weight_version += 1
    assert engines.submitted == other_engines.submitted


@pytest.mark.parametrize("asynchronous", [True, False])
def test_dynamic_sampling_gives_up_with_a_reason(
    new: Callable[..., Any], models: dict[str, Path], tokenizer: Tokenizer, asynchronous: bool
) -> None:
    overrides = ["grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=3"]
    message = (
        r"dynamic_sampling_max_gen_batches: 3 batches were generated and only 0 of 12 groups have different rewards"
    )
    if not asynchronous:
        source, engines = sync_source(models["tied"], tokenizer, *overrides)
        engines.answer_all = lambda: [engines.answer(n, texts="8") for n in list(engines.open)]
        with pytest.raises(ValueError, match=message):
            source.next_step(1)
        return
    source, engines = new(1, *overrides)
    step = Step(source)
    while not step.done:
        engines.answer_all(texts="8")
        time.sleep(0.005)
    with pytest.raises(ValueError, match=message):
        step.groups()


def test_the_metrics_tell_how_stale_a_step_is(new: Callable[..., Any]) -> None:
    source, engines = new(2)
    step = Step(source)
    settled(engines, 12)
    engines.answer_all()
    step.groups()
    metrics = source.metrics()
    assert metrics["rollout/age_0_share"] == metrics["rollout/lag_0_token_share"] == 1.0
    # Taken as soon as there are enough.
    assert 4 <= metrics["rollout/buffer_groups"] <= 12
    for age in (1, 2):
        push(source, engines)
        step = Step(source)
        step.groups()
        metrics = source.metrics()
        assert metrics[f"rollout/age_{age}_share"] == metrics[f"rollout/lag_{age}_token_share"] == 1.0
        assert (metrics["rollout/age_mean"], metrics["rollout/age_max"]) == (age, age)


def test_the_bound_of_dynamic_sampling_counts_anew_what_was_given_up(new: Callable[..., Any]) -> None:
    """Groups that a jump took away are not there: when no other varies, the search ends."""
    source, engines = new(1, "grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=3")
    step = Step(source)
    settled(engines, 8)
    for number in (0, 1, 2, 4, 3, 5, 6, 7):
        engines.answer(number)
    assert step.groups()
    until(lambda: len(source._buffer) == 4)
    # Four more that vary, of which the next step would have been.
    for _ in range(2):
        with source.halted():
            pass
        settled(engines, 4)
        engines.answer_all()
        until(lambda: len(source._buffer) == 4)
    with source.halted():
        pass
    step = Step(source)
    begin = len(engines.submitted)
    while not step.done:
        engines.answer_all(texts="8")
        time.sleep(0.005)
        assert len(engines.submitted) - begin < 40, "it searches for ever"
    with pytest.raises(ValueError, match="dynamic_sampling_max_gen_batches: 3 batches were generated and only 0 of"):
        step.groups()
