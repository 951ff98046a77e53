#!/usr/bin/env bash
# Generating while training: rollouts are at most one version old.
source "$(dirname "$0")/common.sh"
run_recipe
check_twin "max(rollout/age_max) <= 1"
