"""Kills engines at random while a run generates and trains at the same time, and checks what was trained on.

    python tests/functional/async_faults.py [--steps 100] [--seed 0] [--pause 15] [--age 2] [--keep DIR]

Two engines beside one Megatron rank; now and then one of them gets SIGKILL, or SIGSTOP, which only a heartbeat finds.
The run must go on by itself to its last step. Afterwards, from rollouts.jsonl: every group was trained on exactly once
and whole, no token is of weights that are too old or were never pushed, and the reward rose. Prints one line per fault
and per check. Exit status: 0 all passed, 1 not.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

GROUPS, SAMPLES = 128, 4


def command(folder: Path, steps: int, age: int) -> list[str]:
    """The default job with engines of their own."""
    return [
        sys.executable,
        "examples/run_grpo.py",
        "--config",
        "examples/configs/grpo_async_tiny_cpu.yaml",
        f"grpo.max_num_steps={steps}",
        f"grpo.async_grpo.max_trajectory_age_steps={age}",
        "grpo.max_val_samples=256",
        f"grpo.val_period={steps}",
        "policy.generation.colocated.resources.gpus_per_node=2",
        "cluster.heartbeat_timeout_s=10",
        # Faults also hit engines that are being started.
        "cluster.max_engine_restarts=10",
        "logger.log_rollouts=true",
        "logger.console=plain",
        "logger.tensorboard_enabled=false",
        f"logger.log_dir={folder}",
    ]


def engine_process(folder: Path, engine: int) -> int | None:
    """The newest process of an engine, if it still lives."""
    log = folder / "logs" / f"engine_{engine}.log"
    if not log.exists():
        return None
    process = int(re.findall(rb", process (\d+)", log.read_bytes())[-1])
    return process if Path(f"/proc/{process}").exists() else None


def steps_done(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") - 1 if file.exists() else -1


def disturb(folder: Path, driver: subprocess.Popen, steps: int, pause: float, rng: random.Random) -> int:
    """Strike until the run ends; the number of faults."""
    faults, struck = 0, set()
    while driver.poll() is None:
        wait = rng.uniform(0.5, 1.5) * pause
        until = time.monotonic() + wait
        while driver.poll() is None and time.monotonic() < until:
            time.sleep(0.2)
        done, engine = steps_done(folder), rng.randrange(2)
        process = engine_process(folder, engine)
        # The same process is not struck twice, and the last steps are left alone, so that the end can be reached.
        if driver.poll() is not None or not 1 <= done < steps - 2 or process is None or process in struck:
            continue
        how = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        os.kill(process, how)
        struck.add(process)
        faults += 1
        print(f"fault {faults}: {how.name} to engine {engine} after step {done}", flush=True)
    return faults


def check(folder: Path, steps: int, age: int, faults: int) -> list[tuple[str, bool]]:
    """What the files say."""
    from lora_rl.track import read_metrics

    records = read_metrics(folder / "metrics.jsonl")
    versions = {r["step"]: int(r["sync/version"]) for r in records if "sync/version" in r}
    groups: dict[int, list[dict]] = defaultdict(list)
    for line in (folder / "rollouts.jsonl").read_text().splitlines():
        rollout = json.loads(line)
        groups[rollout["group"]].append(rollout)
    whole = all(
        sorted(r["sample"] for r in members) == list(range(SAMPLES)) and len({r["step"] for r in members}) == 1
        for members in groups.values()
    )
    refused = int(records[-1]["rollout/refused_groups"])
    missing = set(range(steps * GROUPS + refused)) - set(groups)
    too_old = impossible = mixed = 0
    for members in groups.values():
        for rollout in members:
            trainer = versions[rollout["step"] - 1]
            spans = [version for version, _ in rollout["versions"]]
            too_old += trainer - min(spans) > age
            impossible += max(spans) > trainer or min(spans) < 1
            mixed += len(set(spans)) > 1
    rewards = [r["train/reward"] for r in records[1:]]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    restarts = int(records[-1]["rollout/engine_restarts"])
    return [
        (f"{len(groups)} groups of {SAMPLES} completions, each trained on once", whole),
        (f"no group is lost ({len(missing)} missing, {refused} left out)", len(missing) == refused == 0),
        (f"no completion is older than {age} versions", too_old == 0),
        ("no completion is of a version that was not pushed before", impossible == 0),
        # The last one may not have been noticed before the end.
        (f"{restarts} engines were started anew after {faults} faults", restarts >= faults - 1 > 0),
        (f"the reward rose from {first:.3f} to {last:.3f}", last > first + 0.25),
        (f"{mixed} completions have tokens of several weight versions", True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=15, help="mean seconds between faults")
    parser.add_argument("--age", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="run folder to keep")
    options = parser.parse_args()
    # A short path: Ray puts Unix sockets below it, whose names have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="lora_rl.", dir="/tmp") as temporary:
        os.environ["RAY_TMPDIR"] = temporary
        folder = options.keep or Path(temporary) / "run"
        with (Path(temporary) / "output").open("w+b") as output:
            driver = subprocess.Popen(command(folder, options.steps, options.age), stdout=output, stderr=output)
            faults = disturb(folder, driver, options.steps, options.pause, random.Random(options.seed))
            if driver.wait() != 0:
                output.seek(0)
                print(output.read().decode()[-4000:])
                print(f"FAIL   the run ended with status {driver.returncode}")
                return 1
        checks = check(folder, options.steps, options.age, faults)
    for text, passed in checks:
        print(f"{'PASS' if passed else 'FAIL'}   {text}")
    return not all(passed for _, passed in checks)


if __name__ == "__main__":
    sys.exit(main())
