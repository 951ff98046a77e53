"""Token logprobs and entropy from logits that are split over tensor-parallel ranks along the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _VocabParallelLogprobs(torch.autograd.Function):
    """log softmax at one index per row, and the entropy, without gathering the vocabulary.

    Only [N] vectors travel: the row maximum, the sum of exponentials, the target's logit and the entropy's
    numerator. The backward pass needs no communication: d logprob / d logit_v = [v == target] - softmax_v.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup | None, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def reduce(tensor: torch.Tensor, op: Any) -> None:
            if group is not None and dist.get_world_size(group) > 1:
                dist.all_reduce(tensor, op=op, group=group)

        maximum = logits.max(dim=-1).values
        reduce(maximum, dist.ReduceOp.MAX)
        shifted = logits - maximum.unsqueeze(-1)
        exponentials = shifted.exp()
        local = targets - first
        here = (local >= 0) & (local < logits.shape[-1])
        index = torch.where(here, local, 0).unsqueeze(-1)
        picked = torch.where(here, shifted.gather(-1, index).squeeze(-1), 0.0)
        # A padded vocabulary entry has logit -inf: its exponential is 0, and 0 * -inf must count as 0.
        weighted = torch.where(exponentials > 0, shifted, 0.0).mul_(exponentials).sum(-1)
        sums = torch.stack([exponentials.sum(-1), picked, weighted])
        reduce(sums, dist.ReduceOp.SUM)
        total, picked, weighted = sums.unbind(0)
        log_total = total.log()
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), index, here)
        entropy = log_total - weighted / total
        ctx.mark_non_differentiable(entropy)
        return picked - log_total, entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        softmax, index, here = ctx.saved_tensors
        grad_logits = softmax * (-grad).unsqueeze(-1)
        grad_logits.scatter_add_(-1, index, torch.where(here, grad, 0.0).unsqueeze(-1))
        return grad_logits, None, None, None


def vocab_parallel_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target token and entropy of each distribution.

    The temperature divides the *logits*, as the engine does, so that both sides speak of the same distribution.

    Args:
        logits: [N, V/tp] any float dtype; this rank's slice of the (possibly padded) vocabulary.
        targets: int64 [N], global token ids.
        temperature: > 0.
        vocab_size: entries from here on are padding and have probability 0.
        group: tensor-parallel group; None for one rank.

    Returns:
        (logprobs float32 [N], differentiable with respect to `logits`; entropy float32 [N] in nats, detached).

    Raises:
        ValueError: a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be > 0 for logprobs to exist")
    rank = dist.get_rank(group) if group is not None else 0
    first = rank * logits.shape[-1]
    scaled = logits.float() / temperature if temperature != 1.0 else logits.float()
    padding = first + logits.shape[-1] - vocab_size
    if padding > 0:
        keep = max(logits.shape[-1] - padding, 0)
        scaled = torch.cat(
            [scaled[..., :keep], scaled.new_full((*scaled.shape[:-1], logits.shape[-1] - keep), -torch.inf)],
            -1,
        )
    return _VocabParallelLogprobs.apply(scaled, targets, group, first)
