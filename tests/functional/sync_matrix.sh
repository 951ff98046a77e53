#!/usr/bin/env bash
# The whole matrix of sync modes, layouts, engines, targets and models; the default test run does a part of it.
set -euo pipefail
cd "$(dirname "$0")/../.."
uv run pytest -m "" tests/unit/sync/test_matrix.py
