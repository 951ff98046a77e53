"""Generation through our engine actor against bare vLLM on the same requests, in turns, in one run.

uv run benchmarks/generation_vs_vllm.py [--prompts 32] [--samples 8] [--rounds 15]

The actor's time is what the training loop sees: requests sent through Ray, answers with behaviour logprobs back.
Bare vLLM is `LLM.generate` in this process with the same model, settings, prompts, seeds and sampling parameters.
The printed figure is the ratio of the medians; 1 means that the actor costs nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path


def main() -> None:
    """Parse arguments, start both engines, time them in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="examples/configs/grpo_tiny_cpu.yaml")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    # What it logs goes to standard output, into the figures.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

    from lora_rl.cluster.local import ray_session
    from lora_rl.cluster.workers import wait
    from lora_rl.config import derive_layout, load_config
    from lora_rl.rollout.engine import Engine
    from lora_rl.rollout.launch import engine_settings, start_engines
    from lora_rl.rollout.pool import EnginePool
    from lora_rl.rollout.source import request_seed, training_sampling
    from lora_rl.rollout.types import GenerationRequest
    from lora_rl.train.job import load_data

    config = load_config(arguments.config)
    layout = derive_layout(config)
    prompts = load_data(config).prompts
    sampling = training_sampling(config)
    jobs = [
        [
            GenerationRequest(prompt.token_ids, request_seed(0, "benchmark", position, sample))
            for sample in range(arguments.samples)
        ]
        for position, prompt in enumerate(prompts.next_batch(arguments.prompts))
    ]
    requests = [request for job in jobs for request in job]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ray.log"
        with ray_session(address=None, num_cpus=layout.num_engines, num_gpus=0, log_file=log):
            workers = start_engines(config, layout, Path(folder), [{"num_cpus": 1}])
            wait([w.call("build") for w in workers], timeout_s=300, doing="starting the engine")

            pool = EnginePool(workers, timeout_s=300)

            def actor() -> int:
                return sum(len(c.token_ids) for group in pool.generate(jobs, sampling) for c in group)

            bare_engine = Engine(engine_settings(config, layout)).llm
            from vllm import SamplingParams, TokensPrompt

            bare_prompts = [TokensPrompt(prompt_token_ids=list(r.prompt_ids)) for r in requests]
            bare_params = [
                SamplingParams(
                    temperature=sampling.temperature,
                    max_tokens=sampling.max_tokens,
                    seed=r.seed,
                    logprobs=0,
                    detokenize=False,
                )
                for r in requests
            ]

            def bare() -> int:
                outputs = bare_engine.generate(bare_prompts, bare_params, use_tqdm=False)
                return sum(len(o.outputs[0].token_ids) for o in outputs)

            sides = {"engine actor": actor, "bare vLLM": bare}
            tokens = {name: side() for name, side in sides.items()}  # warm-up
            assert len(set(tokens.values())) == 1, f"the two sides sampled different completions: {tokens}"
            times: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(arguments.rounds):
                for name, side in sides.items():
                    start = time.perf_counter()
                    side()
                    times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        print(f"{name:14s} {median * 1e3:8.1f} ms  {tokens[name] / median:8.0f} tokens/s")
    print(f"ratio (bare / actor) {medians['bare vLLM'] / medians['engine actor']:6.2f}   {len(requests)} requests")
    # vLLM's repacked weights crash while the interpreter tears down; there is nothing left to do.
    os._exit(0)


if __name__ == "__main__":
    main()
