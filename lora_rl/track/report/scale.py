"""From values to places on an axis: ranges, round ticks, and fewer points where there are too many."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_POINTS = 600
LEAST_SPREAD = 2e-3  # of an axis, in parts of the values on it
LOG_FROM_RATIO = 1e3  # positive values that spread further apart than this need a logarithmic axis


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic axis.

    Attributes:
        low, high: values at the ends of the axis; low < high, and low > 0 when `log`.
        begin, end: places of the ends, in the units of the picture.
        ticks: round values between the ends.
    """

    low: float
    high: float
    begin: float
    end: float
    ticks: tuple[float, ...]
    log: bool = False

    def __call__(self, value: float) -> float:
        """Place of a value; of a value <= 0 on a logarithmic axis, the lower end."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)


def value_scale(values: Sequence[float], begin: float, end: float, *, zero: bool = False, count: int = 5) -> Scale:
    """Axis for finite values: logarithmic when all are positive and spread widely, else linear.

    Args:
        zero: the axis begins at zero.
        count: ticks at most, about.
    """
    low, high = min(values, default=0.0), max(values, default=1.0)
    # A single start near zero does not make a logarithmic axis.
    typical = sorted(values)[len(values) // 20] if values else low
    if not zero and low > 0 and high / typical > LOG_FROM_RATIO:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        stride = max(1, math.ceil((last - first) / count))
        powers = tuple(10.0**n for n in range(first, last + 1, stride))
        return Scale(10.0**first, 10.0**last, begin, end, powers, log=True)
    low = min(low, 0.0) if zero else low
    if high == low:
        room = abs(high) * 0.1 or 1.0
        low, high = (0.0, high + room) if zero else (low - room, high + room)
    elif (least := LEAST_SPREAD * max(abs(high), abs(low))) > high - low:
        # Noise in the last digits must not look like a change.
        middle = (low + high) / 2
        low, high = middle - least / 2, middle + least / 2
    step = nice_step(high - low, count)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Scale(low, high, begin, end, _ticks(low, high, step))


def step_scale(first: float, last: float, begin: float, end: float, *, count: int = 7, whole: bool = True) -> Scale:
    """Axis for steps or time that begins and ends with the data; `whole`: ticks are whole numbers."""
    if first == last:
        first, last = first - 1, last + 1
    step = nice_step(last - first, count)
    step = max(1.0, step) if whole else step
    return Scale(first, last, begin, end, _ticks(math.ceil(first / step) * step, last, step))


def nice_step(span: float, count: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten that divides `span` into at most `count` parts."""
    power = 10.0 ** math.floor(math.log10(span / count))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if span / (factor * power) <= count * (1 + 1e-9))


def tick_text(value: float, ticks: Sequence[float]) -> str:
    """A tick with as many digits as tell it from its neighbours: `0.25`, `1,500`, `2e-12`."""
    if value == 0:
        return "0"
    size, gap = max(map(abs, ticks)), min((b - a for a, b in pairwise(ticks)), default=abs(value))
    digits = max(0, -math.floor(math.log10(gap) + 1e-9))
    # Where ticks are powers of ten, each has the digits that it needs by itself.
    powers = len(ticks) > 2 and ticks[0] > 0 and ticks[2] / ticks[1] > 2 and ticks[1] / ticks[0] > 2
    if powers:
        digits = max(0, -math.floor(math.log10(value) + 1e-9))
    if size >= 1e6 or digits > 4 or (digits > 3 and size < 0.1):
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:,.{digits}f}"


def thinned(steps: Sequence[float], values: Sequence[float], most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most about `most` points that keep the lowest and highest value of every stretch; NaN stays as a gap."""
    points = list(zip(steps, values, strict=True))
    if len(points) <= most:
        return points
    stretch = math.ceil(len(points) / (most // 2))
    kept: list[tuple[float, float]] = []
    for begin in range(0, len(points), stretch):
        part = [point for point in points[begin : begin + stretch] if math.isfinite(point[1])]
        if not part:
            kept.append((points[begin][0], math.nan))
            continue
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(ends)
    if kept[-1][0] != points[-1][0]:
        kept.append(points[-1])
    return kept


def _ticks(first: float, last: float, step: float) -> tuple[float, ...]:
    return tuple(first + n * step for n in range(int((last - first) / step + 1e-6) + 1))
