"""Every method of docs/methods.md on the tiny task: reward at the start and the end, and held-out accuracy.

uv run benchmarks/methods.py [--methods grpo,dapo] [--steps 30] [--seeds 0,1,2] [--out results/methods]

Runs are real jobs, one after the other, with the configuration that the page gives and the same number of completions
per step. A run that is already complete in --out is not repeated, so an interrupted table is continued by the same
command; `--table` only prints what there is. Prints a table in Markdown: mean and standard deviation over the seeds of
the reward of the first five and the last five steps, and of the accuracy on the held-out pairs after the last step.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "examples/configs"
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
    parser.add_argument("--methods", default=",".join(METHODS), help="names, separated by commas; default: all")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=Path("results/methods"))
    parser.add_argument("--table", action="store_true", help="start nothing, print what is complete")
    parser.add_argument("--skip-validation", action="store_true", help="leave the held-out accuracy out")
    parser.add_argument("--lock", type=Path, help="file to lock during each run, where the machine is shared")
    parser.add_argument("overrides", nargs="*", help="further key=value of every run")
    arguments = parser.parse_args()
    names, seeds = arguments.methods.split(","), [int(seed) for seed in arguments.seeds.split(",")]
    if unknown := [name for name in names if name not in METHODS]:
        parser.error(f"--methods: {', '.join(unknown)}; there are: {', '.join(METHODS)}")
    # A SIGTERM ends the running job as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failed = []
    for name in names if not arguments.table else ():
        for seed in seeds:
            folder = run_folder(arguments.out, name, seed)
            if records_of(folder, arguments.steps) is None and not run(name, seed, folder, arguments):
                failed.append(folder)
    sys.stdout.write(table(names, seeds, arguments.out, arguments.steps))
    for folder in failed:
        sys.stderr.write(f"failed: see {folder.with_suffix('.log')}\n")
    return 1 if failed else 0


def run_folder(out: Path, name: str, seed: int) -> Path:
    """Where a run keeps its records."""
    return out / f"{name}-{seed}"


def records_of(folder: Path, steps: int) -> list[dict[str, Any]] | None:
    """The records of a run that reached its last step, else None."""
    from lora_rl.track import read_metrics

    path = folder / "metrics.jsonl"
    records = read_metrics(path) if path.exists() else []
    return records if records and records[-1]["step"] == steps else None


def run(name: str, seed: int, folder: Path, arguments: argparse.Namespace) -> bool:
    """One job, in a folder cleared of an incomplete earlier one; whether it ended well."""
    config, overrides = METHODS[name]
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, str(ROOT / "examples/run_grpo.py"), "--config", str(CONFIGS / config), *overrides,
        f"grpo.max_num_steps={arguments.steps}", f"grpo.seed={seed}", "grpo.val_at_start=false",
        f"grpo.val_period={0 if arguments.skip_validation else arguments.steps}",
        f"logger.log_dir={folder.resolve()}", "logger.console=plain", *arguments.overrides,
    ]  # fmt: skip
    sys.stderr.write(f"{folder.name} ...\n")
    with locked(arguments.lock), folder.with_suffix(".log").open("w") as log:
        job = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            return job.wait() == 0
        except BaseException:
            # It ends its own processes; killed, it would leave them.
            job.terminate()
            job.wait()
            raise


@contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Hold an exclusive lock on the file, if there is one."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def table(names: Sequence[str], seeds: Sequence[int], out: Path, steps: int) -> str:
    """What is complete, as Markdown."""
    lines = [
        f"| method | seeds | reward, steps 1-{WINDOW} | reward, last {WINDOW} steps | held-out accuracy |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in names:
        runs = [r for seed in seeds if (r := records_of(run_folder(out, name, seed), steps))]
        if not runs:
            lines.append(f"| {name} | 0 |  |  |  |")
            continue
        rewards = [[record["train/reward"] for record in r if "train/reward" in record] for r in runs]
        start = [statistics.fmean(values[:WINDOW]) for values in rewards]
        end = [statistics.fmean(values[-WINDOW:]) for values in rewards]
        accuracy = [r[-1]["val/accuracy"] for r in runs if "val/accuracy" in r[-1]]
        lines.append(f"| {name} | {len(runs)} | {spread(start)} | {spread(end)} | {spread(accuracy)} |")
    return "\n".join(lines) + "\n"


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over the seeds."""
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from here")
