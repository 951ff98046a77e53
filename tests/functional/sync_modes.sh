#!/usr/bin/env bash
# Every sync mode trains the tiny model, colocated and apart, with several engines, two-process engines and both
# transports; trainer and engine agree at every step, and all runs of the same seeds see the same rewards.
set -euo pipefail
cd "$(dirname "$0")/../.."
# A short path: Ray puts Unix sockets below it, whose names have at most 107 characters.
work=$(mktemp -d -p /tmp)
trap 'rm -rf "$work"' EXIT

sync=policy.generation.weight_sync
apart=policy.generation.colocated.enabled=false
run() { # run <name> <overrides...>
  local name=$1
  shift
  if ! RAY_TMPDIR="$work" uv run examples/run_grpo.py --config examples/configs/grpo_tiny_cpu.yaml \
    grpo.num_prompts_per_step=16 policy.train_global_batch_size=32 grpo.max_num_steps=3 grpo.val_period=0 \
    grpo.val_at_start=false $sync.probe_period=1 logger.console=plain logger.tensorboard_enabled=false \
    "logger.log_dir=$work/$name" "$@" >"$work/output" 2>&1; then
    tail -n 40 "$work/output"
    echo "FAIL   $name: the run ended with an error"
    exit 1
  fi
  echo "PASS   $name: the run ended by itself"
}

run merged
run adapter_merge $sync.mode=adapter_merge policy.megatron_cfg.tensor_model_parallel_size=2
run adapter $sync.mode=adapter policy.megatron_cfg.pipeline_model_parallel_size=2
run merged_apart $apart $sync.transport=object_store policy.generation.vllm_cfg.tensor_parallel_size=2
run adapter_merge_apart $apart $sync.mode=adapter_merge policy.generation.colocated.resources.gpus_per_node=2
run adapter_apart $apart $sync.mode=adapter $sync.transport=object_store

uv run python - "$work" <<'PYTHON'
import sys
from pathlib import Path

from lora_rl.lora.peft_io import read_peft
from lora_rl.track import read_metrics

folder, failed = Path(sys.argv[1]), 0
runs = ("merged", "adapter_merge", "adapter", "merged_apart", "adapter_merge_apart", "adapter_apart")
expected = [r["train/reward"] for r in read_metrics(folder / "merged" / "metrics.jsonl") if r["step"]]
sizes = {}
for name in runs:
    records = [r for r in read_metrics(folder / name / "metrics.jsonl") if r["step"]]
    worst = max(r["train/token_mult_prob_error"] for r in records)
    parity = max(r["sync/parity"] for r in records)
    sizes[name] = records[-1]["sync/bytes"]
    engines = len(list((folder / name / "logs").glob("engine_*.log")))
    checks = [
        (f"token_mult_prob_error {worst:.7f} < 1.0001", worst < 1.0001),
        (f"probe after each push: {parity:.1e} nats <= 1e-4", parity <= 1e-4),
        (f"versions {[r['sync/version'] for r in records]}", [r["sync/version"] for r in records] == [2, 3, 4]),
        (f"{engines} engines ran", engines == (2 if name == "adapter_merge_apart" else 1)),
        ("memory of both sides is recorded", all(r[f"memory/{p}/{s}_gib"] > 0.1 for r in records
            for p in ("generation", "training", "sync") for s in ("ranks", "engines"))),
        ("the adapter is kept", len(read_peft(folder / name / "adapter").tensors) == 28),
    ]
    if "adapter" not in name or "merge" in name:
        retention = [r["sync/retention"] for r in records]
        checks.append((f"retention {min(retention):.6f} is 1 in float32", all(abs(x - 1) < 1e-3 for x in retention)))
    # Completions are sampled with seeds of their own: the same weights give the same rewards wherever they run.
    rewards = [r["train/reward"] for r in records]
    off = max(abs(a - b) for a, b in zip(rewards, expected, strict=True))
    checks.append((f"rewards differ from merged by at most {off:.3f} <= 0.05", off <= 0.05))
    for text, passed in checks:
        print(f"{'PASS' if passed else 'FAIL'}   {name}: {text}")
        failed |= not passed
less = sizes["merged"] / sizes["adapter_merge"]
print(f"{'PASS' if less > 3 else 'FAIL'}   adapters are {less:.1f} times fewer bytes")
sys.exit(failed or less <= 3)
PYTHON

adapter=$work/merged/adapter
uv run examples/export_adapter.py --adapter "$adapter" --out "$work/hf" >/dev/null
uv run examples/export_adapter.py --adapter "$adapter" --out "$work/peft" --format peft >/dev/null
for file in hf/model.safetensors hf/config.json hf/tokenizer.json peft/adapter_model.safetensors; do
  [[ -e $work/$file ]] && echo "PASS   export: $file" || { echo "FAIL   export: $file is missing"; exit 1; }
done
