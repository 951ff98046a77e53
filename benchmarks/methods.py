"""Every method of docs/methods.md on the tiny task: reward at the start and the end, and held-out accuracy.

uv run benchmarks/methods.py [--methods grpo,dapo] [--steps 30] [--seeds 0,1,2] [--out results/methods]

Runs are real jobs, `--jobs` at a time, with the configuration that the page gives and the same number of completions
per step. A run that is already complete in --out is not repeated, so an interrupted table is continued by the same
command; `--table` only prints what there is. Prints a table in Markdown: mean and standard deviation over the seeds of
the reward of the first five and the last five steps, and of the accuracy on the held-out pairs after the last step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from runs import Run, Starter, add_run_options, last, markdown, parse_runs, spread

CORRECTION = ("loss_fn.use_importance_sampling_correction=true",)
# name: (configuration file, overrides)
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "grpo": ("grpo_tiny_cpu.yaml", ()),
    "grpo_sequence_mean": ("grpo_tiny_cpu.yaml", ("loss_fn.token_level_loss=false",)),
    "dr_grpo": ("dr_grpo_tiny_cpu.yaml", ()),
    "rloo": ("rloo_tiny_cpu.yaml", ()),
    "reinforce_pp": ("reinforce_pp_tiny_cpu.yaml", ()),
    "reinforce_pp_no_baseline": (
        "reinforce_pp_tiny_cpu.yaml",
        ("grpo.adv_estimator.minus_baseline=false", "grpo.drop_zero_variance_groups=false"),
    ),
    "dapo": ("dapo_tiny_cpu.yaml", ()),
    "gspo": ("gspo_tiny_cpu.yaml", ()),
    "cispo": ("cispo_tiny_cpu.yaml", ()),
    "sapo": ("sapo_tiny_cpu.yaml", ()),
    "dual_clip": ("grpo_tiny_cpu.yaml", ("loss_fn.ratio_clip_c=3.0",)),
    "kl_k2": (
        "grpo_tiny_cpu.yaml",
        ("loss_fn.reference_policy_kl_penalty=0.01", "loss_fn.reference_policy_kl_type=k2"),
    ),
    "kl_k3": ("grpo_tiny_cpu.yaml", ("loss_fn.reference_policy_kl_penalty=0.01",)),
    "kl_in_reward": (
        "grpo_tiny_cpu.yaml",
        (
            "loss_fn.reference_policy_kl_penalty=0.01",
            "loss_fn.reference_policy_kl_type=k1",
            "loss_fn.use_kl_in_reward=true",
        ),
    ),
    "tis": ("grpo_tiny_cpu.yaml", CORRECTION),
    "icepop": ("grpo_tiny_cpu.yaml", (*CORRECTION, "loss_fn.importance_sampling_type=icepop")),
    "seq_mask": ("grpo_tiny_cpu.yaml", (*CORRECTION, "loss_fn.importance_sampling_type=seq_mask")),
    "overlong_filtering": ("grpo_tiny_cpu.yaml", ("grpo.overlong_filtering=true",)),
}
WINDOW = 5


def main() -> int:
    """Run what is missing, print the table; 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("results/methods"))
    parser.add_argument("--skip-validation", action="store_true", help="leave the held-out accuracy out")
    add_run_options(parser, list(METHODS), what="methods", seeds="0,1,2", note="separated by commas")
    arguments, names, seeds = parse_runs(parser, list(METHODS), what="methods")
    runs = {name: [the_run(name, seed, arguments) for seed in seeds] for name in names}
    # Seed by seed, so that what is interrupted has every method.
    ordered = [runs[name][i] for i in range(len(seeds)) for name in names]
    failed = [] if arguments.table else Starter(arguments.jobs, arguments.lock).complete(ordered)
    sys.stdout.write(table(runs))
    return 1 if failed else 0


def the_run(name: str, seed: int, arguments: argparse.Namespace) -> Run:
    """A method with a seed."""
    config, overrides = METHODS[name]
    options = [
        f"grpo.max_num_steps={arguments.steps}",
        f"grpo.seed={seed}",
        "grpo.val_at_start=false",
        f"grpo.val_period={0 if arguments.skip_validation else arguments.steps}",
    ]
    return Run(arguments.out / f"{name}-{seed}", arguments.steps, config, (*overrides, *options, *arguments.overrides))


def table(runs: dict[str, list[Run]]) -> str:
    """What is complete, as Markdown."""
    rows = []
    for name, of_seeds in runs.items():
        complete: list[Sequence[dict]] = [records for run in of_seeds if (records := run.records())]
        rewards = [[record["train/reward"] for record in r if "train/reward" in record] for r in complete]
        rows.append([
            name,
            str(len(complete)),
            spread([statistics.fmean(values[:WINDOW]) for values in rewards]),
            spread([statistics.fmean(values[-WINDOW:]) for values in rewards]),
            spread([last(r, "val/accuracy") for r in complete if "val/accuracy" in r[-1]]),
        ])  # fmt: skip
    heads = [
        "method", "seeds", f"reward, steps 1-{WINDOW}", f"reward, last {WINDOW} steps", "held-out accuracy",
    ]  # fmt: skip
    return markdown(heads, rows)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from here")
