"""A job, and the same job with TRL's GRPOTrainer: seconds to an accuracy, tokens per second, memory.

uv run benchmarks/vs_trl.py [--config NAME.yaml] [--seeds 0] [--steps 170] [--target 0.85] [--out results/vs_trl]
    [--figure FILE.png] [key=value ...]

Both sides start from the same model and get the same prompts, answers, batch, loss, optimizer and learning rate, taken
from the resolved configuration; both validate as often, on the same held-out prompts. TRL generates with Hugging Face
transformers (its vLLM mode needs a GPU), in an environment that `uv run` makes from the header of trl_grpo.py, with the
number of threads of --trl-threads: give it what is fastest for it. Runs go one after the other; complete ones are not
repeated. Memory is the largest proportional set size of all processes of a side, sampled every five seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import operator
import os
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from runs import ROOT, Run, last, markdown, spread

DEFAULT = "grpo_tiny_cpu.yaml"
# What trl_grpo.py does, whatever the configuration says.
FIXED = {
    "grpo.adv_estimator.name": "grpo",
    "grpo.normalize_rewards": True,
    "grpo.use_leave_one_out_baseline": False,
    "grpo.val_num_generations": 1,
    "grpo.val_temperature": 1.0,
    "grpo.use_dynamic_sampling": False,
    "grpo.overlong_filtering": False,
    "grpo.reward_shaping.enabled": False,
    "grpo.async_grpo.enabled": False,
    "grpo.next.enabled": False,
    "loss_fn.policy_loss": "ppo_clip",
    "loss_fn.token_level_loss": True,
    "loss_fn.ratio_clip_c": None,
    "loss_fn.reference_policy_kl_penalty": 0.0,
    "policy.generation.temperature": 1.0,
    "policy.generation.top_p": 1.0,
    "policy.precision": "float32",
    "policy.megatron_cfg.optimizer.min_lr": 0.0,
    "policy.megatron_cfg.peft.svd.enabled": False,
    "policy.tokenizer.name": None,
    "reward.name": "exact_match",
    "reward.additional": [],
}
# Megatron's fused linears and what they are called in a Hugging Face model.
ALL_LINEARS = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}


def main() -> int:
    """Run what is missing, print, draw; 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=DEFAULT, help="in examples/configs; default: the default job")
    parser.add_argument("--steps", type=int, default=170)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--target", type=float, default=0.85, help="accuracy on held-out prompts")
    parser.add_argument("--trl-threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("results/vs_trl"))
    parser.add_argument("--figure", type=Path)
    parser.add_argument("overrides", nargs="*", help="further key=value of the configuration")
    arguments = parser.parse_args()
    sides: dict[str, list[list[dict[str, Any]]]] = {"lora_rl": [], "TRL": []}
    for seed in map(int, arguments.seeds.split(",")):
        options = (f"grpo.max_num_steps={arguments.steps}", f"grpo.seed={seed}", *arguments.overrides)
        # Another job has folders of its own, so that one is never taken for the other.
        job = "" if (arguments.config, arguments.overrides) == (DEFAULT, []) else f"-{name_of(arguments)}"
        ours = Run(arguments.out / f"lora_rl{job}-{seed}", arguments.steps, arguments.config, options)
        theirs = Run(arguments.out / f"trl{job}-{seed}", arguments.steps, arguments.config, options)
        for name, run in (("lora_rl", ours), ("TRL", theirs)):
            if run.records() is None:
                start(name, run, arguments.trl_threads)
            records = run.records()
            if records is None:
                sys.stderr.write(f"failed: see {run.folder.with_suffix('.log')}\n")
                return 1
            sides[name].append(records)
            records[0]["peak_gib"] = json.loads((run.folder / "peak.json").read_text())
    sys.stdout.write(table(sides, arguments.target))
    if arguments.figure is not None:
        draw(sides, arguments.target, arguments.figure)
    return 0


def name_of(arguments: argparse.Namespace) -> str:
    """The configuration and the overrides as part of a file name."""
    digest = hashlib.blake2b("\n".join([arguments.config, *arguments.overrides]).encode(), digest_size=4).hexdigest()
    return f"{Path(arguments.config).stem}-{digest}"


def start(name: str, run: Run, threads: int) -> None:
    """One job, watched; its largest memory is kept in peak.json."""
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if name == "lora_rl":
        command = run.command()
    else:
        run.folder.mkdir()
        settings = run.folder / "settings.json"
        settings.write_text(json.dumps(trl_settings(run, threads)))
        # Its environment is its own: this one's must not be found by it.
        environment.pop("VIRTUAL_ENV", None)
        environment["OMP_NUM_THREADS"] = str(threads)
        command = ["uv", "run", "--script", str(ROOT / "benchmarks/trl_grpo.py"), str(settings), str(run.folder)]
    sys.stderr.write(f"{run.folder.name} ...\n")
    with run.folder.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)
        peak = Peak(process.pid)
        try:
            process.wait()
        except BaseException:
            # It ends its own processes; killed, it would leave them.
            process.terminate()
            process.wait()
            raise
        finally:
            peak.stop()
    if run.folder.is_dir():
        (run.folder / "peak.json").write_text(json.dumps(peak.gib))


class Peak:
    """Largest sum of the memory of a process and all below it.

    Attributes:
        gib: Proportional set size: memory that processes share counts once.
    """

    def __init__(self, pid: int) -> None:
        self.gib = 0.0
        self._pid, self._ended = pid, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Measure no more."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        import psutil

        while not self._ended.wait(5.0):  # a look takes a tenth of a second of a core
            total = 0
            try:
                root = psutil.Process(self._pid)
                processes = [root, *root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in processes:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    # It ended meanwhile.
                    continue
            self.gib = max(self.gib, total / 2**30)


def trl_settings(run: Run, threads: int) -> dict[str, Any]:
    """What TRL is given, from the configuration of the run."""
    from lora_rl.config import load_config
    from lora_rl.data import load_prompts, load_tokenizer

    config = load_config(str(ROOT / "examples/configs" / run.config), list(run.overrides))
    grpo, policy, loss = config.grpo, config.policy, config.loss_fn
    optimizer, scheduler, peft = policy.megatron_cfg.optimizer, policy.megatron_cfg.scheduler, policy.megatron_cfg.peft
    update_batch = policy.train_global_batch_size or config.sequences_per_step
    if set(peft.target_modules) != ALL_LINEARS:
        raise ValueError(f"{run.config}: the comparison knows adapters on all linears only")
    for key, value in FIXED.items():
        if (found := operator.attrgetter(key)(config)) != value:
            raise ValueError(f"{run.config}: {key} = {found}: TRL is not given that; the comparison knows {value} only")
    tokenizer = load_tokenizer(policy.tokenizer_name, policy.tokenizer.chat_template)
    train, held_out = load_prompts(config.data, tokenizer, sys.stderr.write)
    return {
        "model": str(ROOT / policy.model_name),
        "adapter": peft.adapter_path,
        "marker": config.reward.answer_marker,
        "train": [(p.text, p.answer) for p in train],
        "held_out": [(p.text, p.answer) for p in held_out[: grpo.max_val_samples]],
        "lr_decay": scheduler.lr_decay_style,
        "steps": grpo.max_num_steps,
        "seed": grpo.seed,
        "val_period": grpo.val_period,
        "group": grpo.num_generations_per_prompt,
        "update_batch": update_batch,
        "updates_per_step": config.sequences_per_step // update_batch,
        "max_new_tokens": policy.generation.max_new_tokens,
        "clip_low": loss.ratio_clip_min,
        "clip_high": loss.ratio_clip_max,
        "rank": peft.dim,
        "alpha": peft.alpha,
        "lr": optimizer.lr,
        "beta1": optimizer.adam_beta1,
        "beta2": optimizer.adam_beta2,
        "eps": optimizer.adam_eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": policy.max_grad_norm,
        "warmup": scheduler.lr_warmup_iters,
        "threads": threads,
    }


def seconds_to(records: Sequence[Mapping[str, Any]], target: float) -> float:
    """Seconds from the command to the first validation at or above the target; infinite if there is none."""
    return next((r["elapsed_s"] for r in records if r.get("val/accuracy", 0.0) >= target), float("inf"))


def seconds_per_step(records: Sequence[Mapping[str, Any]]) -> float:
    """Median over the steps."""
    spans = (b["elapsed_s"] - a["elapsed_s"] - b.get("time/validation", 0.0) for a, b in pairwise(records[1:]))
    return statistics.median(spans)


def rate(records: Sequence[Mapping[str, Any]], phase: str) -> float:
    """Median tokens per second of a phase."""
    return statistics.median(r[f"tokens/{phase}"] / r[f"time/{phase}"] for r in records[1:] if r.get(f"time/{phase}"))


def table(sides: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], target: float) -> str:
    """A line per figure."""
    figures = {
        "steps": lambda r: r[-1]["step"],
        f"seconds to accuracy {target}": lambda r: seconds_to(r, target),
        "seconds to the first optimizer step": lambda r: r[1]["elapsed_s"],
        "seconds per step, validation left out": seconds_per_step,
        "seconds in all": lambda r: r[-1]["elapsed_s"],
        "accuracy at the end": lambda r: last(r, "val/accuracy"),
        "generated tokens per second": lambda r: rate(r, "generation"),
        "tokens per second of training, prompts included": lambda r: rate(r, "training"),
        "largest memory, GiB": lambda r: r[0]["peak_gib"],
    }
    rows = []
    for label, figure in figures.items():
        ours, theirs = ([figure(records) for records in runs] for runs in sides.values())
        if not all(map(math.isfinite, (*ours, *theirs))):
            # Not every run was long enough to reach it.
            continue
        ratio = statistics.fmean(theirs) / statistics.fmean(ours)
        digits = next((n for word, n in (("accuracy at", 3), ("per step", 2), ("GiB", 1)) if word in label), 0)
        rows.append([label, spread(ours, digits), spread(theirs, digits), f"{ratio:.2f}"])
    return markdown(["", *sides, "TRL / lora_rl"], rows)


def draw(sides: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], target: float, path: Path) -> None:
    """Accuracy over seconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from lora_rl.track.plot import COLOURS, STYLE

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 3.6), constrained_layout=True)
        for colour, (name, runs) in zip(COLOURS, sides.items(), strict=False):
            for i, records in enumerate(runs):
                points = [(r["elapsed_s"], r["val/accuracy"]) for r in records if "val/accuracy" in r]
                axes.plot(*zip(*points, strict=True), marker=".", color=colour, label=name if i == 0 else None)
        axes.axhline(target, color="0.6", linewidth=0.8, linestyle="--")
        axes.set(xlabel="seconds from the command", ylabel="accuracy", title="Accuracy on held-out prompts")
        axes.legend(loc="lower right")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
        plt.close(figure)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
