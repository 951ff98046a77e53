#!/usr/bin/env bash
# Every benchmark, one after the other, on an otherwise idle machine; writes docs/benchmarks.md and its pictures.
#
#   benchmarks/run.sh [FOLDER]     default: results/benchmarks; what is complete in it is not repeated
# SEEDS (0,1,2) of the comparison with TRL and SIZES (1M,8M,30M,135M) of models make it shorter.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-results/benchmarks}
mkdir -p "$out"

measure() { # measure <name> <arguments...>: keeps what the benchmark prints
  local name=$1
  shift
  [[ -s $out/$name.out ]] && return
  echo "== $name"
  uv run "benchmarks/$name.py" "$@" | tee "$out/$name.unfinished"
  mv "$out/$name.unfinished" "$out/$name.out"
}

measure vs_trl --seeds "${SEEDS:-0,1,2}" --out "$out/vs_trl" --figure docs/images/vs_trl.png
measure trainer_vs_torch
measure generation_vs_vllm
measure sync_modes
measure async_vs_sync --out "$out/async_vs_sync" --figure docs/images/async.png
measure model_size --sizes "${SIZES:-1M,8M,30M,135M}" --out "$out/model_size" --figure docs/images/model_size.png
uv run benchmarks/page.py "$out"
