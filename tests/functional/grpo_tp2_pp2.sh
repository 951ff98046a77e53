#!/usr/bin/env bash
# Splitting the model over two ranks, by tensor or by pipeline, changes how a step is computed but not its result.
set -euo pipefail
cd "$(dirname "$0")/../.."
# A short path: Ray puts Unix sockets below it, whose names have at most 107 characters.
work=$(mktemp -d -p /tmp)
trap 'rm -rf "$work"' EXIT

run() { # run <name> <overrides...>
  local name=$1
  shift
  if ! RAY_TMPDIR="$work" uv run examples/run_grpo.py --config examples/configs/grpo_tiny_cpu.yaml \
    grpo.num_prompts_per_step=16 policy.train_global_batch_size=null grpo.max_num_steps=2 grpo.val_at_start=false \
    grpo.val_period=0 policy.megatron_cfg.scheduler.lr_warmup_iters=0 logger.console=plain \
    logger.tensorboard_enabled=false "logger.log_dir=$work/$name" "$@" >"$work/output" 2>&1; then
    tail -n 40 "$work/output"
    echo "FAIL   $name: the run ended with an error"
    exit 1
  fi
  echo "PASS   $name: the run ended by itself"
}

run one_rank
run tp2 policy.megatron_cfg.tensor_model_parallel_size=2
run pp2 policy.megatron_cfg.pipeline_model_parallel_size=2

uv run python - "$work" <<'PYTHON'
import sys
from pathlib import Path

from lora_rl.track import read_metrics

# Accepted differences. The loss of an on-policy step barely depends on the model, its gradient does; the second
# step's rollouts come from the weights that the first step made.
TOLERANCES = {
    (1, "train/reward"): 1e-9,
    (1, "train/loss"): 1e-4,
    (1, "train/grad_norm"): 1e-4,
    (2, "train/loss"): 1e-3,
    (2, "train/grad_norm"): 1e-2,
}

folder, failed = Path(sys.argv[1]), 0
expected = {record["step"]: record for record in read_metrics(folder / "one_rank" / "metrics.jsonl")}
for name in ("tp2", "pp2"):
    records = {record["step"]: record for record in read_metrics(folder / name / "metrics.jsonl")}
    ranks = len(list((folder / name / "logs").glob("rank_*.log")))
    checks = [(f"{ranks} ranks ran", ranks == 2), ("steps 0 to 2 are recorded", sorted(records) == [0, 1, 2])]
    for (step, metric), tolerance in TOLERANCES.items():
        one, split = expected[step][metric], records[step][metric]
        text = f"step {step} {metric} {split:.8g}, on one rank {one:.8g}, accepted difference {tolerance:g}"
        checks.append((text, abs(one - split) <= tolerance))
    worst = max(records[step]["train/token_mult_prob_error"] for step in (1, 2))
    checks.append((f"trainer and engine agree: token_mult_prob_error {worst:.7f} < 1.0001", worst < 1.0001))
    for text, passed in checks:
        print(f"{'PASS' if passed else 'FAIL'}   {name}: {text}")
        failed |= not passed
sys.exit(failed)
PYTHON
