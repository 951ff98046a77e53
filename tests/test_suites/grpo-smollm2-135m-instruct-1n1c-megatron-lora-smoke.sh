#!/usr/bin/env bash
# A real model for a quarter of an hour: some sums are right, and each such step makes a version. MODEL: as for the long run.
source "$(dirname "$0")/common.sh"
model=${MODEL:-results/models/smollm2-135m-instruct}
[ -d "$model" ] || uv run --no-sync --with gguf==0.19.0 examples/get_smollm2.py --out "$model"
run_recipe policy.model_name="$model"
check \
  "count(train/reward) == 16" \
  "max(sync/parity) < 1e-4" \
  "min(train/grad_norm) > 0" \
  "mean(train/reward) > 0.1" \
  "last(sync/version) == count(train/zero_variance_share < 1) + 1" \
  "max(train/token_mult_prob_error) < 1.001"
