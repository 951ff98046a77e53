"""Where actors land in a real Ray: side by side, apart, over nodes, or nowhere with an error that says what was asked.

The clusters of several nodes run on this machine, each node with a loopback address of its own. GPUs are only counted:
Ray takes their number as it is told.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from lora_rl.cluster.local import ray_session
from lora_rl.cluster.nodes import check_nodes
from lora_rl.cluster.placement import place
from lora_rl.cluster.workers import Worker, WorkerError, wait
from tests.support.ray_cluster import RayCluster


@pytest.mark.parametrize(
    ("allowed", "engine_tp", "ranks_see", "engines_see"),
    [
        (None, 1, "0,1,2,3", ["0", "1", "2", "3"]),
        (None, 2, "0,1,2,3", ["0,1", "2,3"]),
        ("4,5,6,7,8", 4, "4,5,6,7", ["4,5,6,7"]),
        ("GPU-a, GPU-b,GPU-c,GPU-d", 2, "GPU-a,GPU-b,GPU-c,GPU-d", ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
    ],
)
def test_colocated_engines_get_the_devices_of_their_ranks(
    monkeypatch: pytest.MonkeyPatch, allowed: str | None, engine_tp: int, ranks_see: str, engines_see: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if allowed:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    sizes = {"ranks_on": [4], "engines_on": [4 // engine_tp], "engine_tp": engine_tp}
    with place(platform="cuda", colocated=True, timeout_s=1.0, **sizes) as placement:

        def devices(options: list[dict[str, Any]]) -> list[str]:
            # Nothing is asked of Ray, which would pack fractions of devices together.
            assert all(o["num_gpus"] == 0 for o in options)
            return [o["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] for o in options]

        # A rank picks its own by its number.
        assert devices(placement.ranks) == [ranks_see] * 4
        assert devices(placement.engines) == engines_see


def test_colocated_on_the_cpu_nothing_is_reserved() -> None:
    sizes = {"ranks_on": [4], "engines_on": [2], "engine_tp": 2}
    with place(platform="cpu", colocated=True, timeout_s=1.0, **sizes) as placement:
        assert placement.ranks == [{"num_cpus": 1, "num_gpus": 0}] * 4
        assert placement.engines == [{"num_cpus": 1, "num_gpus": 0}] * 2
        assert not placement.nodes


# -- one node --------------------------------------------------------------------------------------------------------


class Somewhere:
    """An actor that knows where it is."""

    def group(self) -> str:
        import ray

        return ray.get_runtime_context().get_placement_group_id()

    def place(self) -> tuple[str, str | None]:
        import ray.util

        return ray.util.get_node_ip_address(), os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.e2e
def test_apart_every_process_fits_into_the_bundle_of_its_node(
    local_ray: None, start_worker: Callable[..., Worker]
) -> None:
    sizes = {"ranks_on": [2], "engines_on": [2], "engine_tp": 2}
    with place(platform="cpu", colocated=False, timeout_s=30.0, **sizes) as placement:
        everyone = [*placement.ranks, *placement.engines]
        [group] = {options["scheduling_strategy"].placement_group for options in everyone}
        # On the CPU an engine is one actor, whatever processes it starts.
        assert group.bundle_specs == [{"CPU": 4}]
        # All four run at once.
        workers = [start_worker(f"actor {n}", Somewhere, **options) for n, options in enumerate(everyone)]
        groups = wait([w.call("group") for w in workers], timeout_s=60, doing="asking")
        assert groups == [group.id.hex()] * 4
    # The end of the block ends them, a moment later.
    end = time.monotonic() + 30
    with pytest.raises(WorkerError, match=r"actor 0 died"):
        while time.monotonic() < end:
            wait([workers[0].call("group")], timeout_s=60, doing="asking")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("sizes", "asked"),
    [
        ({"ranks_on": [9], "engines_on": [1]}, "1 node with CPU 10 for 9 Megatron ranks and 1 vLLM engine"),
        ({"ranks_on": [1, 1], "engines_on": [0, 0]}, "2 nodes with CPU 1 for 1 Megatron rank"),
        (
            {"ranks_on": [1], "engines_on": [1], "engine_tp": 2, "platform": "cuda"},
            "1 node with CPU 2, GPU 3 for 1 Megatron rank and 1 vLLM engine",
        ),
    ],
)
def test_asking_for_more_than_there_is_ends_in_time_and_says_what(
    local_ray: None, sizes: dict[str, Any], asked: str
) -> None:
    begin, options = time.monotonic(), {"platform": "cpu", "colocated": False, "engine_tp": 1, **sizes}
    with pytest.raises(WorkerError) as error, place(**options, timeout_s=1.0):
        pass
    message = str(error.value).splitlines()
    assert message[0].startswith("no room for the job within 1 s (cluster.startup_timeout_s)")
    assert message[1].strip() == asked
    assert message[2] == "The cluster has:"
    assert message[3].endswith(": CPU 4 free of 4")
    assert 0.9 < time.monotonic() - begin < 10


# -- several nodes ---------------------------------------------------------------------------------------------------

CPUS, GPUS = 8, 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    cluster = RayCluster(3, cpus=CPUS, gpus=GPUS)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def driver() -> Iterator[Callable[..., Any]]:
    """Calls a function in another process, which may attach to a cluster although this one has a Ray of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result(timeout=180)


def places(address: str, folder: Path, sizes: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Attach, start all actors at once, and ask each where it is and which GPUs it sees: ranks, then engines."""
    with ray_session(address=address, num_cpus=1, num_gpus=0, log_file=folder / "ray.log"):
        import ray

        with place(**sizes, timeout_s=30.0, attached=True) as placement:
            actors = [ray.remote(Somewhere).options(**o).remote() for o in (*placement.ranks, *placement.engines)]
            found = ray.get([actor.place.remote() for actor in actors], timeout=60)
            # The names in messages are true.
            named = [name.split()[1] for name in (*placement.rank_nodes, *placement.engine_nodes)]
            assert named == [address for address, _ in found]
            # A process that ended can be started again with the same options.
            ray.kill(actors[-1])
            options = (*placement.ranks, *placement.engines)[-1]
            again = ray.remote(Somewhere).options(**options).remote()
            assert ray.get(again.place.remote(), timeout=60)[0] == named[-1]
            return found


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("platform", "colocated", "ranks_on", "engines_on", "engine_tp", "gpus"),
    [
        ("cpu", True, [2, 2, 2], [1, 1, 1], 2, [None] * 9),
        ("cpu", False, [2, 0], [0, 1], 1, [None] * 3),
        ("cpu", True, [0, 0], [2, 2], 1, [None] * 4),
        ("cuda", True, [2, 2], [2, 2], 1, ["0,1"] * 4 + ["0", "1"] * 2),
        ("cuda", False, [2, 2, 0], [0, 0, 2], 2, ["0", "1", "0", "1", "0,1", "2,3"]),
        ("cuda", False, [2, 2], [1, 1], 2, ["0", "1", "0", "1", "2,3", "2,3"]),
    ],
)
def test_ranks_and_engines_are_numbered_node_by_node(
    cluster: RayCluster,
    driver: Callable[..., Any],
    tmp_path: Path,
    platform: str,
    colocated: bool,
    ranks_on: list[int],
    engines_on: list[int],
    engine_tp: int,
    gpus: list[str | None],
) -> None:
    sizes = {"ranks_on": ranks_on, "engines_on": engines_on, "engine_tp": engine_tp}
    found = driver(places, cluster.address, tmp_path, {"platform": platform, "colocated": colocated, **sizes})
    ranks, engines = [node for node, _ in found[: sum(ranks_on)]], [node for node, _ in found[sum(ranks_on) :]]
    # Groups of neighbours, such as those of tensor parallelism, are never on two nodes.
    of_node: list[set[str]] = []
    for ranks_here, engines_here in zip(ranks_on, engines_on, strict=True):
        of_node.append({*ranks[:ranks_here], *engines[:engines_here]})
        ranks, engines = ranks[ranks_here:], engines[engines_here:]
    assert all(len(nodes) == 1 for nodes in of_node)
    used = [next(iter(nodes)) for nodes in of_node]
    assert len(set(used)) == len(used)
    if len(set(zip(ranks_on, engines_on, strict=True))) == 1:
        assert used == sorted(used)
    if platform == "cpu" or colocated:
        assert [seen for _, seen in found] == gpus
    else:
        # Which ones is for Ray to say; on no node are two processes given the same.
        assert [len(seen.split(",")) for _, seen in found] == [len(text.split(",")) for text in gpus]
        given = [(node, name) for node, seen in found for name in seen.split(",")]
        assert len(set(given)) == len(given)
    cluster.wait_until_free()


def fail_inside(address: str, folder: Path, error: type[BaseException]) -> str:
    """A job that reserves everything, starts actors, and ends by this error."""
    sizes = {"ranks_on": [CPUS] * 3, "engines_on": [0] * 3, "engine_tp": 1}
    try:
        with (
            ray_session(address=address, num_cpus=1, num_gpus=0, log_file=folder / "ray.log"),
            place(platform="cpu", colocated=True, **sizes, timeout_s=30.0, attached=True) as placement,
        ):
            import ray

            ray.get([ray.remote(Somewhere).options(**o).remote().group.remote() for o in placement.ranks[::8]])
            raise error("in the middle")
    except BaseException as caught:
        return type(caught).__name__
    return "nothing was raised"


@pytest.mark.e2e
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, WorkerError])
def test_however_a_job_ends_the_cluster_goes_on_with_all_its_resources(
    cluster: RayCluster, driver: Callable[..., Any], tmp_path: Path, error: type[BaseException]
) -> None:
    assert driver(fail_inside, cluster.address, tmp_path, error) == error.__name__
    cluster.wait_until_free()
    assert sorted(cluster.resources()) == cluster.nodes


def wait_for_room(address: str, folder: Path, held_s: float, timeout_s: float) -> str:
    """Ask for all of two nodes while another job holds one of three, for `held_s` seconds, and one more."""
    import threading

    with ray_session(address=address, num_cpus=1, num_gpus=0, log_file=folder / "ray.log"):
        from ray.util.placement_group import placement_group, remove_placement_group

        other = placement_group([{"CPU": CPUS - 1}, {"CPU": 1}], strategy="STRICT_SPREAD")
        assert other.wait(30)
        timer = threading.Timer(held_s, remove_placement_group, [other])
        timer.start()
        sizes = {"ranks_on": [CPUS] * 2, "engines_on": [0] * 2, "engine_tp": 1}
        try:
            with place(platform="cpu", colocated=True, **sizes, timeout_s=timeout_s, attached=True):
                return "there was room"
        except WorkerError as error:
            return str(error)
        finally:
            timer.cancel()
            timer.join()
            if held_s > timeout_s:
                remove_placement_group(other)


@pytest.mark.e2e
def test_what_others_hold_is_waited_for(cluster: RayCluster, driver: Callable[..., Any], tmp_path: Path) -> None:
    assert driver(wait_for_room, cluster.address, tmp_path, 2.0, 30.0) == "there was room"
    cluster.wait_until_free()
    message = driver(wait_for_room, cluster.address, tmp_path, 60.0, 2.0)
    assert "2 nodes with CPU 8 for 8 Megatron ranks\n" in message
    free = sorted(line.partition(": ")[2] for line in message.splitlines() if line.startswith("  node 127.0.0."))
    assert free == [f"CPU {n} free of 8, GPU 4 free of 4" for n in (1, 7, 8)]
    cluster.wait_until_free()


def compare_nodes(address: str, folder: Path, models: list[str]) -> str:
    """Check two nodes for these models; what was wrong."""
    with ray_session(address=address, num_cpus=1, num_gpus=0, log_file=folder / "ray.log"):
        sizes = {"ranks_on": [1] * 2, "engines_on": [0] * 2, "engine_tp": 1}
        with place(platform="cpu", colocated=True, **sizes, timeout_s=30.0, attached=True) as placement:
            # A folder that only this process can find: the nodes have other current directories.
            os.chdir(folder)
            try:
                check_nodes(placement.nodes, models, folder, timeout_s=60)
            except WorkerError as error:
                return str(error)
            return "alike"


@pytest.mark.e2e
def test_nodes_are_compared_with_the_driver(
    cluster: RayCluster, driver: Callable[..., Any], tmp_path: Path, models: dict[str, Path]
) -> None:
    there = [str(models["tied"]), str(models["untied"]), "some/hub-id"]
    assert driver(compare_nodes, cluster.address, tmp_path, there) == "alike"
    assert [path.name for path in tmp_path.iterdir()] == ["ray.log"]
    (tmp_path / "only-here").mkdir()
    message = driver(compare_nodes, cluster.address, tmp_path, [*there, "only-here"]).splitlines()
    assert message[0] == "the nodes of the job are not alike:"
    assert [line.partition(" (")[0].strip() for line in message[1:]] == [f"node {ip}" for ip in used_nodes(message[1:])]
    assert all(line.endswith("): only-here is not there") for line in message[1:])
    assert len(message) == 3


def used_nodes(lines: list[str]) -> list[str]:
    return sorted(line.split()[1] for line in lines)


def attach(address: str, folder: Path) -> str:
    try:
        with ray_session(address=address, num_cpus=1, num_gpus=0, log_file=folder / "ray.log"):
            return "attached"
    except WorkerError as error:
        return str(error)


@pytest.mark.e2e
@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:6379"])
def test_no_cluster_to_attach_to(driver: Callable[..., Any], tmp_path: Path, address: str) -> None:
    begin = time.monotonic()
    message = driver(attach, address, tmp_path)
    assert message.startswith(f"cluster.address {address}: cannot attach to a Ray cluster there: ")
    assert "ray start --head" in message
    assert time.monotonic() - begin < 60
