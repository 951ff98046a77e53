# Shared by the scripts of recipes, which are named as the recipe they run. Source it, then:
#   run_recipe [key=value ...]   runs the recipe with these overrides in a folder of its own
#   fine_tune CONFIG [key=value ...]   makes the adapter that the recipe starts from, in $work/sft/adapter
#   check "expression" ...       checks what the run recorded, see tests/functional/check_metrics.py
#   check_twin, check_large      the same, with what holds for every twin of six steps, or large recipe of 20, before it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
name=$(basename "$0" .sh)
recipe=$(find examples/configs/recipes -name "$name.yaml")
# A short path: Ray puts Unix sockets below it, whose names have at most 107 characters.
work=$(mktemp -d -p /tmp)
trap 'rm -rf "$work"' EXIT

run_recipe() {
  if ! RAY_TMPDIR="$work" uv run --no-sync examples/run_grpo.py --config "$recipe" logger.console=plain \
    "logger.log_dir=$work/run" "$@" >"$work/output" 2>&1; then
    tail -n 40 "$work/output"
    echo "FAIL   $name ended with an error"
    exit 1
  fi
  grep -E "^(start-up|step )" "$work/output" || true
  echo "PASS   $name ended by itself"
}

fine_tune() { # fine_tune <config> [key=value ...]: leaves $work/sft/adapter
  if ! RAY_TMPDIR="$work" uv run --no-sync examples/run_sft.py --config "$@" \
    logger.console=plain "logger.log_dir=$work/sft" >"$work/sft.out" 2>&1; then
    tail -n 40 "$work/sft.out"
    echo "FAIL   fine-tuning ended with an error"
    exit 1
  fi
}

check() {
  uv run --no-sync tests/functional/check_metrics.py "$work/run/metrics.jsonl" "$@"
}

check_twin() {
  check "count(train/reward) == 6" "max(sync/parity) < 1e-4" "min(train/grad_norm) > 0" \
    "last(sync/version) == 7" "min(train/reward) > 0.2" "last(val/accuracy) > 0.3" "$@"
}

check_large() {
  check "count(train/reward) == 20" "min(train/grad_norm) > 0" "last(sync/version) == 21" \
    "mean(train/token_mult_prob_error) < 1.05" "mean(train/reward, 16, 20) > mean(train/reward, 1, 5)" "$@"
}
