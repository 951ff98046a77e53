#!/usr/bin/env bash
# Generating while training: rollouts are at most one version old.
source "$(dirname "$0")/common.sh"
run_recipe grpo.max_num_steps=20 grpo.val_period=10
check_large "max(rollout/age_max) <= 1"
