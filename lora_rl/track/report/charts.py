"""Line charts and stacked bars as SVG, readable without JavaScript, which only adds the value under the pointer."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from lora_rl.track.format import number
from lora_rl.track.report.html import Node, h
from lora_rl.track.report.scale import Scale, step_scale, thinned, tick_text, value_scale

# Units of the picture. The page scales it to the width of its card.
WIDTH, HEIGHT = 440, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 38
WIDE = 1040
COLOURS = 8  # that the style sheet has


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        label: in the legend and the readout.
        steps, values: of equal length; a value that is not finite is a gap.
        colour: number of a colour.
        faint: drawn thin and pale, behind the others.
        dots: each value is marked.
    """

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    colour: int = 0
    faint: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """One picture.

    Attributes:
        title, unit: what is shown, and in what.
        note: a remark under the title.
        level: a value marked by a dashed line, with its label.
        zero: the axis begins at zero.
        x_unit: of the horizontal axis.
    """

    title: str
    unit: str
    lines: Sequence[Line] = field(default_factory=list)
    note: str = ""
    level: tuple[float, str] | None = None
    zero: bool = False
    x_unit: str = "step"


def line_chart(chart: Chart) -> Node:
    """A chart in its card, with a legend when colours tell curves apart. Nothing finite to draw: the card says so."""
    # Values too many to draw are thinned; what is drawn is what the readout reads.
    drawn = [(line, thinned(line.steps, line.values)) for line in chart.lines]
    finite = [point for _, points in drawn for point in points if math.isfinite(point[1])]
    if not finite:
        return _card(chart.title, chart.unit, chart.note, [h("p", "not recorded", class_="empty")])
    values = [value for _, value in finite] + ([chart.level[0]] if chart.level else [])
    y = value_scale(values, HEIGHT - BOTTOM, TOP, zero=chart.zero)
    steps = [step for step, _ in finite]
    x = step_scale(min(steps), max(steps), LEFT, WIDTH - RIGHT, whole=chart.x_unit == "step")
    shapes: list[Node] = []
    if chart.level:
        place, label = y(chart.level[0]), chart.level[1]
        shapes.append(h("line", x1=LEFT, x2=WIDTH - RIGHT, y1=place, y2=place, class_="level"))
        shapes.append(h("text", label, x=WIDTH - RIGHT, y=place - 4, class_="level-label", text_anchor="end"))
    for line, points in sorted(drawn, key=lambda pair: not pair[0].faint):
        shapes += _curve(line, points, x, y)
    data = {
        "x": [x.low, x.high, x.begin, x.end],
        "unit": chart.x_unit,
        "lines": [
            {"label": line.label, "points": [[_short(s), _short(v)] for s, v in points if math.isfinite(v)]}
            for line, points in drawn
        ],
    }
    picture = _picture(chart, finite, [*_axes(x, y, chart.x_unit), *shapes], json.dumps(data, separators=(",", ":")))
    shown = [line for line in chart.lines if not line.faint]
    keys = legend([(line.label, line.colour) for line in shown]) if len(shown) > 1 else None
    unit = chart.unit + (", logarithmic" if y.log else "")
    return _card(chart.title, unit, chart.note, [keys, picture])


def stacked_bars(
    title: str,
    unit: str,
    centres: Sequence[float],
    layers: Mapping[str, Sequence[float]],
    width: float,
    colour: Callable[[str], int],
    note: str = "",
) -> Node:
    """Bars over steps, each the layers on top of each other, in a wide card.

    Args:
        layers: heights by name, one per bar.
        width: steps that a bar covers.
        colour: number of the colour of a layer.
    """
    totals = [math.fsum(column) for column in zip(*layers.values(), strict=True)]
    if not totals or not any(totals):
        return _card(title, unit, note, [h("p", "not recorded", class_="empty")])
    y = value_scale(totals, HEIGHT - BOTTOM, TOP, zero=True)
    x = step_scale(centres[0] - width / 2, centres[-1] + width / 2, LEFT, WIDE - RIGHT, count=12)
    bar = max((x(width) - x(0)) * 0.9, 0.5)
    bottoms = [0.0] * len(totals)
    shapes = []
    for name, heights in layers.items():
        boxes = []
        for n, height in enumerate(heights):
            if height > 0:
                top, bottom = y(bottoms[n] + height), y(bottoms[n])
                tip = h("title", f"{name}: {number(height)} {unit} at step {centres[n]:g}")
                boxes.append(h("rect", tip, x=x(centres[n]) - bar / 2, y=top, width=bar, height=bottom - top))
            bottoms[n] += height
        shapes.append(h("g", boxes, class_=f"fill p{colour(name)}"))
    svg = h(
        "svg",
        [*_axes(x, y, "step", WIDE), *shapes],
        viewBox=f"0 0 {WIDE} {HEIGHT}",
        role="img",
        aria_label=f"{title}, {unit} per step: {', '.join(layers)}",
    )
    return _card(title, unit, note, [legend([(name, colour(name)) for name in layers], "p"), svg], wide=True)


def share_bar(parts: Mapping[str, float], colour: Callable[[str], int], describe: Callable[[str, float], str]) -> Node:
    """One horizontal bar in proportion to `parts`."""
    whole = math.fsum(parts.values()) or 1.0
    return h(
        "div",
        [
            h(
                "span",
                class_=f"part fill p{colour(name)}",
                style=f"width:{part / whole:.4%}",
                title=describe(name, part),
            )
            for name, part in parts.items()
            if part > 0
        ],
        class_="share",
    )


def _curve(line: Line, points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> list[Node]:
    commands, pen_down = [], False
    for step, value in points:
        if not math.isfinite(value):
            pen_down = False
            continue
        commands.append(f"{'L' if pen_down else 'M'}{x(step):.1f} {y(value):.1f}")
        pen_down = True
    kind = f"line c{line.colour % COLOURS}" + (" faint" if line.faint else "")
    shapes = [h("path", d="".join(commands), class_=kind)]
    finite = [point for point in points if math.isfinite(point[1])]
    alone = [b for a, b, c in _neighbours(points) if math.isfinite(b[1]) and not (_drawn(a) or _drawn(c))]
    for step, value in finite if line.dots and len(finite) <= 60 else alone:
        shapes.append(
            h("circle", cx=round(x(step), 1), cy=round(y(value), 1), r=2.6, class_=f"dot c{line.colour % COLOURS}")
        )
    return shapes


def _neighbours(points: Sequence[tuple[float, float]]):
    ends = [None, *points, None]
    return ((a, b, c) for (a, b), (_, c) in pairwise(pairwise(ends)))


def _drawn(point: tuple[float, float] | None) -> bool:
    return point is not None and math.isfinite(point[1])


def _axes(x: Scale, y: Scale, x_unit: str, width: float = WIDTH) -> list[Node]:
    floor = HEIGHT - BOTTOM
    shapes = []
    for tick in y.ticks:
        place = y(tick)
        shapes.append(h("line", x1=LEFT, x2=width - RIGHT, y1=place, y2=place, class_="grid"))
        shapes.append(h("text", tick_text(tick, y.ticks), x=LEFT - 6, y=place + 4, text_anchor="end"))
    for tick in x.ticks:
        anchor = "end" if x(tick) > width - RIGHT - 8 else "middle"
        shapes.append(h("text", tick_text(tick, x.ticks), x=x(tick), y=floor + 16, text_anchor=anchor))
    shapes.append(h("line", x1=LEFT, x2=width - RIGHT, y1=floor, y2=floor, class_="axis"))
    shapes.append(h("text", x_unit, x=(LEFT + width - RIGHT) / 2, y=HEIGHT - 4, text_anchor="middle", class_="unit"))
    return shapes


def _picture(chart: Chart, finite: Sequence[tuple[float, float]], shapes: list[Node], data: str) -> Node:
    first, last = finite[0][1], finite[-1][1]
    label = f"{chart.title}, {chart.unit}: from {number(first)} to {number(last)}"
    cursor = h("line", x1=0, x2=0, y1=TOP, y2=HEIGHT - BOTTOM, class_="cursor")
    return h("svg", [*shapes, cursor], viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label, data_lines=data)


def legend(entries: Sequence[tuple[str, int]], letter: str = "c") -> Node:
    """Names with their colours, of curves (`c`) or phases (`p`)."""
    return h(
        "ul",
        [h("li", h("i", class_=f"key fill {letter}{n % COLOURS}"), name) for name, n in entries],
        class_="legend",
    )


def _card(title: str, unit: str, note: str, content: Sequence[Node | None], wide: bool = False) -> Node:
    head = h("figcaption", h("b", title), h("span", f" {unit}" if unit else "", class_="unit"), h("output"))
    remark = h("p", note, class_="note") if note else None
    return h("figure", head, remark, *content, class_="card wide" if wide else "card")


def _short(value: float) -> float:
    return float(f"{value:.6g}")
