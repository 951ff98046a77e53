#!/usr/bin/env bash
# The benchmarks of docs/benchmarks.md, one after the other, on an otherwise idle machine; writes that page and its
# pictures.
#
#   benchmarks/run.sh [FOLDER]     default: results/benchmarks; what is complete in it is not repeated
# SEEDS (0,1,2) of the comparison with TRL and SIZES (1M,8M,30M,135M) of models make it shorter. With SMOLLM2, a folder
# of SmolLM2-135M-Instruct, and SMOLLM2_ADAPTER, the adapter that sft_smollm2_cpu.yaml leaves, TRL is compared on that
# model, too: ten minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-results/benchmarks}
mkdir -p "$out"

measure() { # measure <script> <arguments...>: keeps what the benchmark prints, in $name.out
  local script=$1 name=${name:-$1}
  shift
  [[ -s $out/$name.out ]] && return
  echo "== $name"
  uv run "benchmarks/$script.py" "$@" | tee "$out/$name.unfinished"
  mv "$out/$name.unfinished" "$out/$name.out"
}

measure vs_trl --seeds "${SEEDS:-0,1,2}" --out "$out/vs_trl" --figure docs/images/vs_trl.png
if [[ -n ${SMOLLM2:-} ]]; then
  name=vs_trl_smollm2 measure vs_trl --config recipes/cpu/grpo-smollm2-135m-instruct-1n1c-megatron-lora.yaml \
    --steps 8 --target 0.6 --out "$out/vs_trl_smollm2" policy.model_name="$SMOLLM2" \
    policy.megatron_cfg.peft.adapter_path="${SMOLLM2_ADAPTER:?}" grpo.num_prompts_per_step=16 grpo.val_period=8 \
    checkpointing.enabled=false
fi
measure trainer_vs_torch
measure generation_vs_vllm
measure sync_modes
measure async_vs_sync --out "$out/async_vs_sync" --figure docs/images/async.png
measure model_size --sizes "${SIZES:-1M,8M,30M,135M}" --out "$out/model_size" --figure docs/images/model_size.png
uv run benchmarks/page.py "$out"
