#!/usr/bin/env bash
# Three real steps of methods that differ in what they need of the trainer: GSPO, REINFORCE against the others with the KL
# in the reward, and the same KL with several optimizer steps per batch, whose old logprobs are those of the KL.
set -euo pipefail
cd "$(dirname "$0")/../.."
# A short path: Ray puts Unix sockets below it, whose names have at most 107 characters.
work=$(mktemp -d -p /tmp)
trap 'rm -rf "$work"' EXIT

methods=gspo,rloo,kl_in_reward
if ! RAY_TMPDIR="$work" uv run benchmarks/methods.py --methods $methods --steps 3 --seeds 0 --skip-validation --out "$work/runs"; then
  tail -n 20 "$work"/runs/*.log
  echo "FAIL   a run ended with an error"
  exit 1
fi
echo "PASS   the runs ended by themselves"

on_policy="max(train/token_mult_prob_error) < 1.0001"
uv run tests/functional/check_metrics.py "$work/runs/gspo-0/metrics.jsonl" "$on_policy" "count(train/reward) == 3" \
  "min(train/optimizer_steps) == 4" "min(train/grad_norm) > 0" "max(train/probs_ratio_max) > 1"
for run in rloo kl_in_reward; do
  # The reference is what the run starts from.
  uv run tests/functional/check_metrics.py "$work/runs/$run-0/metrics.jsonl" "$on_policy" "count(train/reward) == 3" \
    "first(train/kl) == 0" "last(train/kl) > 0" "last(train/kl_per_sequence) > last(train/kl)" "min(train/grad_norm) > 0"
done
uv run tests/functional/check_metrics.py "$work/runs/rloo-0/metrics.jsonl" "max(train/probs_ratio_max) == 1"
uv run tests/functional/check_metrics.py "$work/runs/kl_in_reward-0/metrics.jsonl" "min(train/optimizer_steps) == 4"
