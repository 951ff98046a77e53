#!/usr/bin/env bash
# Supervised fine-tuning, GRPO on the singular values of its adapter, resume on two ranks, evaluation, export.
source "$(dirname "$0")/steps.sh"
svd=policy.megatron_cfg.peft.svd
grpo=(uv run examples/run_grpo.py --config examples/configs/svd_lora_cpu.yaml grpo.num_prompts_per_step=32
  policy.train_global_batch_size=null loss_fn.reference_policy_kl_penalty=0.01 checkpointing.enabled=true
  "policy.megatron_cfg.peft.adapter_path=$work/sft/adapter" "logger.log_dir=$work/grpo" "${common[@]}")

step sft uv run examples/run_sft.py --config examples/configs/sft_svd_lora_cpu.yaml sft.max_num_steps=20 sft.val_period=20 \
  sft.target_answer_probability=null "logger.log_dir=$work/sft" "${common[@]}"

step grpo "${grpo[@]}" grpo.max_num_steps=3 grpo.val_period=3 "$svd.sigma_lr=0.05"
step resume "${grpo[@]}" grpo.max_num_steps=5 grpo.val_period=5 "$svd.sigma_lr=0.05" \
  policy.megatron_cfg.tensor_model_parallel_size=2
# 16 linears of rank 16. The engine merged singular vectors that came once and values that came with every push.
uv run tests/functional/check_metrics.py "$work/grpo/metrics.jsonl" "count(train/reward) == 5" \
  "first(model/trainable) == 256" "first(model/directions) == 256" "first(train/kl) == 0" "last(train/kl) > 0" \
  "max(train/token_mult_prob_error) < 1.0001" "max(sync/bytes, 1, 3) == 4 * 256" "last(sync/delta_norm) > 0" \
  "min(train/grad_norm) > 0" "last(sync/version) == 6"
if "${grpo[@]}" grpo.max_num_steps=6 "$svd.mode=core" >"$work/refused.out" 2>&1; then
  echo "FAIL   another mode was not refused"
  exit 1
fi
grep -q "adapter.svd.mode: the checkpoint has 'product', this run 'core'" "$work/refused.out"
echo "PASS   another mode is refused"

step eval uv run examples/run_eval.py --config examples/configs/grpo_tiny_cpu.yaml --adapter "$work/grpo/checkpoints" \
  --out "$work/eval" "${common[@]}"
step export uv run examples/export_adapter.py --adapter "$work/grpo/adapter" --base examples/models/tiny-adder --out "$work/merged"
step eval_merged uv run examples/run_eval.py --config examples/configs/grpo_tiny_cpu.yaml "policy.model_name=$work/merged" \
  --out "$work/eval_merged" "${common[@]}"
uv run python - "$work" <<'PYTHON'
import json
import sys
from pathlib import Path

from lora_rl.track import read_metrics

work = Path(sys.argv[1])
adapter, merged = (json.loads((work / name / "summary.json").read_text())["accuracy"] for name in ("eval", "eval_merged"))
validated = [r["val/accuracy"] for r in read_metrics(work / "grpo" / "metrics.jsonl") if "val/accuracy" in r]
# Same prompts, same seeds: evaluation repeats what validation saw, up to sums taken in another order.
checks = [
    (f"evaluation of the checkpoint {adapter:.3f} is its validation {validated[-1]:.3f}", abs(adapter - validated[-1]) <= 0.02),
    (f"and that of the merged export {merged:.3f}", abs(adapter - merged) <= 0.02),
    (f"the start {validated[0]:.3f} is the fine-tuned one", validated[0] > 0.45),
]
for text, passed in checks:
    print(f"{'PASS' if passed else 'FAIL'}   {text}")
sys.exit(not all(passed for _, passed in checks))
PYTHON
