"""The nodes of a job: asking each of them something, and checking that they have the same files."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_rl.cluster import facts
from lora_rl.cluster.workers import WorkerError


@dataclass(frozen=True)
class Node:
    """A node that the job has reserved resources on.

    Attributes:
        id: Ray's id.
        address: IP address.
        options: Ray options of a task there that takes everything reserved.
    """

    id: str
    address: str
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """See `node_name`."""
        return node_name(self.id, self.address)


def node_name(node_id: str, address: str) -> str:
    """For messages; the beginning of the id is what `ray list nodes` shows, too."""
    return f"node {address} ({node_id[:8]})"


def this_node() -> str:
    """Name of the node that this process is on."""
    import ray.util

    return node_name(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())


def is_alive(name: str) -> bool:
    """Whether the node of that name is part of the cluster."""
    import ray

    return any(n["Alive"] and node_name(n["NodeID"], n["NodeManagerAddress"]) == name for n in ray.nodes())


def ask(nodes: Sequence[Node], function: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
    """Answers of a function of `lora_rl.cluster.facts` called on every node, in order.

    It takes all that is reserved on the node, so nothing else of the job may run there yet.

    Raises:
        WorkerError: it raised on some node, or did not answer in time.
    """
    import ray
    import ray.cloudpickle

    task = ray.remote(function)
    # On a node without lora_rl the function could not be found by its name.
    ray.cloudpickle.register_pickle_by_value(facts)
    try:
        refs = [task.options(max_retries=0, **node.options).remote(*args) for node in nodes]
    finally:
        ray.cloudpickle.unregister_pickle_by_value(facts)
    deadline = time.monotonic() + timeout_s
    answers = []
    for node, ref in zip(nodes, refs, strict=True):
        try:
            answers.append(ray.get(ref, timeout=max(0.0, deadline - time.monotonic())))
        except ray.exceptions.GetTimeoutError:
            raise WorkerError(f"start-up: {node.name} did not answer within {timeout_s:g} s") from None
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            raise WorkerError(f"start-up: {node.name} failed: {type(cause).__name__}: {cause}") from None
    return answers


def check_nodes(nodes: Sequence[Node], folders: Sequence[str], run_dir: Path, *, timeout_s: float) -> None:
    """Make sure that every node has the code, packages, model and run folder of this process.

    Args:
        folders: of the model and the tokenizer; those that are no folder here, such as hub ids, are left out.
        run_dir: an existing folder of the run.

    Raises:
        WorkerError: some node has not; with every difference on every node.
    """
    run_dir = run_dir.absolute()
    local = list(dict.fromkeys(f for f in folders if Path(f).is_dir()))
    with tempfile.NamedTemporaryFile(dir=run_dir, prefix=".shared_") as marker:
        here = facts.node_facts(local, marker.name)
        there = ask(nodes, facts.node_facts, local, marker.name, timeout_s=timeout_s)
    lines = [
        f"  {node.name}: {difference.what} {difference.problem}"
        for node, answer in zip(nodes, there, strict=True)
        for difference in facts.differences(here, answer, str(run_dir))
    ]
    if lines:
        raise WorkerError("the nodes of the job are not alike:\n" + "\n".join(lines))
