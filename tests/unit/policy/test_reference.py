"""The reference policy, and several optimizer steps on one batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lora_rl.config import RunConfig
from tests.support.batches import make_batch, one_microbatch
from tests.support.configs import tiny_config
from tests.support.hf import completion_mask
from tests.support.lab import Survey, fingerprint, new_rank
from tests.support.ranks import run_ranks
from tests.unit.conftest import BATCH_SEED, LAYOUTS

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "tp1"])
def test_reference_and_policy_logprobs_do_not_depend_on_the_layout(surveys: Callable[..., Survey], layout: str) -> None:
    one, other = surveys("tp1"), surveys(layout)
    for name in ("logprobs", "logprobs_tempered", "reference", "initial_logprobs", "initial_reference"):
        np.testing.assert_allclose(getattr(other, name), getattr(one, name), atol=1e-5, rtol=0, err_msg=name)


def test_reference_is_the_base_model_whatever_b_is(surveys: Callable[..., Survey]) -> None:
    survey = surveys("tp1")
    np.testing.assert_array_equal(survey.reference, survey.initial_reference)
    outside = ~completion_mask(make_batch(BATCH_SEED))
    assert not survey.reference[outside].any()
    assert (survey.reference[~outside] < 0).all()


def two_updates(config: RunConfig) -> dict[str, Any]:
    """As `PolicyGroup.train` runs them: old and reference logprobs first, then two steps on the same batch."""
    rank = new_rank(config)
    batch = make_batch(seed=2)
    (shard,), (cut,) = one_microbatch(batch, 1)
    before = fingerprint(rank)
    old, reference = rank.logprobs(shard, cut), rank.logprobs(shard, cut, reference=True)
    untouched = fingerprint(rank) == before
    steps = [rank.train_step(shard, cut, old_logprobs=old, reference_logprobs=reference) for _ in range(2)]
    later = rank.logprobs(shard, cut), rank.logprobs(shard, cut, reference=True)
    tokens = batch.global_tokens
    return {
        "untouched": untouched,
        "old": old,
        "reference": reference,
        "later": later,
        "steps": [
            {n: m.value / tokens if m.normaliser == "tokens" else m.value for n, m in step.metrics.items()}
            for step in steps
        ],
    }


@pytest.fixture(scope="module")
def updates(models: dict[str, Path]) -> dict[str, Any]:
    config = tiny_config(models["tied"], "loss_fn.reference_policy_kl_penalty=0.5", "policy.generation.temperature=0.8")
    return run_ranks(two_updates, config)[0]


def test_kl_is_zero_at_the_start(updates: dict[str, Any]) -> None:
    assert updates["untouched"]
    np.testing.assert_array_equal(updates["old"], updates["reference"])
    assert updates["steps"][0]["kl"] == 0.0


def test_ratio_leaves_one_in_the_second_update(updates: dict[str, Any]) -> None:
    first, second = updates["steps"]
    # The logprobs of the first update come from another forward pass than the old ones, but the same arithmetic.
    assert first["probs_ratio_min"] == pytest.approx(1.0, abs=1e-6)
    assert first["probs_ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert second["probs_ratio_max"] > 1.01
    assert second["probs_ratio_min"] < 0.99
    assert second["kl"] > 1e-6
    # Engine against trainer is measured at the old logprobs, which no update moves.
    assert second["token_mult_prob_error"] == first["token_mult_prob_error"]


def test_updates_move_the_policy_and_not_the_reference(updates: dict[str, Any]) -> None:
    policy, reference = updates["later"]
    np.testing.assert_array_equal(reference, updates["reference"])
    assert np.abs(policy - updates["old"]).max() > 0.05
