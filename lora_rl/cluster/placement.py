"""Which resources each process holds: ranks and engines side by side on the same devices, or apart."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from lora_rl.cluster.workers import WorkerError


@dataclass(frozen=True)
class Placement:
    """Ray options for each actor.

    Attributes:
        ranks: options of each Megatron rank's actor.
        engines: options of each engine's actor.
    """

    ranks: list[dict[str, Any]]
    engines: list[dict[str, Any]]


def place(
    *, platform: str, colocated: bool, world_size: int, num_engines: int, engine_tp: int, timeout_s: float
) -> Placement:
    """Reserve resources for a job in the running Ray cluster.

    Apart (not colocated), ranks and engines get placement groups of their own: one bundle per rank, one bundle per
    engine that holds all its processes. Colocated, they take turns on the devices of this machine: rank n computes on
    the n-th, engine n on the n-th run of `engine_tp`.

    Raises:
        WorkerError: the cluster does not have the resources within `timeout_s`; the message says what was asked for.
    """
    gpu = platform == "cuda"
    if colocated:
        devices = visible_devices(world_size) if gpu else []
        # Ray would pack fractions of GPUs onto as few as possible, and give an engine of two one whole GPU.
        return Placement(
            ranks=[_on(devices)] * world_size,
            engines=[_on(devices[n * engine_tp : (n + 1) * engine_tp]) for n in range(num_engines)],
        )
    rank = {"CPU": 1, **({"GPU": 1} if gpu else {})}
    engine = {"CPU": 1, **({"GPU": engine_tp} if gpu else {})}
    return Placement(
        ranks=_bundles([rank] * world_size, "Megatron ranks", timeout_s),
        engines=_bundles([engine] * num_engines, "vLLM engines", timeout_s),
    )


def visible_devices(count: int) -> list[str]:
    """Names of the first `count` GPUs that this process may use, as CUDA_VISIBLE_DEVICES spells them."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [n.strip() for n in allowed.split(",")] if allowed else [str(n) for n in range(count)]
    return names[:count]


def _on(devices: list[str]) -> dict[str, Any]:
    """Options of an actor that sees these GPUs; none: it is left as it is."""
    options: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0}
    if devices:
        options["runtime_env"] = {"env_vars": {"CUDA_VISIBLE_DEVICES": ",".join(devices)}}
    return options


def _bundles(bundles: list[dict[str, float]], what: str, timeout_s: float) -> list[dict[str, Any]]:
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group(bundles, strategy="PACK")
    if not group.wait(timeout_s):
        raise WorkerError(
            f"no room for the {what}: {len(bundles)} x {bundles[0]} within {timeout_s:.0f} s; the cluster has "
            f"{ray.cluster_resources()}, of which {ray.available_resources()} are free"
        )
    return [
        {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        }
        for index, bundle in enumerate(bundles)
    ]
