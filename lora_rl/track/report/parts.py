"""Pieces that the page of one run and the page of several are made of."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from lora_rl.track import names
from lora_rl.track.format import duration, number
from lora_rl.track.report.catalogue import Shown
from lora_rl.track.report.charts import Chart, Line, line_chart
from lora_rl.track.report.html import Node, h
from lora_rl.track.report.run_folder import Run
from lora_rl.track.samples import Change, Changes
from lora_rl.track.smoothing import moving_mean

SMOOTHING_STEPS = 10
NOISY_FROM = 25  # values; fewer are drawn as they are
SHOWN_SAMPLES = 20
PHASES = (*names.PHASES, names.OTHER)


def metric_chart(run: Run, shown: Shown) -> Node | None:
    """One metric of one run: values pale, their moving mean bold. None when it was recorded less than twice."""
    steps, values = run.series(shown.metric)
    values = [value - shown.minus for value in values]
    if len(values) < 2 or (not shown.constant and len(set(values)) == 1):
        return None
    noisy = len(values) > NOISY_FROM and not shown.dots and is_noisy(values)
    lines = [Line("value", steps, values, faint=noisy, dots=shown.dots)]
    if noisy:
        lines.append(Line(f"mean of {SMOOTHING_STEPS} steps", steps, moving_mean(values, SMOOTHING_STEPS)))
    level = (values[0], "start") if shown.metric == names.ACCURACY and len(values) > 1 else None
    return line_chart(Chart(shown.title, shown.unit, lines, shown.note, level=level, zero=shown.zero))


def is_noisy(values: Sequence[float]) -> bool:
    """Whether a curve goes to and fro, by more than three times its range in all."""
    finite = [value for value in values if math.isfinite(value)]
    path = math.fsum(abs(b - a) for a, b in pairwise(finite))
    return bool(finite) and path > 3 * (max(finite) - min(finite))


def charts(nodes: Sequence[Node | None], big: bool = False) -> Node | None:
    """Charts side by side, as many as there is room for; None without any."""
    there = [node for node in nodes if node is not None]
    return h("div", there, class_="charts big" if big else "charts") if there else None


def tile(name: str, value: str, unit: str = "", below: str = "") -> Node:
    """A key figure."""
    return h(
        "div", h("span", name), h("b", value, h("small", f" {unit}") if unit else None), h("span", below), class_="tile"
    )


def phase_colour(phase: str) -> int:
    """Number of the colour of a phase; phases that only some runs have share one."""
    return PHASES.index(phase) if phase in PHASES else PHASES.index("checkpoint")


def describe_phase(phase: str, seconds: float) -> str:
    """A phase with its time."""
    return f"{phase_name(phase)} {duration(seconds)}"


def phase_name(phase: str) -> str:
    return "start-up" if phase == "startup" else phase


def table(head: Sequence[str], rows: Sequence[Sequence[Node | str]], numeric: Sequence[int] = ()) -> Node:
    """A table that scrolls by itself when it is too wide.

    Args:
        rows: cells; a text becomes one, a `td` stays what it is.
        numeric: columns that are aligned to the right.
    """

    def cell(column: int, content: Node | str) -> Node:
        if not isinstance(content, str) and content.tag == "td":
            return content
        return h("td", content, class_="n" if column in numeric else None)

    top = [h("th", name, class_="n" if column in numeric else None) for column, name in enumerate(head)]
    body = [h("tr", [cell(column, content) for column, content in enumerate(row)]) for row in rows]
    return h("div", h("table", h("thead", h("tr", top)), h("tbody", body)), class_="scroll")


def sample_groups(changes: Changes, before: str, after: str, names_of: Mapping[str, str]) -> list[Node]:
    """Foldable tables of prompts by what changed, the first open.

    Args:
        before, after: headings of the two columns of completions.
        names_of: a heading for each list of `Changes`.
    """
    groups = []
    for attribute, heading in names_of.items():
        found: list[Change] = getattr(changes, attribute)
        if not found:
            continue
        count = f" {len(found)}" + (f", the first {SHOWN_SAMPLES} are shown" if len(found) > SHOWN_SAMPLES else "")
        rows = [_sample_row(change, before, after) for change in found[:SHOWN_SAMPLES]]
        head = h("tr", [h("th", name) for name in ("prompt", "expected", before, after)])
        widths = h("colgroup", [h("col", style=f"width:{share}%") for share in (30, 12, 29, 29)])
        body = h("table", widths, h("thead", head), h("tbody", rows), class_="samples")
        is_open = attribute in ("improved", "regressed")
        groups.append(h("details", h("summary", heading, h("span", count)), body, open="" if is_open else None))
    return groups


def _sample_row(change: Change, before: str, after: str) -> Node:
    first = change.after[0]
    return h(
        "tr",
        h("td", h("pre", str(first["prompt"])), data_name="prompt"),
        h("td", h("pre", str(first["expected"])), data_name="expected"),
        h("td", [_completion(line) for line in change.before[:3]], data_name=before),
        h("td", [_completion(line) for line in change.after[:3]], data_name=after),
    )


def _completion(line: Mapping) -> Node:
    right = bool(line["right"])
    mark = h("span", "✓ " if right else "✗ ", class_="mark good" if right else "mark bad")
    reward = "" if line["reward"] == float(right) else f"  (reward {number(line['reward'])})"
    return h("pre", mark, str(line["completion"]) or "(empty)", h("span", reward, class_="unit") if reward else None)
