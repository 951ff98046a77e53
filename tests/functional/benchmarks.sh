#!/usr/bin/env bash
# Benchmarks at their smallest size: they still run, and print figures, which say nothing. Left out are those that take
# many minutes whatever they are asked: vs_trl, svd_lora, merge_fidelity.
source "$(dirname "$0")/steps.sh"
export OMP_NUM_THREADS=1

few=(grpo.num_prompts_per_step=8 policy.train_global_batch_size=null grpo.val_batch_size=16 grpo.max_val_samples=16)
measure() { # measure <benchmark> <what its figures match> <arguments...>
  local name=$1 expected=$2
  shift 2
  step "$name" uv run "benchmarks/$name.py" "$@"
  if grep -Eq "$expected" "$work/$name.out"; then
    echo "PASS   $name prints its figures"
  else
    tail -n 20 "$work/$name.out"
    echo "FAIL   $name: nothing matches $expected"
    exit 1
  fi
}

measure trainer_vs_torch 'ratio \(plain / Megatron\) +[0-9]' --sequences 16 --rounds 1
measure generation_vs_vllm 'ratio \(bare / actor\) +[0-9]' --prompts 2 --samples 2 --rounds 1
measure sync_modes 'adapter_merge \| 56 ' --pushes 1 --skip-large
measure engine_memory '^\| .* \| 2 \| [0-9]+ \|' --rounds 2
measure model_size '^\| 1M \| [0-9]' --sizes 1M --tokens 16 --out "$work/model_size" --figure "$work/model_size.png"
measure async_vs_sync '^\| async age 1 \| [0-9]' --steps 8 --arms 'sync,async age 1' --out "$work/async" \
  --figure "$work/async.png" "${few[@]}"
measure methods '^\| rloo \| 1 \|' --steps 2 --methods rloo --seeds 1 --out "$work/methods" --skip-validation
measure next '^\| no jumps \| 0 of 1' --steps 4 --rate 1e-3 --arms baseline --seeds 1 --out "$work/next" "${few[@]}"
