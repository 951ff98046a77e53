"""Forward and backward of one Megatron rank against a plain PyTorch loop on the same model, batch and loss.

uv run benchmarks/trainer_vs_torch.py [--model DIR] [--sequences 256] [--rounds 15] [--threads 1]

The plain loop is what one would write by hand: the Hugging Face model with `peft` LoRA adapters of the same rank on
the same linears, log-softmax over the completion tokens, the same policy loss. The Megatron rank is given the batch
sequence by sequence, and with the completions of a group behind one copy of their prompt, as it trains by itself. All
three run in turns in one process on one thread count; the printed figures are ratios of medians. Above 1 means that
the Megatron rank is faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

PLAIN = "plain PyTorch + peft"
# Sequences of a prompt, as in the default job.
GROUP = 4


def main() -> None:
    """Print what `measure` finds; what Megatron prints goes to standard error."""
    with redirect_stdout(sys.stderr):
        lines = measure()
    print("\n".join(lines))


def measure() -> list[str]:
    """Parse arguments, build both, time them in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="examples/configs/grpo_tiny_cpu.yaml")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="print where the Megatron rank's time goes")
    arguments = parser.parse_args()

    from lora_rl.policy.platform import prepare

    platform = prepare("cpu", num_threads=arguments.threads)
    import torch

    from lora_rl.algorithm import share_prompts
    from lora_rl.config import load_config
    from lora_rl.policy.model import initialise_parallel
    from lora_rl.policy.trainer import PolicyRank

    config = load_config(arguments.config)
    with tempfile.TemporaryDirectory() as folder:
        initialise_parallel(
            platform, rank=0, world_size=1, tp=1, pp=1, seed=0, init_method=f"file://{folder}/rendezvous"
        )
        rank = PolicyRank(config, platform)
        batch = addition_like_batch(arguments.sequences)

        shared = share_prompts(
            batch.group_ids.tolist(),
            batch.prompt_lengths.tolist(),
            batch.lengths.tolist(),
            attention_tokens=rank.attention_tokens() or 1.0,
        )

        def megatron(rows: list[Any]) -> None:
            for chunk in rank.model.chunks:
                chunk.zero_grad_buffer()
            rank.forward_backward(batch, [rows])

        ways = {
            "Megatron rank": partial(megatron, list(range(len(batch)))),
            "  with shared prompts": partial(megatron, shared),
            PLAIN: plain_loop(config, batch),
        }
        for way in ways.values():
            way()  # warm-up
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, way in ways.items():
                times[name].append(seconds(way))
        medians = {name: statistics.median(values) for name, values in times.items()}
        lines = []
        for name, median in medians.items():
            lines.append(f"{name:24s} {median * 1e3:8.1f} ms  {batch.num_tokens / median:10.0f} tokens/s")
        one, many = (medians[PLAIN] / medians[name] for name in list(ways)[:2])
        lines.append(f"ratio (plain / Megatron) {one:8.2f}, with shared prompts {many:.2f}")
        lines.append(f"sequences {arguments.sequences} in groups of {GROUP}, threads {arguments.threads}")
        if arguments.profile:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                ways["  with shared prompts"]()
            lines.append(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))
        torch.distributed.destroy_process_group()
        return lines


def addition_like_batch(sequences: int):
    """Random tokens in the shape of the addition task: 6 prompt tokens, 3 or 4 completion tokens."""
    from lora_rl.rollout.types import TrainBatch

    rng = np.random.default_rng(0)
    prompt_lengths = np.full(sequences, 6)
    lengths = prompt_lengths + rng.integers(3, 5, sequences)
    width = int(lengths.max())
    inside = np.arange(width) < lengths[:, None]
    tokens = rng.integers(4, 260, (sequences, width))
    first = np.arange(sequences) // GROUP * GROUP
    tokens[:, :6] = tokens[first, :6]
    return TrainBatch(
        token_ids=np.where(inside, tokens, 0),
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        behaviour_logprobs=np.full((sequences, width), -5.0, dtype=np.float32),
        advantages=rng.normal(size=sequences).astype(np.float32),
        group_ids=np.arange(sequences) // GROUP,
        global_tokens=int((lengths - 6).sum()),
        global_sequences=sequences,
    )


def plain_loop(config, batch) -> Callable[[], None]:
    """One forward and backward pass of the Hugging Face model with peft adapters."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings = config.policy.megatron_cfg.peft
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(config.policy.model_name, dtype=torch.float32),
        LoraConfig(
            r=settings.dim,
            lora_alpha=settings.alpha,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        ),
    ).train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    tokens = torch.from_numpy(batch.token_ids)
    time_axis = torch.arange(tokens.shape[1])
    lengths, prompts = torch.from_numpy(batch.lengths), torch.from_numpy(batch.prompt_lengths)
    attention = (time_axis < lengths[:, None]).long()
    mask = ((time_axis >= prompts[:, None]) & (time_axis < lengths[:, None]))[:, 1:]
    advantages = torch.from_numpy(batch.advantages)[:, None]

    def run() -> None:
        for parameter in trainable:
            parameter.grad = None
        logits = model(input_ids=tokens, attention_mask=attention, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
        ratio = torch.exp(logprobs - logprobs.detach())
        clipped = ratio.clamp(0.8, 1.2)
        loss = (torch.maximum(-advantages * ratio, -advantages * clipped) * mask).sum() / mask.sum()
        loss.backward()

    return run


def seconds(function: Callable[[], None]) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
