#!/usr/bin/env bash
# Two replicas of two ranks, and an engine of two processes: on-policy throughout.
source "$(dirname "$0")/common.sh"
run_recipe
check_twin "max(train/token_mult_prob_error) < 1.0001"
