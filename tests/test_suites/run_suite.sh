#!/usr/bin/env bash
# Runs the scripts of one suite, one after the other: run_suite.sh cpu|nightly|release. Exit status 1 if one failed.
set -uo pipefail
cd "$(dirname "$0")"
failed=0
while read -r name; do
  echo "== $name"
  "./$name.sh" || failed=1
done <"${1:?name of a suite: cpu, nightly or release}.txt"
exit "$failed"
