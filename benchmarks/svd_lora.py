"""From one fine-tuned adapter: LoRA against SVD-LoRA in its three modes, and against singular values of random vectors.

uv run benchmarks/svd_lora.py [--jobs 2] [--seeds 1,2,3,4,5] [--out results/svd_lora] [--figure FILE]

First the adapter is made by supervised fine-tuning. Then each arm gets its learning rate, the best of its `rates` by
accuracy on 405 held-out pairs, on a seed of its own. Then all arms run with the other seeds. A run that is complete in
--out is not repeated. Prints a table in Markdown, which `--page` also writes into docs/svd-lora.md, and draws the
rewards, mean and standard deviation over the seeds.

The arm `random` tells whether it matters that the directions are those of fine-tuning: the start is the same policy,
but what is trained are singular values of random orthonormal vectors. Its base model is the fine-tuned one, merged,
less an adapter of such vectors with the same spectrum, which is then the adapter that is trained.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs import ROOT, Run, Starter, add_run_options, last, markdown, parse_runs, spread, write_at_end

from lora_rl.lora.peft_io import CONFIG_FILE

SVD = "policy.megatron_cfg.peft.svd"
CONFIG = "grpo_tiny_cpu.yaml"
COMMON = (
    "policy.generation.weight_sync.mode=adapter_merge",
    "grpo.val_at_start=false",
    "logger.tensorboard_enabled=false",
)
# Measures the KL to the start, and is too small to have an effect.
WATCH_KL = "loss_fn.reference_policy_kl_penalty=1e-8"
CHOOSING_SEED, CHOOSING_PROMPTS = 0, 405
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
WINDOW = 10


@dataclass(frozen=True)
class Arm:
    """What is trained.

    Attributes:
        title: In the table and the picture.
        mode: Of SVD-LoRA; None: plain LoRA.
        rates: Learning rates to choose from.
        random: Whether the vectors are random.
    """

    title: str
    mode: str | None
    rates: tuple[float, ...]
    random: bool = False


ARMS = {
    "lora": Arm("LoRA: A and B", None, (3e-4, 1e-3, 3e-3)),
    "product": Arm("SVD-LoRA, product", "product", (1e-2, 3e-2, 1e-1, 3e-1)),
    "factors": Arm("SVD-LoRA, factors", "factors", (1e-2, 3e-2, 1e-1, 3e-1)),
    "core": Arm("SVD-LoRA, core", "core", (3e-3, 1e-2, 3e-2)),
    "random": Arm("product, random vectors", "product", (1e-2, 3e-2, 1e-1), random=True),
}


@dataclass(frozen=True)
class FineTuning(Run):
    """Ends where its target is reached, so it is complete when it has left an adapter."""

    def records(self) -> list[dict[str, Any]] | None:
        from lora_rl.track import read_metrics

        done = (self.folder / "adapter" / CONFIG_FILE).is_file()
        return read_metrics(self.folder / "metrics.jsonl") if done else None


def main() -> int:
    """Run what is missing, print, draw; 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--choosing-steps", type=int, default=60, help="steps of the runs that choose learning rates")
    parser.add_argument("--out", type=Path, default=Path("results/svd_lora"))
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--page", action="store_true", help="also write the tables into docs/svd-lora.md")
    add_run_options(parser, list(ARMS), what="arms", seeds="1,2,3,4,5", note="not 0, which chooses the learning rates")
    arguments, names, seeds = parse_runs(parser, list(ARMS), what="arms")
    if CHOOSING_SEED in seeds:
        parser.error(f"--seeds: {CHOOSING_SEED} chooses the learning rates")
    starter = Starter(arguments.jobs, arguments.lock)

    def complete(runs: Sequence[Run]) -> bool:
        return arguments.table or not starter.complete(runs)

    tuning = FineTuning(arguments.out / "sft", 0, "sft_svd_lora_cpu.yaml", script="run_sft.py")
    choosing = {name: {rate: choosing_run(name, rate, arguments) for rate in ARMS[name].rates} for name in names}
    ordered = [run for by_rate in choosing.values() for run in by_rate.values()]
    if not complete([tuning]):
        return 1
    if any(ARMS[name].random for name in names) and not arguments.table:
        write_random_start(arguments.out)
    if not complete(ordered):
        return 1
    best = {name: rate for name in names if (rate := best_rate(choosing[name])) is not None}
    runs = {name: [final_run(name, rate, seed, arguments) for seed in seeds] for name, rate in best.items()}
    # Seed by seed, so that what is interrupted has every arm.
    well = complete([runs[name][i] for i in range(len(seeds)) for name in runs])
    found = {name: [records for run in of_seeds if (records := run.records())] for name, of_seeds in runs.items()}
    text = table(found, best, tuning.records()) + "\n" + choosing_table(choosing)
    sys.stdout.write(text)
    if arguments.page:
        write_at_end(ROOT / "docs/svd-lora.md", "svd_lora.py", text)
    if arguments.figure is not None and all(found.values()):
        draw(found, arguments.figure)
    return 0 if well else 1


def options(name: str, rate: float, seed: int, steps: int, arguments: argparse.Namespace) -> list[str]:
    """Overrides of a run of an arm."""
    arm, out = ARMS[name], arguments.out.resolve()
    start = out / "random" if arm.random else out / "sft"
    chosen = [f"policy.megatron_cfg.peft.adapter_path={start / 'adapter'}", f"grpo.seed={seed}", *COMMON]
    if arm.random:
        chosen.append(f"policy.model_name={start / 'model'}")
    if arm.mode is None:
        chosen.append(f"policy.megatron_cfg.optimizer.lr={rate}")
    else:
        chosen += [f"{SVD}.enabled=true", f"{SVD}.mode={arm.mode}", f"{SVD}.sigma_lr={rate}"]
    return [*chosen, f"grpo.max_num_steps={steps}", f"grpo.val_period={steps}", *arguments.overrides]


def choosing_run(name: str, rate: float, arguments: argparse.Namespace) -> Run:
    """One that a learning rate is judged by."""
    steps = arguments.choosing_steps
    overrides = options(name, rate, CHOOSING_SEED, steps, arguments)
    folder = arguments.out / f"{name}-lr{rate:g}"
    return Run(folder, steps, CONFIG, [*overrides, f"grpo.max_val_samples={CHOOSING_PROMPTS}"])


def final_run(name: str, rate: float, seed: int, arguments: argparse.Namespace) -> Run:
    """One that is reported."""
    overrides = options(name, rate, seed, arguments.steps, arguments)
    return Run(arguments.out / f"{name}-{seed}", arguments.steps, CONFIG, [*overrides, WATCH_KL])


def best_rate(runs: Mapping[float, Run]) -> float | None:
    """The learning rate with the best accuracy on held-out pairs; None before all are known."""
    accuracy = {rate: last(records, "val/accuracy") for rate, run in runs.items() if (records := run.records())}
    return max(accuracy, key=lambda rate: accuracy[rate]) if len(accuracy) == len(runs) else None


def write_random_start(out: Path) -> None:
    """The fine-tuned policy as another base model and an adapter of random orthonormal vectors with its spectrum."""
    import torch

    from lora_rl.lora.export import export_merged
    from lora_rl.lora.merge import AdapterTensors
    from lora_rl.lora.peft_io import PeftAdapter, read_peft, write_peft
    from lora_rl.lora.svd import decompose
    from lora_rl.lora.targets import HF_LINEARS

    if (out / "random" / "model").exists():
        return
    base, tuned = ROOT / "examples/models/tiny-adder", read_peft(out / "sft" / "adapter")
    generator = torch.Generator().manual_seed(0)

    def frame(rows: int, rank: int) -> torch.Tensor:
        return torch.linalg.qr(torch.randn(rows, rank, generator=generator, dtype=torch.float64))[0].float()

    fused: dict[tuple[str, str], list[str]] = {}
    for module in tuned.tensors:
        parent, _, linear = module.rpartition(".")
        megatron = next(name for name, parts in HF_LINEARS.items() if linear in parts)
        fused.setdefault((parent, megatron), []).append(module)
    random = {}
    for modules in fused.values():
        parts = [tuned.tensors[m] for m in modules]
        # One A for all parts: that is how this repository trains them.
        assert all(part.a.equal(parts[0].a) for part in parts)
        found = decompose(parts[0].a, torch.cat([part.b for part in parts]), "product")
        assert found is not None
        v, u = frame(found.v.shape[0], found.v.shape[1]), frame(found.u.shape[0], found.u.shape[1]) * found.sigma
        for module, rows in zip(modules, u.split([len(part.b) for part in parts]), strict=True):
            random[module] = AdapterTensors(v.T.contiguous(), rows.contiguous(), parts[0].scale)
    negative = {m: AdapterTensors(t.a, -t.b, t.scale) for m, t in random.items()}
    export_merged(base, tuned, out / "random" / "merged")
    write_peft(out / "random" / "adapter", PeftAdapter(random), base_model=str(out / "random" / "model"))
    export_merged(out / "random" / "merged", PeftAdapter(negative), out / "random" / "model")


def choosing_table(choosing: Mapping[str, Mapping[float, Run]]) -> str:
    """Accuracy of each learning rate, the chosen one in bold."""
    rows = []
    for name, runs in choosing.items():
        best = best_rate(runs)
        shown = [(rate, run.records()) for rate, run in runs.items()]
        cells = [f"{rate:g}: {last(records, 'val/accuracy'):.3f}" for rate, records in shown if records]
        marked = [f"**{cell}**" if rate == best else cell for cell, (rate, _) in zip(cells, shown, strict=False)]
        rows.append([ARMS[name].title, ", ".join(marked)])
    return markdown(["arm", f"accuracy on {CHOOSING_PROMPTS} held-out pairs by learning rate"], rows)


def table(
    found: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    best: Mapping[str, float],
    tuning: Sequence[Mapping[str, Any]] | None,
) -> str:
    """One line per arm: mean and standard deviation over the seeds."""
    rows = []
    for name, runs in found.items():
        if not runs:
            continue
        first = runs[0]
        rows.append([
            ARMS[name].title,
            f"{last(first, 'model/trainable'):,.0f}",
            f"{best[name]:g}",
            str(len(runs)),
            spread([mean(r[1 : 1 + WINDOW // 2], "train/reward") for r in runs]),
            spread([mean(r[-WINDOW:], "train/reward") for r in runs]),
            spread([last(r, "val/accuracy") for r in runs]),
            against([last(r, "val/accuracy") for r in runs], [last(r, "val/accuracy") for r in found.get("lora", ())]),
            spread([mean(r[-WINDOW:], "train/kl") for r in runs], 4),
            f"{last(first, 'sync/bytes'):,.0f}",
        ])  # fmt: skip
    heads = [
        "arm", "trained numbers", "learning rate", "seeds", f"reward, steps 1-{WINDOW // 2}",
        f"reward, last {WINDOW} steps", "held-out accuracy", "less LoRA's, 95 % interval",
        "KL to the start, nats per token", "bytes per push",
    ]  # fmt: skip
    text = markdown(heads, rows)
    if tuning:
        text += (
            f"\nThe start, after {tuning[-1]['step']:.0f} steps of fine-tuning, has the expected held-out accuracy "
            f"{last(tuning, 'val/answer_probability'):.3f}.\n"
        )
    return text


def against(values: Sequence[float], others: Sequence[float]) -> str:
    """Mean difference of pairs with the half-width of its 95 % interval (Student's t); empty for an arm and itself."""
    differences = [a - b for a, b in zip(values, others, strict=False)]
    if not any(differences) or not 2 <= len(differences) <= len(T95) + 1:
        return ""
    half = T95[len(differences) - 2] * statistics.stdev(differences) / len(differences) ** 0.5
    return f"{statistics.fmean(differences):+.3f} ± {half:.3f}"


def mean(records: Sequence[Mapping[str, Any]], metric: str) -> float:
    """Mean over the records that have the metric; NaN if none has."""
    values = [r[metric] for r in records if metric in r]
    return statistics.fmean(values) if values else float("nan")


def draw(found: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], path: Path) -> None:
    """Reward over steps (running mean of five) with bands; accuracy at the end over KL to the start."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    from lora_rl.track.plot import COLOURS, STYLE

    with plt.rc_context(STYLE):
        figure, (curve, scatter) = plt.subplots(1, 2, figsize=(11, 3.8), constrained_layout=True)
        for colour, (name, runs) in zip(COLOURS, found.items(), strict=False):
            rewards = np.array([[r["train/reward"] for r in records if "train/reward" in r] for records in runs])
            width = min(5, rewards.shape[1])
            smooth = np.array([np.convolve(line, np.ones(width) / width, mode="valid") for line in rewards])
            steps = np.arange(smooth.shape[1]) + width
            middle, spread_of = smooth.mean(axis=0), smooth.std(axis=0, ddof=1 if len(smooth) > 1 else 0)
            curve.plot(steps, middle, color=colour, label=ARMS[name].title)
            curve.fill_between(steps, middle - spread_of, middle + spread_of, color=colour, alpha=0.2, linewidth=0)
            kl = [mean(records[-WINDOW:], "train/kl") for records in runs]
            scatter.scatter(kl, [last(records, "val/accuracy") for records in runs], color=colour, s=18)
        curve.set(xlabel="step", ylabel="reward", title="Reward, running mean of five steps")
        figure.legend(loc="outside lower center", ncols=len(found))
        scatter.set(xlabel="KL to the start, nats per token", ylabel="accuracy", title="Held-out accuracy, each seed")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from here")
