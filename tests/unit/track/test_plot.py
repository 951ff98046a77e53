"""The pictures: that they are drawn from what was recorded. How they look was judged by eye."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from synthetic_run import run_records

from lora_rl.track import learning_curve, learning_curve_many
from lora_rl.track.plot import median_curve
from lora_rl.track.smoothing import moving_mean


def pixels(path: Path) -> np.ndarray:
    from matplotlib.image import imread

    return imread(path)


def differing_panels(a: np.ndarray, b: np.ndarray, rows: int, columns: int) -> set[tuple[int, int]]:
    """Panels, by row and column, in which two pictures differ."""
    assert a.shape == b.shape
    height, width = a.shape[0] // rows, a.shape[1] // columns
    places = np.argwhere((a != b).any(axis=-1))
    return {(int(y) // height, int(x) // width) for y, x in places}


PANELS = {
    "train/reward": (0, 0),
    "train/token_mult_prob_error": (1, 1),
    "train/response_length": (0, 2),
    "train/gen_kl_error": (1, 0),
    "val/accuracy": (0, 1),
    "time/generation": (1, 2),
}


def test_each_metric_has_its_panel(tmp_path: Path):
    records = run_records(steps=40)
    learning_curve(records, tmp_path / "plots" / "whole.png")
    whole = pixels(tmp_path / "plots" / "whole.png")
    assert whole.shape[0] > 700
    assert whole.shape[1] > 1500
    for metrics in itertools.batched(PANELS, 3):
        swapped = [dict(record) for record in records]  # two values trade places, so that no axis changes
        one, other = swapped[15], swapped[20]
        for metric in metrics:
            one[metric], other[metric] = other[metric], one[metric]
        learning_curve(swapped, tmp_path / "swapped.png")
        expected = {PANELS[metric] for metric in metrics}
        assert differing_panels(whole, pixels(tmp_path / "swapped.png"), 2, 3) == expected


@pytest.mark.parametrize("records", [[], run_records(steps=0), run_records(steps=1)], ids=["none", "start", "one"])
def test_a_run_that_has_hardly_begun_can_be_drawn(records, tmp_path: Path):
    learning_curve(records, tmp_path / "curve.png")
    assert pixels(tmp_path / "curve.png").shape[0] > 700


def test_a_run_with_values_that_are_not_finite_can_be_drawn(tmp_path: Path):
    records = run_records(steps=6)
    for record in records[1:]:
        record["train/reward"] = record["train/gen_kl_error"] = math.nan
    records[3]["val/accuracy"] = math.inf
    learning_curve(records, tmp_path / "curve.png", "a run that went wrong")
    assert pixels(tmp_path / "curve.png").shape[0] > 700


def test_many_runs_with_and_without_arms(tmp_path: Path):
    runs = {f"{arm}/seed{seed}": run_records(20, seed) for arm in ("merged", "adapter") for seed in (1, 2)}
    learning_curve_many(runs, tmp_path / "arms.png", "two arms")
    learning_curve_many({"seed1": run_records(20, 1)}, tmp_path / "one.png")
    assert pixels(tmp_path / "arms.png").shape == pixels(tmp_path / "one.png").shape
    assert (pixels(tmp_path / "arms.png") != pixels(tmp_path / "one.png")).any()
    with pytest.raises(ValueError, match="no runs to draw"):
        learning_curve_many({}, tmp_path / "none.png")


def test_moving_mean_uses_what_there_is_and_leaves_nan_out():
    assert moving_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert moving_mean([1.0, math.nan, 5.0], 3) == [1.0, 1.0, 3.0]
    assert math.isnan(moving_mean([math.nan], 3)[0])


def test_median_needs_half_of_the_runs():
    curves = [{1: 0.0, 2: 1.0, 3: 4.0, 4: 9.0}, {1: 2.0, 2: math.nan, 3: 6.0}, {1: 7.0, 2: 3.0}]
    assert median_curve(curves) == ([1, 2, 3], [2.0, 2.0, 5.0])
