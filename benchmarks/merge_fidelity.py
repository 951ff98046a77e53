"""How much of a small update a bfloat16 engine gets, by sync mode and rounding: retention and gen-KL over 20 steps.

uv run benchmarks/merge_fidelity.py [--steps 20] [--seeds 1 2] [--out FOLDER] [--picture FILE.png]

Each arm is a run of `examples/run_grpo.py` on the tiny model whose base weights are rounded to bfloat16 first, so that
the base itself loses nothing: trainer in float32, engine in bfloat16, one optimizer step per batch, constant learning
rate. gen-KL is `train/gen_kl_error`, the divergence of trainer and engine on the tokens the engine sampled. A run with
a learning rate of 1e-12 gives the floor: what the engine's bfloat16 arithmetic alone makes of it. Takes about 40 s per
arm, learning rate and seed. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SYNC = "policy.generation.weight_sync"
ARMS = {
    "merged, nearest": [f"{SYNC}.mode=merged", f"{SYNC}.rounding=nearest"],
    "merged, stochastic": [f"{SYNC}.mode=merged", f"{SYNC}.rounding=stochastic"],
    "adapter": [f"{SYNC}.mode=adapter"],
}
RATES = ("5e-6", "1e-5", "1e-4")
FLOOR = ("adapter", "1e-12")


def main() -> None:
    """Run every arm, print the table, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="examples/configs/grpo_tiny_cpu.yaml")
    parser.add_argument("--model", type=Path, default=Path("examples/models/tiny-adder"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, help="keep the run folders here; finished ones are used again")
    parser.add_argument("--picture", type=Path, help="PNG to draw")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = arguments.out or Path(temporary)
        model = out / "model"
        if not model.exists():
            round_model(arguments.model, model)
        results = {
            (arm, rate): [run(arguments, out, model, arm, rate, seed) for seed in arguments.seeds]
            for arm, rate in [FLOOR, *((arm, rate) for rate in RATES for arm in ARMS)]
        }
    print_table(results)
    if arguments.picture:
        draw(results, arguments.picture)


def round_model(source: Path, target: Path) -> None:
    """A copy of the checkpoint whose weights bfloat16 can represent."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    tensors = {name: t.bfloat16().float() for name, t in load_file(source / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def run(arguments: argparse.Namespace, out: Path, model: Path, arm: str, rate: str, seed: int) -> list[dict]:
    """Records of the steps after the first, whose rollouts come from B = 0."""
    from lora_rl.track import read_metrics

    folder = out / f"{arm.replace(', ', '_')}_{rate}_{seed}"
    if not (folder / "adapter").exists():
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "examples/run_grpo.py", "--config", arguments.config, f"policy.model_name={model}"]
        command += ["policy.generation.vllm_cfg.precision=bfloat16", "policy.train_global_batch_size=null"]
        command += [f"grpo.max_num_steps={arguments.steps}", "grpo.val_period=0", "grpo.val_at_start=false"]
        command += [f"grpo.seed={seed}", f"policy.megatron_cfg.optimizer.lr={rate}"]
        command += ["policy.megatron_cfg.scheduler.lr_decay_style=constant"]
        command += ["policy.megatron_cfg.scheduler.lr_warmup_iters=0", "logger.console=plain"]
        command += ["logger.tensorboard_enabled=false", f"logger.log_dir={folder}", *ARMS[arm]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["step"] > 1]


def over_seeds(runs: list[list[dict]], metric: str) -> list[float]:
    """Mean over the steps of each seed's run."""
    return [statistics.fmean(r[metric] for r in records) for records in runs if metric in records[0]]


def print_table(results: dict[tuple[str, str], list[list[dict]]]) -> None:
    """Means over the steps; the range over seeds in brackets."""

    def cell(values: list[float], form: str) -> str:
        if not values:
            return "-"
        low, high = (format(f(values), form) for f in (min, max))
        return f"{format(statistics.median(values), form)} ({low} to {high})"

    sys.stdout.write("| learning rate | arm | gen-KL, nats per token | sync/retention | sync/relative_error |\n")
    sys.stdout.write("| --- | --- | --- | --- | --- |\n")
    for (arm, rate), runs in results.items():
        label = "floor (1e-12)" if rate == FLOOR[1] else rate
        columns = [
            cell(over_seeds(runs, "train/gen_kl_error"), ".2e"),
            cell(over_seeds(runs, "sync/retention"), ".3f"),
            cell(over_seeds(runs, "sync/relative_error"), ".2f"),
        ]
        sys.stdout.write(f"| {label} | {arm} | {' | '.join(columns)} |\n")


def draw(results: dict[tuple[str, str], list[list[dict]]], path: Path) -> None:
    """gen-KL per step, one panel per learning rate; bands are the range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    floor = statistics.median(over_seeds(results[FLOOR], "train/gen_kl_error"))
    figure, panels = plt.subplots(2, len(RATES), figsize=(13, 7), sharex=True, sharey="row", layout="constrained")
    for column, rate in enumerate(RATES):
        upper, lower = panels[:, column]
        for arm, colour in zip(ARMS, ("tab:red", "tab:blue", "tab:green"), strict=True):
            for panel, metric in ((upper, "train/gen_kl_error"), (lower, "sync/retention")):
                series = [[r[metric] for r in records] for records in results[arm, rate] if metric in records[0]]
                if not series:
                    continue
                steps = [r["step"] for r in results[arm, rate][0]]
                by_step = list(zip(*series, strict=True))
                panel.plot(steps, [statistics.median(v) for v in by_step], color=colour, label=arm)
                low, high = [min(v) for v in by_step], [max(v) for v in by_step]
                panel.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        upper.axhline(floor, color="grey", linestyle="--", linewidth=1, label="floor of bfloat16 arithmetic")
        upper.set_yscale("log")
        upper.set_title(f"learning rate {rate}")
        lower.axhline(1, color="grey", linestyle="--", linewidth=1)
        lower.set_xlabel("step")
        lower.xaxis.get_major_locator().set_params(integer=True)
    panels[0, 0].set_ylabel("gen-KL, nats per token")
    panels[1, 0].set_ylabel("share of the update delivered")
    panels[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main()
