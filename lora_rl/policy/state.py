"""What a policy is beyond its adapters: optimizer moments, schedule and random state, independent of the layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lora_rl.lora.init import full_shape, local_slice
from lora_rl.lora.svd import spectrum_of
from lora_rl.lora.targets import adapter_modules
from lora_rl.policy.trainer import PolicyRank


@dataclass
class PolicyState:
    """The training state of a whole policy.

    Attributes:
        moments: float32 whole matrices by `<global linear>.<linear_in|linear_out|theta>.<name of the moment>`.
        counters: `step`, the number of optimizer steps, and `scheduler`, its schedule's position.
        flags: `gradients_checked`.
        random: uint8 states of random generators by `rank_<n>.<generator>`; they fit only the same layout.
        svd: of SVD-LoRA adapters, float32 whole tensors by `<global linear>.<linear_in|linear_out|sigma_ref|mixing|
            theta>`: V^T, U and the spectrum. Decomposed anew, vectors of close singular values could come out turned.
    """

    moments: dict[str, torch.Tensor]
    counters: dict[str, float]
    flags: dict[str, bool] = field(default_factory=dict)
    random: dict[str, torch.Tensor] = field(default_factory=dict)
    svd: dict[str, torch.Tensor] = field(default_factory=dict)


def gather_state(rank: PolicyRank) -> PolicyState | None:
    """The state of all ranks together. Collective.

    Returns:
        The state on rank 0, None on the others.
    """
    mine: dict[str, Any] = {"moments": {}, "svd": {}, "random": _random_state(), "counters": _counters(rank)}
    if rank.dp_rank == 0:
        for name, parameter, gated, state in _parameters(rank):
            for moment, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    mine["moments"][f"{name}.{moment}"] = (_copy(value), _split(parameter), gated)
        for name, tensor, gated in _spectral(rank):
            mine["svd"][name] = (_copy(tensor), _split(tensor), gated)
    everyone: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else None  # type: ignore[assignment]
    dist.gather_object(mine, everyone, dst=0)
    if dist.get_rank() != 0:
        return None
    # A stage without adapters has no optimizer; every other one counts the same.
    counters = max((part["counters"] for part in everyone), key=len)
    return PolicyState(
        moments=_whole_tensors([part["moments"] for part in everyone]),
        counters={**counters, "scheduler": float(rank.scheduler.num_steps)},
        flags={"gradients_checked": rank._gradients_checked},
        random={f"rank_{n}.{k}": v for n, part in enumerate(everyone) for k, v in part["random"].items()},
        svd=_whole_tensors([part["svd"] for part in everyone]),
    )


def load_state(rank: PolicyRank, state: PolicyState, *, with_random: bool) -> None:
    """Continue from a state. Every rank gets the whole and keeps its slices.

    Args:
        with_random: also restore random generators, which needs the layout that the state was taken in.

    Raises:
        ValueError: the state has other adapters, shapes or random generators than this policy, naming them.

    SVD-LoRA adapters come from the state as a whole; plain ones are imported apart from it.
    """
    used, problems = set(), []
    tp_rank, tp_size = (
        rank._parallel.get_tensor_model_parallel_rank(),
        rank._parallel.get_tensor_model_parallel_world_size(),
    )
    for inner in _torch_optimizers(rank):
        inner.state.clear()
    loaded = []
    for name, parameter, gated, _ in _parameters(rank):
        found = {key: t for key, t in state.moments.items() if key.rpartition(".")[0] == name}
        if not found and state.moments:
            problems.append(f"no optimizer state for {name}")
        for key, tensor in found.items():
            if tuple(tensor.shape) != full_shape(parameter, tp_size):
                problems.append(f"{key} is {list(tensor.shape)}, not {list(full_shape(parameter, tp_size))}")
                continue
            used.add(key)
            loaded.append((parameter, key.rpartition(".")[2], local_slice(tensor, parameter, tp_rank, gated=gated)))
    spectral = list(_spectral(rank))
    problems += [f"no singular vectors or values {name}" for name, _, _ in spectral if name not in state.svd]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (used, problems))
    unused = sorted(state.moments.keys() - set().union(*(part for part, _ in everyone)))
    problems = sorted({problem for _, found in everyone for problem in found})
    problems += [f"{key} belongs to no adapter" for key in unused]
    if problems:
        raise ValueError(f"the saved training state is of another policy: {'; '.join(problems[:8])}")
    with torch.no_grad():
        for name, tensor, gated in spectral:
            tensor.copy_(local_slice(state.svd[name], tensor, tp_rank, gated=gated))
    for parameter, moment, value in loaded:
        state_of(rank, parameter)[moment] = value.to(parameter.device).clone()
    _set_counters(rank, state.counters)
    rank.scheduler.num_steps = int(state.counters["scheduler"])
    rank.scheduler.step(increment=0)
    rank._gradients_checked = state.flags["gradients_checked"]
    if with_random:
        prefix = f"rank_{dist.get_rank()}."
        _set_random_state({k.removeprefix(prefix): v for k, v in state.random.items() if k.startswith(prefix)})


def _parameters(rank: PolicyRank) -> Iterator[tuple[str, torch.nn.Parameter, bool, Mapping[str, Any]]]:
    """(global name, parameter, gated, optimizer state) of every trainable parameter of this rank."""
    module = rank.model.module
    for name, adapter in adapter_modules(module).items():
        if (spectrum := spectrum_of(adapter)) is not None:
            yield f"{name}.theta", spectrum.theta, False, state_of(rank, spectrum.theta, create=False)
            continue
        for factor in ("linear_in", "linear_out"):
            parameter = getattr(adapter, factor).weight
            gated = factor == "linear_out" and name.endswith("linear_fc1") and module.config.gated_linear_unit
            yield f"{name}.{factor}", parameter, gated, state_of(rank, parameter, create=False)


def _spectral(rank: PolicyRank) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(global name, tensor, gated) of all that SVD-LoRA adapters of this rank consist of."""
    module = rank.model.module
    for name, adapter in adapter_modules(module).items():
        if (spectrum := spectrum_of(adapter)) is not None:
            gated = name.endswith("linear_fc1") and module.config.gated_linear_unit
            yield f"{name}.linear_in", adapter.linear_in.weight, False
            yield f"{name}.linear_out", adapter.linear_out.weight, gated
            for part in ("sigma_ref", "mixing", "theta"):
                yield f"{name}.{part}", getattr(spectrum, part), False


def _split(tensor: torch.Tensor) -> int | None:
    return tensor.partition_dim if getattr(tensor, "tensor_model_parallel", False) else None


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float().cpu().clone()


def _torch_optimizers(rank: PolicyRank) -> list[torch.optim.Optimizer]:
    chained = getattr(rank.optimizer, "chained_optimizers", [rank.optimizer])
    return [o.optimizer for o in chained if getattr(o, "optimizer", None) is not None]


def state_of(rank: PolicyRank, parameter: torch.nn.Parameter, *, create: bool = True) -> dict[str, Any]:
    for inner in _torch_optimizers(rank):
        if any(p is parameter for group in inner.param_groups for p in group["params"]):
            return inner.state[parameter] if create else inner.state.get(parameter, {})
    raise RuntimeError(f"no optimizer updates a parameter of shape {list(parameter.shape)}")


def _counts_per_parameter(inner: torch.optim.Optimizer) -> bool:
    """torch's optimizers number the steps of each parameter; fused ones those of a group."""
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def _counters(rank: PolicyRank) -> dict[str, float]:
    """The number of optimizer steps, the same for all parameters; empty before the first."""
    for inner in _torch_optimizers(rank):
        for group in inner.param_groups:
            for holder in inner.state.values() if _counts_per_parameter(inner) else [group]:
                if "step" in holder:
                    return {"step": float(holder["step"])}
    return {}


def _set_counters(rank: PolicyRank, counters: Mapping[str, float]) -> None:
    if "step" not in counters:
        return
    for inner in _torch_optimizers(rank):
        for group in inner.param_groups:
            if not _counts_per_parameter(inner):
                group["step"] = int(counters["step"])
                continue
            for parameter in group["params"]:
                inner.state[parameter]["step"] = torch.tensor(counters["step"], dtype=torch.float32)


def forget_moments(rank: PolicyRank) -> None:
    """Let the optimizer begin anew: no moments, and no steps that Adam's correction of young moments would count."""
    for inner in _torch_optimizers(rank):
        for state in inner.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
        if not _counts_per_parameter(inner):
            for group in inner.param_groups:
                if "step" in group:
                    group["step"] = 0


def _whole_tensors(
    parts: Sequence[Mapping[str, tuple[torch.Tensor, int | None, bool]]],
) -> dict[str, torch.Tensor]:
    """Whole tensors from what the ranks hold of them, in the ranks' order."""
    shards: dict[str, list[tuple[torch.Tensor, int | None, bool]]] = {}
    for part in parts:
        for key, shard in part.items():
            shards.setdefault(key, []).append(shard)
    return {key: whole(shards[key]) for key in sorted(shards)}


def whole(shards: list[tuple[torch.Tensor, int | None, bool]]) -> torch.Tensor:
    """One matrix from its tensor-parallel shards; the inverse of `local_slice`."""
    tensors, (_, split, gated) = [t for t, _, _ in shards], shards[0]
    if split is None:
        return tensors[0]
    if gated and split == 0:
        halves = [t.chunk(2) for t in tensors]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(tensors, dim=split)


def _random_state() -> dict[str, torch.Tensor]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    tracked = get_cuda_rng_tracker().get_states()
    states |= {f"tracker.{name}": s.clone() for name, s in tracked.items() if isinstance(s, torch.Tensor)}
    return states


def _set_random_state(states: Mapping[str, torch.Tensor]) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    tracked = {k.removeprefix("tracker."): v for k, v in states.items() if k.startswith("tracker.")}
    if tracked:
        get_cuda_rng_tracker().set_states({**get_cuda_rng_tracker().get_states(), **tracked})
