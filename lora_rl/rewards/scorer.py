"""Scores batches by all verifiers of a configuration: the cheap ones here, the others in worker processes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rl.config.schema import RewardConfig
from lora_rl.rewards.pool import PoolSettings, WorkerPool
from lora_rl.rewards.types import RewardError, RewardReason, RewardResult, Score, ScoreRequest, Verifier, failed
from lora_rl.rewards.verifier import POOLED, build_verifier

if TYPE_CHECKING:
    from lora_rl.data import Prompt

logger = logging.getLogger(__name__)

_MAX_WORKERS = 8


class Scorer:
    """Turns completions into scores, with the verifiers of `reward`. A context manager; may be used from any thread.

    Nothing has to be started for verifiers that run in the driver.

    Args:
        config: the section `reward`.
        startup_timeout_s: seconds until the workers must be ready.
        log_file: where workers print; None: where this process does.
    """

    def __init__(
        self, config: RewardConfig | None = None, *, startup_timeout_s: float = 300.0, log_file: Path | None = None
    ):
        config = config or RewardConfig()
        self._verifiers = (config, *config.additional)
        pooled = [one for one in self._verifiers if one.name in POOLED]
        self._inline: dict[int, Verifier] = {}
        self._pool_index: dict[int, int] = {}
        for place, one in enumerate(self._verifiers):
            if one.name in POOLED:
                self._pool_index[place] = len(self._pool_index)
            else:
                self._inline[place] = build_verifier(one, config.max_answer_chars)
        self._pool: WorkerPool | None = None
        self._settings = PoolSettings(
            verifiers=pooled,
            num_workers=config.num_workers or min(_MAX_WORKERS, len(os.sched_getaffinity(0))),
            timeout_s=config.timeout_s,
            startup_timeout_s=startup_timeout_s,
            max_chars=config.max_answer_chars,
            memory_gib=config.worker_memory_gib,
            log_file=log_file,
        )
        self._logged: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    @property
    def needs_workers(self) -> bool:
        """Whether some verifier runs in worker processes."""
        return bool(self._pool_index)

    def start(self) -> None:
        """Begin to start the workers, if there are any to start, and return. `score` and `check` wait for them."""
        if self.needs_workers and self._pool is None:
            self._pool = WorkerPool(self._settings)
            self._pool.start()

    def wait_ready(self) -> None:
        """Wait until every worker can score.

        Raises:
            RewardError: one could not be started, such as for a function that cannot be imported.
        """
        if self._pool is not None:
            self._pool.wait_ready()

    def close(self) -> None:
        """Kill the workers; scores that are not there yet raise RewardError."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Scorer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """The scores of a batch, in its order.

        Whatever a completion holds, it has a score within `num attempts x timeout_s` of its turn.

        Raises:
            RewardError: workers cannot be started any more, or were not.
        """
        return self.submit(requests).result()

    def submit(self, requests: Sequence[ScoreRequest]) -> Future[list[Score]]:
        """As `score`, without waiting for the workers. In a coroutine: `await asyncio.wrap_future(submit(...))`."""
        batch: Future[list[Score]] = Future()
        batch.set_running_or_notify_cancel()
        results: list[dict[int, RewardResult]] = [{} for _ in requests]
        waiting = _Countdown(len(requests) * len(self._pool_index) + 1)

        def finish() -> None:
            try:
                batch.set_result([self._total(one) for one in results])
            except Exception as error:
                batch.set_exception(error)

        for row, request in enumerate(requests):
            for place, verifier in self._inline.items():
                results[row][place] = self._score_here(verifier, request)
            for place, index in self._pool_index.items():

                def take(future: Future[RewardResult], row: int = row, place: int = place) -> None:
                    if (error := future.exception()) is not None:
                        if waiting.fail():
                            batch.set_exception(error)
                        return
                    results[row][place] = future.result()
                    if waiting.one_less():
                        finish()

                self._running_pool().submit(index, request).add_done_callback(take)
        if waiting.one_less():
            finish()
        return batch

    def check(self, prompts: Iterable[Prompt]) -> None:
        """See that every verifier can use the prompts' answers.

        Raises:
            RewardError: naming the first prompt whose answer it cannot use.
        """
        asked: list[tuple[Prompt, Future[str | None]]] = []
        seen: set[tuple[int, str]] = set()
        for prompt in prompts:
            request = ScoreRequest("", prompt.answer, prompt=prompt.text, metadata=prompt.metadata)
            for verifier in self._inline.values():
                try:
                    verifier.check(request)
                except ValueError as error:
                    raise RewardError(f"prompt {prompt.id}: {error}") from error
            for place, index in self._pool_index.items():
                key = (place, prompt.answer)
                # Where the metadata count, equal answers are different cases.
                if self._verifiers[place].name == "reasoning_gym" or key not in seen:
                    seen.add(key)
                    asked.append((prompt, self._running_pool().check(index, request)))
        for prompt, future in asked:
            if (problem := future.result()) is not None:
                raise RewardError(f"prompt {prompt.id}: {problem}")

    def _running_pool(self) -> WorkerPool:
        if self._pool is None:
            names = ", ".join(sorted({one.name for one in self._settings.verifiers}))
            raise RewardError(f"{names} runs in worker processes, which were not started: call start() first")
        return self._pool

    def _score_here(self, verifier: Verifier, request: ScoreRequest) -> RewardResult:
        try:
            return verifier.score(request)
        except Exception as error:
            return failed(RewardReason.ERROR, f"{type(error).__name__}: {error}")

    def _total(self, results: dict[int, RewardResult]) -> Score:
        components: dict[str, float] = {}
        value = 0.0
        for place, verifier in enumerate(self._verifiers):
            result = results[place]
            value += verifier.weight * result.value
            components[verifier.metric] = result.value
            components |= {f"{verifier.metric}/{name}": part for name, part in result.components.items()}
            if result.message:
                self._log_once(verifier.metric, result)
        return Score(value, results[0].reason, components)

    def _log_once(self, label: str, result: RewardResult) -> None:
        # A message that quotes the answer differs every time: one line per kind of exception is enough.
        key = (label, f"{result.reason.value}: {result.message.partition(':')[0]}"[:80])
        with self._lock:
            new = key not in self._logged
            self._logged.add(key)
        if new:
            where = f"; the traceback is in {self._settings.log_file}" if self._settings.log_file else ""
            logger.warning("reward %s: %s: %s (said once)%s", label, result.reason.value, result.message, where)


class _Countdown:
    """Counts events of several threads; the last one, or the first failure, is told so."""

    def __init__(self, events: int):
        self._left = events
        self._lock = threading.Lock()

    def one_less(self) -> bool:
        """Whether this was the last."""
        with self._lock:
            self._left -= 1
            return self._left == 0

    def fail(self) -> bool:
        """Whether nothing failed or ended before; `one_less` is never true afterwards."""
        with self._lock:
            first = self._left > 0
            self._left = -1
            return first
