#!/usr/bin/env bash
# Generating while training: rollouts are at most one version old.
source "$(dirname "$0")/common.sh"
run_recipe
check \
  "count(train/reward) == 6" \
  "max(sync/parity) < 1e-4" \
  "min(train/grad_norm) > 0" \
  "last(sync/version) == 7" \
  "min(train/reward) > 0.2" \
  "last(val/accuracy) > 0.3" \
  "max(rollout/age_max) <= 1"
