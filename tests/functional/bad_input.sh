#!/usr/bin/env bash
# A wrong configuration ends with exit code 2 and a message that names key, value and remedy, and starts no process.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d -p /tmp)
trap 'rm -rf "$work"' EXIT

# Python imports this module at start-up: it writes down every process that the interpreter starts.
cat >"$work/sitecustomize.py" <<'PYTHON'
import os
import sys

_STARTS = {"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}


def _watch(event, arguments):
    if event in _STARTS:
        with open(os.environ["STARTED_PROCESSES"], "a") as file:
            file.write(f"{event}\n")


sys.addaudithook(_watch)
PYTHON

failed=0
check() { # check <description> <command...>
  local description=$1
  shift
  if "$@"; then
    echo "PASS   $description"
  else
    echo "FAIL   $description"
    failed=1
  fi
}

watched() { PYTHONPATH="$work" STARTED_PROCESSES="$work/started" uv run "$@"; }

refused() { # refused <name> <overrides...>: run with the overrides; the message goes to $work/message
  local name=$1 code=0
  shift
  rm -f "$work/started"
  watched examples/run_grpo.py --config examples/configs/grpo_tiny_cpu.yaml "logger.log_dir=$work/run" "$@" \
    >"$work/output" 2>"$work/message" || code=$?
  check "$name: exit code 2 (was $code)" test "$code" -eq 2
  check "$name: no process was started" test ! -e "$work/started"
  check "$name: no run folder was made" test ! -e "$work/run"
  check "$name: no traceback, nothing on standard output" no_traceback
}

no_traceback() { ! grep -q Traceback "$work/message" && test ! -s "$work/output"; }
says() { check "$1: says \"$2\"" grep -qF -- "$2" "$work/message"; }

watched python -c "import subprocess; subprocess.run(['true'])"
check "the watch notices a started process" test -s "$work/started"

refused "misspelt key" grpo.num_prompt_per_step=4
says "misspelt key" "1 mistake in"
says "misspelt key" "grpo.num_prompt_per_step = 4"
says "misspelt key" "did you mean grpo.num_prompts_per_step?"

refused "unknown target" "policy.megatron_cfg.peft.target_modules=[linear_qkvv]"
says "unknown target" "policy.megatron_cfg.peft.target_modules = linear_qkvv"
says "unknown target" "expected linear_qkv, linear_proj, linear_fc1, linear_fc2"
says "unknown target" "did you mean linear_qkv?"

refused "unsafe pair" policy.generation.top_p=0.9 loss_fn.use_importance_sampling_correction=true
says "unsafe pair" "policy.generation.top_p = 0.9"
says "unsafe pair" "loss_fn.use_importance_sampling_correction"
says "unsafe pair" "use 1.0 or switch the correction off"

refused "three mistakes" grpo.num_prompt_per_step=4 grpo.num_generations_per_prompt=1 policy.precision=float16
says "three mistakes" "3 mistakes in"
says "three mistakes" "did you mean grpo.num_prompts_per_step?"
says "three mistakes" "grpo.num_generations_per_prompt = 1"
says "three mistakes" "use 8, say"
says "three mistakes" "policy.precision = float16"
says "three mistakes" "expected float32 | bfloat16"

exit "$failed"
