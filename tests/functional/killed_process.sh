#!/usr/bin/env bash
# A killed engine is started anew and the job goes on. A killed or hung rank, or an engine that may not be started anew,
# ends the job, non-zero, within 60 seconds, with a message that names it, and a checkpoint where there can be one. Ctrl-C
# ends it cleanly.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
note() { if [ "$1" = ok ]; then echo "ok    $2"; else echo "FAIL  $2"; failures=$((failures + 1)); fi; }

# run NAME VICTIM SIGNAL: start a job, send SIGNAL to VICTIM (a log file's process, or the driver) after the third step.
run() {
  local name=$1 victim=$2 signal=$3 dir=$work/$1
  # A background job starts with SIGINT ignored, which Python would respect.
  env --default-signal=INT uv run python examples/run_grpo.py --config examples/configs/grpo_tiny_cpu.yaml grpo.max_num_steps=100000 \
    grpo.num_prompts_per_step=8 policy.train_global_batch_size=null grpo.val_period=0 grpo.val_at_start=false \
    logger.console=plain "logger.log_dir=$dir" "${@:4}" >"$work/$name.out" 2>&1 &
  local driver=$! pid
  for _ in $(seq 600); do
    [ -f "$dir/metrics.jsonl" ] && [ "$(wc -l <"$dir/metrics.jsonl")" -ge 4 ] && break
    kill -0 "$driver" 2>/dev/null || break
    sleep 1
  done
  if [ "$victim" = driver ]; then
    # `uv run` passes the signal on, as a terminal would give it to both.
    pid=$(pgrep -P "$driver" -f run_grpo | head -n 1 || true)
    pid=${pid:-$driver}
  else
    pid=$(grep -oE ', process [0-9]+' "$dir/logs/$victim.log" | tail -n 1 | cut -d' ' -f3)
  fi
  kill "-$signal" "$pid"
  local start=$SECONDS
  while kill -0 "$driver" 2>/dev/null && [ $((SECONDS - start)) -lt 90 ]; do sleep 0.2; done
  took=$((SECONDS - start))
  code=0
  wait "$driver" || code=$?
}

run restart engine_0 KILL grpo.max_num_steps=30
[ "$code" -eq 0 ] && note ok "killed engine: the job went on to its end" || note fail "killed engine: exit code $code, want 0"
grep -q 'engine 0 died (log: .*); it is started anew' "$work/restart.out" && note ok "killed engine: told" ||
  note fail "killed engine: not told"
[ "$(wc -l <"$work/restart/metrics.jsonl")" -eq 31 ] && note ok "killed engine: every step recorded" ||
  note fail "killed engine: records are missing"

run engine engine_0 KILL cluster.max_engine_restarts=0 checkpointing.enabled=true checkpointing.save_period=1000
[ "$code" -eq 1 ] && note ok "killed engine: exit code 1" || note fail "killed engine: exit code $code, want 1"
[ "$took" -le 60 ] && note ok "killed engine: ended after $took s" || note fail "killed engine: took $took s"
grep -q 'engine 0 died' "$work/engine.out" && note ok "killed engine: named" || note fail "killed engine: not named"

saved=$(cat "$work/engine/checkpoints/latest" 2>/dev/null || true)
last=step_$(($(wc -l <"$work/engine/metrics.jsonl") - 1))
[ "$saved" = "$last" ] && note ok "lost engine: checkpoint $saved was written" || note fail "lost engine: $saved, want $last"

[ -s "$work/engine/adapter/adapter_model.safetensors" ] && note ok "lost engine: the adapter was kept" ||
  note fail "lost engine: the adapter was not kept"

run hung rank_0 STOP cluster.step_timeout_s=10
[ "$code" -eq 1 ] && note ok "hung rank: exit code 1" || note fail "hung rank: exit code $code, want 1"
[ "$took" -le 60 ] && note ok "hung rank: ended after $took s" || note fail "hung rank: took $took s"
grep -q 'no answer from rank 0' "$work/hung.out" && note ok "hung rank: named" || note fail "hung rank: not named"

run rank rank_1 KILL policy.megatron_cfg.tensor_model_parallel_size=2
[ "$code" -eq 1 ] && note ok "killed rank: exit code 1" || note fail "killed rank: exit code $code, want 1"
[ "$took" -le 60 ] && note ok "killed rank: ended after $took s" || note fail "killed rank: took $took s"
grep -q 'rank 1 (tp 1, pp 0, dp 0) died' "$work/rank.out" && note ok "killed rank: named" || note fail "killed rank: not named"

run interrupt driver INT
[ "$code" -eq 130 ] && note ok "Ctrl-C: exit code 130" || note fail "Ctrl-C: exit code $code, want 130"
[ "$took" -le 30 ] && note ok "Ctrl-C: ended after $took s" || note fail "Ctrl-C: took $took s"
grep -q "results are in $work/interrupt" "$work/interrupt.out" && note ok "Ctrl-C: says where things are" ||
  note fail "Ctrl-C: does not say where things are"
[ -s "$work/interrupt/learning_curve.png" ] && note ok "Ctrl-C: curve drawn" || note fail "Ctrl-C: no curve"

if [ "$failures" -gt 0 ]; then tail -n 20 "$work"/*.out; fi
echo "$failures failed"
exit $((failures > 0))
