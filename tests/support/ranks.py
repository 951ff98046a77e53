"""Run a function on several Megatron ranks, each a process of its own, and collect what they return."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from queue import Empty
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.preload"])


class RankFailed(AssertionError):
    """A rank raised; the message holds its traceback."""


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    seed: int = 1,
    timeout: float = 180,
) -> list[Any]:
    """Call `function(*args)` on tp x pp x dp ranks with Megatron's groups built; return the results by rank.

    Args:
        ep: of the dp ranks, those that share experts.

    Raises:
        RankFailed: a rank raised or ended without an answer; the others are terminated.
    """
    world = tp * pp * dp
    results: Any = _context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        init = f"file://{folder}/rendezvous"
        processes = [
            _context.Process(
                target=_rank, args=(function, args, rank, world, tp, pp, ep, seed, init, results), daemon=True
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            answers: dict[int, Any] = {}
            while len(answers) < world:
                try:
                    rank, ok, value = results.get(timeout=timeout)
                except Empty:
                    raise RankFailed(f"ranks {sorted(set(range(world)) - set(answers))} gave no answer") from None
                if not ok:
                    raise RankFailed(f"rank {rank} failed:\n{value}")
                answers[rank] = pickle.loads(value)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()
    return [answers[rank] for rank in range(world)]


def _rank(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world: int,
    tp: int,
    pp: int,
    ep: int,
    seed: int,
    init: str,
    results: Any,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch.distributed as dist

    from lora_rl.policy.model import initialise_parallel
    from lora_rl.policy.platform import prepare

    try:
        platform = prepare("cpu")
        initialise_parallel(platform, rank=rank, world_size=world, tp=tp, pp=pp, seed=seed, init_method=init, ep=ep)
        value = function(*args)
        # Nobody leaves while a peer still communicates.
        dist.barrier()
        # Pickled here: the queue would pass tensors as shared memory, which ends with this process.
        results.put((rank, True, pickle.dumps(value)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
