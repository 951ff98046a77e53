#!/usr/bin/env bash
# An adapter that was fine-tuned half-way, of which only singular values are trained, in two replicas of two ranks.
source "$(dirname "$0")/common.sh"
fine_tune examples/configs/sft_svd_lora_cpu.yaml "policy.megatron_cfg.peft.target_modules=[linear_qkv,linear_proj]"
run_recipe "policy.megatron_cfg.peft.adapter_path=$work/sft/adapter"
check \
  "count(train/reward) == 6" \
  "max(sync/parity) < 1e-4" \
  "min(train/grad_norm) > 0" \
  "last(sync/version) == 7" \
  "min(train/reward) > 0.4" \
  "max(train/token_mult_prob_error) < 1.0001"
