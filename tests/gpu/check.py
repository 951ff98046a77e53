"""Run the checks of a platform, each in a process of its own with a time limit, and print a table.

Those of one rank run side by side, as nearly all of their time goes into imports; then job after job.

python -m tests.gpu.check cuda|cpu [NAME ...]

Exit status 0: all passed, or could not apply here; 1: one failed; 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lora_rl.config.layout import count_gpus

ROOT = Path(__file__).parents[2]
CONFIG = "examples/configs/grpo_tiny_cpu.yaml"
VERSIONS_LIMIT_S, RANK_LIMIT_S, JOB_LIMIT_S, METRICS_LIMIT_S = 60, 120, 100, 10
# What is over its limit has this long to end the processes it started.
GRACE_S = 5
SHORT = (
    "grpo.num_prompts_per_step=32", "policy.train_global_batch_size=64", "grpo.max_num_steps=4", "grpo.val_period=0",
    "grpo.max_val_samples=64", "logger.console=plain", "logger.tensorboard_enabled=false",
)  # fmt: skip
APART = (
    "policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=1",
)  # fmt: skip
# Metrics of a short job; in bfloat16 trainer and engine round differently.
EXACT = ("count(train/reward) == 4", "min(train/grad_norm) > 0", "last(sync/version) == 5", "min(train/reward) > 0.2")
CLOSE = ("max(sync/parity) < 1e-3", "max(train/token_mult_prob_error) < 1.01")
ROUNDED = ("max(train/token_mult_prob_error) < 1.2",)


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes:
        name: what is checked.
        gpus: how many it needs.
        run: does it, given the platform and a folder; text for the table, or raises.
        limit_s: seconds after which `run` gives up.
        alone: no other check may run beside it.
        only: the platform it makes sense on; None for both.
    """

    name: str
    gpus: int
    run: Callable[[str, Path], str]
    limit_s: float = JOB_LIMIT_S + METRICS_LIMIT_S + GRACE_S
    alone: bool = True
    only: str | None = None


class Failed(Exception):
    """A check did not pass; the message is for the table, the rest of the output for below it."""


def one_rank(text: str, name: str, only: str | None = None) -> Check:
    """A check of `tests.gpu.trainer`."""

    def run(platform: str, folder: Path) -> str:
        command = [sys.executable, "-m", "tests.gpu.trainer", platform, name, str(folder)]
        return _output(command, RANK_LIMIT_S).splitlines()[-1]

    return Check(text, 1, run, RANK_LIMIT_S + GRACE_S, alone=False, only=only)


def job(*overrides: str, checks: Sequence[str]) -> Callable[[str, Path], str]:
    """A short job of the tiny model, and what its metrics must be."""

    def run(platform: str, folder: Path) -> str:
        on = ("cluster.platform=cuda", "cluster.gpus_per_node=2") if platform == "cuda" else ()
        if platform == "cuda" and not set(APART) & set(overrides):
            on = ("cluster.platform=cuda", "cluster.gpus_per_node=1", "policy.generation.vllm_cfg.kv_cache_gib=1")
        out = folder / "run"
        begin = time.monotonic()
        command = [sys.executable, "examples/run_grpo.py", "--config", CONFIG, *SHORT, *on, *overrides]
        _output([*command, f"logger.log_dir={out}"], JOB_LIMIT_S, RAY_TMPDIR=str(folder))
        seconds = time.monotonic() - begin
        metrics = [sys.executable, "tests/functional/check_metrics.py", str(out / "metrics.jsonl"), *checks]
        passed = _output(metrics, METRICS_LIMIT_S).count("PASS")
        return f"{passed} checks of metrics, {seconds:.0f} s"

    return run


def versions(platform: str, folder: Path) -> str:
    """What is installed."""
    code = (
        "import torch, vllm, megatron.core as m, importlib.metadata as i\n"
        "te = [d.version for d in i.distributions() if d.name.replace('_', '-') == 'transformer-engine']\n"
        "gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else 'no GPU'\n"
        "print(f'{gpu}; torch {torch.__version__}, vLLM {vllm.__version__}, Megatron {m.__version__}, "
        "Transformer Engine {te[0] if te else None}')"
    )
    return _output([sys.executable, "-c", code], VERSIONS_LIMIT_S).splitlines()[-1]


CHECKS = (
    Check("what is installed", 0, versions, VERSIONS_LIMIT_S + GRACE_S),
    one_rank("float32 logprobs and gradients of adapters equal plain PyTorch", "parity"),
    one_rank("Transformer Engine builds the layers", "transformer_engine", only="cuda"),
    one_rank("bfloat16 base under float32 adapters: types, gradients, a step", "bfloat16"),
    one_rank("recomputed activations: the same gradients", "recompute"),
    one_rank("frozen weights leave the device and come back bit for bit", "offload"),
    one_rank("device memory is what the plan says", "memory"),
    Check("job, float32: merged weights (CUDA IPC), taking turns", 1, job(checks=(*EXACT, *CLOSE))),
    Check(
        "job, bfloat16: adapters merged by the engine, taking turns", 1,
        job("policy.precision=bfloat16", "policy.generation.weight_sync.mode=adapter_merge",
            checks=(*EXACT, *ROUNDED)),
    ),
    Check(
        "job, bfloat16: adapters served by vLLM, taking turns", 1,
        job("policy.precision=bfloat16", "policy.generation.weight_sync.mode=adapter", checks=(*EXACT, *ROUNDED)),
    ),
    Check("job, float32: merged weights (NCCL), devices apart", 2, job(*APART, checks=(*EXACT, *CLOSE))),
    Check(
        "job, float32: generating while training, devices apart", 2,
        job(*APART, "grpo.async_grpo.enabled=true", "grpo.async_grpo.in_flight_weight_updates=true",
            "loss_fn.use_importance_sampling_correction=true", checks=(*EXACT, "max(rollout/age_max) <= 1")),
    ),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platform", choices=("cuda", "cpu"))
    parser.add_argument("names", nargs="*", help="only checks whose name contains one of these")
    options = parser.parse_args(arguments)
    gpus = count_gpus()
    if options.platform == "cuda" and gpus == 0:
        print("there is no GPU on this machine; check.sh cpu runs what can be run without one", file=sys.stderr)
        return 2
    failures: list[tuple[str, str]] = []
    chosen = [c for c in CHECKS if not options.names or any(name in c.name for name in options.names)]

    def line(check: Check) -> str:
        begin = time.monotonic()
        verdict, detail = _verdict(check, options.platform, gpus, failures)
        return f"{verdict:<5} {time.monotonic() - begin:5.0f} s  {check.name:<66} {detail}"

    for group in groups(chosen):
        with ThreadPoolExecutor(len(group)) as pool:
            for text in pool.map(line, group):
                print(text, flush=True)
    for name, output in failures:
        print(f"\n-- {name}\n{output}")
    return 1 if failures else 0


def groups(checks: Sequence[Check]) -> list[list[Check]]:
    """Checks that run side by side, in order."""
    together: list[list[Check]] = []
    for check in checks:
        if together and not check.alone and not together[-1][-1].alone:
            together[-1].append(check)
        else:
            together.append([check])
    return together


def longest_s(checks: Sequence[Check]) -> float:
    """Seconds after which the last of them has ended or been given up."""
    return sum(max(check.limit_s for check in group) for group in groups(checks))


def _verdict(check: Check, platform: str, gpus: int, failures: list[tuple[str, str]]) -> tuple[str, str]:
    if check.only not in (None, platform):
        return "-", f"on {check.only} only"
    if platform == "cuda" and check.gpus > gpus:
        return "-", f"needs {check.gpus} GPUs"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        try:
            return "PASS", check.run(platform, Path(folder))
        except Failed as failure:
            failures.append((check.name, str(failure)))
            return "FAIL", "see below"


def _output(command: Sequence[str], limit_s: float, **environment: str) -> str:
    """What a command prints. Raises Failed with the end of it when it does not succeed within the time."""
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        # A job ends what it started; what does not is killed, with all that is still in its session.
        process.terminate()
        try:
            said, _ = process.communicate(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
        raise Failed(f"not done after {limit_s:.0f} s\n{said[-3000:]}") from None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if process.returncode:
        raise Failed(f"exit status {process.returncode}\n{said[-3000:]}")
    return said


if __name__ == "__main__":
    sys.exit(main())
