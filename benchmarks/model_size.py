"""What a step costs as models and completions grow: tokens per second, sync, memory.

uv run benchmarks/model_size.py [--sizes 1M,8M,30M,135M] [--tokens 16,64,256] [--out results/model_size] [--figure FILE]

Each point is a short real job with random weights, in which every completion has the same length. Sizes are measured
with 64 tokens per completion, lengths with the smallest size. Runs go one after the other; complete ones are not
repeated. Prints two tables in Markdown: medians over the steps after the second.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runs import ROOT, Run, Starter, markdown

TINY = ROOT / "examples/models/tiny-adder"
CONFIG = "grpo_tiny_cpu.yaml"
# name: hidden, FFN, layers, query heads, key-value heads, vocabulary; head size 32 below 30M and 64 from there on. The
# largest has the shape of SmolLM2-135M.
SIZES = {
    "1M": (128, 512, 4, 4, 2, 264),
    "8M": (288, 1152, 6, 9, 3, 4096),
    "30M": (448, 1536, 10, 7, 7, 16384),
    "135M": (576, 1536, 30, 9, 3, 49152),
}
TOKENS = 64
# Tokens per microbatch where 64 completions at once would take 16 GiB.
MICROBATCH = {"135M": 1024}
STEPS = 6


def main() -> int:
    """Run what is missing, print the tables, draw; 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--tokens", default="16,64,256", help="lengths of completions")
    parser.add_argument("--out", type=Path, default=Path("results/model_size"))
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    sizes = arguments.sizes.split(",")
    if unknown := [size for size in sizes if size not in SIZES]:
        parser.error(f"--sizes: {', '.join(unknown)}; there are: {', '.join(SIZES)}")
    lengths = [int(tokens) for tokens in arguments.tokens.split(",")]
    by_size = {size: the_run(arguments.out, size, TOKENS) for size in sizes}
    by_length = {str(tokens): the_run(arguments.out, sizes[0], tokens) for tokens in lengths}
    # A point may be in both.
    distinct = {run.folder: run for run in (*by_size.values(), *by_length.values())}
    if Starter().complete(list(distinct.values())):
        return 1
    sys.stdout.write(table("model", by_size) + "\n")
    sys.stdout.write(table(f"tokens per completion ({sizes[0]})", by_length))
    if arguments.figure is not None:
        draw(by_size, by_length, arguments.figure)
    return 0


def the_run(out: Path, size: str, tokens: int) -> Run:
    """The job of a point: 64 completions a step, one optimizer step."""
    model = out / "models" / size
    options = (
        f"policy.model_name={model.resolve()}",
        f"grpo.max_num_steps={STEPS}",
        "grpo.num_prompts_per_step=16",
        "grpo.val_at_start=false",
        "grpo.val_period=0",
        "policy.train_global_batch_size=null",
        f"policy.max_total_sequence_length={tokens + 16}",
        f"policy.generation.max_new_tokens={tokens}",
        "policy.generation.ignore_eos=true",
        "policy.generation.vllm_cfg.max_num_seqs=64",
        # Random completions are all wrong: every group must teach all the same.
        "grpo.adv_estimator.name=reinforce_plus_plus",
        "grpo.adv_estimator.minus_baseline=false",
        "grpo.drop_zero_variance_groups=false",
        "reward.name=function",
        "reward.score_truncated=true",
        f"reward.function={ROOT / 'benchmarks/model_size.py'}:even",
        "logger.tensorboard_enabled=false",
    )
    if size in MICROBATCH:
        options += (
            "policy.dynamic_batching.enabled=true",
            f"policy.dynamic_batching.train_mb_tokens={MICROBATCH[size]}",
        )
    return Run(out / f"{size}-{tokens}", STEPS, CONFIG, options, prepare=lambda _: make_model(model, size))


def even(completion: str, answer: str, prompt: str, metadata: Mapping[str, Any]) -> float:
    """A reward that random completions differ in."""
    return float(len(completion) % 2 == 0)


def make_model(folder: Path, size: str) -> None:
    """A Qwen3 of this size with random weights, and the tiny model's tokenizer."""
    if folder.exists():
        return
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, ffn, layers, heads, kv_heads, vocabulary = SIZES[size]
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(TINY, unfinished)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(unfinished)
    unfinished.rename(folder)


def medians(run: Run) -> dict[str, float]:
    """Of the steps after the second; memory is the largest sum of all processes at the end of a phase."""
    records = [r for r in run.records() or [] if r["step"] > 2]

    def median(value: Any) -> float:
        return statistics.median(value(r) for r in records)

    return {
        "generation": median(lambda r: r["tokens/generation"] / r["time/generation"]),
        "training": median(lambda r: r["tokens/training"] / r["time/training"]),
        "sync": median(lambda r: r["time/sync"]),
        "megabytes": median(lambda r: r["sync/bytes"] / 1e6),
        "step": median(lambda r: r["time/step"]),
        "gib": max(
            sum(r[f"memory/{phase}/{side}_gib"] for side in ("ranks", "engines", "driver"))
            for r in records
            for phase in ("generation", "training", "sync")
        ),
        "error": max(r["train/token_mult_prob_error"] for r in records),
    }


def table(head: str, runs: Mapping[str, Run]) -> str:
    """A line per run."""
    rows = []
    for name, run in runs.items():
        m = medians(run)
        rows.append([
            name, f"{m['step']:.2f}", f"{m['generation']:.0f}", f"{m['training']:.0f}", f"{m['sync']:.2f}",
            f"{m['megabytes']:.0f}", f"{m['gib']:.1f}", f"{m['error']:.6f}",
        ])  # fmt: skip
    heads = [
        head, "s per step", "generated tokens/s", "trained tokens/s", "s per sync", "MB per sync", "GiB in all",
        "token_mult_prob_error, at most",
    ]  # fmt: skip
    return markdown(heads, rows)


def draw(by_size: Mapping[str, Run], by_length: Mapping[str, Run], path: Path) -> None:
    """Tokens per second of both phases over size and over length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from lora_rl.track.plot import COLOURS, STYLE

    with plt.rc_context(STYLE):
        figure, both = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True, sharey=True)
        of_axes: Sequence[tuple[Mapping[str, Run], str]] = (
            (by_size, "parameters"),
            (by_length, "tokens per completion"),
        )
        for axes, (runs, label) in zip(both, of_axes, strict=True):
            values = {name: medians(run) for name, run in runs.items()}
            for colour, phase in zip(COLOURS, ("generation", "training"), strict=False):
                axes.plot(list(values), [v[phase] for v in values.values()], marker="o", color=colour, label=phase)
            axes.set(xlabel=label, ylabel="tokens per second", yscale="log")
        both[0].legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
        plt.close(figure)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
