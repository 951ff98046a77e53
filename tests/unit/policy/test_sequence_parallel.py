"""Sequence parallelism does not change the result; a mixture of experts, which needs it under tensor parallelism."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.batches import make_batch
from tests.support.configs import tiny_config, with_peft
from tests.support.hf import hf_logprobs, load_hf
from tests.support.lab import Survey, survey
from tests.support.ranks import run_ranks
from tests.unit.conftest import BATCH_SEED, SURVEY_OVERRIDES

pytestmark = pytest.mark.multiprocess
ROOT = Path(__file__).parents[3]
SP = "policy.megatron_cfg.sequence_parallel=true"


def assert_same(got: Survey, want: Survey) -> None:
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=2e-5)
    np.testing.assert_allclose(got.reference, want.reference, atol=2e-5)
    assert got.gradients.keys() == want.gradients.keys()
    for name, factors in want.gradients.items():
        for mine, theirs in zip(got.gradients[name], factors, strict=True):
            assert np.abs(theirs).max() > 0
            np.testing.assert_allclose(mine, theirs, atol=1e-4 * np.abs(theirs).max(), err_msg=name)
    assert got.weights.keys() == want.weights.keys()
    for name, weight in want.weights.items():
        np.testing.assert_allclose(got.weights[name], weight, atol=1e-6, err_msg=name)
    assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-4)


@pytest.mark.parametrize("pp", [1, 2])
def test_splitting_sequences_changes_nothing(
    surveys: Callable[[str, str], Survey], models: dict[str, Path], pp: int
) -> None:
    # Batches are 13 wide or less: their width is not a multiple of two.
    config = with_peft(tiny_config(models["tied"], *SURVEY_OVERRIDES, SP, tp=2, pp=pp), lora_B_init_method="normal")
    answers = run_ranks(survey, config, BATCH_SEED, 3, tp=2, pp=pp)
    assert_same(next(answer for answer in answers if answer is not None), surveys("tp1", "tied"))


def test_a_mixture_of_experts_computes_what_hugging_face_does(tmp_path: Path) -> None:
    """Random routers, large random adapters on attention; the merged export is loaded as a checkpoint."""
    model = ROOT / "examples/models/tiny-moe"
    attention = (
        "policy.megatron_cfg.peft.target_modules=[linear_qkv, linear_proj]",
        "policy.generation.weight_sync.mode=adapter_merge",
    )
    made = {}
    for tp, split in ((1, ()), (2, (SP,))):
        config = with_peft(
            tiny_config(model, *SURVEY_OVERRIDES, *attention, *split, tp=tp), lora_B_init_method="normal"
        )
        made[tp] = next(a for a in run_ranks(survey, config, BATCH_SEED, 3, tp=tp) if a is not None)
    assert_same(made[2], made[1])
    shutil.copy(model / "config.json", tmp_path)
    save_file(made[1].weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = hf_logprobs(load_hf(tmp_path), make_batch(BATCH_SEED)).detach().numpy()
    np.testing.assert_allclose(made[1].logprobs, expected, atol=2e-5)
    unmerged = hf_logprobs(load_hf(model), make_batch(BATCH_SEED)).detach().numpy()
    assert np.abs(expected - unmerged).max() > 0.1
