"""Frozen weights leave the device and come back bit for bit, on real Megatron ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from lora_rl.config import RunConfig
from tests.support.batches import make_batch, one_microbatch
from tests.support.configs import tiny_config
from tests.support.lab import LARGE_B, fingerprint, new_rank, new_sender, record
from tests.support.ranks import run_ranks
from tests.unit.conftest import BATCH_SEED, LAYOUTS

pytestmark = pytest.mark.multiprocess
CASES = [(layout, kind) for layout in ("tp1", "tp2_pp2") for kind in ("tied", "untied")]
Answers = list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]


def away_and_back(config: RunConfig) -> dict[str, Any]:
    """What one rank holds and computes before, between and after two rounds of `offload` and `reload`, each twice."""
    import torch.distributed as dist

    from lora_rl.policy.offload import FrozenWeights

    rank, batch = new_rank(config, b_std=LARGE_B), make_batch(BATCH_SEED)
    cut = one_microbatch(batch, 1)[1][0]
    frozen, sender = FrozenWeights(rank.model.chunks), new_sender(rank)
    parameters = dict(rank.model.module.named_parameters())

    def held() -> dict[str, Any]:
        return {
            "frozen": {name: p.numel() for name, p in parameters.items() if not p.requires_grad},
            "adapters": {name: p.detach().numpy().tobytes() for name, p in parameters.items() if p.requires_grad},
            "nbytes": frozen.nbytes,
            "on_device": frozen.on_device,
        }

    def computed() -> dict[str, Any]:
        push = record(sender, 1)
        return {
            "fingerprint": fingerprint(rank),
            "logprobs": rank.logprobs(batch, cut),
            "payload": push and push.payload,
        }

    before, away, failures = {**held(), **computed()}, [], []
    for _ in range(2):
        for _ in range(2):
            frozen.offload()
            away.append(held())
        # Where there are several ranks, one would wait for another that fails.
        if dist.get_world_size() == 1:
            for work in (lambda: rank.logprobs(batch, cut), lambda: record(sender, 1)):
                try:
                    work()
                    failures.append("none")
                except (RuntimeError, ValueError) as error:
                    failures.append(str(error))
        for _ in range(2):
            frozen.reload()
    return {"before": before, "away": away, "failures": failures, "after": {**held(), **computed()}}


def two_steps(config: RunConfig, *, moving: bool) -> dict[str, Any]:
    """Two optimizer steps of a new policy; with `moving` the frozen weights go away and come back before each."""
    from lora_rl.policy.offload import FrozenWeights

    rank = new_rank(config)
    frozen, fingerprints, steps = FrozenWeights(rank.model.chunks), [fingerprint(rank)], []
    for seed in range(2):
        if moving:
            frozen.offload()
            frozen.reload()
        (shard,), (cut,) = one_microbatch(make_batch(seed), 1)
        result = rank.train_step(shard, cut)
        steps.append((result.grad_norm, {name: metric.value for name, metric in result.metrics.items()}))
        fingerprints.append(fingerprint(rank))
    return {"fingerprints": fingerprints, "steps": steps}


def visit(config: RunConfig) -> tuple[dict[str, Any], ...]:
    return away_and_back(config), two_steps(config, moving=False), two_steps(config, moving=True)


@pytest.fixture(scope="module")
def answers(models: dict[str, Path]) -> Callable[[str, str], Answers]:
    """`answers(layout, model)`: of `visit` by rank."""

    @functools.cache
    def made(layout: str, kind: str) -> Answers:
        tp, pp = LAYOUTS[layout]
        return run_ranks(visit, tiny_config(models[kind], tp=tp, pp=pp), tp=tp, pp=pp)

    return made


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_offloading_empties_the_frozen_weights_and_nothing_else(
    answers: Callable[[str, str], Answers], layout: str, kind: str
) -> None:
    for answer, *_ in answers(layout, kind):
        before = answer["before"]
        assert before["on_device"]
        assert before["nbytes"] == 4 * sum(before["frozen"].values()) > 0
        assert len(answer["away"]) == 4
        for away in answer["away"]:
            assert not away["on_device"]
            assert away["nbytes"] == 0
            assert away["frozen"] == dict.fromkeys(before["frozen"], 0)
            assert away["adapters"] == before["adapters"]


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_the_frozen_weights_are_the_checkpoint(
    answers: Callable[[str, str], Answers], models: dict[str, Path], kind: str
) -> None:
    """A tied output layer is the embedding, and counts once."""
    [(answer, *_)] = answers("tp1", kind)
    saved = load_file(models[kind] / "model.safetensors")
    assert answer["before"]["nbytes"] == sum(tensor.nbytes for tensor in saved.values())
    assert ("output_layer.weight" in answer["before"]["frozen"]) == (kind == "untied")


def test_neither_computing_nor_exporting_works_without_them(answers: Callable[[str, str], Answers]) -> None:
    for kind in ("tied", "untied"):
        [(answer, *_)] = answers("tp1", kind)
        assert len(answer["failures"]) == 4
        assert "none" not in answer["failures"], answer["failures"]


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_reloading_brings_every_bit_back(answers: Callable[[str, str], Answers], layout: str, kind: str) -> None:
    for answer, *_ in answers(layout, kind):
        before, after = answer["before"], answer["after"]
        for name in ("fingerprint", "payload", "frozen", "adapters", "nbytes", "on_device"):
            assert after[name] == before[name], name
        np.testing.assert_array_equal(after["logprobs"], before["logprobs"])
    assert any(answer["before"]["logprobs"] is not None for answer, *_ in answers(layout, kind))


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_steps_after_a_reload_are_the_same_bit_for_bit(
    answers: Callable[[str, str], Answers], layout: str, kind: str
) -> None:
    for _, still, moved in answers(layout, kind):
        assert moved == still
        assert len(set(still["fingerprints"])) == 3, "the steps must change something"
        assert all(norm > 0 for norm, _ in still["steps"])
