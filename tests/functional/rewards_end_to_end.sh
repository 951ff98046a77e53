#!/usr/bin/env bash
# Real jobs with rewards from workers: an own function that hangs now and then, math_verify, reasoning_gym; what is
# recorded of them, and that no process is left.
set -euo pipefail
cd "$(dirname "$0")/../.."
# A short path: Ray puts Unix sockets below it, whose names have at most 107 characters.
work=$(mktemp -d -p /tmp)
trap 'rm -rf "$work"' EXIT
export RAY_TMPDIR=$work
failed=0

check() { # check <description> <command...>
  local description=$1
  shift
  if "$@"; then
    echo "PASS   $description"
  else
    echo "FAIL   $description"
    failed=1
  fi
}

run() { # run <name> <overrides...>
  local name=$1
  shift
  uv run examples/run_grpo.py --config examples/configs/grpo_tiny_cpu.yaml grpo.num_prompts_per_step=32 \
    policy.train_global_batch_size=64 grpo.max_num_steps=3 grpo.val_period=3 grpo.max_val_samples=64 \
    logger.console=plain logger.tensorboard_enabled=false reward.num_workers=2 "logger.log_dir=$work/$name" "$@" \
    >"$work/$name.out" 2>&1
}

ended() { # ended <name> <overrides...>: the run must end by itself, and take everything along
  local name=$1
  if ! run "$@"; then
    tail -n 40 "$work/$name.out"
    echo "FAIL   $name ended with an error"
    exit 1
  fi
  echo "PASS   $name ended by itself"
  # Every process of the run has its environment; the shells of this script got theirs before.
  check "$name: no worker is left" no_worker
}

no_worker() {
  local process
  for process in /proc/[0-9]*; do
    if grep -qs "RAY_TMPDIR=$work" "$process/environ" && grep -qs "fork_server" "$process/cmdline"; then
      return 1
    fi
  done
}

cat >"$work/own.py" <<'PYTHON'
import asyncio
import time


async def score(completion, answer, prompt, metadata):
    await asyncio.sleep(0)
    assert prompt == f"{metadata['a']}+{metadata['b']}="
    if int(answer) % 20 == 7:
        time.sleep(3600)
    return {"reward": float(completion == answer), "length": len(completion)}
PYTHON

ended function reward.name=function "reward.function=$work/own.py:score" reward.timeout_s=0.25 reward.label=own \
  'reward.additional=[{name: format, weight: 0.1, pattern: "[0-9]+"}, {name: exact_match, weight: 0.000001}]'
uv run tests/functional/check_metrics.py "$work/function/metrics.jsonl" \
  "count(train/reward) == 3" "min(reward/own) > 0.1" "min(reward/own/length) > 1" "min(reward/timed_out) > 0" \
  "max(reward/timed_out) < 0.25" "min(reward/format) > 0.5" "min(train/grad_norm) > 0" "min(val/accuracy) > 0.1"
check "function: a time-out is said once" test "$(grep -c 'reward own: timed_out' "$work/function.out")" -eq 1

ended math reward.name=math_verify 'reward.additional=[{name: exact_match, weight: 0.000001}]'
uv run tests/functional/check_metrics.py "$work/math/metrics.jsonl" \
  "count(train/reward) == 3" "min(reward/math_verify) > 0.1" "min(train/grad_norm) > 0" "max(reward/correct) < 1"

uv run python - "$work" <<'PYTHON' || failed=1
import sys
from pathlib import Path

from lora_rl.track import read_metrics

steps = {
    name: [r for r in read_metrics(Path(sys.argv[1]) / name / "metrics.jsonl") if "train/reward" in r]
    for name in ("function", "math")
}
own, math = steps["function"], steps["math"]
small = 1e-6
checks = [
    ("the reward is the weighted sum of its components",
     all(abs(r["train/reward"] - r["reward/own"] - 0.1 * r["reward/format"] - small * r["reward/exact_match"]) < 1e-9
         for r in own)),
    ("a hanging function loses answers that exact_match finds right, and no other",
     all(0 <= r["reward/exact_match"] - r["reward/own"] <= r.get("reward/timed_out", 0) + 1e-9 for r in own)),
    ("math_verify takes every exact match for right",
     all(r["reward/math_verify"] >= r["reward/exact_match"] - 1e-9 for r in math)),
    ("accuracy and the share of correct ones are the first verifier's",
     all(abs(r["reward/correct"] - r["reward/math_verify"]) < 1e-9 for r in math)),
    ("both runs saw the same completions in their first step",
     abs(own[0]["reward/exact_match"] - math[0]["reward/exact_match"]) < 1e-9),
]
for text, passed in checks:
    print(f"{'PASS' if passed else 'FAIL'}   {text}")
sys.exit(not all(passed for _, passed in checks))
PYTHON

echo 'raise RuntimeError("no model for the judge")
def score(completion): ...' >"$work/failing.py"
code=0
run failing reward.name=function "reward.function=$work/failing.py:score" || code=$?
check "a module that fails to import: exit code 1 (was $code)" test "$code" -eq 1
check "a module that fails to import: named" grep -q "failing.py failed: RuntimeError: no model for the judge" "$work/failing.out"
check "a module that fails to import: no traceback" test "$(grep -c Traceback "$work/failing.out")" -eq 0
check "a module that fails to import: Ray was not started" test ! -e "$work/failing/logs/ray.log"

if uv run examples/run_grpo.py --config examples/configs/grpo_tiny_cpu.yaml --dry-run data.task=reasoning_gym \
  >"$work/dry" 2>&1 || ! grep -q "data.task" "$work/dry"; then
  ended reasoning data.task=reasoning_gym reward.name=reasoning_gym \
    'data.reasoning_gym.datasets=[{name: chain_sum, config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}]' \
    grpo.drop_zero_variance_groups=false data.reasoning_gym.size=64 data.reasoning_gym.val_size=16 \
    policy.max_total_sequence_length=128 grpo.max_num_steps=1 grpo.val_period=1
  uv run tests/functional/check_metrics.py "$work/reasoning/metrics.jsonl" "count(train/reward) == 1" \
    "min(reward/reasoning_gym) >= 0" "max(reward/reasoning_gym) <= 1"
fi
exit "$failed"
