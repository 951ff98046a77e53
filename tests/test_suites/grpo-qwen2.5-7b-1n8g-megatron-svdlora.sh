#!/usr/bin/env bash
# Singular values of an adapter, which is given as ADAPTER=<PEFT folder>: the reward rises.
source "$(dirname "$0")/common.sh"
run_recipe grpo.max_num_steps=20 grpo.val_period=10 "policy.megatron_cfg.peft.adapter_path=${ADAPTER:?a PEFT folder}"
check_large
