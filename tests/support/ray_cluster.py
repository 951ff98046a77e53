"""A Ray cluster of several nodes on this machine, each with a loopback address of its own, in a process of its own.

    python -m tests.support.ray_cluster 3 [--cpus 4] [--gpus 0]

Prints the address, then obeys lines on standard input: `kill 127.0.0.3` ends the processes of a node without warning,
`resources` prints what is free of what there is, as JSON by node address. Ends the cluster at the end of its input.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
OBJECT_STORE_BYTES = 100 * 1024**2


class RayCluster:
    """Such a cluster, for a test.

    Attributes:
        address: of the head, for `cluster.address`.
        nodes: addresses of all nodes; the first is the head.
    """

    def __init__(self, nodes: int, *, cpus: int = 4, gpus: int = 0) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.support.ray_cluster",
            str(nodes),
            "--cpus",
            str(cpus),
            "--gpus",
            str(gpus),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        self.address = self._answer()
        self.nodes = [_ip(n) for n in range(nodes)]

    def kill(self, node: str) -> None:
        """End a node, the processes on it included, without warning."""
        self._tell(f"kill {node}")

    def resources(self) -> dict[str, dict[str, list[float]]]:
        """[free, total] of CPU and GPU by node address."""
        return json.loads(self._tell("resources"))

    def wait_until_free(self, seconds: float = 30.0) -> None:
        """Raises AssertionError if some resource of some node is still held then."""
        deadline = time.monotonic() + seconds
        while any(free != total for kinds in self.resources().values() for free, total in kinds.values()):
            assert time.monotonic() < deadline, self.resources()
            time.sleep(0.2)

    def close(self) -> None:
        """End the cluster."""
        self._process.communicate(timeout=120)

    def _tell(self, line: str) -> str:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        line = self._process.stdout.readline().strip()
        assert line, "the cluster's process ended"
        return line


def _ip(number: int) -> str:
    # 127.0.0.1 itself would be replaced by the machine's address.
    return f"127.0.0.{number + 2}"


def _resources() -> dict[str, Any]:
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return {
        node["NodeManagerAddress"]: {
            kind: [free.get(node["NodeID"], {}).get(kind, 0.0), node["Resources"][kind]]
            for kind in ("CPU", "GPU")
            if kind in node["Resources"]
        }
        for node in ray.nodes()
        if node["Alive"]
    }


def _kill(node: Any) -> None:
    import psutil

    processes = [info.process for infos in node.all_processes.values() for info in infos]
    families = [psutil.Process(p.pid) for p in processes if p.poll() is None]
    families += [child for parent in families for child in parent.children(recursive=True)]
    for process in families:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("nodes", type=int)
    parser.add_argument("--cpus", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Only answers go to standard output.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    nodes = {}
    for number in range(options.nodes):
        settings = {"num_cpus": options.cpus, "num_gpus": options.gpus, "object_store_memory": OBJECT_STORE_BYTES}
        settings |= {"node_ip_address": _ip(number), "include_dashboard": False}
        nodes[_ip(number)] = cluster.add_node(**settings)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    answers.write(f"{cluster.address}\n")
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "kill":
            _kill(nodes[arguments[0]])
            answers.write("killed\n")
        else:
            answers.write(json.dumps(_resources()) + "\n")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
