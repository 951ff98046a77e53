"""What is added to vLLM's workers. Imported by vLLM in each of them."""

from __future__ import annotations

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from lora_rl.rollout.sampling import sample_by_inversion
from lora_rl.sync.receiver import WorkerExtension


class SamplingWorkerExtension(WorkerExtension):
    """Methods added to vLLM's worker class, those of weight sync among them."""

    def lora_rl_sample_by_inversion(self) -> None:
        """Draw tokens with `sample_by_inversion` from now on, in an engine whose logprobs are processed."""
        self.model_runner.sampler.topk_topp_sampler.forward = _forward  # type: ignore[attr-defined]


def _forward(
    logits: torch.Tensor, generators: dict[int, torch.Generator], k: torch.Tensor | None, p: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM's `TopKTopPSampler.forward_cpu` does: tokens, and logprobs of what they were drawn from."""
    logprobs = apply_top_k_top_p(logits, k, p).log_softmax(dim=-1, dtype=torch.float32)
    return sample_by_inversion(logprobs.exp(), generators), logprobs
