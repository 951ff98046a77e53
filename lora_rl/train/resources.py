"""Ray and the resources of a job, reserved on nodes that were checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_rl.cluster.placement import Placement
    from lora_rl.config import RunConfig
    from lora_rl.config.layout import Layout
    from lora_rl.track import Console


@contextmanager
def reserve(
    config: RunConfig, layout: Layout, console: Console, logs: Path, *, ranks: bool = True, engines: bool = True
) -> Iterator[Placement]:
    """Ray, with room for a job, for the length of the block; see `ray_session` and `place`.

    Args:
        logs: existing folder of the run.
        ranks, engines: whether the job has them; those alone take turns with nobody.

    Raises:
        WorkerError: no cluster, no room in it, or nodes that are not alike.
    """
    from lora_rl.cluster.local import ray_session
    from lora_rl.cluster.nodes import check_nodes
    from lora_rl.cluster.placement import place

    cluster, nothing = config.cluster, (0,) * len(layout.ranks_on)
    ranks_on, engines_on = layout.ranks_on if ranks else nothing, layout.engines_on if engines else nothing
    num_gpus = layout.num_gpus if ranks and engines else sum(ranks_on) + sum(engines_on) * layout.engine_tp
    with ExitStack() as stack:
        with console.startup("Ray") as task:
            # Every actor takes one logical CPU; a local cluster has exactly as many.
            session = ray_session(
                address=cluster.address,
                num_cpus=sum(ranks_on) + sum(engines_on),
                num_gpus=num_gpus if layout.platform == "cuda" else 0,
                log_file=logs / "ray.log",
            )
            stack.enter_context(session)
            if cluster.address is not None:
                task.update("waiting for resources")
            placement = stack.enter_context(
                place(
                    platform=layout.platform,
                    colocated=layout.colocated or not (ranks and engines),
                    ranks_on=ranks_on,
                    engines_on=engines_on,
                    engine_tp=layout.engine_tp,
                    timeout_s=cluster.startup_timeout_s,
                    attached=cluster.address is not None,
                )
            )
            if placement.nodes:
                task.update("comparing nodes")
                folders = [config.policy.model_name, config.policy.tokenizer_name]
                check_nodes(placement.nodes, folders, logs, timeout_s=cluster.startup_timeout_s)
        yield placement
