"""A policy's training state survives being written down, at the same layout bit for bit, at another closely."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lora_rl.config import RunConfig
from tests.support.batches import make_batch, one_microbatch
from tests.support.configs import tiny_config
from tests.support.lab import adapters, new_rank
from tests.support.models import make_model
from tests.support.ranks import RankFailed, run_ranks

pytestmark = pytest.mark.multiprocess
LAYOUTS = {"tp1": (1, 1, 1), "tp2": (2, 1, 1), "pp2": (1, 2, 1), "tp2_pp2": (2, 2, 1), "dp2": (1, 1, 2)}
SPLIT, END = 3, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def train(config: RunConfig, first: int, last: int, saved: Any = None, same_layout: bool = False) -> dict[str, Any]:
    """Train steps first..last-1 on fixed batches, from a saved state or anew; what came out, and the state then."""
    from lora_rl.policy.export import export_peft, import_peft
    from lora_rl.policy.state import gather_state, load_state

    rank = new_rank(config)
    if saved is not None:
        import_peft(rank.model, saved["adapter"])
        load_state(rank, saved["state"], with_random=same_layout)
    losses, rates = [], []
    for step in range(first, last):
        batch = make_batch(seed=step)
        shards, microbatches = one_microbatch(batch, rank.dp_size)
        result = rank.train_step(shards[rank.dp_rank], microbatches[rank.dp_rank])
        rates.append(result.learning_rate)
        if result.metrics:
            losses.append(result.metrics["loss"].value / batch.global_tokens)
    whole = adapters(rank)
    return {
        "losses": losses,
        "rates": rates,
        "adapters": whole,
        "adapter": export_peft(rank.model),
        "state": gather_state(rank),
    }


def run(model: Path, layout: str, *args: Any) -> dict[str, Any]:
    tp, pp, dp = LAYOUTS[layout]
    # A schedule that moves, and dropout of nothing: the state must carry the position.
    config = tiny_config(
        model,
        "policy.megatron_cfg.scheduler.lr_warmup_iters=4",
        "policy.megatron_cfg.scheduler.lr_decay_style=linear",
        tp=tp,
        pp=pp,
        dp=dp,
    )
    answers = run_ranks(train, config, *args, tp=tp, pp=pp, dp=dp)
    first = answers[0]
    first["losses"] = np.sum([a["losses"] for a in answers if a["losses"]], axis=0)
    return first


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> dict[str, Any]:
    return run(model, "tp1", 0, END)


@pytest.fixture(scope="module")
def halfway(model: Path) -> dict[str, Any]:
    return run(model, "tp1", 0, SPLIT)


@pytest.mark.parametrize("layout", ["tp1", "tp2_pp2", "dp2"])
def test_the_same_layout_continues_bit_for_bit(model: Path, layout: str) -> None:
    whole, half = run(model, layout, 0, END), run(model, layout, 0, SPLIT)
    rest = run(model, layout, SPLIT, END, half, True)
    np.testing.assert_array_equal(rest["losses"], whole["losses"][SPLIT:])
    assert rest["rates"] == whole["rates"][SPLIT:]
    for name, (a, b) in whole["adapters"].items():
        np.testing.assert_array_equal(rest["adapters"][name][0], a)
        np.testing.assert_array_equal(rest["adapters"][name][1], b)
    assert rest["state"].counters == whole["state"].counters
    assert rest["state"].counters["scheduler"] == END
    assert rest["state"].moments.keys() == whole["state"].moments.keys()
    assert all(rest["state"].moments[key].equal(t) for key, t in whole["state"].moments.items())
    assert all(rest["state"].random[key].equal(t) for key, t in whole["state"].random.items())


def furthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest difference of any adapter weight."""
    pairs = [(a, b) for name, x in one["adapters"].items() for a, b in zip(x, other["adapters"][name], strict=True)]
    return max(float(np.abs(a - b).max()) for a, b in pairs)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2_pp2", "dp2"])
def test_another_layout_continues_closely(
    model: Path, undisturbed: dict[str, Any], halfway: dict[str, Any], layout: str
) -> None:
    rest = run(model, layout, SPLIT, END, halfway)
    np.testing.assert_allclose(rest["losses"], undisturbed["losses"][SPLIT:], atol=1e-5, rtol=0)
    assert rest["rates"] == undisturbed["rates"][SPLIT:]
    assert furthest(rest, undisturbed) < 1e-4
    for key, moment in undisturbed["state"].moments.items():
        np.testing.assert_allclose(rest["state"].moments[key], moment, atol=1e-5, rtol=1e-3)


def test_forgetting_the_optimizer_would_be_noticed(
    model: Path, undisturbed: dict[str, Any], halfway: dict[str, Any]
) -> None:
    """Adam's first step after a restart is a full one whatever the gradient: with fresh moments all goes elsewhere."""
    state = halfway["state"]
    fresh = {**halfway, "state": type(state)({}, {"scheduler": float(SPLIT)}, state.flags, {})}
    assert furthest(run(model, "tp1", SPLIT, END, fresh), undisturbed) > 1e-3


def test_the_state_of_other_adapters_is_refused(model: Path, halfway: dict[str, Any]) -> None:
    config = tiny_config(model, pp=2, target_modules=["linear_qkv"])
    query = {name: t for name, t in halfway["adapter"].tensors.items() if name.endswith(("q_proj", "k_proj", "v_proj"))}
    saved = {**halfway, "adapter": type(halfway["adapter"])(query)}
    with pytest.raises(RankFailed, match=r"of another policy: .*linear_fc1\.linear_in\.exp_avg belongs to no adapter"):
        run_ranks(train, config, SPLIT, END, saved, pp=2)
