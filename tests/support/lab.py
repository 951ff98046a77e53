"""What tests do with a policy inside a rank: random adapters, whole matrices out of shards, one survey of it all."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.batches import make_batch, one_microbatch

if TYPE_CHECKING:
    import torch

    from lora_rl.config import RunConfig
    from lora_rl.policy.trainer import PolicyRank

# Half of the standard deviation 1: the adapters then move the logits by more than the base model spreads them.
LARGE_B = 0.5


def new_rank(config: RunConfig, *, b_std: float = 0.0) -> PolicyRank:
    """A policy rank in this (rank) process; with `b_std` its B are N(0, b_std^2), the same in every layout."""
    from lora_rl.policy.platform import prepare
    from lora_rl.policy.trainer import PolicyRank

    rank = PolicyRank(config, prepare("cpu"))
    if b_std:
        randomise_b(rank, b_std)
    return rank


def randomise_b(rank: PolicyRank, std: float, seed: int = 0) -> None:
    """Overwrite every B by N(0, std^2) drawn from the module's name."""
    import torch

    from lora_rl.lora.targets import adapter_modules

    for name, adapter in adapter_modules(rank.model.module).items():
        parameter = adapter.linear_out.weight
        generator = torch.Generator().manual_seed(_number(f"{seed}/{name}"))
        rows = parameter.shape[0] * _tp_size()
        full = torch.randn(rows, parameter.shape[1], generator=generator) * std
        parameter.data.copy_(_shard_rows(name, full))


def adapters(rank: PolicyRank, *, gradients: bool = False) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A [r, in] and B [out, r] (or their gradients) of every adapter of the whole model, put together from all ranks.

    Collective. Rows are in the order of a model on one rank.
    """
    import torch
    import torch.distributed as dist

    from lora_rl.lora.targets import adapter_modules

    mine: dict[tuple[str, int], tuple[torch.Tensor, int | None]] = {}
    for name, adapter in adapter_modules(rank.model.module).items():
        for which, linear in enumerate((adapter.linear_in, adapter.linear_out)):
            weight = linear.weight
            split = weight.partition_dim if getattr(weight, "tensor_model_parallel", False) else None
            mine[name, which] = ((weight.main_grad if gradients else weight.data).clone(), split)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole: dict[tuple[str, int], np.ndarray] = {}
    for key in sorted({key for part in everyone for key in part}):
        # With data parallelism every replica holds the same; the first tp ranks that have the module are enough.
        shards = [part[key] for part in everyone if key in part][: _tp_size()]
        split = shards[0][1]
        tensors = [tensor for tensor, _ in shards]
        if split is None:
            full = tensors[0]
        elif key[1] == 1 and _gated(key[0]):
            halves = [tensor.chunk(2, dim=0) for tensor in tensors]
            full = torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
        else:
            full = torch.cat(tensors, dim=split)
        whole[key] = full.numpy()
    return {name: (whole[name, 0], whole[name, 1]) for name in sorted({name for name, _ in whole})}


def fingerprint(rank: PolicyRank) -> str:
    """SHA-256 over the bytes of every parameter and buffer of this rank's model."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(rank.model.module.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            digest.update(name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def exported(rank: PolicyRank) -> dict[str, np.ndarray]:
    """Merged Hugging Face weights. Collective."""
    from lora_rl.policy.export import merged_weights

    return {name: tensor.float().numpy().copy() for name, tensor in merged_weights(rank.model)}


@dataclass
class Survey:
    """What one layout computes, told by the first rank that sees logits; see `survey`.

    Attributes:
        initial: adapters as the configuration starts them, with `initial_logprobs`, `initial_reference`.
        adapters, logprobs, reference, weights: after B was overwritten by large random values.
        base_weights: exported with B = 0.
        gradients: of the step described in `survey`.
    """

    initial: dict[str, tuple[np.ndarray, np.ndarray]]
    initial_logprobs: np.ndarray
    initial_reference: np.ndarray
    adapters: dict[str, tuple[np.ndarray, np.ndarray]]
    logprobs: np.ndarray
    logprobs_tempered: np.ndarray
    reference: np.ndarray
    weights: dict[str, np.ndarray]
    digest: str | None
    base_weights: dict[str, np.ndarray]
    unchanged_by_exports: bool
    gradients: dict[str, tuple[np.ndarray, np.ndarray]]
    grad_norm: float
    metrics: dict[str, float]


def survey(config: RunConfig, batch_seed: int, exports: int) -> Survey | None:
    """Build the policy, give it large random B, and record everything that may not depend on the layout.

    The gradients are those of a step with given old and reference logprobs, see `old_logprobs_like`.

    Returns:
        None on the ranks that see no logits.
    """
    from lora_rl.lora.targets import adapter_modules

    rank = new_rank(config)
    batch = make_batch(batch_seed)
    shards, cuts = one_microbatch(batch, 1)
    at_first = [rank.logprobs(batch, cuts[0], reference=reference) for reference in (False, True)]
    initial = adapters(rank)
    randomise_b(rank, LARGE_B)
    before = fingerprint(rank)
    weights = exported(rank)
    for _ in range(exports - 1):
        exported(rank)
    digest = sent_digest(rank)
    unchanged = fingerprint(rank) == before
    logprobs = [rank.logprobs(batch, cuts[0], temperature=t) for t in (1.0, None)]
    reference = rank.logprobs(batch, cuts[0], reference=True)
    unchanged = unchanged and fingerprint(rank) == before
    at_start = adapters(rank)
    own = rank.logprobs(batch, cuts[0])
    given = {} if own is None else {"old_logprobs": old_logprobs_like(own), "reference_logprobs": reference}
    result = rank.train_step(shards[0], cuts[0], **given)
    gradients = adapters(rank, gradients=True)
    for adapter in adapter_modules(rank.model.module).values():
        adapter.linear_out.weight.data.zero_()
    base = exported(rank)
    if own is None:
        return None
    return Survey(
        initial=initial,
        initial_logprobs=at_first[0],
        initial_reference=at_first[1],
        adapters=at_start,
        logprobs=logprobs[0],
        logprobs_tempered=logprobs[1],
        reference=reference,
        weights=weights,
        digest=digest,
        base_weights=base,
        unchanged_by_exports=unchanged,
        gradients=gradients,
        grad_norm=result.grad_norm,
        metrics={name: float(m.value) for name, m in result.metrics.items()},
    )


def sent_digest(rank: PolicyRank) -> str | None:
    """Digest of the manifest that the real sender makes of this model; None on ranks that do not send. Collective."""
    from functools import partial

    import torch
    import torch.distributed as dist

    from lora_rl.policy.export import merged_weights
    from lora_rl.sync.sender import MergedSender

    weights = partial(merged_weights, rank.model)
    sender = MergedSender(weights, is_sender=dist.get_rank() == 0, dtype=torch.float32)
    sender.open()
    manifest = sender.send(1, must_differ=False)
    sender.close_name()
    return None if manifest is None else manifest.digest


def old_logprobs_like(logprobs: np.ndarray) -> np.ndarray:
    """Logprobs N(0, 0.2^2) away from the given ones: ratios on both sides of the clip range."""
    noise = np.random.default_rng(5).normal(0, 0.2, logprobs.shape)
    return np.where(logprobs != 0, logprobs + noise, 0).astype(np.float32)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def _gated(name: str) -> bool:
    return name.endswith("linear_fc1")


def _tp_size() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_world_size()


def _shard_rows(name: str, full: torch.Tensor) -> torch.Tensor:
    """This tp rank's rows of a whole B. A gated layer's shard is a piece of the gate, then the same piece of up."""
    import torch
    from megatron.core import parallel_state

    rank, size = parallel_state.get_tensor_model_parallel_rank(), _tp_size()
    if _gated(name):
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    return full.chunk(size)[rank]


def scale(config: RunConfig) -> float:
    """alpha / r."""
    peft = config.policy.megatron_cfg.peft
    assert not math.isclose(peft.alpha, peft.dim)
    return peft.alpha / peft.dim
