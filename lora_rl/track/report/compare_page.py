"""Two or more runs on one page."""

import math
from collections.abc import Callable, Sequence

from lora_rl.track import names
from lora_rl.track.format import duration, number
from lora_rl.track.report import catalogue
from lora_rl.track.report.catalogue import Shown
from lora_rl.track.report.charts import Chart, Line, legend, line_chart, share_bar
from lora_rl.track.report.html import Node, h, page
from lora_rl.track.report.parts import (
    SMOOTHING_STEPS,
    charts,
    describe_phase,
    is_noisy,
    phase_colour,
    phase_name,
    sample_groups,
    table,
)
from lora_rl.track.report.run_folder import RECENT_STEPS, Run, outcome
from lora_rl.track.samples import compare
from lora_rl.track.smoothing import moving_mean

# Keys that differ between any two runs and say nothing.
UNTOLD_KEYS = ("logger.log_dir",)


def compare_page(runs: Sequence[Run]) -> str:
    """The whole page as HTML.

    Args:
        runs: two or more.
    """
    labels = run_labels(runs)
    title = " and ".join(labels) if len(labels) == 2 else f"{len(labels)} runs"
    keys = legend([(label, n) for n, label in enumerate(labels)])
    sections = [
        ("At a glance", _glance(runs, labels)),
        ("Learning", _curves(runs, labels, (*catalogue.RESULT, *catalogue.LEARNING), by_time=True)),
        ("Answers after the last validation", _samples(runs, labels)),
        ("Trainer against engine", _curves(runs, labels, catalogue.ENGINE)),
        ("Weight synchronisation", _curves(runs, labels, catalogue.SYNC)),
        (
            "Staleness",
            _curves(
                runs,
                labels,
                (Shown(names.AGE, "Age of the rollouts", "weight versions", zero=True), *catalogue.STALENESS),
            ),
        ),
        ("Where the time goes", _time(runs, labels)),
        ("What was set differently", _config(runs, labels)),
        ("What they ran on differently", _environment(runs, labels)),
    ]
    body = [h("section", h("h2", heading), content) for heading, content in sections if content is not None]
    head = h("header", h("div", h("h1", title), class_="top"), keys)
    note = h(
        "p", f"Curves that go to and fro at every step are drawn as the mean of {SMOOTHING_STEPS} steps.", class_="note"
    )
    foot = h("footer", "Made by `lora-rl compare` from " + ", ".join(str(run.folder) for run in runs) + ".")
    return page(f"{title} - lora_rl", head, note, *body, foot)


def run_labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run, all different: the folder's, with as many of the folders above it as are needed."""
    paths = [run.folder.resolve().parts for run in runs]
    for count in range(1, max(map(len, paths)) + 1):
        found = ["/".join(parts[-count:]) for parts in paths]
        if len(set(found)) == len(found):
            return found
    return [f"{run.name} ({n})" for n, run in enumerate(runs, start=1)]


def _glance(runs: Sequence[Run], labels: Sequence[str]) -> Node:
    def first(run: Run, metric: str) -> float | None:
        values = run.values(metric)
        return values[0] if values else None

    def last(run: Run, metric: str) -> float | None:
        values = run.values(metric)
        return values[-1] if values else None

    def best(run: Run) -> float | None:
        found = run.best(names.ACCURACY)
        return found[1] if found else None

    def rate(run: Run, phase: str) -> float | None:
        seconds = run.seconds().get(phase)
        return run.tokens().get(phase, 0.0) / seconds if seconds and phase in run.tokens() else None

    level = common_level(runs)
    rows: list[tuple[str, list[float | None], Callable[[float], str], int]] = [
        ("held-out accuracy at the start", [first(r, names.ACCURACY) for r in runs], number, 0),
        ("held-out accuracy, last", [last(r, names.ACCURACY) for r in runs], number, 1),
        ("held-out accuracy, best", [best(r) for r in runs], number, 1),
        ("held-out loss, last", [last(r, names.VAL_NLL) for r in runs], number, -1),
        (f"reward, mean of the last {RECENT_STEPS} steps", [r.recent(names.REWARD) for r in runs], number, 1),
        ("time", [math.fsum(r.seconds().values()) or None for r in runs], duration, 0),
        ("time per step, median", [r.median(names.STEP_TIME) for r in runs], duration, -1),
        ("generation, tokens/s", [rate(r, "generation") for r in runs], number, 1),
        ("training, tokens/s", [rate(r, "training") for r in runs], number, 1),
        ("gen_kl_error, median", [r.median(names.GEN_KL_ERROR) for r in runs], number, -1),
        ("token_mult_prob_error, median", [r.median(names.TOKEN_MULT_PROB_ERROR) for r in runs], "{:.4f}".format, -1),
    ]
    if level is not None:
        until = [seconds_to(run, level) for run in runs]
        rows.insert(3, (f"time until accuracy {number(level)}, which all reached", until, duration, -1))
    body = [("ended", *[outcome(run)[0] for run in runs])]
    for name, values, shown, better in rows:
        known = [value for value in values if value is not None]
        if not known:
            continue
        winner = None
        if better and len(known) > 1 and min(known) < max(known):
            winner = max(known) if better > 0 else min(known)
        cells = []
        for value in values:
            # What reads the same is as good.
            is_best = winner is not None and value is not None and shown(value) == shown(winner)
            cells.append(h("td", "–" if value is None else shown(value), class_="n best" if is_best else "n"))
        body.append((name, *cells))
    return h(
        "div", table(("", *labels), body, range(1, len(runs) + 1)), h("p", "Bold: the best of a row.", class_="note")
    )


def common_level(runs: Sequence[Run]) -> float | None:
    """The highest held-out accuracy that every run reached, if it is above where all of them started."""
    found = [run.best(names.ACCURACY) for run in runs]
    if not all(found):
        return None
    level = min(best for _, best in found)
    return level if level > max(run.values(names.ACCURACY)[0] for run in runs) else None


def seconds_to(run: Run, accuracy: float) -> float | None:
    """Seconds from the start of a run to the first validation with at least this accuracy."""
    return next((r["elapsed_s"] for r in run.records if r.get(names.ACCURACY, -1.0) >= accuracy), None)


def _curves(runs: Sequence[Run], labels: Sequence[str], section: Sequence[Shown], by_time: bool = False) -> Node | None:
    nodes = [_chart(runs, labels, shown) for shown in section]
    if by_time:
        timed = [_chart(runs, labels, shown, minutes=True) for shown in catalogue.RESULT]
        rest = charts(nodes[2:])
        return h("div", [n for n in (charts(nodes[:2], big=True), charts(timed, big=True), rest) if n is not None])
    return charts(nodes)


def _chart(runs: Sequence[Run], labels: Sequence[str], shown: Shown, minutes: bool = False) -> Node | None:
    """One metric of all runs, against steps or the minutes since each began. None when none of them changes."""
    lines, seen = [], set()
    for n, (run, label) in enumerate(zip(runs, labels, strict=True)):
        steps, values = run.series(shown.metric)
        seen.update(values)
        if not shown.dots and is_noisy(values):
            values = moving_mean(values, SMOOTHING_STEPS)
        if minutes:
            at = {record["step"]: record["elapsed_s"] / 60 for record in run.records}
            steps = [at[step] for step in steps]
        lines.append(Line(label, steps, [value - shown.minus for value in values], colour=n, dots=shown.dots))
    if len(seen) < 2 or not any(len(line.values) > 1 for line in lines):
        return None
    title, x_unit = (f"{shown.title} over time", "minutes") if minutes else (shown.title, "step")
    return line_chart(Chart(title, shown.unit, lines, shown.note, zero=shown.zero, x_unit=x_unit))


def _samples(runs: Sequence[Run], labels: Sequence[str]) -> Node | None:
    """Of two runs: the prompts that only one of them answers."""
    if len(runs) != 2 or runs[0].validations is None or runs[1].validations is None:
        return None
    a, b = (run.validations[1] for run in runs)
    changes = compare(a, b)
    if not changes.total:
        return None
    text = (
        f"Of {changes.total} held-out prompts that both answered: {len(changes.still_right)} right in both, "
        f"{len(changes.improved)} better in {labels[1]}, {len(changes.regressed)} better in {labels[0]}, "
        f"{len(changes.still_wrong)} wrong in both."
    )
    headings = {
        "improved": f"Better in {labels[1]}",
        "regressed": f"Better in {labels[0]}",
        "still_wrong": "Wrong in both",
    }
    columns = [f"{label}, step {v.step}" for label, v in zip(labels, (a, b), strict=True)]
    return h("div", h("p", text), sample_groups(changes, columns[0], columns[1], headings))


def _time(runs: Sequence[Run], labels: Sequence[str]) -> Node | None:
    """Mean seconds per step and phase, start-up left out, as bars whose lengths can be compared."""
    means = []
    for run in runs:
        trained = [record for record in run.trained if names.STEP_TIME in record]
        phases: dict[str, float] = {}
        for record in trained:
            for phase, spent in names.phase_seconds(record).items():
                phases[phase] = phases.get(phase, 0.0) + spent / len(trained)
        means.append(phases)
    longest = max((math.fsum(phases.values()) for phases in means), default=0.0)
    if not longest:
        return None
    known = sorted({phase for phases in means for phase in phases}, key=names.phase_order)
    rows = []
    for label, phases in zip(labels, means, strict=True):
        ordered = {phase: phases[phase] for phase in known if phase in phases}
        bar = share_bar(ordered, phase_colour, describe_phase)
        length = h("div", bar, style=f"width:{math.fsum(phases.values()) / longest:.2%}")
        rows.append((label, h("td", length, class_="bar"), duration(math.fsum(phases.values()))))
    keys = legend([(phase_name(phase), phase_colour(phase)) for phase in known], "p")
    text = h("p", "Mean seconds per training step; start-up and the validation before the first step are left out.")
    numbers = [
        (phase_name(phase), *[number(phases[phase]) if phase in phases else "–" for phases in means]) for phase in known
    ]
    detail = table(("seconds per step", *labels), numbers, range(1, len(runs) + 1))
    return h("div", text, keys, table(("", "", "in all"), rows, (2,)), detail)


def _config(runs: Sequence[Run], labels: Sequence[str]) -> Node | None:
    if not all(run.config for run in runs):
        return None
    return _differences([run.config for run in runs], labels, "key", UNTOLD_KEYS, "Nothing: every key is the same.")


def _environment(runs: Sequence[Run], labels: Sequence[str]) -> Node | None:
    found = [run.info.get("environment", {}) for run in runs]
    if not all(found):
        return None
    return _differences(found, labels, "", (), "Nothing: machine and packages are the same.")


def _differences(
    tables: Sequence[dict[str, str]], labels: Sequence[str], head: str, untold: Sequence[str], same: str
) -> Node:
    keys = dict.fromkeys(key for entries in tables for key in entries)
    rows = [
        (h("td", key, class_="key-name"), *[str(entries.get(key, "–")) for entries in tables])
        for key in keys
        if key not in untold and len({entries.get(key) for entries in tables}) > 1
    ]
    return table((head, *labels), rows) if rows else h("p", same)
