#!/usr/bin/env -S uv run python
"""A rank and an engine on two Ray nodes, started by the command line; then the engine's node is lost.

    tests/functional/two_nodes.py

Both nodes run on this machine, with loopback addresses of their own. Prints one line per check. Exit status: 0 all
passed, 1 not.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lora_rl.track import read_metrics  # noqa: E402
from tests.support.ray_cluster import RayCluster  # noqa: E402

STEPS_BEFORE_THE_LOSS = 3


def start(folder: Path, address: str, output: Path) -> subprocess.Popen:
    command = [
        sys.executable,
        "examples/run_grpo.py",
        "--config",
        "examples/configs/grpo_tiny_cpu.yaml",
        "grpo.num_prompts_per_step=16",
        "policy.train_global_batch_size=null",
        "grpo.max_num_steps=100000",
        "grpo.val_at_start=false",
        "grpo.val_period=0",
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.num_nodes=1",
        "policy.generation.weight_sync.probe_period=1",
        "cluster.num_nodes=2",
        f"cluster.address={address}",
        "logger.console=plain",
        "logger.tensorboard_enabled=false",
        f"logger.log_dir={folder}",
    ]
    with output.open("wb") as stream:
        return subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT)


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def place(log: Path) -> str:
    return re.search(r", process \d+, (node \S+ \(\w+\))", log.read_text())[1]


def main() -> int:
    failed = 0

    def check(passed: bool, text: str) -> None:
        nonlocal failed
        failed += not passed
        print(f"{'PASS' if passed else 'FAIL'}   {text}", flush=True)

    # A short path: Ray puts Unix sockets below it, whose names have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="lora_rl.", dir="/tmp") as temporary:
        os.environ["RAY_TMPDIR"] = temporary
        folder, output = Path(temporary) / "run", Path(temporary) / "output"
        cluster = RayCluster(2)
        try:
            # `auto` prefers this to other clusters on the machine.
            os.environ["RAY_ADDRESS"] = cluster.address
            driver = start(folder, "auto", output)
            deadline = time.monotonic() + 600
            while lines(folder / "metrics.jsonl") < STEPS_BEFORE_THE_LOSS + 1 and driver.poll() is None:
                if time.monotonic() > deadline:
                    driver.kill()
                time.sleep(0.1)
            if driver.poll() is not None:
                print(output.read_text()[-3000:])
                check(False, f"the run ended by itself with code {driver.returncode}")
                return 1
            rank, engine = (place(folder / "logs" / f"{name}.log") for name in ("rank_0", "engine_0"))
            check(rank.split()[1] != engine.split()[1], f"rank 0 on {rank}, engine 0 on {engine}")
            lost = engine.split()[1]
            # The head holds the cluster together; whichever side is on the other node is lost.
            name = f"engine 0 on {engine}"
            if lost == cluster.nodes[0]:
                lost, name = rank.split()[1], f"rank 0 (tp 0, pp 0, dp 0) on {rank}"
            begin = time.monotonic()
            cluster.kill(lost)
            code = driver.wait(timeout=120)
            check(code == 1, f"the lost node ends the run with code {code}")
            text = output.read_text()
            gone = f"{name} died" in text or f"{name} has no node any more" in text
            check(gone, f"named: {name}")
            check(time.monotonic() - begin < 60, f"after {time.monotonic() - begin:.0f} s")
            records = [r for r in read_metrics(folder / "metrics.jsonl") if r["step"]]
            worst = max(r["sync/parity"] for r in records)
            check(worst < 1e-4, f"{len(records)} pushes to the other node, parity {worst:.1e} nats < 1e-4")
            worst = max(r["train/token_mult_prob_error"] for r in records)
            check(worst < 1.0001, f"token_mult_prob_error {worst:.7f} < 1.0001")
            cluster.wait_until_free(60)
            check(cluster.nodes[0] in cluster.resources(), f"the cluster lives, all is free: {cluster.resources()}")
        finally:
            cluster.close()
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
