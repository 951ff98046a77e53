#!/usr/bin/env bash
# One GPU that trainer and engine take turns on: the reward rises.
source "$(dirname "$0")/common.sh"
run_recipe grpo.max_num_steps=20 grpo.val_period=10
check_large
