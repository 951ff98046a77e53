"""Which resources each process holds: ranks and engines side by side on the same devices, or apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
    engine that holds all its processes. Colocated, they take turns: on GPUs each claims half of a device.

    Raises:
        RuntimeError: the cluster does not have the resources within `timeout_s`; the message says what was asked for.
    """
    gpu = platform == "cuda"
    if colocated:
        share = 0.5 if gpu else 0
        return Placement(
            ranks=[{"num_cpus": 1, "num_gpus": share}] * world_size,
            engines=[{"num_cpus": 1, "num_gpus": share * engine_tp}] * num_engines,
        )
    rank = {"CPU": 1, **({"GPU": 1} if gpu else {})}
    engine = {"CPU": 1, **({"GPU": engine_tp} if gpu else {})}
    return Placement(
        ranks=_bundles([rank] * world_size, "Megatron ranks", timeout_s),
        engines=_bundles([engine] * num_engines, "vLLM engines", timeout_s),
    )


def _bundles(bundles: list[dict[str, float]], what: str, timeout_s: float) -> list[dict[str, Any]]:
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group(bundles, strategy="PACK")
    if not group.wait(timeout_s):
        raise RuntimeError(
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
