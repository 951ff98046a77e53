#!/usr/bin/env bash
# Supervised fine-tuning, GRPO from its adapter with a KL penalty to it, evaluation of both. The model is named by an id
# of the hub, whose files are in the hub's cache.
source "$(dirname "$0")/steps.sh"

export HF_HOME=$work/hub HF_HUB_OFFLINE=1
uv run python -m tests.support.hub examples/models/tiny-adder lora-rl/tiny-adder "$HF_HOME"
common+=(policy.model_name=lora-rl/tiny-adder)

step sft uv run examples/run_sft.py --config examples/configs/sft_tiny_cpu.yaml sft.max_num_steps=30 sft.val_period=30 \
  checkpointing.enabled=true "logger.log_dir=$work/sft" "${common[@]}"
uv run tests/functional/check_metrics.py "$work/sft/metrics.jsonl" "last(val/nll) < first(val/nll) * 0.7" \
  "last(train/nll) < first(train/nll)" "min(train/grad_norm) > 0"

# The rank may grow: what is left over starts at B = 0. Two ranks, though the adapter was trained on one.
step grpo uv run examples/run_grpo.py --config examples/configs/grpo_tiny_cpu.yaml grpo.max_num_steps=4 grpo.val_period=4 \
  grpo.num_prompts_per_step=32 policy.train_global_batch_size=null loss_fn.reference_policy_kl_penalty=0.05 \
  "policy.megatron_cfg.peft.adapter_path=$work/sft/adapter" policy.megatron_cfg.peft.dim=32 \
  policy.megatron_cfg.peft.alpha=64 policy.megatron_cfg.tensor_model_parallel_size=2 checkpointing.enabled=true \
  "logger.log_dir=$work/grpo" "${common[@]}"
uv run tests/functional/check_metrics.py "$work/grpo/metrics.jsonl" "first(val/accuracy) > 0.5" \
  "first(train/kl) == 0" "last(train/kl) > 0" "max(train/token_mult_prob_error) < 1.0001"

for name in sft grpo; do
  step "eval_$name" uv run examples/run_eval.py --config examples/configs/grpo_tiny_cpu.yaml \
    --adapter "$work/$name/checkpoints" --out "$work/eval_$name" "${common[@]}"
done
uv run python - "$work" <<'PYTHON'
import json
import sys
from pathlib import Path

from lora_rl.track import read_metrics

work = Path(sys.argv[1])
accuracy = {name: json.loads((work / f"eval_{name}" / "summary.json").read_text())["accuracy"] for name in ("sft", "grpo")}
validated = [r["val/accuracy"] for r in read_metrics(work / "grpo" / "metrics.jsonl") if "val/accuracy" in r]
checks = [
    # Same prompts, same seeds: evaluation repeats what validation saw, up to sums taken in another order.
    (f"evaluation of the SFT adapter {accuracy['sft']:.3f} is GRPO's start {validated[0]:.3f}",
     abs(accuracy["sft"] - validated[0]) <= 0.02),
    (f"evaluation of the checkpoint {accuracy['grpo']:.3f} is its validation {validated[-1]:.3f}",
     abs(accuracy["grpo"] - validated[-1]) <= 0.02),
]
named = json.loads((work / "grpo" / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
checks.append((f"the adapter's base is {named}", named == "lora-rl/tiny-adder"))
for text, passed in checks:
    print(f"{'PASS' if passed else 'FAIL'}   {text}")
sys.exit(not all(passed for _, passed in checks))
PYTHON

step export uv run examples/export_adapter.py --adapter "$work/grpo/adapter" --out "$work/merged"
[[ -s $work/merged/model.safetensors ]] && echo "PASS   the adapter is merged into the files of the hub's cache"
