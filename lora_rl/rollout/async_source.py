"""Generating while training: a collector keeps the engines busy, a bounded buffer holds finished groups.

                 submit             done              score            take
    prompt queue ------> engines --------> rewards ---------> buffer -------> trainer
         ^                  |                                    |
         +--- again --------+------- too old for any step -------+

The age of a group is the trainer's weight version minus the oldest version that sampled a token of it. How many groups
may be open follows from the bound on the age, so that none can become too old by waiting; see `_room`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_rl.cluster.workers import WorkerError
from lora_rl.rollout.queue import PromptQueue
from lora_rl.rollout.seats import JobRefused
from lora_rl.rollout.source import DynamicSampling, Generator, Refusals, check_versions, training_sampling
from lora_rl.rollout.types import PromptGroup, Rollout

if TYPE_CHECKING:
    from lora_rl.config import RunConfig

_SCORERS = 2


@dataclass
class _InFlight:
    group: PromptGroup
    started: int
    future: Future[Any]


@dataclass
class _Ready:
    group: PromptGroup
    rollouts: list[Rollout]
    # Version of the oldest weights that took part, once the trainer has checked it.
    oldest: int | None = None


class AsyncRolloutSource:
    """Generates from the first step to the last, with whatever weights the engines hold.

    One thread moves groups from state to state; whatever it or a helper raises ends the next `next_step`.
    """

    def __init__(
        self,
        generator: Generator,
        prompts: PromptQueue,
        config: RunConfig,
        warn: Callable[[str], None],
        *,
        steps: int,
    ) -> None:
        """
        Args:
            steps: steps that will be asked for: nothing is generated beyond them.
        """
        self._generator, self._queue, self._config, self._warn = generator, prompts, config, warn
        self._engines = generator.engines
        settings = config.grpo.async_grpo
        self._max_age, self._in_flight_updates = settings.max_trajectory_age_steps, settings.in_flight_weight_updates
        self._max_attempts = config.policy.generation.max_attempts
        self._per_step = config.grpo.num_prompts_per_step
        self._left = steps * self._per_step
        self._filter, self._refusals = DynamicSampling(config), Refusals(prompts, config, warn)

        self._changed = threading.Condition()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._scorers = ThreadPoolExecutor(_SCORERS, thread_name_prefix="scoring")
        self._running: dict[int, _InFlight] = {}
        self._scoring: dict[int, tuple[PromptGroup, float]] = {}
        self._timeout = config.cluster.step_timeout_s
        self._buffer: dict[int, _Ready] = {}
        self._waiting = self._paused = self._halted = self._closed = False
        self._failure: BaseException | None = None
        self._counts: Counter[str] = Counter()
        self._metrics: dict[str, float] = {}
        self._asked = time.monotonic()
        self._thread: threading.Thread | None = None

    # -- what the loop calls -----------------------------------------------------------------------------------

    def next_step(self, step: int) -> list[Rollout]:
        """Wait for enough groups, and take the ones that were started first.

        Raises:
            WorkerError: all engines are lost, or nothing happens any more.
            SyncError: a group was sampled by weights that were never pushed.
            Exception: what scoring raised.
        """
        began = time.monotonic()
        self._engines.restart_clock()
        self._start()
        with self._changed:
            self._waiting = True
            self._wake()
            while True:
                self._drop_stale(self._engines.weight_version)
                if len(self._buffer) >= self._per_step:
                    break
                self._check()
                self._changed.wait(0.5)
            depth = len(self._buffer)
            taken = [self._buffer.pop(number) for number in sorted(self._buffer)[: self._per_step]]
            self._waiting = False
            self._left -= self._per_step
            # Within the lock: the collector counts on meanwhile, and what is counted starts anew here.
            self._metrics = self._describe(taken, depth, time.monotonic() - began)
        return [rollout for ready in taken for rollout in ready.rollouts]

    def before_push(self, version: int) -> None:
        """Give up what would be too old for every later step; without in-flight updates, let the rest end.

        Raises:
            WorkerError: the engines are lost, or do not come to an end.
        """
        with self._changed:
            self._give_up([n for n, f in self._running.items() if version - f.started > self._max_age])
            if self._in_flight_updates:
                return
            self._paused = True
            self._engines.restart_clock()
            while self._running:
                self._check()
                self._changed.wait(0.5)

    def after_push(self) -> None:
        """Go on with the new weights."""
        with self._changed:
            self._paused = False
        self._wake()

    @contextmanager
    def halted(self) -> Iterator[None]:
        """See `RolloutSource.halted`: the groups that are given up are drawn again, as the same attempt.

        Groups that were started before would seem older than they are by every weight version pushed inside.

        Raises:
            WorkerError: the engines are lost, or a reward does not come.
        """
        with self._changed:
            self._halted = True
            flights = list(self._running.values())
            self._running.clear()
            self._engines.abort([flight.future for flight in flights])
            self._engines.restart_clock()
            while self._scoring:
                self._check()
                self._changed.wait(0.5)
            given_up = [*(flight.group for flight in flights), *(ready.group for ready in self._buffer.values())]
            self._filter.forget(len(self._buffer))
            self._filter.forget_rewards()
            self._buffer.clear()
            self._queue.put_back(given_up)
            self._counts["dropped"] += len(given_up)
        try:
            yield
        finally:
            with self._changed:
                self._halted = False
            self._wake()

    def metrics(self) -> dict[str, float]:
        """See `RolloutSource.metrics`: ages, depth of the buffer, what was given up, who waited."""
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        """The order of prompts; all groups that were not trained on are drawn again when the run continues."""
        with self._changed:
            scored = [ready.group for ready in self._buffer.values()]
            running = [flight.group for flight in self._running.values()]
            return self._queue.state_dict([*running, *(group for group, _ in self._scoring.values()), *scored])

    def close(self) -> None:
        """Stop generating."""
        self._closed = True
        self._wake()
        if self._thread is not None:
            self._thread.join(timeout=10)
        self._scorers.shutdown(wait=False, cancel_futures=True)

    # -- the collector -----------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._collect, name="collector", daemon=True)
            self._thread.start()

    def _wake(self) -> None:
        self._events.put(lambda: None)

    def _collect(self) -> None:
        try:
            while not self._closed:
                self._admit()
                event = self._events.get()
                with self._changed:
                    event()
                    self._changed.notify_all()
            with self._changed:
                self._engines.abort([flight.future for flight in self._running.values()])
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _room(self) -> int:
        """Groups that may be started now.

        A group started with version v can be trained on while the trainer has v, v + 1, ... v + max_age. If the trainer
        is waiting, its next batch is of version v: that is max_age + 1 batches; while it trains on one, it is max_age.
        """
        if self._paused or self._halted:
            return 0
        batches = self._max_age + (1 if self._waiting else 0)
        open_groups = len(self._running) + len(self._scoring) + len(self._buffer)
        if self._max_age == 0 and (self._running or self._scoring):
            # Then everything goes in rounds, exactly as in a synchronous run.
            return 0
        return min(batches * self._per_step, self._left) - open_groups

    def _admit(self) -> None:
        with self._changed:
            if (room := self._room()) <= 0:
                return
            groups = self._queue.draw(room)
            per_prompt = self._config.grpo.num_generations_per_prompt
            # In rounds, it is the synchronous run; otherwise groups that start one by one may share a system prompt.
            cache = self._generator.new_cache() if self._max_age == 0 else ""
            jobs = [self._generator.requests(group, per_prompt, purpose="train", cache=cache) for group in groups]
            version = self._engines.weight_version
            futures = self._engines.submit(jobs, training_sampling(self._config))
            for group, future in zip(groups, futures, strict=True):
                self._running[group.group_id] = _InFlight(group, version, future)
                self._counts["started"] += 1
        for group, future in zip(groups, futures, strict=True):
            future.add_done_callback(lambda done, group=group: self._events.put(lambda: self._answered(group, done)))

    def _answered(self, group: PromptGroup, future: Future[Any]) -> None:
        """An engine is done with a group: score it."""
        flight = self._running.get(group.group_id)
        if flight is None or flight.future is not future or future.cancelled():
            # Given up meanwhile.
            return
        del self._running[group.group_id]
        error = future.exception()
        if isinstance(error, JobRefused):
            self._refusals.note(group, error)
            return
        if error is not None:
            raise error
        completions = future.result()
        self._scoring[group.group_id] = (group, time.monotonic())
        scored = self._scorers.submit(self._generator.score, [(group, completions)], training_sampling(self._config))
        scored.add_done_callback(lambda done: self._events.put(lambda: self._scored(group, done)))

    def _scored(self, group: PromptGroup, future: Future[Any]) -> None:
        """A group has its rewards: buffer it."""
        del self._scoring[group.group_id]
        [rollouts] = future.result()
        if self._filter.keep(rollouts):
            self._buffer[group.group_id] = _Ready(group, rollouts)

    # -- within the lock ---------------------------------------------------------------------------------------

    def _drop_stale(self, version: int) -> None:
        """Give up buffered groups that are too old for a trainer of this version, and refuse impossible ones."""
        for number, ready in list(self._buffer.items()):
            if ready.oldest is None:
                # Here, where no push is under way, and not when it was scored: an engine may be ahead of the driver.
                completions = [r.completion for r in ready.rollouts]
                check_versions(ready.group, completions, oldest=1, newest=version)
                ready.oldest = min(c.weight_version for c in completions)
            if version - ready.oldest > self._max_age:
                del self._buffer[number]
                self._filter.forget(1)
                self._again(ready.group)

    def _give_up(self, numbers: list[int]) -> None:
        flights = [self._running.pop(number) for number in numbers]
        self._engines.abort([flight.future for flight in flights])
        for flight in flights:
            self._again(flight.group)

    def _again(self, group: PromptGroup) -> None:
        self._counts["stale"] += 1
        if group.attempt + 1 < self._max_attempts:
            self._queue.give_back(group)
        else:
            problem = (
                f"its rollouts were {self._max_attempts} times older than grpo.async_grpo.max_trajectory_age_steps"
            )
            self._refusals.note(group, JobRefused(problem))
        self._wake()

    def _check(self) -> None:
        if self._failure is not None:
            if isinstance(self._failure, Exception):
                raise self._failure
            raise WorkerError(f"collecting rollouts failed: {self._failure!r}")
        if self._scoring:
            group, since = min(self._scoring.values(), key=lambda scoring: scoring[1])
            if (seconds := time.monotonic() - since) > self._timeout:
                raise WorkerError(
                    f"scoring: no reward for a completion of prompt {group.prompt.id} within {seconds:.0f} s "
                    "(cluster.step_timeout_s)"
                )
            # Engines may be idle because everything waits for rewards.
            self._engines.restart_clock()
        self._engines.check()

    def _describe(self, taken: list[_Ready], depth: int, waited: float) -> dict[str, float]:
        version = self._engines.weight_version
        ages = [version - ready.oldest for ready in taken]
        lags: Counter[int] = Counter()
        for ready in taken:
            for rollout in ready.rollouts:
                for sampled_by, tokens in rollout.completion.spans:
                    lags[version - sampled_by] += tokens
        tokens = max(sum(lags.values()), 1)
        now = time.monotonic()
        elapsed, self._asked = now - self._asked, now
        stale, self._counts["stale"] = self._counts["stale"], 0
        started, self._counts["started"] = self._counts["started"], 0
        engines = len(self._engines.seats)
        return {
            "rollout/age_mean": sum(ages) / len(ages),
            "rollout/age_max": max(ages),
            **{f"rollout/age_{age}_share": ages.count(age) / len(ages) for age in range(self._max_age + 1)},
            **{f"rollout/lag_{lag}_token_share": lags[lag] / tokens for lag in range(self._max_age + 1)},
            "rollout/buffer_groups": depth,
            "rollout/in_flight_groups": len(self._running),
            "rollout/stale_groups": stale,
            **({"rollout/dropped_groups": self._counts.pop("dropped")} if self._counts["dropped"] else {}),
            "rollout/stale_share": stale / max(started, 1),
            "rollout/refused_groups": self._refusals.count,
            "rollout/trainer_idle_s": waited,
            "rollout/engine_idle_share": min(self._engines.idle_seconds() / (elapsed * engines), 1.0),
            "rollout/engine_restarts": self._engines.restarts,
            **self._filter.start_step(),
        }
