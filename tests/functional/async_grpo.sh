#!/usr/bin/env bash
# Generating while training: age 0 equals a synchronous run bit for bit, an older age stays within its bound, also after
# a restart.
set -euo pipefail
cd "$(dirname "$0")/../.."
# A short path: Ray puts Unix sockets below it, whose names have at most 107 characters.
work=$(mktemp -d -p /tmp)
trap 'rm -rf "$work"' EXIT
export RAY_TMPDIR=$work
run() { # run <name> <key=value...>
  local name=$1
  shift
  if ! uv run examples/run_grpo.py --config examples/configs/grpo_async_tiny_cpu.yaml grpo.num_prompts_per_step=32 \
    policy.train_global_batch_size=64 grpo.max_val_samples=64 grpo.use_dynamic_sampling=true logger.console=plain \
    logger.tensorboard_enabled=false logger.log_rollouts=true "logger.log_dir=$work/$name" "$@" >"$work/$name.out" 2>&1; then
    tail -n 40 "$work/$name.out"
    echo "FAIL   $name ended with an error"
    exit 1
  fi
  echo "PASS   $name ended by itself"
}

run sync grpo.max_num_steps=6 grpo.val_period=3 grpo.async_grpo.enabled=false \
  grpo.async_grpo.in_flight_weight_updates=false
run age_0 grpo.max_num_steps=6 grpo.val_period=3 grpo.async_grpo.max_trajectory_age_steps=0
older=(grpo.val_period=4 grpo.async_grpo.max_trajectory_age_steps=2 checkpointing.enabled=true checkpointing.save_period=4)
# The second start continues the first: what had been drawn and not trained on is drawn again.
run age_2 grpo.max_num_steps=4 policy.megatron_cfg.scheduler.lr_decay_iters=96 "${older[@]}"
run age_2 grpo.max_num_steps=8 policy.megatron_cfg.scheduler.lr_decay_iters=96 "${older[@]}"
uv run tests/functional/check_metrics.py "$work/age_2/metrics.jsonl" "max(rollout/age_max) <= 2" "max(rollout/age_max) > 0" \
  "max(rollout/refused_groups) == 0" "min(train/reward) > 0.3" "last(val/accuracy) > 0.3" "max(train/is_oob_ratio) < 0.5"
uv run python - "$work" <<'PYTHON'
import json
import sys
from pathlib import Path

from lora_rl.track import read_metrics

work = Path(sys.argv[1])
sync, age_0 = (read_metrics(work / name / "metrics.jsonl") for name in ("sync", "age_0"))
names = sorted(name for name in sync[-1] if name.startswith(("train/", "val/", "reward/")))
different = sorted({f"step {a['step']} {n}" for a, b in zip(sync, age_0, strict=True) for n in names if a.get(n) != b.get(n)})
lines = [json.loads(line) for line in (work / "age_2" / "rollouts.jsonl").read_text().splitlines()]
times = {}
for line in lines:
    times.setdefault(line["group"], set()).add(line["step"])
checks = [
    (f"{len(names)} metrics of {len(sync)} records are equal bit for bit {different[:5] or ''}", not different),
    ("the same completions", (work / "sync/rollouts.jsonl").read_bytes() == (work / "age_0/rollouts.jsonl").read_bytes()),
    (f"{len(times)} groups, each trained on in one step, also over the restart",
     len(times) == 8 * 32 and all(len(steps) == 1 for steps in times.values())),
]
for text, passed in checks:
    print(f"{'PASS' if passed else 'FAIL'}   {text}")
sys.exit(not all(passed for _, passed in checks))
PYTHON
