"""The default job synchronous, with an engine of its own, and generating while training: wall clock, reward, memory.

uv run benchmarks/async_vs_sync.py [--steps 170] [--out results/async_vs_sync] [--figure docs/images/async.png]

Runs real jobs one after the other; one that is already complete in --out is not repeated. Prints a table in Markdown:
held-out accuracy at the end, median seconds per step and their ratios, who waited, and how fast the memory of each side
grows (slope of a line through the second half of the run). Draws the accuracy over time and where a step's time goes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from runs import Run, Starter, last, markdown

ASYNC = "grpo_async_tiny_cpu.yaml"
OFF = ("grpo.async_grpo.enabled=false", "grpo.async_grpo.in_flight_weight_updates=false")
# name: (configuration, overrides)
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sync": ("grpo_tiny_cpu.yaml", ()),
    "sync own engine": (ASYNC, OFF),
    "async age 1": (ASYNC, ()),
    "async age 2": (ASYNC, ("grpo.async_grpo.max_trajectory_age_steps=2",)),
}
PHASES = {
    "generation": "waiting for rollouts",
    "training": "training",
    "sync": "weight sync",
    "validation": "validation",
}
# Steps that are left out of medians: caches warm up.
WARM_UP = 5


def main() -> int:
    """Run what is missing, print, draw; 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=170)
    parser.add_argument("--arms", default=",".join(ARMS), help="names, separated by commas; default: all")
    parser.add_argument("--out", type=Path, default=Path("results/async_vs_sync"))
    parser.add_argument("--figure", type=Path)
    parser.add_argument("overrides", nargs="*", help="further key=value of every run")
    arguments = parser.parse_args()
    runs = {name: the_run(name, arguments) for name in arguments.arms.split(",")}
    # One at a time: what is compared is seconds.
    if Starter().complete(list(runs.values())):
        return 1
    records = {name: run.records() or [] for name, run in runs.items()}
    sys.stdout.write(table(records))
    if arguments.figure is not None:
        draw(records, arguments.figure)
    return 0


def the_run(name: str, arguments: argparse.Namespace) -> Run:
    """The job of an arm."""
    config, options = ARMS[name]
    folder = arguments.out / name.replace(" ", "_")
    return Run(
        folder, arguments.steps, config, (*options, f"grpo.max_num_steps={arguments.steps}", *arguments.overrides)
    )


def step_seconds(records: Sequence[Mapping]) -> float:
    """Median seconds of a step, its validation left out."""
    return statistics.median(r["time/step"] - r.get("time/validation", 0.0) for r in records[1 + WARM_UP :])


def slope(records: Sequence[Mapping], metric: str) -> float:
    """MiB per step by which a metric in GiB grows over the second half of a run (least squares)."""
    import numpy as np

    half = [r for r in records[len(records) // 2 :] if metric in r]
    if len(half) < 2:
        return float("nan")
    return float(np.polyfit([r["step"] for r in half], [r[metric] * 1024 for r in half], 1)[0])


def mean(records: Sequence[Mapping], metric: str) -> float:
    """Mean over the steps that have the metric; NaN if none has."""
    values = [r[metric] for r in records[1 + WARM_UP :] if metric in r]
    return statistics.fmean(values) if values else float("nan")


def table(runs: Mapping[str, Sequence[Mapping]]) -> str:
    """One line per run."""
    heads = [
        "run", "accuracy", "reward", "s per step", "to the first", "total s", "trainer waits", "engine idle",
        "mean age", "rank, engine, driver: MiB per step",
    ]  # fmt: skip
    base = step_seconds(next(iter(runs.values())))
    rows = []
    for name, records in runs.items():
        seconds = step_seconds(records)
        age, idle = mean(records, "rollout/age_mean"), mean(records, "rollout/engine_idle_share")
        growth = [slope(records, f"memory/training/{side}_gib") for side in ("ranks", "engines", "driver")]
        rows.append([
            name,
            f"{last(records, 'val/accuracy'):.3f}",
            f"{statistics.fmean(r['train/reward'] for r in records[-10:]):.3f}",
            f"{seconds:.2f}",
            f"{seconds / base:.2f}",
            f"{records[-1]['elapsed_s']:.0f}",
            f"{mean(records, 'time/generation') / seconds:.0%}",
            "" if idle != idle else f"{idle:.0%}",
            "0" if age != age else f"{age:.2f}",
            ", ".join(f"{value:.2f}" for value in growth),
        ])  # fmt: skip
    return markdown(heads, rows)


def draw(runs: Mapping[str, Sequence[Mapping]], path: Path) -> None:
    """Accuracy over wall-clock seconds, and the mean seconds of a step by what the trainer does."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from lora_rl.track.plot import COLOURS, STYLE

    with plt.rc_context(STYLE):
        figure, (curve, bars) = plt.subplots(1, 2, figsize=(11, 3.6), constrained_layout=True)
        for colour, (name, records) in zip(COLOURS, runs.items(), strict=False):
            points = [(r["elapsed_s"], r["val/accuracy"]) for r in records if "val/accuracy" in r]
            curve.plot(*zip(*points, strict=True), marker=".", color=colour, label=name)
        curve.set(xlabel="seconds from the start", ylabel="accuracy", title="Accuracy on held-out prompts")
        curve.legend(loc="lower right")
        names, left = list(runs), [0.0] * len(runs)
        for colour, (phase, label) in zip(COLOURS, PHASES.items(), strict=False):
            seconds = [
                sum(r.get(f"time/{phase}", 0.0) for r in records[1:]) / (len(records) - 1) for records in runs.values()
            ]
            bars.barh(names, seconds, left=left, color=colour, label=label)
            left = [a + b for a, b in zip(left, seconds, strict=True)]
        bars.invert_yaxis()
        bars.set(xlabel="seconds", title="What the trainer does in a step (mean)")
        bars.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
        plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
