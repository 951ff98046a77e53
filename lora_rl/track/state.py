"""What the console knows of a run: the records so far, reduced to what it shows."""

import math
from collections import deque
from collections.abc import Mapping

from lora_rl.track import names

RECENT_STEPS = 20


class RunState:
    """History of one run, fed by `update`.

    Attributes:
        step: the last step, None before the first record.
        total_steps: the step at which the run ends, None when unknown.
        latest: the last value of every metric.
        steps, history: for the reward and the held-out accuracy, the steps and values recorded.
        seconds, tokens: per phase, summed over the records.
        async_steps: ages and waiting of each step of an asynchronous run.
    """

    def __init__(self, total_steps: int | None = None):
        self.total_steps = total_steps
        self.step: int | None = None
        self.trained = 0  # records of training steps, so without the one before the first step
        self.latest: dict[str, float] = {}
        self.steps: dict[str, list[int]] = {names.REWARD: [], names.ACCURACY: []}
        self.history: dict[str, list[float]] = {names.REWARD: [], names.ACCURACY: []}
        self.seconds: dict[str, float] = {}
        self.tokens: dict[str, float] = {}
        self.async_steps: list[dict[str, float]] = []
        self._recent_step_s: deque[float] = deque(maxlen=RECENT_STEPS)

    def update(self, record: Mapping) -> None:
        """Take in one record, as `RunRecorder.log` returns it."""
        self.step = record["step"]
        self.latest.update((name, value) for name, value in record.items() if "/" in name)
        for name in self.history:
            if name in record:
                self.steps[name].append(self.step)
                self.history[name].append(record[name])
        if names.AGE in record:
            kept = (names.AGE, names.OLDEST, names.STALE_SHARE, names.ENGINE_IDLE_SHARE, names.TRAINER_IDLE_S)
            self.async_steps.append({name: record.get(name, 0.0) for name in (*kept, names.STEP_TIME)})
        for phase, seconds in names.phase_seconds(record).items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
            if names.TOKENS + phase in record:
                self.tokens[phase] = self.tokens.get(phase, 0) + record[names.TOKENS + phase]
        if self.step > 0:
            self.trained += 1
            if names.STEP_TIME in record:
                self._recent_step_s.append(record[names.STEP_TIME])

    def staleness(self) -> dict[str, float] | None:
        """Of an asynchronous run: mean and largest age, and the shares of groups given up, and of the time in which
        engines or trainer had nothing to do. None for others."""
        steps = self.async_steps
        if not steps:
            return None
        wall = math.fsum(s[names.STEP_TIME] for s in steps)
        return {
            "mean age": math.fsum(s[names.AGE] for s in steps) / len(steps),
            "oldest": max(s[names.OLDEST] for s in steps),
            "given up": math.fsum(s[names.STALE_SHARE] for s in steps) / len(steps),
            "engines idle": math.fsum(s[names.ENGINE_IDLE_SHARE] for s in steps) / len(steps),
            "trainer waiting": math.fsum(s[names.TRAINER_IDLE_S] for s in steps) / wall if wall else 0.0,
        }

    def wall_s(self) -> float:
        """Wall seconds of all records."""
        return math.fsum(self.seconds.values())

    def shares(self, startup: bool) -> list[tuple[str, float]]:
        """Phases in display order with their seconds; `startup` says whether to count that one."""
        phases = sorted(self.seconds, key=names.phase_order)
        return [(p, self.seconds[p]) for p in phases if self.seconds[p] > 0 and (startup or p != "startup")]

    def step_s(self) -> float | None:
        """Mean seconds of the last steps, validation and checkpoints included."""
        recent = self._recent_step_s
        return math.fsum(recent) / len(recent) if recent else None

    def left_s(self) -> float | None:
        """Seconds until the last step at the pace of the last steps, None while unknown."""
        pace = self.step_s()
        if pace is None or self.total_steps is None or self.step is None:
            return None
        return pace * max(self.total_steps - self.step, 0)

    def tokens_per_s(self) -> dict[str, float]:
        """Per phase, tokens per second over the whole run, or the last rate logged if only rates are."""
        rates = {
            name.removeprefix(names.TOKENS_PER_S): value
            for name, value in self.latest.items()
            if name.startswith(names.TOKENS_PER_S)
        }
        rates |= {p: count / self.seconds[p] for p, count in self.tokens.items() if self.seconds[p] > 0}
        return {phase: rates[phase] for phase in sorted(rates, key=names.phase_order)}

    def best_accuracy(self) -> tuple[int, float] | None:
        """Step and value of the highest held-out accuracy, the earliest of equals."""
        points = zip(self.steps[names.ACCURACY], self.history[names.ACCURACY], strict=True)
        finite = [(step, value) for step, value in points if math.isfinite(value)]
        return max(finite, key=lambda point: point[1], default=None)
