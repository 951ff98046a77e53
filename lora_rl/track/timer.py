"""Where the wall time of a run goes."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from lora_rl.track.names import OTHER, STEP_TIME, TIME, TOKENS, TOKENS_PER_S

NANOSECONDS = 1e9


class PhaseTimer:
    """Seconds per phase, per step and in total.

        timer = PhaseTimer()
        with timer("startup"):
            ...
        recorder.log(0, timer.end_step())
        for step in range(1, steps + 1):
            with timer("generation"):
                ...
            with timer("training"):
                ...
            recorder.log(step, timer.end_step(tokens={"generation": 5120, "training": 6400}))

    A step lasts from the previous `end_step` (or from construction) to the next. Time in no phase is
    `other`. Time is counted in whole nanoseconds, so the phases and `other` add up to the wall time
    exactly, in every step and in total. For one thread; `current` may be read from another.

    Args:
        clock_ns: a monotonic clock in nanoseconds.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns):
        self._clock_ns = clock_ns
        self._step_start = self._run_start = clock_ns()
        self._step_ns: dict[str, int] = {}
        self._total_ns: dict[str, int] = {}
        self._open: tuple[str, int] | None = None  # phase and when it began

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time of the `with` body as `phase`, also when the body raises.

        Raises:
            RuntimeError: another phase is open: its time would be counted twice.
            ValueError: the name is reserved or cannot be part of a metric name.
        """
        if phase in (OTHER, "step") or not phase.replace("-", "_").isidentifier():
            raise ValueError(f"phase {phase!r}: use one word, other than 'other' and 'step'")
        if self._open is not None:
            raise RuntimeError(f"phase {phase!r} began inside phase {self._open[0]!r}; phases do not nest")
        begin = self._clock_ns()
        self._open = (phase, begin)
        try:
            yield
        finally:
            self._open = None
            self._step_ns[phase] = self._step_ns.get(phase, 0) + self._clock_ns() - begin

    @property
    def current(self) -> tuple[str, float] | None:
        """The open phase and its seconds so far, None between phases."""
        opened = self._open
        return opened and (opened[0], (self._clock_ns() - opened[1]) / NANOSECONDS)

    def end_step(self, tokens: Mapping[str, int] | None = None) -> dict[str, float]:
        """Close the step and begin the next.

        Args:
            tokens: per phase, how many tokens it worked on in this step.

        Returns:
            `time/<phase>`, `time/other` and `time/step` in seconds; `tokens/<phase>` and
            `tokens_per_s/<phase>` for each phase in `tokens`.

        Raises:
            RuntimeError: a phase is open.
            ValueError: `tokens` names a phase that did not run in this step.
        """
        if self._open is not None:
            raise RuntimeError(f"end_step inside phase {self._open[0]!r}; leave the phase first")
        tokens = tokens or {}
        if unknown := sorted(tokens.keys() - self._step_ns.keys()):
            raise ValueError(f"tokens for {unknown}, phases that did not run; ran: {sorted(self._step_ns)}")

        now = self._clock_ns()
        wall = now - self._step_start
        phases = {**self._step_ns, OTHER: wall - sum(self._step_ns.values())}
        for phase, spent in phases.items():
            self._total_ns[phase] = self._total_ns.get(phase, 0) + spent
        self._step_start, self._step_ns = now, {}

        metrics = {TIME + phase: spent / NANOSECONDS for phase, spent in phases.items()}
        metrics[STEP_TIME] = wall / NANOSECONDS
        for phase, count in tokens.items():
            metrics[TOKENS + phase] = count
            if phases[phase] > 0:
                metrics[TOKENS_PER_S + phase] = count * NANOSECONDS / phases[phase]
        return metrics

    def totals_ns(self) -> dict[str, int]:
        """Nanoseconds per phase, `other` included, over all closed steps; they add up to `wall_ns()`."""
        return dict(self._total_ns)

    def wall_ns(self) -> int:
        """Nanoseconds from construction to the last `end_step`."""
        return self._step_start - self._run_start
