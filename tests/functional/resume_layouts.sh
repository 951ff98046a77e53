#!/usr/bin/env bash
# One run goes on over other layouts: one rank, then two tensor-parallel ones, then two pipeline stages, then two
# data-parallel ones. It stays close to a run on one rank all along.
set -euo pipefail
cd "$(dirname "$0")/../.."
# A short path: Ray puts Unix sockets below it, whose names have at most 107 characters.
work=$(mktemp -d -p /tmp)
trap 'rm -rf "$work"' EXIT
run() { # run <folder> <last step> <overrides...>
  local folder=$1 last=$2
  shift 2
  if ! RAY_TMPDIR="$work" uv run examples/run_grpo.py --config examples/configs/grpo_tiny_cpu.yaml \
    grpo.num_prompts_per_step=16 policy.train_global_batch_size=32 grpo.val_at_start=false grpo.val_period=0 \
    policy.megatron_cfg.scheduler.lr_decay_iters=40 checkpointing.enabled=true checkpointing.save_period=100 \
    logger.console=plain logger.tensorboard_enabled=false "grpo.max_num_steps=$last" "logger.log_dir=$work/$folder" \
    "$@" >"$work/output" 2>&1; then
    tail -n 40 "$work/output"
    echo "FAIL   $folder to step $last ended with an error"
    exit 1
  fi
  echo "PASS   $folder to step $last"
}

run one 12
run many 3
run many 6 policy.megatron_cfg.tensor_model_parallel_size=2
run many 9 policy.megatron_cfg.pipeline_model_parallel_size=2
run many 12 cluster.gpus_per_node=2

uv run python - "$work" <<'PYTHON'
import sys
from pathlib import Path

from lora_rl.lora.peft_io import read_peft
from lora_rl.track import read_metrics

work, failed = Path(sys.argv[1]), False
one, many = (read_metrics(work / name / "metrics.jsonl") for name in ("one", "many"))
checks = [("12 steps each", [r["step"] for r in one] == [r["step"] for r in many] == list(range(13)))]
for metric, tolerance in (("train/loss", 1e-4), ("train/reward", 1e-9), ("train/lr", 1e-12)):
    worst = max(abs(a[metric] - b[metric]) for a, b in zip(one[1:], many[1:], strict=True))
    checks.append((f"{metric} differs by at most {worst:.1e} <= {tolerance:g}", worst <= tolerance))
worst = max(abs(a["train/grad_norm"] / b["train/grad_norm"] - 1) for a, b in zip(one[1:], many[1:], strict=True))
checks.append((f"train/grad_norm differs by at most {worst:.1e} of itself <= 1e-4", worst <= 1e-4))
a, b = (read_peft(work / name / "adapter").tensors for name in ("one", "many"))
worst = max(float((x.delta() - b[name].delta()).abs().max()) for name, x in a.items())
largest = max(float(x.delta().abs().max()) for x in a.values())
checks.append((f"merged weights differ by at most {worst:.1e} <= 1e-4 (deltas reach {largest:.1e})", worst <= 1e-4))
for text, passed in checks:
    print(f"{'PASS' if passed else 'FAIL'}   {text}")
sys.exit(not all(passed for _, passed in checks))
PYTHON
