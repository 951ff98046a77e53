"""Starting Ray for one run, or joining a cluster that is there."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_rl.cluster.workers import WorkerError

_CONNECT_SECONDS = 10.0


@contextmanager
def ray_session(*, address: str | None, num_cpus: int, num_gpus: int, log_file: Path) -> Iterator[None]:
    """Ray for the length of the `with` block. At its end, whatever happened, a Ray started here is stopped, and a
    cluster that was there goes on without this job.

    Args:
        address: an existing cluster, `host:port` or `auto`; None starts one on this machine that listens on loopback
            only.
        num_cpus: logical CPUs of a started cluster: one per actor, so that placement never waits.
        num_gpus: GPUs of a started cluster.
        log_file: receives Ray's own messages.

    Raises:
        WorkerError: there is no cluster at `address`, or this machine is no node of it.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray would zero CUDA_VISIBLE_DEVICES for actors without GPUs; Megatron-Bridge then only warns more.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # A busy start on few cores is slow, not broken.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    import ray
    from ray._private import ray_constants

    # Under `uv run` Ray would otherwise build a second environment for its workers, for minutes. Its environment
    # variable of the same name is read at the import, which a module of the user's may have made before.
    ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    handler = logging.FileHandler(log_file)
    # Ray writes its notices to standard error, in the middle of the progress display; they belong in a file.
    notices = logging.getLogger("ray._private")
    notices.addHandler(handler)
    notices.propagate = False
    # Ray replaces the handler of SIGTERM by one that exits at once; a run has its own way to end.
    handles_sigterm = threading.current_thread() is threading.main_thread()
    sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if address is not None:
            _attach(address)
        else:
            _start(num_cpus, num_gpus)
        if handles_sigterm:
            signal.signal(signal.SIGTERM, sigterm)
        yield
    finally:
        ray.shutdown()
        notices.propagate = True
        notices.removeHandler(handler)
        handler.close()


def _start(num_cpus: int, num_gpus: int) -> None:
    """A second time, too: Ray gives its own node half a minute, which an overloaded machine may not have."""
    import ray

    for last_try in (False, True):
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _node_ip_address="127.0.0.1",
                # Objects here are token ids and metrics, and adapters when they are saved; larger ones go to the disk.
                object_store_memory=256 * 1024**2,
            )
            return
        except Exception as error:
            if last_try or "timed out" not in str(error).lower():
                raise
            logging.getLogger("ray._private").warning("Ray is started again: %s", error)
            ray.shutdown()


def _attach(address: str) -> None:
    import ray

    try:
        if address != "auto":
            # Ray tries for minutes.
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
        # Without a namespace the job gets one of its own: nothing in it can meet what other jobs name alike.
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise WorkerError(
            f"cluster.address {address}: cannot attach to a Ray cluster there: {reason}. This machine must be a node "
            "of it: ray start --head on the first one, ray start --address=HOST:PORT on every other"
        ) from error
