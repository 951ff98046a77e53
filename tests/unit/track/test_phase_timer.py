"""PhaseTimer, on a clock that the test moves."""

import math
import time

import pytest

from lora_rl.track import PhaseTimer


class Clock:
    now = 5_000

    def __call__(self) -> int:
        return self.now


def test_phases_and_the_rest_add_up_to_the_wall_time():
    clock = Clock()
    timer = PhaseTimer(clock)
    for phase, spent, after in (("generation", 3_000_000_001, 7), ("training", 2_000_000_003, 11)):
        with timer(phase):
            clock.now += spent
        clock.now += after
    with timer("generation"):
        clock.now += 500_000_000
    metrics = timer.end_step(tokens={"generation": 7_000})
    assert metrics["time/generation"] == 3.500000001
    assert metrics["time/training"] == 2.000000003
    assert metrics["time/other"] == 18e-9
    assert metrics["time/step"] == 5.500000022
    assert metrics["tokens/generation"] == 7_000
    assert metrics["tokens_per_s/generation"] == pytest.approx(2_000, rel=1e-6)
    assert timer.totals_ns() == {"generation": 3_500_000_001, "training": 2_000_000_003, "other": 18}
    assert sum(timer.totals_ns().values()) == timer.wall_ns() == clock.now - 5_000


def test_the_sum_is_exact_on_the_real_clock_over_many_steps():
    timer = PhaseTimer()
    for _ in range(50):
        for phase in ("generation", "training", "sync"):
            with timer(phase):
                time.sleep(1e-4)
        metrics = timer.end_step()
        phases = [value for name, value in metrics.items() if name != "time/step"]
        assert math.fsum(phases) == pytest.approx(metrics["time/step"], abs=2e-9)
    assert sum(timer.totals_ns().values()) == timer.wall_ns()
    assert timer.totals_ns()["other"] >= 0


def test_a_step_begins_where_the_last_ended():
    clock = Clock()
    timer = PhaseTimer(clock)
    with timer("startup"):
        clock.now += 10
    assert timer.end_step()["time/startup"] == 10e-9
    clock.now += 5
    second = timer.end_step()
    assert second == {"time/other": 5e-9, "time/step": 5e-9}


def test_nesting_is_refused_and_the_outer_phase_still_counts():
    clock = Clock()
    timer = PhaseTimer(clock)
    with pytest.raises(RuntimeError, match="'sync' began inside phase 'training'"), timer("training"):
        clock.now += 40
        with timer("sync"):
            pass
    assert timer.end_step()["time/training"] == 40e-9


def test_time_is_counted_when_the_body_raises():
    clock = Clock()
    timer = PhaseTimer(clock)
    with pytest.raises(KeyError), timer("generation"):
        clock.now += 40
        raise KeyError
    assert timer.current is None
    assert timer.end_step()["time/generation"] == 40e-9


def test_misuse_is_refused():
    timer = PhaseTimer()
    for name in ("other", "step", "two words", "a/b", ""):
        with pytest.raises(ValueError, match=f"phase {name!r}"), timer(name):
            pass
    with pytest.raises(RuntimeError, match="end_step inside phase 'sync'"), timer("sync"):
        timer.end_step()
    with pytest.raises(ValueError, match=r"tokens for \['generation'\].*ran: \['sync'\]"):
        timer.end_step(tokens={"generation": 3})


def test_current_names_the_open_phase_and_its_seconds():
    clock = Clock()
    timer = PhaseTimer(clock)
    assert timer.current is None
    with timer("generation"):
        clock.now += 2_500_000_000
        assert timer.current == ("generation", 2.5)
