#!/usr/bin/env bash
# One jump ahead of the frozen weights, over two replicas of two ranks: a version of its own, which engines hold exactly.
source "$(dirname "$0")/common.sh"
run_recipe
check \
  "count(train/reward) == 12" \
  "max(sync/parity) < 1e-4" \
  "min(train/grad_norm) > 0" \
  "count(next/alpha > 0) == 1" \
  "last(next/accepted) == 1" \
  "max(next/alpha) == 1.5" \
  "last(sync/version) == 14" \
  "min(train/reward) > 0.2" \
  "max(train/token_mult_prob_error) < 1.0001"
