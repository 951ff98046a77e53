"""The state of an extrapolation as numbers and tensors, for a checkpoint: snapshots, ledger, and the way back."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from lora_rl.lora.merge import AdapterTensors
from lora_rl.lora.peft_io import PeftAdapter
from lora_rl.next.factors import RankOne
from lora_rl.next.ledger import Ledger
from lora_rl.next.watch import Watch
from lora_rl.policy.state import PolicyState
from lora_rl.train.extrapolate import Extrapolation, Taken

if TYPE_CHECKING:
    from lora_rl.policy.group import PolicyGroup

# What can be written as JSON, and tensors by name.
type SavedExtrapolation = tuple[dict[str, Any], dict[str, torch.Tensor]]

_LAYOUT = ("tp", "pp", "dp")
# The tensors of a `PolicyState`.
_TENSORS = ("moments", "random", "svd")


def save_extrapolation(extrapolation: Extrapolation, policy: PolicyGroup) -> SavedExtrapolation:
    """Everything that an extrapolation needs to go on, also in the middle of a watch."""
    tensors: dict[str, torch.Tensor] = {}
    for number, snapshot in enumerate(policy.extrapolation("snapshots")):
        for name, (a, b) in snapshot.items():
            tensors[f"snapshot.{number}.{name}.a"], tensors[f"snapshot.{number}.{name}.b"] = a, b
    merged = policy.extrapolation("merged")
    for number, jump in enumerate(merged):
        for name, change in jump.items():
            sigma = torch.tensor([change.sigma], dtype=torch.float64)
            for key, tensor in {"sigma": sigma, "u": change.u, "v": change.v}.items():
                tensors[f"merged.{number}.{name}.{key}"] = tensor
    plain: dict[str, Any] = {
        "merged": len(merged),
        "ledger": extrapolation.ledger.state_dict(),
        "origin": extrapolation.origin,
        "since": extrapolation.since,
        "retry_at": extrapolation.retry_at,
        "rewards": list(extrapolation.rewards),
        "trail": extrapolation.trail,
        "taken": None,
    }
    if (taken := extrapolation.taken) is not None:
        for name, pair in taken.adapter.tensors.items():
            tensors[f"taken.adapter.{name}.a"], tensors[f"taken.adapter.{name}.b"] = pair.a, pair.b
        for part in _TENSORS:
            tensors |= {f"taken.{part}.{key}": tensor for key, tensor in getattr(taken.state, part).items()}
        plain["taken"] = {
            "watch": taken.watch.state_dict(),
            "optimizer_steps": taken.optimizer_steps,
            # Jumps are added in order: those before the last are the first so many.
            "merged": len(taken.merged),
            "counters": taken.state.counters,
            "flags": taken.state.flags,
            "scales": {name: pair.scale for name, pair in taken.adapter.tensors.items()},
            "layout": _layout(policy) if taken.same_layout else None,
        }
    # Copies: parts of a fused linear share their A, and a file of tensors cannot.
    return plain, {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def load_extrapolation(extrapolation: Extrapolation, saved: SavedExtrapolation, policy: PolicyGroup) -> None:
    """Continue from `save_extrapolation`, at any layout."""
    plain, tensors = saved
    snapshots: dict[int, dict[str, dict[str, torch.Tensor]]] = {}
    for key, tensor in tensors.items():
        if key.startswith("snapshot."):
            number, name = key.removeprefix("snapshot.").split(".", 1)
            module, _, factor = name.rpartition(".")
            snapshots.setdefault(int(number), {}).setdefault(module, {})[factor] = tensor
    policy.extrapolation(
        "load_snapshots", [{n: (f["a"], f["b"]) for n, f in snapshots[i].items()} for i in sorted(snapshots)]
    )
    extrapolation.ledger = Ledger(**plain["ledger"])
    extrapolation.origin, extrapolation.since = plain["origin"], plain["since"]
    extrapolation.retry_at = plain["retry_at"]
    # None in checkpoints that were written before it was kept.
    extrapolation.trail = plain.get("trail", extrapolation.trail)
    extrapolation.rewards = deque(plain["rewards"], maxlen=extrapolation.rewards.maxlen)
    if (taken := plain["taken"]) is None:
        return
    adapter = _part(tensors, "taken.adapter.")
    pairs = {
        name: AdapterTensors(adapter[f"{name}.a"], adapter[f"{name}.b"], scale)
        for name, scale in taken["scales"].items()
    }
    state = PolicyState(
        counters=taken["counters"], flags=taken["flags"], **{p: _part(tensors, f"taken.{p}.") for p in _TENSORS}
    )
    same = taken["layout"] == _layout(policy)
    before = merged_jumps(saved)[: taken["merged"]]
    watch = Watch(**taken["watch"])
    extrapolation.taken = Taken(PeftAdapter(pairs), state, watch, taken["optimizer_steps"], before, same)


def merged_jumps(saved: SavedExtrapolation) -> list[dict[str, RankOne]]:
    """The jumps that were in the frozen weights, oldest first."""
    jumps: list[dict[str, RankOne]] = []
    for number in range(saved[0]["merged"]):
        parts = _part(saved[1], f"merged.{number}.")
        names = sorted(key.removesuffix(".sigma") for key in parts if key.endswith(".sigma"))
        jumps.append({n: RankOne(float(parts[f"{n}.sigma"]), parts[f"{n}.u"], parts[f"{n}.v"]) for n in names})
    return jumps


def _part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _layout(policy: PolicyGroup) -> dict[str, int]:
    return {name: getattr(policy.layout, name) for name in _LAYOUT}
