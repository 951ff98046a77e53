"""Bytes and seconds of a push in each sync mode, on the tiny model and on one with the shapes of Qwen2.5-0.5B.

uv run benchmarks/sync_modes.py [--pushes 5] [--skip-large]

For each model and mode a real job is started (one Megatron rank, one vLLM engine, shared memory), trained for one step
between pushes, and the pushes are timed as the loop sees them: gather, merge and write on the trainer's side, read,
check, merge and repack on the engine's. The large model has random weights, in bfloat16 on both sides; the adapters
have rank 16 on all four linears of each layer. Prints a table in Markdown: medians, and the ratio to mode merged.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

MODES = ("merged", "adapter_merge", "adapter")
TINY = Path("examples/models/tiny-adder")


def main() -> None:
    """Time every mode on every model and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="examples/configs/grpo_tiny_cpu.yaml")
    parser.add_argument("--pushes", type=int, default=5)
    parser.add_argument("--skip-large", action="store_true")
    arguments = parser.parse_args()
    sys.stdout.write("| model | mode | tensors | MB per push | seconds | bytes to merged | seconds to merged |\n")
    sys.stdout.write("| --- | --- | --- | --- | --- | --- | --- |\n")
    with tempfile.TemporaryDirectory() as folder:
        models = {"tiny (float32)": (TINY, "float32")}
        if not arguments.skip_large:
            models["Qwen2.5-0.5B shapes (bfloat16)"] = (make_large(Path(folder) / "large"), "bfloat16")
        for name, (model, precision) in models.items():
            first: tuple[float, float] | None = None
            for mode in MODES:
                run = Path(folder) / f"{mode}-{precision}"
                tensors, nbytes, seconds = measure(arguments, model, precision, mode, run)
                first = first or (nbytes, seconds)
                sys.stdout.write(
                    f"| {name} | {mode} | {tensors:.0f} | {nbytes / 1e6:.2f} | {seconds:.3f} "
                    f"| 1/{first[0] / nbytes:.0f} | {seconds / first[1]:.2f} |\n"
                )
                sys.stdout.flush()


def make_large(folder: Path) -> Path:
    """A checkpoint with the shapes of Qwen2.5-0.5B, random weights, and the tiny model's tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shutil.copytree(TINY, folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_theta=1e6,
    )
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def measure(
    arguments: argparse.Namespace, model: Path, precision: str, mode: str, folder: Path
) -> tuple[float, float, float]:
    """Medians over the pushes: tensors, bytes, seconds."""
    from lora_rl.config import derive_layout, load_config
    from lora_rl.rollout.types import build_train_batch
    from lora_rl.track import Console
    from lora_rl.train.grpo import rollout_source
    from lora_rl.train.job import load_data, start_job

    overrides = [
        f"policy.model_name={model}",
        f"policy.precision={precision}",
        f"policy.generation.weight_sync.mode={mode}",
        "policy.train_global_batch_size=null",
        "grpo.num_prompts_per_step=4",
        "policy.megatron_cfg.optimizer.lr=1e-2",
        "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
        "policy.megatron_cfg.scheduler.lr_decay_style=constant",
    ]
    config = load_config(arguments.config, overrides)
    layout = derive_layout(config)
    folder.mkdir()
    with (folder / "console").open("w") as stream:
        console = Console("plain", 1, stream=stream)
        with console, start_job(config, layout, console, folder, load_data(config)) as job:
            rollouts = rollout_source(job, config, console.warn, steps=1).next_step(1)
            batch = build_train_batch(rollouts, [1.0, -1.0] * (len(rollouts) // 2))
            records = []
            for _ in range(arguments.pushes):
                job.policy.train(batch, [list(range(len(batch)))])
                records.append(job.weights.push(after_update=True))
    return tuple(statistics.median(r[f"sync/{key}"] for r in records) for key in ("tensors", "bytes", "seconds"))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main()
