"""Where the policy computes: `cpu` (gloo, patched Megatron) or `cuda` (NCCL, Transformer Engine when installed).

Everything outside this package is written against the small `Platform` record and never asks which one it is on.
"""

from __future__ import annotations

from lora_rl.policy.platform.base import Platform


def prepare(name: str, *, num_threads: int = 1) -> Platform:
    """Make this process ready to import Megatron, and say what it computes on.

    Must run before the first `import megatron`. Safe to call again with the same name.

    Args:
        name: `cpu` or `cuda`.
        num_threads: OpenMP threads of this process (CPU only).

    Raises:
        ValueError: `name` is neither.
        RuntimeError: `cuda` was asked for and torch sees no GPU, or `cpu` while Megatron was imported unprepared.
    """
    if name == "cpu":
        from lora_rl.policy.platform import cpu

        return cpu.prepare(num_threads)
    if name == "cuda":
        from lora_rl.policy.platform import cuda

        return cuda.prepare()
    raise ValueError(f"cluster.platform={name!r}: valid are 'cpu' and 'cuda'")
