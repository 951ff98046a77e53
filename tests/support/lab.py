"""What tests do with a policy inside a rank: random adapters, whole matrices out of shards, one survey of it all."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.batches import make_batch, one_microbatch

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from lora_rl.config import RunConfig
    from lora_rl.policy.trainer import PolicyRank
    from lora_rl.sync.sender import WeightSender

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


def started_rank(config: RunConfig) -> PolicyRank:
    """A policy rank that starts from `policy.megatron_cfg.peft.adapter_path`, as the actor starts it."""
    from pathlib import Path

    from lora_rl.lora.peft_io import read_peft
    from lora_rl.policy.export import import_peft
    from lora_rl.policy.spectral import decompose_adapters

    rank = new_rank(config)
    peft = config.policy.megatron_cfg.peft
    import_peft(rank.model, read_peft(Path(peft.adapter_path)))
    if peft.svd.enabled:
        decompose_adapters(rank.model, peft.svd.mode)
    rank.freeze_reference()
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
            mine[name, which] = ((weight.main_grad if gradients else weight.data).cpu().clone(), split)
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
            digest.update(name.encode() + tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def exported(rank: PolicyRank) -> dict[str, np.ndarray]:
    """Hugging Face weights as Megatron-Bridge itself merges them: the reference for our merge. Collective."""
    weights = rank.model.bridge.export_hf_weights(rank.model.chunks, cpu=True, show_progress=False)
    return {name: tensor.detach().float().numpy().copy() for name, tensor in weights}


@dataclass
class Survey:
    """What one layout computes, told by the first rank that sees logits; see `survey`.

    Attributes:
        initial: adapters as the configuration starts them, with `initial_logprobs`, `initial_reference`.
        adapters, logprobs, reference, weights: after B was overwritten by large random values.
        sent: a push of these in mode `merged`, where this rank sends.
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
    sent: Recorded | None
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
    sender = new_sender(rank)
    sent = record(sender, 1)
    for version in range(2, exports + 1):
        sender.send(version, must_differ=False)
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
        sent=sent,
        base_weights=base,
        unchanged_by_exports=unchanged,
        gradients=gradients,
        grad_norm=result.grad_norm,
        metrics={name: float(m.value) for name, m in result.metrics.items()},
    )


@dataclass(frozen=True)
class Recorded:
    """One push as the sending rank wrote it.

    Attributes:
        manifest: `Manifest.to_dict()`.
        payload: the bytes of the shared buffer.
        fidelity: metrics of the sender's merge; None where engines merge.
    """

    manifest: dict[str, Any]
    payload: bytes
    fidelity: dict[str, float] | None


def new_sender(rank: PolicyRank, mode: str = "merged") -> WeightSender:
    """The real sender of this model, opened, in float32. Collective."""
    from functools import partial

    import torch
    import torch.distributed as dist

    from lora_rl.policy.export import adapters, base_weights
    from lora_rl.sync.sender import WeightSender

    sender = WeightSender(
        mode=mode,
        base=partial(base_weights, rank.model),
        adapters=partial(adapters, rank.model),
        is_sender=dist.get_rank() == 0,
        dtype=torch.float32,
    )
    sender.open()
    sender.close_name()
    return sender


def record(sender: WeightSender, version: int) -> Recorded | None:
    """Send, and keep what was written; None on ranks that do not send. Collective."""
    push = sender.send(version, must_differ=False)
    if push is None:
        return None
    fidelity = None if push.fidelity is None else push.fidelity.metrics()
    return Recorded(push.manifest.to_dict(), sender._buffer.bytes.numpy().tobytes(), fidelity)


@dataclass(frozen=True)
class Pushes:
    """What one layout sends for one choice of target modules, told by the sending rank.

    Attributes:
        adapters: by Megatron module, see `adapters`.
        base: the base weights in mode `merged` (B = 0).
        by_mode: pushes of the large random B.
        late: sent only after another B had been written, as by an exporter that is read too late.
        peft: the adapters as `export_peft` gives them: (A, B, scale) by Hugging Face module.
    """

    adapters: dict[str, tuple[np.ndarray, np.ndarray]]
    base: Recorded
    by_mode: dict[str, Recorded]
    late: dict[str, Recorded]
    peft: dict[str, tuple[np.ndarray, np.ndarray, float]]


def record_pushes(configs: dict[str, RunConfig], b_std: float) -> dict[str, Pushes] | None:
    """For each configuration, the pushes of a policy with B = N(0, b_std^2); None on ranks that do not send."""
    import torch.distributed as dist

    from lora_rl.policy.export import export_peft

    result = {}
    for name, config in configs.items():
        rank = new_rank(config)
        senders = {mode: new_sender(rank, mode) for mode in ("merged", "adapter_merge", "adapter")}
        base = record(senders["merged"], 1)
        randomise_b(rank, b_std)
        whole = adapters(rank)
        peft = export_peft(rank.model).tensors
        by_mode = {mode: record(sender, 2) for mode, sender in senders.items()}
        randomise_b(rank, b_std, seed=1)
        late = {mode: record(sender, 3) for mode, sender in senders.items()}
        plain = {module: (t.a.numpy(), t.b.numpy(), t.scale) for module, t in peft.items()}
        result[name] = Pushes(whole, base, by_mode, late, plain)
    return result if dist.get_rank() == 0 else None


def push_many(config: RunConfig, times: int) -> tuple[str, str, bool]:
    """Fingerprints before and after many merges and exports, and whether the last payload equals the first.

    The sender's merge and Megatron-Bridge's own take turns.
    """
    rank = new_rank(config, b_std=LARGE_B)
    before = fingerprint(rank)
    sender = new_sender(rank)
    first = sender.send(0, must_differ=False).manifest.digest
    for version in range(1, times):
        if version % 2:
            last = sender.send(version, must_differ=False).manifest.digest
        else:
            exported(rank)
    return before, fingerprint(rank), first == last


def import_and_export(
    config: RunConfig, path: Path, batch_seed: int, out: Path
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Read a PEFT directory into a policy whose own adapters are random, and write it back with `out` as its name.

    Returns:
        Logprobs with the imported adapter, and after a second policy read `out`; None on ranks that see no logits.
    """
    import torch.distributed as dist

    from lora_rl.lora.peft_io import read_peft, write_peft
    from lora_rl.policy.export import export_peft, import_peft

    batch = make_batch(batch_seed)
    cut = one_microbatch(batch, 1)[1][0]
    logprobs = []
    for source in (path, out):
        rank = new_rank(config, b_std=LARGE_B)
        import_peft(rank.model, read_peft(source))
        logprobs.append(rank.logprobs(batch, cut))
        exported_adapter = export_peft(rank.model)
        if source is path and dist.get_rank() == 0:
            write_peft(out, exported_adapter, base_model=config.policy.model_name)
        dist.barrier()
    return logprobs[0], logprobs[1]


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
