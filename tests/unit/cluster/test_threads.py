"""OpenMP settings of a process, and that the environment's own go first."""

import os

import pytest

from lora_rl.cluster.threads import set_threads


@pytest.mark.parametrize(
    ("environment", "spins"),
    [({}, "30000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_waiting_is_short_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], spins: str | None
) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    set_threads(3)
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ.get("GOMP_SPINCOUNT") == spins
