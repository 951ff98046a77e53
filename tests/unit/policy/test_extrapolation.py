"""Recording, projecting and jumping on real Megatron ranks, at every layout; and the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lora_rl.config import RunConfig
from lora_rl.next.backtest import judge, walk_forward
from lora_rl.next.factors import RankOne
from lora_rl.next.predictors import Saturating
from lora_rl.next.trajectory import aligned
from tests.support.batches import make_batch, one_microbatch
from tests.support.configs import tiny_config
from tests.support.lab import LARGE_B, adapters, new_rank, scale
from tests.support.models import make_model
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess
HORIZON, STEPS = 2, 6
LAYOUTS = {"tp2": (2, 1), "pp2": (1, 2), "tp2_pp2": (2, 2)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def step(rank: Any, seed: int) -> None:
    batch = make_batch(seed)
    shards, cuts = one_microbatch(batch, rank.dp_size)
    rank.train_step(shards[rank.dp_rank], cuts[rank.dp_rank])


def broadcast(value: Any) -> Any:
    """What rank 0 has, on all ranks: the driver's part."""
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def life(config: RunConfig) -> dict[str, Any]:
    """Record while training, predict, back-test, jump, and come back."""
    from lora_rl.policy.export import export_peft, import_peft
    from lora_rl.policy.extrapolation import RankExtrapolation
    from lora_rl.policy.state import gather_state, load_state

    rank = new_rank(config, b_std=LARGE_B)
    extrapolation = RankExtrapolation(rank, capacity=STEPS + 1, horizon=HORIZON)
    recorded = [adapters(rank)]
    extrapolation.record()
    for seed in range(STEPS):
        step(rank, seed)
        extrapolation.record()
        recorded.append(adapters(rank))
    found = broadcast(extrapolation.trajectories())
    known = {name: aligned(t) for name, t in found.items()}
    at = [3, 4]
    proposals = walk_forward(Saturating(), known, at)
    projections = broadcast(extrapolation.project(proposals, at))
    changes = {name: p.times(5.0) for name, p in Saturating().predict(known).items()}
    before, saved = adapters(rank), broadcast((export_peft(rank.model), gather_state(rank)))
    report = broadcast(extrapolation.jump(changes))
    jumped = adapters(rank)
    anew = broadcast(gather_state(rank))
    step(rank, 99)
    after_jump, rate = adapters(rank), rank.learning_rate
    import_peft(rank.model, saved[0])
    load_state(rank, saved[1], with_random=True)
    back, state = adapters(rank), broadcast(gather_state(rank))
    snapshots = broadcast(extrapolation.snapshots())
    extrapolation.clear()
    extrapolation.load_snapshots(snapshots)
    again = broadcast(extrapolation.trajectories())
    return {
        "recorded": recorded,
        "known": known,
        "judged": judge(proposals, projections),
        "projections": projections,
        "proposals": proposals,
        "changes": changes,
        "before": before,
        "jumped": jumped,
        "report": report,
        "anew": anew,
        "after_jump": after_jump,
        "rate": rate,
        "came back": all(np.array_equal(x, y) for n in before for x, y in zip(before[n], back[n], strict=True))
        and all(t.equal(saved[1].moments[k]) for k, t in state.moments.items())
        and all(t.equal(saved[1].random[k]) for k, t in state.random.items())
        and state.counters == saved[1].counters,
        "again": all(torch.allclose(again[n].total.sigma, t.total.sigma, rtol=1e-12) for n, t in found.items()),
    }


def whole(config: RunConfig, pair: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    return scale(config) * pair[1].astype(np.float64) @ pair[0].astype(np.float64)


def dense(change: RankOne) -> np.ndarray:
    return change.sigma * np.outer(change.u, change.v)


@pytest.fixture(scope="module")
def one(model: Path) -> dict[str, Any]:
    return run_ranks(life, tiny_config(model))[0]


def test_recorded_changes_equal_those_of_dense_matrices(model: Path, one: dict[str, Any]) -> None:
    config = tiny_config(model)
    for name, t in one["known"].items():
        path = [whole(config, snapshot[name]) for snapshot in one["recorded"]]
        pairs = [(t.total, [(i, 0) for i in range(1, STEPS + 1)]), (t.future, [(i + 2, i) for i in range(5)])]
        for triplets, steps in pairs:
            for n, (later, earlier) in enumerate(steps):
                left, sigma, right = np.linalg.svd(path[later] - path[earlier], full_matrices=False)
                expected = sigma[0] * np.outer(left[:, 0], right[0])
                np.testing.assert_allclose(dense(triplets.at(n)), expected, atol=1e-6 * sigma[0], rtol=0)
        for proposal, (inner, squared), i in zip(one["proposals"][name], one["projections"][name], (3, 4), strict=True):
            came = path[i + HORIZON] - path[i]
            assert squared == pytest.approx(float((came**2).sum()), rel=1e-6)
            assert inner == pytest.approx(float((came * dense(proposal)).sum()), rel=1e-6, abs=1e-9)


def test_a_jump_is_the_best_of_the_adapters_rank_and_starts_its_moments_anew(model: Path, one: dict[str, Any]) -> None:
    config = tiny_config(model)
    dropped, length, come = [], 0.0, 0.0
    for name, change in one["changes"].items():
        wanted = whole(config, one["before"][name]) + dense(change)
        sigma = np.linalg.svd(wanted, compute_uv=False)
        error = np.linalg.norm(whole(config, one["jumped"][name]) - wanted)
        # Float32 parameters: what truncation gives up, and rounding.
        assert error == pytest.approx(sigma[8], rel=1e-3, abs=2e-6 * sigma[0])
        dropped.append(sigma[8] ** 2 / (sigma**2).sum())
        length += change.sigma**2
        come += float(((whole(config, one["recorded"][-1][name]) - whole(config, one["recorded"][0][name])) ** 2).sum())
    assert one["report"]["dropped"] == pytest.approx(max(dropped), rel=1e-4)
    assert one["report"]["norm"] == pytest.approx((length / come) ** 0.5, rel=1e-6)
    assert one["anew"].moments
    assert not any(moment.any() for moment in one["anew"].moments.values())
    assert one["anew"].counters["step"] == 0
    # The first update of Adam is the learning rate in every entry; with old counts it would take these moments for old.
    moved = [
        np.abs(after - before) / one["rate"]
        for name, pair in one["after_jump"].items()
        for after, before in zip(pair, one["jumped"][name], strict=True)
    ]
    assert np.median(np.concatenate([m.ravel() for m in moved])) == pytest.approx(1.0, rel=0.01)


def test_the_way_back_is_exact_and_snapshots_survive_being_written_down(one: dict[str, Any]) -> None:
    assert one["came back"]
    assert one["again"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_changes_nothing(model: Path, one: dict[str, Any], layout: str) -> None:
    tp, pp = LAYOUTS[layout]
    other = run_ranks(life, tiny_config(model, tp=tp, pp=pp), tp=tp, pp=pp)[0]
    assert other["known"].keys() == one["known"].keys()
    assert other["came back"] and other["again"]
    assert other["judged"].cosine == pytest.approx(one["judged"].cosine, abs=1e-3)
    assert other["report"] == pytest.approx(one["report"], rel=1e-2)
    config = tiny_config(model)
    for name, t in one["known"].items():
        torch.testing.assert_close(other["known"][name].total.sigma, t.total.sigma, rtol=1e-3, atol=0)
        jumped, expected = (whole(config, x["jumped"][name]) for x in (other, one))
        assert np.abs(jumped - expected).max() < 1e-2 * np.abs(expected - whole(config, one["before"][name])).max()
