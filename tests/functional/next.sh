#!/usr/bin/env bash
# Jumping ahead: a run stopped in the middle of a watch continues bit for bit; versions only grow; asynchronously, what is
# trained on after a jump is of the weights after it.
set -euo pipefail
cd "$(dirname "$0")/../.."
# A short path: Ray puts Unix sockets below it, whose names have at most 107 characters.
work=$(mktemp -d -p /tmp)
trap 'rm -rf "$work"' EXIT
export RAY_TMPDIR=$work
run() { # run <name> <config> <key=value...>
  local name=$1 config=$2
  shift 2
  if ! uv run examples/run_grpo.py --config "examples/configs/$config" grpo.num_prompts_per_step=32 \
    policy.train_global_batch_size=64 grpo.val_period=0 grpo.max_val_samples=64 logger.console=plain \
    logger.tensorboard_enabled=false policy.megatron_cfg.scheduler.lr_decay_iters=64 grpo.next.enabled=true \
    grpo.next.interval=1 grpo.next.snapshots=7 grpo.next.horizon=3 grpo.next.min_backtest_cos=-1 \
    grpo.next.gate.num_prompts=16 grpo.next.watch.patience=4 grpo.next.gate.tolerance=1 grpo.next.retry_after=1 \
    "logger.log_dir=$work/$name" "$@" >"$work/$name.out" 2>&1; then
    tail -n 40 "$work/$name.out"
    echo "FAIL   $name ended with an error"
    exit 1
  fi
  echo "PASS   $name ended by itself"
}

saved=(checkpointing.enabled=true checkpointing.save_period=1 checkpointing.keep_top_k=50)
run whole grpo_next_tiny_cpu.yaml grpo.max_num_steps=14 "${saved[@]}"
# The step in the middle of the first watch, if there was a jump; a stop anywhere else is compared all the same.
stop=$(uv run python - "$work/whole/metrics.jsonl" <<'PYTHON'
import sys
from pathlib import Path

from lora_rl.track import read_metrics

jumps = [r["step"] for r in read_metrics(Path(sys.argv[1])) if r.get("next/alpha")]
print(min(jumps[0] + 1, 13) if jumps else 10)
PYTHON
)
# As a run that was killed there leaves it. (With grpo.max_num_steps=$stop no jump would be proposed so near to the end.)
mkdir -p "$work/parts/checkpoints"
cp -r "$work/whole/checkpoints/step_$stop" "$work/parts/checkpoints/"
run parts grpo_next_tiny_cpu.yaml grpo.max_num_steps=14 "${saved[@]}"
run async grpo_async_tiny_cpu.yaml grpo.max_num_steps=14
uv run tests/functional/check_metrics.py "$work/async/metrics.jsonl" "max(rollout/age_max) <= 1" \
  "max(rollout/refused_groups) == 0" "max(next/proposed) > 0" "min(train/reward) > 0.2" "max(train/is_oob_ratio) < 0.5"
uv run python - "$work" "$stop" <<'PYTHON'
import sys
from pathlib import Path

from lora_rl.train.checkpoint import load
from lora_rl.track import read_metrics

work, stop = Path(sys.argv[1]), int(sys.argv[2])
whole, parts = (read_metrics(work / name / "metrics.jsonl") for name in ("whole", "parts"))
names = sorted({n for r in whole for n in r if n.startswith(("train/", "reward/", "next/")) and "seconds" not in n})
different = sorted({f"step {a['step']} {n}" for a, b in zip(whole, parts, strict=True) for n in names if a.get(n) != b.get(n)})
ends = [load(work / name / "checkpoints/step_14") for name in ("whole", "parts")]
equal = [
    x.keys() == y.keys() and all(x[k].equal(y[k]) for k in x)
    for x, y in (
        (ends[0].moments, ends[1].moments),
        (ends[0].random, ends[1].random),
        (ends[0].extrapolation[1], ends[1].extrapolation[1]),
        *(({k: p.a for k, p in ends[0].adapter.tensors.items()}, {k: p.a for k, p in ends[1].adapter.tensors.items()}),),
        *(({k: p.b for k, p in ends[0].adapter.tensors.items()}, {k: p.b for k, p in ends[1].adapter.tensors.items()}),),
    )
]
pushes = {name: [r["sync/version"] for r in read_metrics(work / name / "metrics.jsonl") if "sync/version" in r]
          for name in ("whole", "async")}
proposed = [r["step"] for r in whole if "next/alpha" in r]
gates = [r["next/gate_generated_tokens"] for r in whole if "next/gate_generated_tokens" in r]
checks = [
    (f"stopped after step {stop}: {len(names)} metrics of {len(whole)} records are equal bit for bit {different[:5] or ''}", not different),
    (f"adapters, moments, random generators and the trail are equal bit for bit {equal}", all(equal)),
    (f"jumps were proposed at steps {proposed}, and the gate generated", bool(proposed) and gates[-1] > 0),
    ("weight versions only grow", all(a < b for v in pushes.values() for a, b in zip(v, v[1:]))),
]
for text, passed in checks:
    print(f"{'PASS' if passed else 'FAIL'}   {text}")
sys.exit(not all(passed for _, passed in checks))
PYTHON
