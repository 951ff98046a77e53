#!/usr/bin/env bash
# Everything that can only be checked on a GPU, on one GPU (two checks more on two), as a table: docs/gpu.md.
# check.sh cpu runs the same checks on the CPU, where they can be.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec uv run --no-sync python -m tests.gpu.check "${1:-cuda}"
