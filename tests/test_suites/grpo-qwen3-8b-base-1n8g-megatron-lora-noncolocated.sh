#!/usr/bin/env bash
# Four GPUs train, four generate: the reward rises.
source "$(dirname "$0")/common.sh"
run_recipe grpo.max_num_steps=20 grpo.val_period=10
check \
  "count(train/reward) == 20" \
  "min(train/grad_norm) > 0" \
  "last(sync/version) == 21" \
  "mean(train/token_mult_prob_error) < 1.05" \
  "mean(train/reward, 16, 20) > mean(train/reward, 1, 5)"
