#!/usr/bin/env bash
# Four GPUs train, four generate: the reward rises.
source "$(dirname "$0")/common.sh"
run_recipe grpo.max_num_steps=20 grpo.val_period=10
check_large
