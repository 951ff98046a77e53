#!/usr/bin/env bash
# SIGTERM saves, the same command continues, another layout continues, a changed adapter is refused, and the result evaluates.
set -euo pipefail
cd "$(dirname "$0")/../.."
# A short path: Ray puts Unix sockets below it, whose names have at most 107 characters.
work=$(mktemp -d -p /tmp)
trap 'rm -rf "$work"' EXIT
run=$work/run
export RAY_TMPDIR=$work
job=(uv run examples/run_grpo.py --config examples/configs/grpo_tiny_cpu.yaml grpo.num_prompts_per_step=16
  policy.train_global_batch_size=32 grpo.val_period=4 grpo.max_val_samples=64 checkpointing.enabled=true
  checkpointing.save_period=50 logger.console=plain logger.tensorboard_enabled=false "logger.log_dir=$run")
to() { # to <file> <command...>: both outputs go there
  local file=$1
  shift
  "$@" >"$file" 2>&1
}
check() { # check <what> <command...>
  local what=$1
  shift
  if "$@"; then echo "PASS   $what"; else echo "FAIL   $what"; tail -n 30 "$work"/*.out; exit 1; fi
}

"${job[@]}" grpo.max_num_steps=1000 >"$work/first.out" 2>&1 &
driver=$!
for _ in $(seq 600); do
  [ -f "$run/metrics.jsonl" ] && [ "$(wc -l <"$run/metrics.jsonl")" -ge 3 ] && break
  sleep 0.5
done
pid=$(pgrep -P "$driver" -f run_grpo | head -n 1 || true)
kill -TERM "${pid:-$driver}"
code=0
wait "$driver" || code=$?
check "SIGTERM: exit code $code is 130" [ "$code" -eq 130 ]
saved=$(cat "$run/checkpoints/latest")
check "SIGTERM: a checkpoint of the last finished step, $saved" [ "$saved" = "step_$(($(wc -l <"$run/metrics.jsonl") - 1))" ]

last=$((${saved#step_} + 3))
check "the same command continues" to "$work/second.out" "${job[@]}" grpo.max_num_steps=$last
check "and says from where" grep -q "continuing after step ${saved#step_}" "$work/second.out"
check "two pipeline stages continue" to "$work/third.out" "${job[@]}" grpo.max_num_steps=$((last + 2)) \
  policy.megatron_cfg.pipeline_model_parallel_size=2
uv run tests/functional/check_metrics.py "$run/metrics.jsonl" "count(train/reward) == $((last + 2))" \
  "max(train/token_mult_prob_error) < 1.0001" "last(sync/version) == $((last + 3))"
if "${job[@]}" grpo.max_num_steps=$((last + 4)) policy.megatron_cfg.peft.dim=8 >"$work/refused.out" 2>&1; then
  echo "FAIL   another rank was not refused"
  exit 1
fi
check "another rank is refused" grep -q "adapter.dim: the checkpoint has 16, this run 8" "$work/refused.out"

check "the newest checkpoint evaluates" to "$work/eval.out" uv run examples/run_eval.py --config examples/configs/grpo_tiny_cpu.yaml \
  --adapter "$run/checkpoints" --k 1,2 grpo.val_num_generations=2 grpo.max_val_samples=32 logger.console=plain \
  "logger.log_dir=$run"
check "with one line per completion" [ "$(wc -l <"$run-eval/samples.jsonl")" -eq 64 ]
