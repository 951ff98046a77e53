"""Jumps ahead against the same job without: what it costs, everything included, to reach a reward fixed beforehand.

uv run benchmarks/next.py [--jobs 2] [--seeds 1,2,3,4,5] [--target 0.8] [--out results/next] [--figure FILE]

First the job without jumps gets its learning rate, the best of three, on a seed of its own; all arms use it. Then all
arms run with the other seeds. A run that is complete in --out is not repeated; `--table` starts nothing. Prints tables
in Markdown, which `--page` also writes into docs/next.md, and draws the rewards, and how well the trail of the runs
without jumps can be predicted, by horizon.

The reward is the mean over the last five steps of the mean reward of a step's rollouts. Tokens are those generated and
those the trainer ran over; the gate's count, and so do steps that a rollback undid. Seconds are those of the steps,
validation left out. Runs that do not reach the reward are counted as not reaching it, and have no cost.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from next_trail import Cosines, kept_cosines
from runs import ROOT, Run, Starter, add_run_options, last, markdown, parse_runs, spread, write_at_end

from lora_rl.track.smoothing import moving_mean

CONFIG = "grpo_tiny_cpu.yaml"
INTERVAL = 2
COMMON = (
    # At a constant rate the reward says how far training is, not where the schedule is.
    "policy.megatron_cfg.scheduler.lr_decay_style=constant",
    "policy.megatron_cfg.scheduler.lr_warmup_iters=5",
    "grpo.val_at_start=false",
    "logger.tensorboard_enabled=false",
)
NEXT = "grpo.next"
JUMPS = (f"{NEXT}.enabled=true", f"{NEXT}.interval={INTERVAL}")
# One to ten: fifteen snapshots, and five of them ahead.
PAPER = (f"{NEXT}.preset=paper",)
# name: (title, overrides). The first is what the others are compared with.
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "baseline": ("no jumps", ()),
    "paper": ("the published procedure: one jump, unmeasured", (*JUMPS, *PAPER)),
    "default": ("best predictor, gate and watch", JUMPS),
    "scale": ("null: the way so far, stretched; gate and watch", (*JUMPS, f"{NEXT}.predictor.type=scale")),
    "random": (
        "null: a random direction as long; gate and watch",
        (*JUMPS, f"{NEXT}.predictor.type=random", f"{NEXT}.min_backtest_cos=null", f"{NEXT}.damping=false"),
    ),
    "random_unmeasured": (
        "null: one random direction, unmeasured",
        (*JUMPS, *PAPER, f"{NEXT}.predictor.type=random"),
    ),
}
RATES = (2.5e-4, 5e-4, 1e-3)
CHOOSING_SEED, WINDOW, HORIZONS = 0, 5, (1, 2, 3, 4, 5)
# How many of the trails the trained predictor is tested on, which takes a quarter of an hour for each.
LEARNT_TRAILS = 1


@dataclass(frozen=True)
class Cost:
    """Of reaching the reward."""

    steps: int
    tokens: float
    seconds: float


def main() -> int:
    """Run what is missing, print, draw; 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--target", type=float, default=0.8, help="the reward whose cost is compared")
    parser.add_argument("--rate", type=float, help="learning rate; default: the best of three")
    parser.add_argument("--out", type=Path, default=Path("results/next"))
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--page", action="store_true", help="also write the tables into docs/next.md")
    add_run_options(parser, list(ARMS), what="arms", seeds="1,2,3,4,5", note="not 0, which chooses the learning rate")
    arguments, names, seeds = parse_runs(parser, list(ARMS), what="arms")
    if names[0] != next(iter(ARMS)):
        parser.error(f"--arms: the first must be {next(iter(ARMS))}, which the others are compared with")
    if CHOOSING_SEED in seeds:
        parser.error(f"--seeds: {CHOOSING_SEED} chooses the learning rate")
    starter = Starter(arguments.jobs, arguments.lock)
    rate, chosen = arguments.rate, ""
    if rate is None:
        choosing = {r: the_run("baseline", r, CHOOSING_SEED, arguments) for r in RATES}
        if not arguments.table and starter.complete(list(choosing.values())):
            return 1
        rate = best_rate(choosing, arguments.target)
        chosen = "\n" + choosing_table(choosing, rate, arguments.target)
    runs = {name: [the_run(name, rate, seed, arguments) for seed in seeds] for name in names}
    # Seed by seed, so that what is interrupted has every arm.
    ordered = [runs[name][i] for i in range(len(seeds)) for name in names]
    failed = [] if arguments.table else starter.complete(ordered)
    found = {
        name: {s: r for s, run in zip(seeds, of, strict=True) if (r := run.records())} for name, of in runs.items()
    }
    text = table(found, arguments.target) + chosen
    sys.stdout.write(text)
    if arguments.page:
        write_at_end(ROOT / "docs/next.md", "next.py", text)
    if arguments.figure is not None and all(found.values()):
        folders = [run.folder for run in runs["baseline"] if run.records()]
        trails = [kept_cosines(f, HORIZONS, n, learnt=n < LEARNT_TRAILS) for n, f in enumerate(folders)]
        draw(found, trails, arguments)
    return 1 if failed else 0


def the_run(name: str, rate: float, seed: int, arguments: argparse.Namespace) -> Run:
    """A job of an arm; without jumps it keeps its trail."""
    options = [
        f"grpo.max_num_steps={arguments.steps}",
        f"grpo.val_period={arguments.steps}",
        f"grpo.seed={seed}",
        f"policy.megatron_cfg.optimizer.lr={rate}",
        *COMMON,
        *ARMS[name][1],
    ]
    if name == "baseline":
        options += [
            "checkpointing.enabled=true",
            f"checkpointing.save_period={INTERVAL}",
            "checkpointing.keep_top_k=null",
        ]
    folder = arguments.out / f"{name}-lr{rate:g}-{seed}"
    return Run(folder, arguments.steps, CONFIG, [*options, *arguments.overrides])


def cost(records: Sequence[Mapping[str, Any]], target: float) -> Cost | None:
    """What it took until the reward was reached; None if it was not."""
    steps = [r for r in records if "train/reward" in r]
    rewards = moving_mean([r["train/reward"] for r in steps], WINDOW)
    reached = next((n for n, reward in enumerate(rewards) if n >= WINDOW - 1 and reward >= target), None)
    if reached is None:
        return None
    done = steps[: reached + 1]
    tokens = sum(r.get("tokens/generation", 0) + r.get("tokens/training", 0) for r in done)
    gate = done[-1].get("next/gate_generated_tokens", 0) + done[-1].get("next/gate_scored_tokens", 0)
    seconds = sum(r["time/step"] - r.get("time/validation", 0.0) - r.get("time/startup", 0.0) for r in done)
    return Cost(len(done), tokens + gate, seconds)


def best_rate(choosing: Mapping[float, Run], target: float) -> float:
    """The rate that reaches the reward in the fewest steps; among those that do not, the one with the best end."""
    known = {rate: records for rate, run in choosing.items() if (records := run.records())}

    def order(rate: float) -> tuple[float, float]:
        reached = cost(known[rate], target)
        return (reached.steps if reached else float("inf")), -end(known[rate])

    return min(known, key=order) if known else RATES[0]


def end(records: Sequence[Mapping[str, Any]]) -> float:
    """Reward of the last ten steps."""
    return statistics.fmean([r["train/reward"] for r in records if "train/reward" in r][-10:])


def choosing_table(choosing: Mapping[float, Run], best: float, target: float) -> str:
    """How each learning rate did without jumps, the chosen one in bold."""
    rows = []
    for rate, run in choosing.items():
        if records := run.records():
            reached = cost(records, target)
            shown = f"**{rate:g}**" if rate == best else f"{rate:g}"
            rows.append([shown, str(reached.steps) if reached else "not reached", f"{end(records):.3f}"])
    return markdown(["learning rate", f"steps to reward {target:g}", "reward, last 10 steps"], rows)


def table(found: Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]], target: float) -> str:
    """One line per arm: mean and standard deviation over the seeds; savings are against the same seed without jumps."""
    base = {seed: cost(records, target) for seed, records in next(iter(found.values())).items()}
    rows = []
    for name, of_seeds in found.items():
        costs = {seed: cost(records, target) for seed, records in of_seeds.items()}
        reached = [c for c in costs.values() if c]
        pairs = [(c, base[seed]) for seed, c in costs.items() if c and base.get(seed)]
        saved = {
            what: spread([1 - getattr(c, what) / getattr(b, what) for c, b in pairs])
            for what in ("steps", "tokens", "seconds")
        }
        ends = [records[-1] for records in of_seeds.values()]
        jumps = [sum(r.get(f"next/{what}", 0) for r in ends) for what in ("proposed", "accepted", "rolled_back")]
        rows.append([
            ARMS[name][0],
            f"{len(reached)} of {len(of_seeds)}",
            spread([c.steps for c in reached], 1),
            spread([c.tokens / 1000 for c in reached], 0),
            spread([c.seconds for c in reached], 0),
            *("" if name == next(iter(found)) else saved[what] for what in ("steps", "tokens", "seconds")),
            " / ".join(f"{count:g}" for count in jumps),
            spread([end(records) for records in of_seeds.values()]),
            spread([last(records, "val/accuracy") for records in of_seeds.values()]),
        ])  # fmt: skip
    heads = [
        "arm", f"reached {target:g}", "steps", "thousand tokens", "seconds", "steps saved", "tokens saved",
        "seconds saved", "jumps proposed / taken / undone", "reward, last 10 steps", "held-out accuracy",
    ]  # fmt: skip
    return markdown(heads, rows)


def draw(
    found: Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]], trails: Sequence[Cosines], arguments: Any
) -> None:
    """Reward over tokens, gate included; cosine of prediction and outcome by horizon, with that of random walks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from lora_rl.track.plot import COLOURS, STYLE

    with plt.rc_context(STYLE):
        figure, (curve, cosine) = plt.subplots(1, 2, figsize=(11, 3.8), constrained_layout=True)
        for colour, (name, of_seeds) in zip(COLOURS, found.items(), strict=False):
            for n, records in enumerate(of_seeds.values()):
                steps = [r for r in records if "train/reward" in r]
                spent, tokens = 0.0, []
                for r in steps:
                    spent += r.get("tokens/generation", 0) + r.get("tokens/training", 0)
                    tokens.append(spent + r.get("next/gate_generated_tokens", 0) + r.get("next/gate_scored_tokens", 0))
                smooth = moving_mean([r["train/reward"] for r in steps], WINDOW)
                label = {"label": ARMS[name][0]} if n == 0 else {}
                curve.plot([t / 1000 for t in tokens], smooth, color=colour, alpha=0.6, linewidth=1, **label)
        curve.axhline(arguments.target, color="#000000", linewidth=0.8, linestyle=":")
        curve.set(xlabel="thousand tokens, the gate's included", ylabel="reward", title="Reward, mean of five steps")
        curve.legend(loc="lower right", fontsize="small")
        for colour, name in zip(COLOURS, trails[0].trained, strict=False):
            of = [t for t in trails if name in t.trained]
            trained, walk = ([statistics.fmean(v) for v in zip(*(getattr(t, w)[name] for t in of), strict=True)]
                             for w in ("trained", "walk"))  # fmt: skip
            steps = [INTERVAL * h for h in HORIZONS]
            cosine.plot(steps, trained, marker="o", markersize=3, color=colour, label=name)
            cosine.plot(steps, walk, color=colour, linewidth=0.8, linestyle="--")
        cosine.plot([], [], color="#666666", linestyle="--", linewidth=0.8, label="on a random walk")
        cosine.axhline(0, color="#000000", linewidth=0.8)
        cosine.set(xlabel="steps ahead", ylabel="cosine", title="Prediction and what training did")
        cosine.legend(loc="lower center", bbox_to_anchor=(0.5, 0.1), ncols=3, fontsize="small")
        arguments.figure.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(arguments.figure, dpi=150)
        plt.close(figure)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from here")
