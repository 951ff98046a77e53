"""Which resources each process holds: ranks and engines side by side on the same devices, or apart, over nodes."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from lora_rl.cluster.facts import visible_devices
from lora_rl.cluster.nodes import Node, ask, node_name
from lora_rl.cluster.workers import WorkerError

Bundle = dict[str, float]


@dataclass(frozen=True)
class Placement:
    """Ray options for each actor. They stay valid until the end of the job: a process that ended can be started again.

    Attributes:
        ranks: options of each Megatron rank's actor.
        engines: options of each engine's actor.
        nodes: the nodes in use; empty in a Ray of the run's own.
        rank_nodes, engine_nodes: name of the node of each rank and engine; empty in a Ray of the run's own.
    """

    ranks: list[dict[str, Any]]
    engines: list[dict[str, Any]]
    nodes: list[Node] = field(default_factory=list)
    rank_nodes: list[str] = field(default_factory=list)
    engine_nodes: list[str] = field(default_factory=list)


@contextmanager
def place(
    *,
    platform: str,
    colocated: bool,
    ranks_on: Sequence[int],
    engines_on: Sequence[int],
    engine_tp: int,
    timeout_s: float,
    attached: bool = False,
) -> Iterator[Placement]:
    """Reserve resources for a job in the running Ray cluster; at the end of the block they are given back, and every
    process in them is killed.

    One bundle per node holds everything the job runs there, so that ranks and engines of a node may share devices; all
    nodes are reserved at once or not at all. Ranks and engines are numbered node by node, and nodes that have the
    same share by their address. In a Ray of the run's own nothing has to be reserved when they are colocated.

    Args:
        colocated: rank n of a node computes on its n-th device, engine n on the n-th run of `engine_tp` devices.
            Otherwise each has devices of its own.
        ranks_on, engines_on: how many there are on each node; a node with neither is not used.
        engine_tp: devices per engine.
        timeout_s: how long to wait for resources that others hold, or for nodes that are still to join.
        attached: the cluster may have other users.

    Raises:
        WorkerError: the cluster does not have the resources within `timeout_s`; the message says what was asked for
            and what each node has.
    """
    shares = [(ranks, engines) for ranks, engines in zip(ranks_on, engines_on, strict=True) if ranks or engines]
    gpus = [_gpus(*share, engine_tp, colocated) if platform == "cuda" else 0 for share in shares]
    if colocated and not attached:
        # Ray would pack fractions of GPUs onto as few as possible, and give an engine of two one whole GPU.
        [share] = shares
        yield _taking_turns([{"num_cpus": 1, "num_gpus": 0}], [share], engine_tp, [visible_devices(gpus[0])])
        return
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    bundles = [{"CPU": sum(s), **({"GPU": g} if g else {})} for s, g in zip(shares, gpus, strict=True)]
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    try:
        if not group.wait(timeout_s):
            raise WorkerError(_no_room(bundles, shares, timeout_s))
        order = _in_order(group, shares)
        nodes = [_node(group, index, bundles[index]) for index in order]
        shares, gpus = [shares[index] for index in order], [gpus[index] for index in order]
        options = [{**node.options, "num_cpus": 1, "num_gpus": 0} for node in nodes]
        if colocated:
            # Asked with all reserved GPUs in hand, a node names them.
            seen = ask(nodes, visible_devices, max(gpus), timeout_s=timeout_s) if any(gpus) else [[]] * len(nodes)
            placement = _taking_turns(options, shares, engine_tp, seen)
        else:
            rank, engine = (1, engine_tp) if platform == "cuda" else (0, 0)
            placement = Placement(
                ranks=[{**o, "num_gpus": rank} for o in _repeat(options, [ranks for ranks, _ in shares])],
                engines=[{**o, "num_gpus": engine} for o in _repeat(options, [engines for _, engines in shares])],
            )
        if attached:
            names = [node.name for node in nodes]
            placement = replace(
                placement,
                nodes=nodes,
                rank_nodes=_repeat(names, [ranks for ranks, _ in shares]),
                engine_nodes=_repeat(names, [engines for _, engines in shares]),
            )
        yield placement
    finally:
        if ray.is_initialized():
            # Also kills the actors in it.
            remove_placement_group(group)


def _repeat[T](items: Sequence[T], times: Sequence[int]) -> list[T]:
    return [item for item, count in zip(items, times, strict=True) for _ in range(count)]


def _gpus(ranks: int, engines: int, engine_tp: int, colocated: bool) -> int:
    return max(ranks, engines * engine_tp) if colocated else ranks + engines * engine_tp


def _taking_turns(
    options: Sequence[dict[str, Any]], shares: Sequence[tuple[int, int]], engine_tp: int, devices: Sequence[list[str]]
) -> Placement:
    """Options of actors that share the devices of their node: a rank picks its own by its number."""
    ranks, engines = [], []
    for base, (rank_count, engine_count), names in zip(options, shares, devices, strict=True):
        ranks += [_on(base, names)] * rank_count
        engines += [_on(base, names[n * engine_tp : (n + 1) * engine_tp]) for n in range(engine_count)]
    return Placement(ranks, engines)


def _on(base: dict[str, Any], devices: list[str]) -> dict[str, Any]:
    """Options of an actor that sees these GPUs; none: it is left as it is."""
    return {**base, "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": ",".join(devices)}}} if devices else {**base}


def _in_order(group: Any, shares: Sequence[tuple[int, int]]) -> list[int]:
    """Bundles in the order of `shares`, those of equal shares by the address of the node they are on."""
    addresses = [_address(node) for node in _nodes_of(group)]
    return sorted(range(len(shares)), key=lambda index: (shares.index(shares[index]), addresses[index]))


def _nodes_of(group: Any) -> list[dict[str, Any]]:
    """Ray's description of the node of each bundle."""
    import ray
    from ray.util.placement_group import placement_group_table

    by_id = {node["NodeID"]: node for node in ray.nodes()}
    placed = placement_group_table(group)["bundles_to_node_id"]
    return [by_id[placed[index]] for index in range(len(placed))]


def _address(node: dict[str, Any]) -> tuple[int, int, str]:
    address = ipaddress.ip_address(node["NodeManagerAddress"])
    return address.version, int(address), node["NodeID"]


def _node(group: Any, index: int, bundle: Bundle) -> Node:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    node = _nodes_of(group)[index]
    options = {
        "num_cpus": bundle["CPU"],
        "num_gpus": bundle.get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    }
    return Node(node["NodeID"], node["NodeManagerAddress"], options)


def _no_room(bundles: Sequence[Bundle], shares: Sequence[tuple[int, int]], timeout_s: float) -> str:
    import ray
    from ray._private.state import available_resources_per_node

    asked = Counter(
        f"{_amounts(bundle)} for "
        + " and ".join(_count(n, noun) for n, noun in zip(share, ("Megatron rank", "vLLM engine"), strict=True) if n)
        for bundle, share in zip(bundles, shares, strict=True)
    )
    free = available_resources_per_node()
    lines = [f"no room for the job within {timeout_s:g} s (cluster.startup_timeout_s). It needs, all at the same time:"]
    lines += [f"  {_count(number, 'node')} with {what}" for what, number in asked.items()]
    lines.append("The cluster has:")
    for node in sorted((node for node in ray.nodes() if node["Alive"]), key=_address):
        amounts = (
            f"{kind} {free.get(node['NodeID'], {}).get(kind, 0):g} free of {total:g}"
            for kind in ("CPU", "GPU")
            if (total := node["Resources"].get(kind, 0))
        )
        lines.append(f"  {node_name(node['NodeID'], node['NodeManagerAddress'])}: {', '.join(amounts) or 'nothing'}")
    return "\n".join(lines)


def _amounts(bundle: Bundle) -> str:
    return ", ".join(f"{kind} {amount}" for kind, amount in bundle.items())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
