"""What a process that computes must have in its environment before it imports torch."""

from __future__ import annotations

import os


def keep_float32() -> None:
    """Have libraries for GPUs compute float32 products in float32, and not in TF32, which has ten bits of mantissa.

    Transformer Engine's products and vLLM's attention (a Triton kernel, for float32) use TF32 unless told otherwise,
    and logprobs of trainer and engine would differ by about 1e-3. Settings of the environment go first.
    """
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")


def set_threads(count: int) -> None:
    """Have OpenMP use this many threads, and wait for each other without spinning for long.

    By default a thread that waits for the others spins, for milliseconds: harmless while the cores are this process's
    own, but where anything else runs on them, it keeps the very thread that is waited for from running, and a step
    takes many times as long. A tenth of that spin is as fast where nothing else runs; much less is not. The
    environment's own settings go first.

    Call before anything imports torch: OpenMP reads the environment as it is loaded.
    """
    os.environ["OMP_NUM_THREADS"] = str(count)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")
