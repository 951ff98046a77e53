"""Kills a run again and again, continues it, and compares it with one that was left alone.

    python tests/functional/kill_and_resume.py [--kills 12] [--steps 30] [--seed 0]

The victims take turns: the driver, a Megatron rank, the engine (which the run survives, so that the driver follows some
steps later), the driver in the middle of writing a checkpoint; each is killed with SIGKILL after a random time. After
every kill the same command is run again. In the end records, adapter, optimizer and random state must equal those of
the undisturbed run bit for bit; only times and memory may differ. Prints one line per kill and per check. Exit status:
0 all equal, 1 not.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = "examples/configs/grpo_tiny_cpu.yaml"
VICTIMS = ("driver", "rank", "engine", "save")
# Metrics that a clock or the operating system decides.
LOOSE = re.compile(
    r"wall_time|elapsed_s|time/.*|tokens/.*|tokens_per_s/.*|memory/.*|sync/seconds|rollout/engine_restarts"
)


def command(folder: Path, steps: int) -> list[str]:
    """The job: small, with several optimizer steps per batch, validation, and a checkpoint every third step."""
    return [
        sys.executable,
        "examples/run_grpo.py",
        "--config",
        CONFIG,
        "grpo.num_prompts_per_step=16",
        "policy.train_global_batch_size=32",
        f"grpo.max_num_steps={steps}",
        "grpo.val_period=5",
        "grpo.max_val_samples=32",
        "checkpointing.enabled=true",
        "checkpointing.save_period=3",
        "checkpointing.keep_top_k=2",
        "logger.console=plain",
        "logger.tensorboard_enabled=false",
        f"logger.log_dir={folder}",
    ]


def start(folder: Path, steps: int, output: Path) -> subprocess.Popen:
    with output.open("ab") as stream:
        return subprocess.Popen(command(folder, steps), stdout=stream, stderr=subprocess.STDOUT)


def records(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def process_of(folder: Path, name: str) -> int:
    """The process that writes this log; each names itself first, and a continued run appends."""
    return int(re.findall(rb", process (\d+)", (folder / "logs" / f"{name}.log").read_bytes())[-1])


def kill_once(folder: Path, steps: int, output: Path, victim: str, rng: random.Random) -> str:
    """Start or continue the run and kill its victim; what happened, in words."""
    lowest = records(folder)
    driver = start(folder, steps, output)
    wait = rng.uniform(0, 4)
    deadline = time.monotonic() + 600
    while driver.poll() is None and time.monotonic() < deadline:
        if victim == "save":
            if any((folder / "checkpoints").glob(".step_*.*")):
                break
            time.sleep(0.001)
        else:
            # A continued run first drops the records behind its checkpoint.
            lowest = min(lowest, records(folder))
            if records(folder) > lowest:
                time.sleep(wait)
                break
            time.sleep(0.05)
    if driver.poll() is not None:
        return "the run ended before the kill"
    at = records(folder) - 1
    target = driver.pid if victim in ("driver", "save") else process_of(folder, f"{victim}_0")
    os.kill(target, signal.SIGKILL)
    if victim == "engine":
        # The run goes on with a new one; it is interrupted some steps later.
        reached = at + 3
        while driver.poll() is None and records(folder) <= reached and time.monotonic() < deadline:
            time.sleep(0.05)
        if driver.poll() is None:
            driver.kill()
    code = driver.wait(timeout=120)
    return f"at step {at}, exit code {code}"


def compare(reference: Path, other: Path) -> list[tuple[str, bool]]:
    """Checks of `other` against the undisturbed run."""
    from safetensors.torch import load_file

    from lora_rl.track import read_metrics

    ours, theirs = (read_metrics(folder / "metrics.jsonl") for folder in (reference, other))
    checks = [(f"{len(theirs)} records, steps in order", [r["step"] for r in ours] == [r["step"] for r in theirs])]
    different = sorted(
        f"step {a['step']} {name}"
        for a, b in zip(ours, theirs, strict=False)
        for name in a.keys() | b.keys()
        if not LOOSE.fullmatch(name) and a.get(name) != b.get(name)
    )
    checks.append((f"metrics are equal {different[:5] or ''}", not different))
    newest = (reference / "checkpoints" / "latest").read_text().strip()
    checks.append((f"the latest checkpoint is {newest}", (other / "checkpoints/latest").read_text().strip() == newest))
    for file in ("adapter/adapter_model.safetensors", "optimizer.safetensors", "random.safetensors"):
        a, b = (load_file(folder / "checkpoints" / newest / file) for folder in (reference, other))
        checks.append((f"{file} is equal bit for bit", a.keys() == b.keys() and all(a[k].equal(b[k]) for k in a)))
    left = [p.name for p in (other / "checkpoints").iterdir() if not re.fullmatch(r"step_\d+|latest", p.name)]
    checks.append((f"nothing unfinished is left behind {left or ''}", not left))
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    failed = 0
    # A short path: Ray puts Unix sockets below it, whose names have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="lora_rl.", dir="/tmp") as temporary:
        work = Path(temporary)
        os.environ["RAY_TMPDIR"] = temporary
        whole, broken, output = work / "whole", work / "broken", work / "output"
        for number in range(options.kills):
            victim = VICTIMS[number % len(VICTIMS)]
            print(f"kill {number + 1}: {victim}, {kill_once(broken, options.steps, output, victim, rng)}", flush=True)
        for folder in (broken, whole):
            if start(folder, options.steps, output).wait() != 0:
                print(output.read_text()[-3000:])
                print(f"FAIL   the run in {folder.name} ended with an error")
                return 1
        for text, passed in compare(whole, broken):
            print(f"{'PASS' if passed else 'FAIL'}   {text}")
            failed += not passed
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
