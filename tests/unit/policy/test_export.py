"""Merged export: Hugging Face's model with the exported weights computes what the policy computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.batches import make_batch
from tests.support.configs import tiny_config
from tests.support.hf import fused, hf_logprobs, load_hf
from tests.support.lab import Survey, push_many, scale
from tests.support.models import make_model
from tests.support.ranks import run_ranks
from tests.unit.conftest import BATCH_SEED, LAYOUTS

pytestmark = pytest.mark.multiprocess
CASES = [*((layout, "tied") for layout in LAYOUTS), ("tp1", "untied"), ("tp2_pp2", "untied")]


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_hugging_face_with_the_exported_weights_agrees(
    surveys: Callable[..., Survey], models: dict[str, Path], layout: str, kind: str
) -> None:
    survey, batch = surveys(layout, kind), make_batch(BATCH_SEED)
    with torch.no_grad():
        model = load_hf(models[kind], survey.weights)
        merged = hf_logprobs(model, batch)
        tempered = hf_logprobs(model, batch, temperature=0.6)
        base = hf_logprobs(load_hf(models[kind]), batch, temperature=0.6)
    np.testing.assert_allclose(survey.logprobs, merged, atol=1e-4, rtol=0)
    np.testing.assert_allclose(survey.logprobs_tempered, tempered, atol=1e-4, rtol=0)
    np.testing.assert_allclose(survey.reference, base, atol=1e-4, rtol=0)
    # An export without the adapters must not pass for one with them.
    assert (tempered - base).abs().max() > 1.0
    assert (tempered - merged).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_names_are_those_of_the_checkpoint(surveys: Callable[..., Survey], models: dict[str, Path], kind: str) -> None:
    from safetensors.numpy import load_file

    saved, survey = load_file(models[kind] / "model.safetensors"), surveys("tp1", kind)
    assert survey.weights.keys() == saved.keys()
    assert ("lm_head.weight" in saved) == (kind == "untied")
    # With B = 0 the export is the checkpoint, bit for bit; norms and embeddings are untouched in any case.
    for name, tensor in saved.items():
        np.testing.assert_array_equal(survey.base_weights[name], tensor, err_msg=name)
        assert np.array_equal(survey.weights[name], tensor) == ("_proj.weight" not in name), name


def test_the_delta_of_every_matrix_is_scaled_b_a(surveys: Callable[..., Survey], models: dict[str, Path]) -> None:
    survey = surveys("tp1")
    model_config = load_hf(models["tied"]).config
    factor = scale(tiny_config(models["tied"]))
    delta = {n: torch.from_numpy(survey.weights[n]) - torch.from_numpy(survey.base_weights[n]) for n in survey.weights}
    assert len(survey.adapters) == 16
    for name, (a, b) in survey.adapters.items():
        layer, linear = int(name.split(".")[2]), name.rsplit(".", 1)[-1]
        want = factor * torch.from_numpy(b).double() @ torch.from_numpy(a).double()
        got = fused(delta, layer, linear, model_config).double()
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    gate, up = (delta[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    assert (gate - up).abs().max() > 0.1, "the case must tell gate and up apart"


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "tp1"])
def test_layouts_export_the_same(surveys: Callable[..., Survey], layout: str) -> None:
    one, other = surveys("tp1"), surveys(layout)
    assert other.weights.keys() == one.weights.keys()
    for name, tensor in one.weights.items():
        np.testing.assert_allclose(other.weights[name], tensor, atol=1e-6, rtol=0, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exporting_leaves_live_weights_bit_identical(surveys: Callable[..., Survey], layout: str) -> None:
    assert surveys(layout).unchanged_by_exports


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_merges_and_exports_leave_every_live_weight_bit_identical(tmp_path: Path, count: int) -> None:
    model = make_model(tmp_path / "model", layers=1)
    [(before, after, same_payload)] = run_ranks(push_many, tiny_config(model), count)
    assert before == after
    assert same_payload
