#!/usr/bin/env bash
# A mixture of experts over two ranks, beside an engine of two processes: on-policy throughout, and it learns. Random weights
# rarely write a digit: a step in which the completions of every prompt have the same reward makes no version.
source "$(dirname "$0")/common.sh"
run_recipe grpo.max_num_steps=12
check \
  "count(train/reward) == 12" \
  "max(sync/parity) < 1e-4" \
  "min(train/grad_norm) > 0" \
  "last(sync/version) == count(train/zero_variance_share < 1) + 1" \
  "count(train/zero_variance_share < 1) > 8" \
  "max(train/token_mult_prob_error) < 1.0001" \
  "mean(train/reward, -3, -1) > mean(train/reward, 1, 3) + 0.1"
