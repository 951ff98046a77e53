"""Whether an engine's memory grows: rounds of generation with the same batch sizes again and again, then with new ones.

uv run benchmarks/engine_memory.py [--rounds 60]

On the CPU the engine keeps prepared matrix products for each number of tokens that ever ran together. So its memory
grows while new batch sizes occur, and no more once they recur. Prints the resident memory after each pass.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))


def main() -> None:
    """Generate, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="examples/configs/grpo_tiny_cpu.yaml")
    parser.add_argument("--rounds", type=int, default=60, help="batches per pass")
    arguments = parser.parse_args()
    from lora_rl.cluster.memory import held_memory
    from lora_rl.config import derive_layout, load_config
    from lora_rl.rollout.engine import Engine
    from lora_rl.rollout.launch import engine_settings
    from lora_rl.rollout.source import training_sampling
    from lora_rl.rollout.types import GenerationRequest

    config = load_config(arguments.config)
    engine = Engine(engine_settings(config, derive_layout(config)))
    sampling = training_sampling(config)
    rng, seeds = random.Random(0), count()
    most = config.policy.generation.vllm_cfg.max_num_seqs

    def generate(size: int) -> None:
        prompts = [tuple(rng.randrange(52, 62) for _ in range(6)) for _ in range(size)]
        engine.generate([GenerationRequest(prompt, next(seeds)) for prompt in prompts], sampling)

    sys.stdout.write("| batch sizes | pass | resident MiB |\n| --- | --- | --- |\n")
    recurring = [rng.randrange(1, most) for _ in range(arguments.rounds)]
    for label, sizes in (
        ("recurring", lambda: recurring),
        ("new", lambda: [rng.randrange(1, most) for _ in range(arguments.rounds)]),
        (f"always {most}", lambda: [most] * arguments.rounds),
    ):
        for number in range(1, 5):
            for size in sizes():
                generate(size)
            sys.stdout.write(f"| {label} | {number} | {held_memory('cpu') / 2**20:.0f} |\n")
            sys.stdout.flush()
    # vLLM's repacked weights crash while the interpreter tears down; there is nothing left to do.
    os._exit(0)


if __name__ == "__main__":
    main()
