#!/usr/bin/env bash
# A mixture of experts, with adapters on attention.
source "$(dirname "$0")/common.sh"
run_recipe grpo.max_num_steps=20 grpo.val_period=10
check \
  "count(train/reward) == 20" \
  "min(train/grad_norm) > 0" \
  "last(sync/version) == 21" \
  "mean(train/token_mult_prob_error) < 1.05"
