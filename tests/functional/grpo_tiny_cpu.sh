#!/usr/bin/env bash
# A short real run of examples/configs/grpo_tiny_cpu.yaml: it keeps its reward, stays on-policy, and leaves a whole run folder.
set -euo pipefail
cd "$(dirname "$0")/../.."
# A short path: Ray puts Unix sockets below it, whose names have at most 107 characters.
work=$(mktemp -d -p /tmp)
trap 'rm -rf "$work"' EXIT
run="$work/run"

if ! RAY_TMPDIR="$work" uv run examples/run_grpo.py --config examples/configs/grpo_tiny_cpu.yaml \
  grpo.num_prompts_per_step=32 policy.train_global_batch_size=64 grpo.max_num_steps=12 grpo.val_period=6 grpo.max_val_samples=128 \
  logger.console=plain "logger.log_dir=$run" >"$work/output" 2>&1; then
  tail -n 40 "$work/output"
  echo "FAIL   the run ended with an error"
  exit 1
fi
echo "PASS   the run ended by itself"

uv run tests/functional/check_metrics.py "$run/metrics.jsonl" \
  "count(train/reward) == 12" \
  "count(val/accuracy) == 3" \
  "max(train/token_mult_prob_error) < 1.0001" \
  "max(sync/parity) < 1e-4" \
  "last(sync/version) == 13" \
  "min(train/reward) > 0.2" \
  "mean(train/reward, -4, -1) > mean(train/reward, 1, 4) - 0.1" \
  "min(train/grad_norm) > 0" \
  "max(train/lr) > first(train/lr)"

failed=0
for file in config.yaml report.html val_samples.jsonl run.json learning_curve.png logs/rank_0.log logs/engine_0.log logs/ray.log \
  "tensorboard/events.out.tfevents.*"; do
  # Unquoted on purpose: the last name is a pattern.
  if [[ -e $(echo "$run"/$file) ]]; then
    echo "PASS   $file exists"
  else
    echo "FAIL   $file is missing from the run folder"
    failed=1
  fi
done

# The resolved configuration is itself a valid one, and names the same processes.
if uv run examples/run_grpo.py --config "$run/config.yaml" --dry-run >"$work/again" && grep -q "1 rank = tp 1" "$work/again"; then
  echo "PASS   config.yaml of the run folder starts the same run"
else
  echo "FAIL   config.yaml of the run folder is not a configuration"
  failed=1
fi
exit "$failed"
