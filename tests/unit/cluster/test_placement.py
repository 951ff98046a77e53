"""Where actors land in a real Ray: side by side, apart, or nowhere with an error that says what was asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lora_rl.cluster.placement import place
from lora_rl.cluster.workers import Worker, wait


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
    engines = 4 // engine_tp
    placement = place(
        platform="cuda", colocated=True, world_size=4, num_engines=engines, engine_tp=engine_tp, timeout_s=1.0
    )

    def devices(options: list[dict[str, Any]]) -> list[str]:
        # Nothing is asked of Ray, which would pack fractions of devices together.
        assert all(o["num_gpus"] == 0 for o in options)
        return [o["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] for o in options]

    # A rank picks its own by its number.
    assert devices(placement.ranks) == [ranks_see] * 4
    assert devices(placement.engines) == engines_see


def test_colocated_on_the_cpu_nothing_is_reserved() -> None:
    placement = place(platform="cpu", colocated=True, world_size=4, num_engines=2, engine_tp=2, timeout_s=1.0)
    assert placement.ranks == [{"num_cpus": 1, "num_gpus": 0}] * 4
    assert placement.engines == [{"num_cpus": 1, "num_gpus": 0}] * 2


# -- apart -----------------------------------------------------------------------------------------------------------


class Somewhere:
    """An actor that knows where it is."""

    def group(self) -> str:
        import ray

        return ray.get_runtime_context().get_placement_group_id()


@pytest.fixture
def apart(local_ray: None) -> Iterator[Callable[..., Any]]:
    """`place`, apart; what it reserved, also in vain, is given back at the end of the test."""
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

    yield lambda **sizes: place(**{"platform": "cpu", "colocated": False, "engine_tp": 1, "timeout_s": 30.0, **sizes})
    for group in placement_group_table():
        remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group)))


def strategies(options: list[dict[str, Any]]) -> list[Any]:
    return [option["scheduling_strategy"] for option in options]


@pytest.mark.e2e
def test_apart_every_process_has_a_bundle_and_lands_in_it(
    apart: Callable[..., Any], start_worker: Callable[..., Worker]
) -> None:
    placement = apart(world_size=2, num_engines=2, engine_tp=2)
    groups = []
    for options in (placement.ranks, placement.engines):
        [group] = {strategy.placement_group for strategy in strategies(options)}
        assert [strategy.placement_group_bundle_index for strategy in strategies(options)] == [0, 1]
        # On the CPU an engine is one actor, whatever processes it starts.
        assert group.bundle_specs == [{"CPU": 1}] * 2
        groups += [group.id.hex()] * 2
    assert len(set(groups)) == 2
    # All four run at once, and a bundle has room for one.
    workers = [
        start_worker(f"actor {n}", Somewhere, **options)
        for n, options in enumerate((*placement.ranks, *placement.engines))
    ]
    assert wait([w.call("group") for w in workers], timeout_s=60, doing="asking") == groups


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("sizes", "asked"),
    [
        ({"world_size": 9, "num_engines": 1}, "no room for the Megatron ranks: 9 x {'CPU': 1} within 1 s"),
        ({"world_size": 3, "num_engines": 2}, "no room for the vLLM engines: 2 x {'CPU': 1} within 1 s"),
        (
            {"world_size": 1, "num_engines": 1, "engine_tp": 2, "platform": "cuda"},
            "no room for the Megatron ranks: 1 x {'CPU': 1, 'GPU': 1} within 1 s",
        ),
    ],
)
def test_asking_for_more_than_there_is_ends_in_time_and_says_what(
    apart: Callable[..., Any], sizes: dict[str, Any], asked: str
) -> None:
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        apart(**sizes, timeout_s=1.0)
    assert str(error.value).startswith(asked)
    assert "the cluster has" in str(error.value)
    assert "'CPU': 4.0" in str(error.value)
    assert 0.9 < time.monotonic() - begin < 10
