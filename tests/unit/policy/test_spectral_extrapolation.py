"""Extrapolating what SVD-LoRA trains, on real Megatron ranks: exact jumps of theta, and the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lora_rl.config import RunConfig
from lora_rl.next.backtest import judge, walk_forward
from lora_rl.next.predictors import Saturating
from lora_rl.next.trajectory import aligned
from tests.support.batches import make_batch, one_microbatch
from tests.support.configs import tiny_config
from tests.support.lab import fingerprint, started_rank
from tests.support.models import make_model
from tests.support.ranks import run_ranks
from tests.unit.policy.test_extrapolation import HORIZON, STEPS, broadcast, dense, step
from tests.unit.policy.test_peft import ALL, make_adapter

pytestmark = pytest.mark.multiprocess
SVD = "policy.megatron_cfg.peft.svd"
MODES = {
    "product": (f"{SVD}.mode=product",),
    "relative": (f"{SVD}.mode=product", f"{SVD}.parameterization=relative", f"{SVD}.sigma_lr=0.1"),
    "factors": (f"{SVD}.mode=factors",),
    "core": (f"{SVD}.mode=core",),
}
AT = [3, 4]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and an adapter for it with large B, alpha / r = 3, of less rank than the policy's."""
    folder = tmp_path_factory.mktemp("models")
    model = make_model(folder / "base", layers=2)
    make_adapter(model, folder / "sft", r=2, lora_alpha=6, target_modules=ALL)
    return model, folder / "sft"


def config_of(models: tuple[Path, Path], name: str, **layout: int) -> RunConfig:
    start = f"policy.megatron_cfg.peft.adapter_path={models[1]}"
    return tiny_config(models[0], start, f"{SVD}.enabled=true", *MODES[name], **layout)


def thetas(rank: Any) -> dict[str, np.ndarray]:
    """Theta of every adapter of the whole model, float64 [n]."""
    import torch.distributed as dist

    from lora_rl.policy.spectral import spectra

    mine = {name: s.theta.detach().double().flatten().numpy() for name, _, s in spectra(rank.model)}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for part in everyone:
        # Tensor-parallel ranks hold the same, bit for bit.
        assert all(np.array_equal(theta, mine[name]) for name, theta in part.items() if name in mine)
    return {name: theta for part in everyone for name, theta in part.items()}


def life(config: RunConfig) -> dict[str, Any]:
    """Record while training, predict, back-test, jump by nothing and by something, and come back."""
    from lora_rl.policy.extrapolation import RankExtrapolation
    from lora_rl.policy.state import gather_state, load_state

    rank = started_rank(config)
    extrapolation = RankExtrapolation(rank, capacity=STEPS + 1, horizon=HORIZON)
    extrapolation.record()
    recorded = [thetas(rank)]
    for seed in range(STEPS):
        step(rank, seed)
        extrapolation.record()
        recorded.append(thetas(rank))
    found = broadcast(extrapolation.trajectories())
    known = {name: aligned(t) for name, t in found.items()}
    proposals = walk_forward(Saturating(), known, AT)
    projections = broadcast(extrapolation.project(proposals, AT))
    changes = {name: p.times(5.0) for name, p in Saturating().predict(known).items()}
    batch = make_batch(99)
    shards, cuts = one_microbatch(batch, rank.dp_size)

    before, state = fingerprint(rank), broadcast(gather_state(rank))
    logprobs = rank.logprobs(shards[rank.dp_rank], cuts[rank.dp_rank])
    extrapolation.jump({name: change.times(0.0) for name, change in changes.items()})
    still = broadcast(gather_state(rank))
    nothing = fingerprint(rank) == before and all(t.equal(state.moments[k]) for k, t in still.moments.items())

    report = broadcast(extrapolation.jump(changes))
    jumped, after = thetas(rank), broadcast(gather_state(rank))
    moved = rank.logprobs(shards[rank.dp_rank], cuts[rank.dp_rank])
    step(rank, 99)
    load_state(rank, state, with_random=True)
    back = broadcast(gather_state(rank))
    snapshots = broadcast(extrapolation.snapshots())
    extrapolation.clear()
    extrapolation.load_snapshots(snapshots)
    again = broadcast(extrapolation.trajectories())
    return {
        "recorded": recorded,
        "known": known,
        "proposals": proposals,
        "projections": projections,
        "judged": judge(proposals, projections),
        "changes": changes,
        "nothing": nothing,
        "report": report,
        "jumped": jumped,
        "after": after,
        "state": state,
        "moved": None if logprobs is None else float(np.abs(moved - logprobs).max()),
        "came back": fingerprint(rank) == before
        and back.counters == state.counters
        and all(
            getattr(back, part).keys() == getattr(state, part).keys()
            and all(t.equal(getattr(state, part)[k]) for k, t in getattr(back, part).items())
            for part in ("moments", "random", "svd")
        ),
        "again": all(
            x.sigma.equal(y.sigma) and x.u.equal(y.u) and x.v.equal(y.v)
            for n, t in found.items()
            for x, y in ((again[n].total, t.total), (again[n].last, t.last), (again[n].future, t.future))
        ),
    }


def lives(configs: dict[str, RunConfig]) -> dict[str, dict[str, Any]]:
    return {name: life(config) for name, config in configs.items()}


@pytest.fixture(scope="module")
def on_one(models: tuple[Path, Path]) -> dict[str, dict[str, Any]]:
    return run_ranks(lives, {name: config_of(models, name) for name in MODES})[0]


@pytest.mark.parametrize("name", MODES)
def test_the_trail_is_that_of_theta(on_one: dict[str, dict[str, Any]], name: str) -> None:
    one = on_one[name]
    assert len(one["known"]) == 8
    for module, t in one["known"].items():
        path = [snapshot[module] for snapshot in one["recorded"]]
        assert not path[0].any() and path[-1].any()
        ends = [(i, 0) for i in range(1, STEPS + 1)]
        steps = [(i, i - 1) for i in range(1, STEPS + 1)]
        ahead = [(i + HORIZON, i) for i in range(STEPS - HORIZON + 1)]
        for triplets, pairs in ((t.total, ends), (t.last, steps), (t.future, ahead)):
            for n, (later, earlier) in enumerate(pairs):
                expected = path[later] - path[earlier]
                np.testing.assert_allclose(
                    dense(triplets.at(n))[:, 0], expected, atol=1e-9 * np.linalg.norm(expected), rtol=0
                )
        for proposal, (inner, squared), i in zip(one["proposals"][module], one["projections"][module], AT, strict=True):
            came = path[i + HORIZON] - path[i]
            assert squared == pytest.approx(float(came @ came), rel=1e-9)
            assert inner == pytest.approx(float(came @ dense(proposal)[:, 0]), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", MODES)
def test_a_jump_moves_theta_as_proposed_and_nothing_else(on_one: dict[str, dict[str, Any]], name: str) -> None:
    one = on_one[name]
    assert one["nothing"]
    length = come = 0.0
    for module, change in one["changes"].items():
        step = dense(change)[:, 0]
        wanted = one["recorded"][-1][module] + step
        np.testing.assert_array_equal(one["jumped"][module], wanted.astype(np.float32))
        length += float(step @ step)
        way = one["recorded"][-1][module] - one["recorded"][0][module]
        come += float(way @ way)
    assert length > 0
    assert one["report"]["dropped"] == 0.0
    assert one["report"]["norm"] == pytest.approx((length / come) ** 0.5, rel=1e-9)
    moved = {key for key, tensor in one["after"].svd.items() if not tensor.equal(one["state"].svd[key])}
    assert moved == {f"{module}.theta" for module in one["changes"]}
    assert any(moment.any() for moment in one["state"].moments.values())
    assert not any(moment.any() for moment in one["after"].moments.values())
    assert one["moved"] > 1e-2


@pytest.mark.parametrize("name", MODES)
def test_the_way_back_is_exact_and_the_trail_survives_being_written_down(
    on_one: dict[str, dict[str, Any]], name: str
) -> None:
    assert on_one[name]["came back"]
    assert on_one[name]["again"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [("factors", (2, 1)), ("product", (2, 2))])
def test_the_layout_changes_nothing(
    models: tuple[Path, Path], on_one: dict[str, dict[str, Any]], name: str, layout: tuple[int, int]
) -> None:
    one, (tp, pp) = on_one[name], layout
    ranks = run_ranks(life, config_of(models, name, tp=tp, pp=pp), tp=tp, pp=pp)
    assert all(rank["nothing"] and rank["came back"] and rank["again"] for rank in ranks)
    other = ranks[0]
    assert other["judged"].cosine == pytest.approx(one["judged"].cosine, abs=1e-3)
    assert other["report"]["dropped"] == 0.0
    assert other["report"]["norm"] == pytest.approx(one["report"]["norm"], rel=1e-2)
    for module, t in one["known"].items():
        torch.testing.assert_close(other["known"][module].total.sigma, t.total.sigma, rtol=1e-3, atol=0)
        way = np.linalg.norm(one["jumped"][module] - one["recorded"][0][module])
        np.testing.assert_allclose(other["jumped"][module], one["jumped"][module], atol=1e-2 * way, rtol=0)
