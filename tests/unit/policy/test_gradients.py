"""Gradients of the adapters against an independent computation, and against themselves cut up in other ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lora_rl.algorithm import shard_sequences
from lora_rl.config import RunConfig
from tests.support.batches import make_batch, one_microbatch, token_budget
from tests.support.configs import tiny_config
from tests.support.hf import completion_mask, fused, hf_logprobs, load_hf
from tests.support.lab import Survey, adapters, fingerprint, new_rank, old_logprobs_like, scale
from tests.support.ranks import run_ranks
from tests.unit.conftest import BATCH_SEED, LAYOUTS

pytestmark = pytest.mark.multiprocess
TEMPERATURE, PENALTY, CLIP = 0.6, 0.1, 0.2


@pytest.fixture(scope="module")
def plain(surveys: Callable[..., Survey], models: dict[str, Path]) -> dict[str, Any]:
    """The same loss in plain PyTorch on Hugging Face's model with merged weights.

    The gradient of a merged matrix W = W0 + s B A gives those of its factors by the chain rule:
    dL/dB = s dL/dW A^T and dL/dA = s B^T dL/dW.
    """
    batch, survey = make_batch(BATCH_SEED), surveys("tp1")
    with torch.no_grad():
        reference = hf_logprobs(load_hf(models["tied"]), batch, TEMPERATURE).double()
    model = load_hf(models["tied"], survey.weights)
    logprobs = hf_logprobs(model, batch, TEMPERATURE).double()
    old = torch.from_numpy(old_logprobs_like(survey.logprobs_tempered)).double()
    mask = torch.from_numpy(completion_mask(batch))
    advantage = torch.from_numpy(batch.advantages).double()[:, None]
    ratio = (logprobs - old).exp()
    policy = -torch.minimum(advantage * ratio, advantage * ratio.clamp(1 - CLIP, 1 + CLIP))
    away = reference - logprobs
    kl = away.exp() - 1 - away
    loss = ((policy + PENALTY * kl) * mask).sum() / mask.sum()
    loss.backward()

    factor = scale(tiny_config(models["tied"]))
    dense = {name: p.grad for name, p in model.named_parameters()}
    gradients = {}
    for name, (a, b) in survey.adapters.items():
        layer, linear = int(name.split(".")[2]), name.rsplit(".", 1)[-1]
        d_w = fused(dense, layer, linear, model.config).double()
        a, b = torch.from_numpy(a).double(), torch.from_numpy(b).double()
        gradients[name] = ((factor * b.T @ d_w).numpy(), (factor * d_w @ a.T).numpy())
    clipped = ((ratio < 1 - CLIP) | (ratio > 1 + CLIP)) & mask
    return {"loss": loss.item(), "tokens": int(mask.sum()), "gradients": gradients, "clipped": int(clipped.sum())}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_plain_pytorch(surveys: Callable[..., Survey], plain: dict[str, Any], layout: str) -> None:
    survey = surveys(layout)
    assert plain["clipped"] > 3
    assert survey.metrics["loss"] / plain["tokens"] == pytest.approx(plain["loss"], rel=1e-5)
    squares = 0.0
    assert survey.gradients.keys() == plain["gradients"].keys()
    for name, pair in plain["gradients"].items():
        for want, got in zip(pair, survey.gradients[name], strict=True):
            np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max(), rtol=0, err_msg=name)
            squares += float(np.square(want).sum())
    assert survey.grad_norm == pytest.approx(squares**0.5, rel=1e-5)


def gradients_of_cuts(config: RunConfig, budgets: list[int | None]) -> list[dict[str, Any]]:
    """For each way to cut the same batch: its gradients, and the adapters after two steps of it."""
    results = []
    for budget in budgets:
        rank = new_rank(config, b_std=0.05)
        batch = make_batch(seed=9, sequences=11)
        shards, cuts = (one_microbatch if budget is None else token_budget)(batch, rank.dp_size, budget)
        shard, cut = shards[rank.dp_rank], cuts[rank.dp_rank]
        rank.train_step(shard, cut)
        gradients = adapters(rank, gradients=True)
        rank.train_step(shard, cut)
        results.append({"gradients": gradients, "after": adapters(rank), "microbatches": len(cut)})
    return results


def test_gradients_do_not_depend_on_how_the_batch_is_cut(models: dict[str, Path]) -> None:
    overrides = ["loss_fn.token_level_loss=false", "policy.max_grad_norm=1e9"]
    config = tiny_config(models["tied"], *overrides)
    one, *others = run_ranks(gradients_of_cuts, config, [None, 60, 13])[0]
    parallel = run_ranks(gradients_of_cuts, tiny_config(models["tied"], *overrides, dp=2), [26], dp=2)
    others += [answer for rank in parallel for answer in rank]
    assert [o["microbatches"] for o in others] == [3, 10, 3, 3]
    for other in others:
        # Adam divides by the gradient's own size, so the noise of its smallest entries shows in the adapters.
        for what, tolerance in (("gradients", 3e-6), ("after", 3e-5)):
            for name, pair in one[what].items():
                for want, got in zip(pair, other[what][name], strict=True):
                    bound = tolerance * np.abs(want).max()
                    np.testing.assert_allclose(got, want, atol=bound, rtol=0, err_msg=f"{what} {name}")


POLICY_LOSSES = {
    "gspo": ["loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"],
    "cispo": ["loss_fn.use_cispo=true", "loss_fn.constant_length_loss=true"],
    "sapo": ["loss_fn.use_sapo=true"],
    "reinforce": ["loss_fn.disable_ppo_ratio=true", "loss_fn.constant_length_loss=true"],
}


def gradients_of_losses(configs: dict[str, RunConfig], budgets: list[int | None]) -> dict[str, list[Any]]:
    """For each policy loss, the gradients of one batch with each way to cut it; the old policy is not the current."""
    from lora_rl.policy.trainer import loss_settings

    rank = new_rank(next(iter(configs.values())), b_std=0.05)
    batch = make_batch(seed=9, sequences=11)
    rows = shard_sequences(batch.lengths.tolist(), rank.dp_size)[rank.dp_rank]
    moved = np.random.default_rng(5).normal(0, 0.2, batch.token_ids.shape).astype(np.float32)[rows]
    results: dict[str, list[Any]] = {}
    for name, config in configs.items():
        rank.loss_settings = loss_settings(config)
        for budget in budgets:
            shards, cuts = (one_microbatch if budget is None else token_budget)(batch, rank.dp_size, budget)
            shard, cut = shards[rank.dp_rank], cuts[rank.dp_rank]
            logprobs = rank.logprobs(shard, cut)
            old = logprobs + moved[:, : logprobs.shape[1]]
            for chunk in rank.model.chunks:
                chunk.zero_grad_buffer()
            rank.forward_backward(shard, cut, old_logprobs=old)
            results.setdefault(name, []).append(adapters(rank, gradients=True))
    return results


def test_every_policy_loss_is_the_same_however_the_batch_is_cut(models: dict[str, Path]) -> None:
    configs = {name: tiny_config(models["tied"], *options) for name, options in POLICY_LOSSES.items()}
    alone = run_ranks(gradients_of_losses, configs, [None, 13])[0]
    parallel = {name: tiny_config(models["tied"], *options, dp=2) for name, options in POLICY_LOSSES.items()}
    both = run_ranks(gradients_of_losses, parallel, [26], dp=2)
    for name, (one, *others) in alone.items():
        others += [gradients for rank in both for gradients in rank[name]]
        assert len(others) == 3
        for other in others:
            for module, pair in one.items():
                for want, got in zip(pair, other[module], strict=True):
                    assert np.abs(want).max() > 0
                    bound = 3e-6 * np.abs(want).max()
                    np.testing.assert_allclose(got, want, atol=bound, rtol=0, err_msg=f"{name} {module}")
    # They are four different losses.
    first = next(iter(alone["sapo"][0]))
    assert len({alone[name][0][first][1].tobytes() for name in alone}) == len(POLICY_LOSSES)


def train_on_spoiled(config: RunConfig, spoiled: float) -> tuple[str, bool]:
    batch = make_batch(seed=9, sequences=4)
    batch.advantages[1] = spoiled
    shards, cuts = one_microbatch(batch, 1, None)
    rank = new_rank(config, b_std=0.05)
    before = fingerprint(rank)
    try:
        rank.train_step(shards[0], cuts[0])
    except RuntimeError as error:
        return str(error), fingerprint(rank) == before
    return "nothing was raised", False


@pytest.mark.parametrize("spoiled", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip", ["1.0", "null"])
def test_gradients_that_are_no_numbers_end_the_run(models: dict[str, Path], spoiled: float, clip: str) -> None:
    """Before any weight has changed: the run leaves what it had trained until then."""
    [(message, unchanged)] = run_ranks(
        train_on_spoiled, tiny_config(models["tied"], f"policy.max_grad_norm={clip}"), spoiled
    )
    assert message.startswith("the gradients are not finite")
    assert unchanged


def train_spoiled_in_one_place(config: RunConfig) -> tuple[str, bool]:
    import torch.distributed as dist

    shards, cuts = one_microbatch(make_batch(seed=9, sequences=4), 1, None)
    rank = new_rank(config, b_std=0.05)
    before, own = fingerprint(rank), rank.forward_backward

    def spoiling(*args: Any, **options: Any) -> Any:
        results = own(*args, **options)
        if dist.get_rank() == 2:
            rank.model.chunks[0].buffers[0].grad_data[-1] = float("nan")
        return results

    rank.forward_backward = spoiling
    try:
        rank.train_step(shards[0], cuts[0])
    except RuntimeError as error:
        return str(error), fingerprint(rank) == before
    return "nothing was raised", False


@pytest.mark.slow
def test_one_rank_that_is_spoiled_ends_all(models: dict[str, Path]) -> None:
    config = tiny_config(models["tied"], tp=2, pp=2)
    for message, unchanged in run_ranks(train_spoiled_in_one_place, config, tp=2, pp=2):
        assert message.startswith("the gradients are not finite")
        assert unchanged


def train_on_masked(config: RunConfig) -> dict[str, Any]:
    """A first step of which icepop masks every token, and then one that it does not touch."""
    shards, cuts = one_microbatch(batch := make_batch(seed=9, sequences=4), 1, None)
    rank = new_rank(config)
    old = rank.logprobs(shards[0], cuts[0])
    far = replace(batch, behaviour_logprobs=np.where(batch.behaviour_logprobs != 0, old - 5.0, 0.0).astype(np.float32))
    near = replace(batch, behaviour_logprobs=np.where(batch.behaviour_logprobs != 0, old, 0.0).astype(np.float32))
    norms = [rank.train_step(b, cuts[0]).grad_norm for b in (far, near)]
    return {"norms": norms}


def test_a_step_without_any_weight_is_not_taken_for_dead_adapters(models: dict[str, Path]) -> None:
    correction = ("use_importance_sampling_correction=true", "importance_sampling_type=icepop")
    config = tiny_config(models["tied"], *(f"loss_fn.{key}" for key in correction))
    [found] = run_ranks(train_on_masked, config)
    assert found["norms"][0] == 0 < found["norms"][1]


def logprobs_with_dropout(config: RunConfig, plain: RunConfig) -> dict[str, Any]:
    batch = make_batch(seed=9, sequences=4)
    shards, cuts = one_microbatch(batch, 1, None)
    want = new_rank(plain, b_std=0.5).logprobs(shards[0], cuts[0])
    rank = new_rank(config, b_std=0.5)
    before = rank.logprobs(shards[0], cuts[0])
    # A step at nearly no learning rate changes nothing but shows what the pass that trains computes.
    metrics = rank.train_step(shards[0], cuts[0], old_logprobs=before).metrics
    after = rank.logprobs(shards[0], cuts[0])
    return {"want": want, "before": before, "after": after, "ratio": metrics["probs_ratio_max"].value}


def test_dropout_acts_in_the_pass_that_trains_and_nowhere_else(models: dict[str, Path]) -> None:
    """Logprobs that are compared, with an engine's or with each other, are those of the policy that is pushed."""
    still = "policy.megatron_cfg.optimizer.lr=1e-12"
    dropping = tiny_config(models["tied"], "policy.megatron_cfg.peft.dropout=0.5", still)
    [found] = run_ranks(logprobs_with_dropout, dropping, tiny_config(models["tied"]))
    np.testing.assert_array_equal(found["before"], found["want"])
    np.testing.assert_allclose(found["after"], found["want"], atol=1e-5, rtol=0)
    assert found["ratio"] > 1.5
