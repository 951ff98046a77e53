#!/usr/bin/env bash
# One jump ahead, shortened: after 15 steps instead of 150.
source "$(dirname "$0")/common.sh"
run_recipe grpo.max_num_steps=20 grpo.val_period=10 grpo.next.interval=1
check \
  "count(train/reward) == 20" \
  "min(train/grad_norm) > 0" \
  "last(next/accepted) == 1" \
  "max(next/alpha) == 1.5" \
  "last(sync/version) == 22" \
  "mean(train/token_mult_prob_error) < 1.05"
