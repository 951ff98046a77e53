#!/usr/bin/env bash
# Sourced by scripts of several jobs: `step <name> <command...>` runs one and ends the script if it fails; what they
# write goes into $work, which is removed at the end. `common` are overrides of every job.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# A short path: Ray puts Unix sockets below it, whose names have at most 107 characters.
work=$(mktemp -d -p /tmp)
trap 'rm -rf "$work"' EXIT
export RAY_TMPDIR=$work
step() { # step <name> <command...>
  local name=$1
  shift
  if ! "$@" >"$work/$name.out" 2>&1; then
    tail -n 40 "$work/$name.out"
    echo "FAIL   $name ended with an error"
    exit 1
  fi
  echo "PASS   $name ended by itself"
}
common=(logger.console=plain logger.tensorboard_enabled=false grpo.max_val_samples=256)
