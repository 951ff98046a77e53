"""Pictures of a run, drawn without a display. matplotlib is imported when a picture is drawn."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rl.track import names
from lora_rl.track.recorder import series
from lora_rl.track.smoothing import moving_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")  # Okabe and Ito's
PHASE_COLOURS = dict(zip(names.PHASES[1:], COLOURS, strict=False)) | {names.OTHER: "#cccccc"}
SMOOTHING_STEPS = 10
MAX_BARS = 120
MAX_LABELLED_RUNS = 10
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def learning_curve(records: Sequence[Mapping], path: Path | str, title: str = "") -> None:
    """Draw one run as a PNG: reward, held-out accuracy, response length, the engine's error, time per phase.

    Args:
        records: as `read_metrics` gives them. A metric that was not recorded leaves its panel empty, saying so;
            a value that was not finite leaves a gap.
        path: the PNG; its directory is made when missing.
    """
    with _drawing(path, 2, 3, title) as (_, panels):
        reward, accuracy, length, kl_error, prob_error, times = panels
        _noisy(reward, records, names.REWARD, "mean reward", COLOURS[0])
        reward.set_title(f"Reward of training rollouts (bold: mean of {SMOOTHING_STEPS} steps)")
        _accuracy(accuracy, records)
        _noisy(length, records, names.RESPONSE_LENGTH, "tokens per response", COLOURS[1])
        length.set_title("Response length")
        _noisy(kl_error, records, names.GEN_KL_ERROR, "nats per token", COLOURS[3])
        kl_error.set_title("gen_kl_error: trainer against engine (0 is exact)")
        _noisy(prob_error, records, names.TOKEN_MULT_PROB_ERROR, "mean factor - 1", COLOURS[3], minus=1.0)
        prob_error.set_title("token_mult_prob_error - 1 (0 is exact)")
        _time_bars(times, records)


def learning_curve_many(runs: Mapping[str, Sequence[Mapping]], path: Path | str, title: str = "") -> None:
    """Draw several runs together as a PNG, with the median of each arm as a bold line.

    Args:
        runs: records by run name. `arm/seed` names put runs into arms, one colour each; names without `/` form
            one arm, in which the runs themselves are told apart.
        path: the PNG; its directory is made when missing.

    Raises:
        ValueError: no runs.
    """
    if not runs:
        raise ValueError("learning_curve_many: no runs to draw")
    smoothed = f"mean of {SMOOTHING_STEPS} steps"
    contents = (
        (names.REWARD, f"Reward of the training rollouts, {smoothed}", "mean reward"),
        (names.ACCURACY, "Accuracy on held-out prompts", "accuracy"),
        (names.RESPONSE_LENGTH, f"Response length, {smoothed}", "tokens per response"),
        (names.GEN_KL_ERROR, f"gen_kl_error (0 is exact), {smoothed}", "nats per token"),
    )
    arms: dict[str, list[str]] = {}
    for name in runs:
        arms.setdefault(name.rpartition("/")[0], []).append(name)
    with _drawing(path, 2, 2, title) as (figure, panels):
        for panel, (metric, heading, unit) in zip(panels, contents, strict=True):
            for number, (arm, members) in enumerate(arms.items()):
                curves = {name: _curve(runs[name], metric) for name in members}
                _arm(panel, arm, curves, COLOURS[number % len(COLOURS)], alone=len(arms) == 1)
            panel.set(title=heading, ylabel=unit)
        handles, _ = panels[0].get_legend_handles_labels()
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6))


def median_curve(curves: Sequence[Mapping[int, float]]) -> tuple[list[int], list[float]]:
    """Median over runs at each step that at least half of the runs recorded with a finite value."""
    steps, medians = [], []
    for step in sorted(set().union(*curves)):
        values = [curve[step] for curve in curves if step in curve and math.isfinite(curve[step])]
        if values and 2 * len(values) >= len(curves):
            steps.append(step)
            medians.append(statistics.median(values))
    return steps, medians


@contextmanager
def _drawing(path: Path | str, rows: int, columns: int, title: str) -> Iterator[tuple["Figure", list["Axes"]]]:
    """A figure and its panels to draw into; afterwards the panels share their steps and the PNG is written."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter, MaxNLocator

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6 * columns, 3.2 * rows), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
        FigureCanvasAgg(figure)
        panels = list(figure.subplots(rows, columns).flat)
        figure.suptitle(title or None, fontsize=12)
        yield figure, panels
        last = max((max(line.get_xdata(), default=0) for p in panels for line in p.get_lines()), default=0)
        for panel in panels:
            if not panel.patches and not any(map(math.isfinite, _drawn_values(panel))):
                panel.set_yticks([])
                panel.text(0.5, 0.5, "not recorded", transform=panel.transAxes, ha="center", color="#888888")
            panel.set_xlabel("step")
            panel.set_xlim(-0.02 * last - 0.5, 1.02 * last + 0.5)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
            panel.yaxis.set_major_formatter(FormatStrFormatter("%.5g"))  # never an offset above the axis
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, format="png")


def _drawn_values(panel: "Axes") -> Iterator[float]:
    for line in panel.get_lines():
        yield from line.get_ydata()


def _curve(records: Sequence[Mapping], metric: str) -> dict[int, float]:
    """Values by step; those of a training step as a moving mean, because they are noisy."""
    steps, values = series(records, metric)
    if metric != names.ACCURACY:
        values = moving_mean(values, SMOOTHING_STEPS)
    return dict(zip(steps, values, strict=True))


def _noisy(panel: "Axes", records: Sequence[Mapping], metric: str, unit: str, colour: str, minus: float = 0.0) -> None:
    """The values pale, their moving mean bold; `minus` is taken off, so that an axis around 1 stays readable."""
    steps, values = series(records, metric)
    values = [value - minus for value in values]
    panel.plot(steps, values, color=colour, linewidth=1, alpha=0.4)
    mean = moving_mean(values, SMOOTHING_STEPS)
    panel.plot(steps, mean, color=colour, linewidth=2)
    panel.set_ylabel(unit)


def _accuracy(panel: "Axes", records: Sequence[Mapping]) -> None:
    steps, values = series(records, names.ACCURACY)
    panel.plot(steps, values, color=COLOURS[2], linewidth=1.5, marker="o", markersize=3.5)
    panel.set(title="Held-out accuracy", ylabel="fraction correct")
    finite = [(value, step) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if finite:
        start = finite[0][0]
        best, at = max(finite, key=lambda point: (point[0], -point[1]))
        panel.axhline(start, color="#999999", linewidth=1, linestyle="--", zorder=0)
        panel.set_title(f"Held-out accuracy: start {start:.3f}, best {best:.3f} at step {at}")


def _time_bars(panel: "Axes", records: Sequence[Mapping]) -> None:
    """Seconds per phase as stacked bars, neighbouring steps averaged when there are many."""
    trained = [record for record in records if record["step"] > 0 and names.STEP_TIME in record]
    panel.set(title="Time per step", ylabel="seconds")
    size = math.ceil(len(trained) / MAX_BARS) or 1
    bins = [trained[i : i + size] for i in range(0, len(trained), size)]
    centres = [statistics.fmean(record["step"] for record in part) for part in bins]
    phases = sorted({phase for record in trained for phase in names.phase_seconds(record)}, key=names.phase_order)
    bottoms = [0.0] * len(bins)
    for phase in phases:
        heights = [math.fsum(r.get(names.TIME + phase, 0.0) for r in part) / len(part) for part in bins]
        colour = PHASE_COLOURS.get(phase, "#666666")
        panel.bar(centres, heights, width=size, bottom=bottoms, color=colour, label=phase, linewidth=0)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    if phases:
        panel.set_ylim(0, max(bottoms) * 1.35 or 1)  # room for the legend above the bars
        panel.legend(loc="upper center", ncols=3, columnspacing=1.0, handlelength=1.0)


def _arm(panel: "Axes", arm: str, curves: Mapping[str, Mapping[int, float]], colour: str, alone: bool) -> None:
    """Thin lines for the runs of an arm and a bold one for their median."""
    labelled = alone and len(curves) <= MAX_LABELLED_RUNS
    for number, (name, curve) in enumerate(curves.items()):
        own = COLOURS[number % len(COLOURS)] if labelled else colour
        panel.plot(curve.keys(), curve.values(), color=own, linewidth=0.9, alpha=0.55, label=name if labelled else None)
    label = f"{arm or 'all'} (median of {len(curves)})"
    panel.plot(*median_curve(list(curves.values())), color="black" if labelled else colour, linewidth=2.2, label=label)
