#!/usr/bin/env bash
# A disk that fills up during a save ends the run with one clear error; the earlier checkpoint stays good and continues
# once there is room. Needs the right to mount a small memory file system.
set -euo pipefail
cd "$(dirname "$0")/../.."
# A short path: Ray puts Unix sockets below it, whose names have at most 107 characters.
work=$(mktemp -d -p /tmp)
disk=$work/disk
mkdir "$disk"
if ! mount -t tmpfs -o size=3m tmpfs "$disk"; then
  echo "FAIL   this user may not mount a file system, so the disk cannot be made small"
  exit 1
fi
trap 'umount "$disk"; rm -rf "$work"' EXIT
export RAY_TMPDIR=$work
job=(uv run examples/run_grpo.py --config examples/configs/grpo_tiny_cpu.yaml grpo.num_prompts_per_step=16
  policy.train_global_batch_size=null grpo.max_num_steps=6 grpo.val_at_start=false grpo.val_period=0
  checkpointing.enabled=true checkpointing.save_period=2 checkpointing.keep_top_k=1
  "checkpointing.checkpoint_dir=$disk/checkpoints" logger.console=plain logger.tensorboard_enabled=false
  "logger.log_dir=$work/run")
check() { # check <what> <command...>
  local what=$1
  shift
  if "$@"; then echo "PASS   $what"; else echo "FAIL   $what"; tail -n 30 "$work"/*.out; ls -laR "$disk"; exit 1; fi
}
code=0
"${job[@]}" >"$work/full.out" 2>&1 || code=$?
check "the run ends with exit code $code, 1" [ "$code" -eq 1 ]
check "one error names the checkpoint, the cause and what is unharmed" grep -q \
  "^CheckpointError: checkpoint $disk/checkpoints/step_4 could not be written: .*No space left on device.*; $disk/checkpoints/step_2 is complete and unharmed" \
  "$work/full.out"
check "nothing else is there" [ "$(ls -A "$disk/checkpoints" | sort | tr '\n' ' ')" = "latest step_2 " ]
mount -o remount,size=30m "$disk"
code=0
"${job[@]}" >"$work/room.out" 2>&1 || code=$?
check "with room the same command continues, exit code $code" [ "$code" -eq 0 ]
check "from the earlier checkpoint" grep -q "continuing after step 2" "$work/room.out"
check "to the end" [ "$(cat "$disk/checkpoints/latest")" = step_6 ]
