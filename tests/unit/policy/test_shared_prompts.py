"""Sequences behind one copy of their prompt give the same logprobs and gradients as one by one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lora_rl.config import RunConfig
from lora_rl.policy.microbatch import lay_out, unable_to_share
from tests.support.batches import make_groups
from tests.support.configs import tiny_config
from tests.support.lab import LARGE_B, adapters, new_rank
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess
ROOT = Path(__file__).parents[3]
KL = ("loss_fn.reference_policy_kl_penalty=0.1", "policy.max_grad_norm=1e9", "policy.generation.temperature=0.6")


def computed(config: RunConfig) -> list[dict[str, Any] | None]:
    """Logprobs and gradients of a batch, laid out one by one and with shared prompts, whole and in parts."""
    rank = new_rank(config, b_std=LARGE_B)
    batch = make_groups(seed=4)
    ways = [
        [list(range(12))],
        # Whole groups, one of them in two parts and one not shared, in two microbatches, and an empty one.
        [[(0, 1, 2), (9, 10, 11)], [(6, 8), 7, 3, 4, (5,)], []],
        [[(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]],
    ]
    results = []
    for cut in ways:
        logprobs, reference = rank.logprobs(batch, cut), rank.logprobs(batch, cut, reference=True)
        for chunk in rank.model.chunks:
            chunk.zero_grad_buffer()
        parts = rank.forward_backward(batch, cut, reference_logprobs=reference)
        gradients = adapters(rank, gradients=True)
        if logprobs is None:
            continue
        loss = sum(float(p["metrics"]["loss"].value) for p in parts)
        results.append({"logprobs": logprobs, "reference": reference, "gradients": gradients, "loss": loss})
    return results


def check(alone: dict[str, Any], other: dict[str, Any]) -> None:
    assert np.abs(alone["logprobs"] - alone["reference"]).max() > 0.5
    for name in ("logprobs", "reference"):
        np.testing.assert_allclose(other[name], alone[name], atol=2e-5, err_msg=name)
    assert other["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    for name, factors in alone["gradients"].items():
        for want, got in zip(factors, other["gradients"][name], strict=True):
            assert np.abs(want).max() > 0
            np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max(), rtol=0, err_msg=name)


@pytest.mark.parametrize(
    ("tp", "pp", "options"),
    [
        (1, 1, ()),
        (1, 1, ("policy.megatron_cfg.activation_checkpointing=true",)),
        (2, 1, ("policy.megatron_cfg.sequence_parallel=true",)),
        (2, 2, ()),
    ],
    ids=["tp1", "recomputed", "tp2_sp", "tp2_pp2"],
)
def test_shared_prompts_change_nothing(models: dict[str, Path], tp: int, pp: int, options: tuple[str, ...]) -> None:
    config = tiny_config(models["tied"], *KL, *options, tp=tp, pp=pp)
    answers = run_ranks(computed, config, tp=tp, pp=pp)
    alone, *others = next(answer for answer in answers if answer)
    assert len(others) == 2
    for other in others:
        check(alone, other)


def test_shared_prompts_change_nothing_in_a_mixture_of_experts() -> None:
    attention = (
        "policy.megatron_cfg.peft.target_modules=[linear_qkv, linear_proj]",
        "policy.generation.weight_sync.mode=adapter_merge",
    )
    alone, *others = run_ranks(computed, tiny_config(ROOT / "examples/models/tiny-moe", *KL, *attention))[0]
    for other in others:
        check(alone, other)


def what_the_driver_cuts(config: RunConfig, told: list[bool | None]) -> list[Any]:
    """(Positions that go through the model, logprobs) with each value of `policy.share_prompts`."""
    from lora_rl.policy.group import PolicyGroup

    rank = new_rank(config, b_std=LARGE_B)
    batch = make_groups(seed=6, groups=5, size=4)
    results = []
    for value in told:
        chosen = config.model_copy(update={"policy": config.policy.model_copy(update={"share_prompts": value})})
        group = PolicyGroup(chosen, SimpleNamespace(dp=2), [])
        group._shared_prompts = None if value is False else rank.attention_tokens()
        shards, cuts = group._cut(batch)
        assert sorted(row for shard in shards for row in shard) == list(range(20))
        out, positions = np.zeros(batch.token_ids.shape, dtype=np.float32), 0
        for shard, cut in zip(shards, cuts, strict=True):
            part = batch.take(shard)
            values = rank.logprobs(part, cut)
            out[shard, : values.shape[1]] = values
            positions += sum(lay_out(part, rows, device="cpu").tokens.numel() for rows in cut)
        results.append((positions, [len(cut) for cut in cuts], out))
    return results


def test_the_driver_shares_prompts_over_shards_and_microbatches(models: dict[str, Path]) -> None:
    config = tiny_config(models["tied"], "policy.dynamic_batching.train_mb_tokens=64")
    (many, equal, alone), (few, shared_equal, shared) = run_ranks(what_the_driver_cuts, config, [False, None])[0]
    assert few < 0.8 * many
    assert len(set(equal)) == len(set(shared_equal)) == 1
    np.testing.assert_allclose(shared, alone, atol=2e-5)


def refuses(config: RunConfig) -> None:
    from lora_rl.policy import trainer

    trainer.unable_to_share = lambda model, local_attention: "its attention has a sliding window"
    assert new_rank(config).attention_tokens() is None
    told = config.model_copy(update={"policy": config.policy.model_copy(update={"share_prompts": True})})
    with pytest.raises(ValueError, match=r"policy\.share_prompts = true: .* model: its attention has a sliding window"):
        new_rank(told)


def test_a_model_that_cannot_share_is_named_when_told_to(models: dict[str, Path]) -> None:
    run_ranks(refuses, tiny_config(models["tied"]))


@pytest.mark.parametrize(
    ("local", "config", "kind", "reason"),
    [
        (True, {}, "rope", None),
        (True, {}, "learned_absolute", None),
        (False, {}, "rope", "fused attention"),
        (True, {"multi_latent_attention": True}, "rope", "latent attention"),
        (True, {"window_size": (8, 0)}, "rope", "sliding window"),
        (True, {}, "mrope", "of the kind mrope"),
        (True, {}, None, "not a plain GPT model"),
        (True, {"experimental_attention_variant": "gated_delta_net"}, "rope", "its attention is gated_delta_net"),
    ],
)
def test_what_cannot_share(local: bool, config: dict[str, Any], kind: str, reason: str | None) -> None:
    settings = SimpleNamespace(**{"multi_latent_attention": False, "window_size": None, **config})
    model: Any = SimpleNamespace(config=settings, position_embedding_type=kind)
    said = unable_to_share(model, local_attention=local)
    assert said is None if reason is None else reason in said


def test_a_row_with_two_prompts_is_refused() -> None:
    batch = make_groups(seed=4)
    with pytest.raises(ValueError, match=r"sequences \(0, 3\) of a shard share a row but do not start with the same"):
        lay_out(batch, [(0, 3)], device="cpu")
