"""Who holds the devices when, and what the ledger says of it: over real Ray actors that write down their calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lora_rl.cluster.memory import GIB
from lora_rl.cluster.workers import Worker
from lora_rl.rollout.pool import EnginePool
from lora_rl.train.turns import Turns

pytestmark = pytest.mark.e2e


class Side:
    """Stands where a rank or an engine does. The calls of both sides go into one file, in the order they ran."""

    def __init__(self, side: str, calls: str, held: int) -> None:
        self._side, self._calls, self._held = side, calls, held

    def _write(self, call: str) -> None:
        with open(self._calls, "a") as file:
            file.write(f"{self._side} {call}\n")

    def offload(self) -> None:
        self._write("offload")

    def reload(self) -> None:
        self._write("reload")

    def give_back(self) -> None:
        self._write("give_back")

    def sleep(self) -> None:
        self._write("sleep")

    def wake(self, parts: list[str]) -> None:
        self._write(f"wake {'+'.join(parts)}")

    def memory(self) -> int:
        return self._held


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    (tmp_path / "calls").touch()
    return tmp_path / "calls"


@pytest.fixture
def new_turns(start_worker: Callable[..., Worker], calls: Path) -> Callable[[bool], Turns]:
    """Two ranks that hold 1 and 2.5 GiB, and one engine that holds 0.5."""
    sizes = {"rank": (GIB, 5 * GIB // 2), "engine": (GIB // 2,)}

    def new(enabled: bool) -> Turns:
        ranks, engines = (
            [start_worker(f"{side} {n}", Side, side, str(calls), held) for n, held in enumerate(sizes[side])]
            for side in ("rank", "engine")
        )
        return Turns(ranks, EnginePool(engines, timeout_s=60), enabled=enabled, timeout_s=60)

    return new


def of_both_sides(ledger: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in ledger.items() if "driver" not in name}


def test_what_leaves_the_device_leaves_before_the_other_side_comes(
    new_turns: Callable[[bool], Turns], calls: Path
) -> None:
    turns = new_turns(True)

    def made(take: Callable[..., None], **options: bool) -> list[str]:
        calls.write_text("")
        take(**options)
        return calls.read_text().splitlines()

    assert made(turns.to_engines) == ["rank offload"] * 2 + ["engine wake weights+kv_cache"]
    assert made(turns.to_trainer) == ["engine sleep"] + ["rank reload"] * 2
    # What training has freed is of no use to engines until torch gives it back.
    both = ["rank reload"] * 2 + ["rank give_back"] * 2
    assert made(turns.to_both) == [*both, "engine wake weights"]
    assert made(turns.to_both, generating=True) == [*both, "engine wake weights+kv_cache"]


def test_sides_with_devices_of_their_own_keep_what_they_have(new_turns: Callable[[bool], Turns], calls: Path) -> None:
    turns = new_turns(False)
    turns.to_engines()
    turns.to_trainer()
    turns.to_both(generating=True)
    assert calls.read_text() == ""
    # The ledger is kept all the same.
    turns.note("sync")
    assert of_both_sides(turns.ledger()) == {"memory/sync/ranks_gib": 2.5, "memory/sync/engines_gib": 0.5}


def test_the_ledger_has_the_largest_process_of_each_side_by_phase(new_turns: Callable[[bool], Turns]) -> None:
    turns = new_turns(True)
    assert turns.ledger() == {}
    for phase in ("generation", "training"):
        turns.note(phase)
    ledger = turns.ledger()
    # This process has loaded at least Python and Ray.
    assert all(0.02 < ledger[f"memory/{phase}/driver_gib"] < 16 for phase in ("generation", "training"))
    assert of_both_sides(ledger) == {
        "memory/generation/ranks_gib": 2.5,
        "memory/generation/engines_gib": 0.5,
        "memory/training/ranks_gib": 2.5,
        "memory/training/engines_gib": 0.5,
    }
    assert turns.ledger() == {}, "a phase counts in the step that noted it"
