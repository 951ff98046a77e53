#!/usr/bin/env bash
# Tests that take more than a minute each, which the default test run leaves out.
set -euo pipefail
cd "$(dirname "$0")/../.."
uv run pytest -m slow
