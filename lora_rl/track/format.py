"""Numbers, durations, texts and bars as a terminal shows them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size


@dataclass(frozen=True)
class Glyphs:
    """Characters of the bars. Phases differ by glyph, not by colour alone."""

    spark: str
    full: str
    empty: str
    phases: Mapping[str, str]
    phase: str  # of a phase without its own


UNICODE = Glyphs(
    spark="▁▂▃▄▅▆▇█",
    full="━",
    empty="─",
    phases={
        "startup": "▞",
        "generation": "█",
        "reward": "▀",
        "training": "▓",
        "sync": "▒",
        "validation": "░",
        "checkpoint": "▄",
        "other": "·",
    },
    phase="▚",
)
ASCII = Glyphs(
    spark="_.-=+*#@",
    full="#",
    empty="-",
    phases={
        "startup": "U",
        "generation": "G",
        "reward": "R",
        "training": "T",
        "sync": "S",
        "validation": "V",
        "checkpoint": "C",
        "other": ".",
    },
    phase="x",
)


def duration(seconds: float) -> str:
    """`3.1 s`, `42 s`, `3 m 12 s`, `2 h 05 m`, `3 d 04 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, small_size, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // small_size:02d} {small}"
    return f"{whole} s"


def number(value: float) -> str:
    """About three significant digits at any size: `0.431`, `12.3`, `812`, `18.2k`, `4.00e-05`, `nan`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    size = abs(value)
    if size < 1e-3:
        return f"{value:.2e}"
    for limit, scale, suffix in ((9.9995e5, 1e6, "M"), (9999.5, 1e3, "k")):
        if size >= limit:
            return f"{value / scale:.1f}{suffix}"
    digits = next((d for limit, d in ((0.01, 5), (0.1, 4), (10, 3), (100, 1)) if size < limit), 0)
    return f"{value:.{digits}f}"


def sparkline(values: Sequence[float], width: int, levels: str) -> str:
    """Curve of `values` in at most `width` characters, scaled to its own range; a space where none is finite.

    More values than characters are averaged in equal stretches.
    """
    count = len(values)
    cells = min(count, width)
    means = []
    for cell in range(cells):
        part = [x for x in values[cell * count // cells : (cell + 1) * count // cells] if math.isfinite(x)]
        means.append(math.fsum(part) / len(part) if part else math.nan)
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return " " * cells
    low, span = min(finite), max(finite) - min(finite)
    top = len(levels) - 1
    return "".join(
        " " if math.isnan(mean) else levels[round((mean - low) / span * top) if span else top // 2] for mean in means
    )


def apportion(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to `shares` that add up to `total` (largest remainder method)."""
    whole = math.fsum(shares)
    if whole <= 0:
        return [0] * len(shares)
    exact = [share / whole * total for share in shares]
    counts = [math.floor(x) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def printable(text: str) -> str:
    """`text` on one line: line breaks, control and invisible characters as Python escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shorten(text: str, cells: int) -> str:
    """`text` made printable and cut in the middle to at most `cells` terminal cells.

    The end is kept because a response has its answer there.
    """
    long = len(text) > 2 * cells
    shown = printable(text[:cells] + text[-cells:] if long else text)
    if not long and cell_len(shown) <= cells:
        return shown
    gap = " ... "
    room = cells - len(gap)
    if room < 6:
        return set_cell_size(shown, cells)
    return set_cell_size(shown, room // 2) + gap + set_cell_size(shown[::-1], room - room // 2)[::-1]
