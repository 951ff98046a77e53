"""The lines that the console shows, as functions of what it knows. Nothing here writes to a terminal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lora_rl.track import names
from lora_rl.track.format import Glyphs, apportion, duration, number, shorten, sparkline
from lora_rl.track.state import RunState

LABEL_CELLS = 12
TABLE_FROM_WIDTH = 100  # below, a table would leave a few words of each text
STYLES = {
    "startup": "yellow",
    "generation": "cyan",
    "reward": "white",
    "training": "green",
    "sync": "magenta",
    "validation": "blue",
    "checkpoint": "red",
    "other": "dim",
}
HEALTH = {  # what the display calls them
    names.KL: "kl",
    names.GEN_KL_ERROR: "gen_kl_error",
    names.TOKEN_MULT_PROB_ERROR: "prob_error",
    names.GRAD_NORM: "grad_norm",
    names.LR: "lr",
    names.NLL: "loss",
    names.VAL_NLL: "held-out loss",
}


@dataclass(frozen=True)
class Sample:
    """One rollout to show. Texts may be of any length and hold any character."""

    prompt: str
    completion: str
    expected: str
    reward: float
    stop_reason: str


def label(text: str) -> Text:
    return Text(f"{text:<{LABEL_CELLS}}", style="dim")


def flow(pieces: Iterable[Text], width: int, first: Text) -> list[Text]:
    """Pieces side by side, on as many lines as they need, none broken in two; `first` labels the first line."""
    lines = [first.copy()]
    for piece in pieces:
        if lines[-1].cell_len + piece.cell_len > width and lines[-1].cell_len > first.cell_len:
            lines.append(Text(" " * first.cell_len))
        lines[-1].append_text(piece).append("   ")
    for line in lines:
        line.rstrip()
    return lines


def live_lines(state: RunState, width: int, glyphs: Glyphs, elapsed_s: float) -> list[Text]:
    """The live region: progress, curves, health, speed and where the time goes, each line within `width`."""
    lines = [_progress(state, width, glyphs, elapsed_s)]
    rewards = state.history[names.REWARD]
    if rewards:
        lines.append(_curve("reward", rewards, f"start {number(rewards[0])}", width, glyphs))
    if accuracies := state.history[names.ACCURACY]:
        best = state.best_accuracy()
        note = f"start {number(accuracies[0])}"
        if best and width >= 80:
            note += f"   best {number(best[1])} at step {best[0]}"
        lines.append(_curve("accuracy", accuracies, note, width, glyphs))
    health = [_pair(shown, number(state.latest[name])) for name, shown in HEALTH.items() if name in state.latest]
    if health:
        lines += flow(health, width, label("health"))
    speed = [_pair(phase, f"{number(rate)} tokens/s") for phase, rate in state.tokens_per_s().items()]
    if (pace := state.step_s()) is not None:
        speed.append(_pair("step", duration(pace)))
    if speed:
        lines += flow(speed, width, label("speed"))
    return lines + share_lines(state.shares(startup=False), width, glyphs)


def share_lines(shares: Sequence[tuple[str, float]], width: int, glyphs: Glyphs) -> list[Text]:
    """A bar of the time per phase, and its legend in per cent."""
    if not shares:
        return []
    seconds = [spent for _, spent in shares]
    bar, legend = label("time"), []
    cells = apportion(seconds, width - LABEL_CELLS)
    for (phase, _), count, percent in zip(shares, cells, apportion(seconds, 100), strict=True):
        glyph, style = glyphs.phases.get(phase, glyphs.phase), STYLES.get(phase, "white")
        bar.append(glyph * count, style=style)
        shown = "start-up" if phase == "startup" else phase
        legend.append(Text.assemble((glyph, style), f" {shown} {percent} %"))
    return [bar, *flow(legend, width, label(""))]


def step_line(state: RunState, record: dict) -> str:
    """One step as one line of plain text."""
    total = "" if state.total_steps is None else f"/{state.total_steps}"
    parts = [f"step {record['step']:>{len(total[1:]) or 4}}{total}"]
    if names.REWARD in record:
        parts.append(f"reward {number(record[names.REWARD])}")
    if names.ACCURACY in record:
        accuracy, start = record[names.ACCURACY], state.history[names.ACCURACY][0]
        parts.append(f"accuracy {number(accuracy)} (start {number(start)})")
    parts += [f"{shown} {number(record[name])}" for name, shown in HEALTH.items() if name in record]
    for phase in sorted(STYLES, key=names.phase_order):
        if names.TOKENS_PER_S + phase in record:
            parts.append(f"{phase} {number(record[names.TOKENS_PER_S + phase])} tokens/s")
    if names.STEP_TIME in record:
        parts.append(duration(record[names.STEP_TIME]))
    if left := state.left_s():
        parts.append(f"left {duration(left)}")
    return "  ".join(parts)


def pick_samples(samples: Sequence[Sample], count: int) -> list[Sample]:
    """`count` samples spread over the rewards, the best first and the worst last."""
    ranked = sorted(samples, key=lambda sample: -sample.reward)
    if len(ranked) <= count:
        return ranked
    return [ranked[round(i * (len(ranked) - 1) / max(count - 1, 1))] for i in range(count)]


def sample_view(step: int, samples: Sequence[Sample], width: int, as_table: bool) -> list[RenderableType]:
    """Samples as a table where there is room for one, otherwise as a few lines each."""
    if not as_table or width < TABLE_FROM_WIDTH:
        return [line for sample in samples for line in _sample_lines(step, sample, width)]
    table = Table(title=f"samples of step {step}", title_justify="left", title_style="dim", box=box.SIMPLE_HEAD)
    expected_cells, stop_cells = 14, 8
    text_cells = width - 9 - expected_cells - stop_cells - 12
    prompt_cells = text_cells * 2 // 5
    columns = ("prompt", prompt_cells), ("completion", text_cells - prompt_cells), ("expected", expected_cells)
    for title, cells in columns:
        table.add_column(title, width=cells, overflow="fold")
    table.add_column("reward", justify="right", width=9)
    table.add_column("stop", width=stop_cells, overflow="fold")
    for sample in samples:
        texts = zip((sample.prompt, sample.completion, sample.expected), columns, (3, 3, 2), strict=True)
        # A little less than the cells of the rows, because words wrap before the end of a row.
        cells = [Text(shorten(text, rows * size - 10)) for text, (_, size), rows in texts]
        table.add_row(*cells, number(sample.reward), Text(shorten(sample.stop_reason, stop_cells)))
    return [table]


def summary_lines(state: RunState, width: int, glyphs: Glyphs, failed: bool) -> list[Text]:
    """What the run did: steps, wall time and its shares, accuracy and reward from start to end, speed."""
    if state.step is None:
        return [Text(f"run {'failed' if failed else 'ended'} before the first step", style="bold")]
    complete = state.total_steps is None or state.step >= state.total_steps
    where = f"step {state.step}" + ("" if state.total_steps is None else f" of {state.total_steps}")
    outcome = f"failed after {where}" if failed else "finished" if complete else f"stopped at {where}"
    steps = f"{state.trained} step" + ("" if state.trained == 1 else "s")
    title = Text(f"run {outcome}: {steps} in {duration(state.wall_s())}", style="bold")
    title.stylize("red" if failed else "green" if complete else "yellow")
    lines = [title, *share_lines(state.shares(startup=True), width, glyphs)]
    for name, shown in ((names.ACCURACY, "accuracy"), (names.REWARD, "reward")):
        if values := state.history[name]:
            line = label(shown).append(f"start {number(values[0])}")
            if name == names.ACCURACY and (best := state.best_accuracy()):
                line.append(f" -> best {number(best[1])} at step {best[0]}")
            lines.append(line.append(f" -> last {number(values[-1])}", style="bold"))
    if rates := state.tokens_per_s():
        lines += flow((_pair(p, number(rate)) for p, rate in rates.items()), width, label("tokens/s"))
    if staleness := state.staleness():
        ages = ("mean age", "oldest")
        shown = (_pair(n, number(v) if n in ages else f"{v:.0%}") for n, v in staleness.items())
        lines += flow(shown, width, label("staleness"))
    return lines


def _pair(name: str, value: str) -> Text:
    return Text.assemble((name + " ", "dim"), (value, "bold"))


def _progress(state: RunState, width: int, glyphs: Glyphs, elapsed_s: float) -> Text:
    step = state.step or 0
    line = label("step")
    if state.total_steps is None:
        return line.append(str(step), style="bold").append(f"   elapsed {duration(elapsed_s)}")
    line.append(f"{step}/{state.total_steps}  ", style="bold")
    left = state.left_s()
    note = f"  left {'unknown' if left is None else duration(left)}"
    if width >= 80:
        note = f"  elapsed {duration(elapsed_s)} {note}"
    cells = width - line.cell_len - len(note)
    done = min(cells, cells * step // max(state.total_steps, 1))
    line.append(glyphs.full * done, style="green").append(glyphs.empty * (cells - done), style="dim")
    return line.append(note)


def _curve(name: str, values: Sequence[float], note: str, width: int, glyphs: Glyphs) -> Text:
    line = label(name).append(f"{number(values[-1]):<9}", style="bold")
    cells = max(width - line.cell_len - len(note) - 2, 8)
    return line.append(sparkline(values, cells, glyphs.spark), style="cyan").append("  " + note, style="dim")


def _sample_lines(step: int, sample: Sample, width: int) -> list[Text]:
    head = f"step {step}  reward {number(sample.reward)} ({shorten(sample.stop_reason, 10)})  expected "
    lines = [label("sample").append(head)]
    lines[0].append(shorten(sample.expected, max(width - lines[0].cell_len, 8)))
    for name, text in (("prompt", sample.prompt), ("completion", sample.completion)):
        lines.append(label(name).append(shorten(text, width - LABEL_CELLS) or "(empty)"))
    return lines
