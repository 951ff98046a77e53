"""Adapters start from the same matrices in every parallel layout."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lora_rl.lora.init import A_INITS, B_INITS, draw, local_slice
from tests.support.lab import Survey


@pytest.mark.parametrize(
    ("method", "std"),
    [
        ("xavier", math.sqrt(2 / (300 + 200))),
        ("normal", 0.02),
        ("kaiming", 1 / math.sqrt(3 * 200)),
        ("uniform", math.sqrt(6 / (300 + 200)) / math.sqrt(3)),
        ("zero", 0.0),
    ],
)
def test_spread_of_each_method(method: str, std: float) -> None:
    values = draw("layer", (300, 200), method, seed=1)
    assert values.dtype is torch.float32
    assert values.std().item() == pytest.approx(std, rel=0.02)
    assert abs(values.mean().item()) <= 4 * std / math.sqrt(values.numel())


def test_every_configurable_method_is_known() -> None:
    for method in {*A_INITS, *B_INITS}:
        assert draw("layer", (4, 3), method, seed=0).shape == (4, 3)
    with pytest.raises(ValueError, match=r"'gaussian'.*xavier"):
        draw("layer", (4, 3), "gaussian", seed=0)


def test_values_depend_on_name_and_seed_only() -> None:
    first = draw("a", (5, 7), "normal", seed=1)
    torch.manual_seed(99)
    assert torch.equal(first, draw("a", (5, 7), "normal", seed=1))
    assert not torch.equal(first, draw("b", (5, 7), "normal", seed=1))
    assert not torch.equal(first, draw("a", (5, 7), "normal", seed=2))


def sharded(rows: int, columns: int, dim: int) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(rows, columns))
    parameter.tensor_model_parallel, parameter.partition_dim = True, dim
    return parameter


def test_slices_of_a_whole_matrix() -> None:
    full = torch.arange(32.0).reshape(8, 4)
    rows, columns = sharded(4, 4, dim=0), sharded(8, 2, dim=1)
    assert torch.equal(local_slice(full, rows, 1, gated=False), full[4:])
    assert torch.equal(local_slice(full, columns, 0, gated=False), full[:, :2])
    assert torch.equal(local_slice(full, torch.nn.Parameter(full.clone()), 0, gated=True), full)
    # Half of the gate and the matching half of up: rows 0-3 are the gate, 4-7 are up.
    assert torch.equal(local_slice(full, rows, 1, gated=True), full[[2, 3, 6, 7]])


@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2_pp2"])
def test_start_is_the_same_in_every_layout(surveys: Callable[..., Survey], layout: str) -> None:
    one, other = surveys("tp1"), surveys(layout)
    assert other.initial.keys() == one.initial.keys()
    for name, (a, b) in one.initial.items():
        np.testing.assert_array_equal(other.initial[name][0], a, err_msg=name)
        np.testing.assert_array_equal(other.initial[name][1], b, err_msg=name)
        assert b.std() > 0.01
    # Equal matrices must also mean equal functions: the gate must meet the gate.
    np.testing.assert_allclose(other.initial_logprobs, one.initial_logprobs, atol=1e-5)
    assert np.abs(one.initial_logprobs - one.initial_reference).max() > 0.01
