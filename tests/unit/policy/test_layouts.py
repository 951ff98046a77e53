"""Promise: the parallel layout does not change the result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lora_rl.config import RunConfig
from tests.support.batches import make_batch, one_microbatch, token_budget
from tests.support.configs import tiny_config
from tests.support.models import make_model
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess
LAYOUTS = {"tp1": (1, 1, 1), "tp2": (2, 1, 1), "pp2": (1, 2, 1), "tp2_pp2": (2, 2, 1), "dp2": (1, 1, 2)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def six_steps(config: RunConfig, *budgets: int | None) -> list[tuple[float, float]]:
    """Train six steps on fixed batches; (loss, gradient norm) of each, on ranks that report.

    Args:
        budgets: tokens of a microbatch, step by step, from the front again after the last; None: one microbatch.
    """
    from lora_rl.policy.platform import prepare
    from lora_rl.policy.trainer import PolicyRank

    rank = PolicyRank(config, prepare("cpu"))
    history = []
    for step in range(6):
        batch, max_tokens = make_batch(seed=step), budgets[step % len(budgets)]
        shards, microbatches = (one_microbatch if max_tokens is None else token_budget)(batch, rank.dp_size, max_tokens)
        result = rank.train_step(shards[rank.dp_rank], microbatches[rank.dp_rank])
        metrics = {k: m.value for k, m in result.metrics.items()}
        history.append((metrics.get("loss"), metrics.get("num_unmasked_tokens"), result.grad_norm, batch))
    return [(None if loss is None else loss / batch.global_tokens, norm) for loss, _, norm, batch in history]


@pytest.fixture(scope="module")
def reference(model: Path) -> list[tuple[float, float]]:
    return run_ranks(six_steps, tiny_config(model), None)[0]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "tp1"])
def test_losses_equal_one_rank_for_six_optimizer_steps(model: Path, reference, layout: str) -> None:
    tp, pp, dp = LAYOUTS[layout]
    answers = run_ranks(six_steps, tiny_config(model, tp=tp, pp=pp, dp=dp), 96, tp=tp, pp=pp, dp=dp)
    check_against(reference, answers, dp)


@pytest.mark.parametrize("dp", [1, 2])
def test_gradients_may_be_reduced_while_others_are_computed(model: Path, reference, dp: int) -> None:
    """Whatever the number of microbatches, which changes from step to step."""
    overlap = "policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce=true"
    answers = run_ranks(six_steps, tiny_config(model, overlap, dp=dp), None, 40, 96, dp=dp)
    check_against(reference, answers, dp)


def check_against(reference, answers, dp: int) -> None:
    reporting = [a for a in answers if a[0][0] is not None]
    assert len(reporting) == dp
    losses = np.sum([[loss for loss, _ in a] for a in reporting], axis=0)
    np.testing.assert_allclose(losses, [loss for loss, _ in reference], atol=1e-5, rtol=0)
    for answer in answers:
        np.testing.assert_allclose([n for _, n in answer], [n for _, n in reference], rtol=1e-4)
    # The run must have gone somewhere, or equality would mean nothing.
    assert abs(losses[-1] - losses[0]) > 1e-3


def fields_of_a_provider_that_asks_for_more(config: RunConfig) -> dict[str, object]:
    from dataclasses import replace

    from megatron.bridge import AutoBridge

    from lora_rl.policy.platform import prepare
    from lora_rl.policy.trainer import PolicyRank

    original = AutoBridge.to_megatron_provider

    def asking(self: AutoBridge, *args: object, **kwargs: object) -> object:
        provider = original(self, *args, **kwargs)
        provider.gradient_accumulation_fusion, provider.moe_router_bias_update_rate = True, 1e-3
        return provider

    AutoBridge.to_megatron_provider = asking
    platform = prepare("cpu")
    overrides = {k: v for k, v in platform.provider_overrides.items() if k != "gradient_accumulation_fusion"}
    rank = PolicyRank(config, replace(platform, provider_overrides=overrides))
    built = rank.model.module.config
    return {name: getattr(built, name) for name in ("gradient_accumulation_fusion", "moe_router_bias_update_rate")}


def test_what_adapters_cannot_do_is_off_on_every_platform(model: Path) -> None:
    """With Transformer Engine installed the bridge asks for a kernel of Apex; some families move routers' biases."""
    [fields] = run_ranks(fields_of_a_provider_that_asks_for_more, tiny_config(model))
    assert fields == {"gradient_accumulation_fusion": False, "moe_router_bias_update_rate": 0.0}
