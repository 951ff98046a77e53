"""Jumps in the frozen weights: exact, invisible to the reference, undone bit for bit, and part of what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lora_rl.config import RunConfig
from lora_rl.next.factors import RankOne
from tests.support.batches import make_batch, one_microbatch
from tests.support.configs import tiny_config
from tests.support.lab import LARGE_B, adapters, exported, fingerprint, new_rank
from tests.support.models import make_model
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess
LAYOUTS = {"one": (1, 1), "tp2": (2, 1), "pp2": (1, 2)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), layers=2)


def changes(whole: dict[str, tuple[np.ndarray, np.ndarray]], seed: int) -> dict[str, RankOne]:
    """A random direction for every module, as large as the weights."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, (a, b) in sorted(whole.items()):
        u, v = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (b.shape[0], a.shape[1]))
        found[name] = RankOne(2.0, u / u.norm(), v / v.norm())
    return found


def jump_and_return(config: RunConfig) -> dict[str, Any]:
    from lora_rl.policy.export import export_peft
    from lora_rl.policy.extrapolation import RankExtrapolation
    from lora_rl.policy.merged_jumps import without_jumps

    rank = new_rank(config, b_std=LARGE_B)
    extrapolation = RankExtrapolation(rank, capacity=5, horizon=1, merge=True)
    extrapolation.record()
    batch = make_batch(0)
    cut = one_microbatch(batch, 1)[1][0]
    whole = adapters(rank)
    jumps = [changes(whole, 1), changes(whole, 2)]
    before, weights = fingerprint(rank), exported(rank)
    reference = rank.logprobs(batch, cut, reference=True)
    for jump in jumps:
        report = extrapolation.jump(jump)
    jumped, sum_adapter, own = exported(rank), extrapolation.whole_adapter(), export_peft(rank.model)
    after = rank.logprobs(batch, cut, reference=True)
    logprobs = rank.logprobs(batch, cut)
    unchanged = adapters(rank)
    extrapolation.set_merged(extrapolation.merged()[:1])
    once = exported(rank)
    extrapolation.set_merged([])
    cut_again = without_jumps(sum_adapter, 2)
    return {
        "report": report,
        "weights": weights,
        "jumped": jumped,
        "once": once,
        "back": fingerprint(rank) == before,
        "logprobs": logprobs,
        "same reference": reference is None or np.array_equal(reference, after),
        "same adapters": all(np.array_equal(x, y) for n in whole for x, y in zip(whole[n], unchanged[n], strict=True)),
        "cut again": all(
            t.a.equal(cut_again.tensors[n].a) and t.b.equal(cut_again.tensors[n].b) for n, t in own.tensors.items()
        ),
        "gained": {n: (t.delta() - own.tensors[n].delta()).numpy() for n, t in sum_adapter.tensors.items()},
        "ranks": {t.rank for t in sum_adapter.tensors.values()},
        "jumps": jumps,
    }


@pytest.mark.parametrize("layout", ["one", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tp2", "pp2"))])
def test_a_merged_jump_is_exact_hidden_from_the_reference_and_undone(model: Path, layout: str) -> None:
    tp, pp = LAYOUTS[layout]
    config = tiny_config(model, tp=tp, pp=pp)
    first = run_ranks(jump_and_return, config, tp=tp, pp=pp)
    assert all(answer["back"] and answer["same reference"] and answer["same adapters"] for answer in first)
    found = first[0]
    assert found["cut again"]
    assert found["report"]["dropped"] == 0.0
    assert found["ranks"] == {8 + 2}
    # By hand for a linear that is one Hugging Face module; fused ones by what the adapter says, checked below.
    name = "decoder.layers.1.self_attention.linear_proj"
    sizes = [j[name].sigma * np.outer(j[name].u, j[name].v) for j in found["jumps"]]
    hf = "model.layers.1.self_attn.o_proj"
    gained = found["jumped"][f"{hf}.weight"] - found["weights"][f"{hf}.weight"]
    np.testing.assert_allclose(gained, sizes[0] + sizes[1], atol=1e-6, rtol=0)
    np.testing.assert_allclose(found["once"][f"{hf}.weight"] - found["weights"][f"{hf}.weight"], sizes[0], atol=1e-6)
    assert len(found["gained"]) == 2 * 7
    for module, expected in found["gained"].items():
        gained = found["jumped"][f"{module}.weight"] - found["weights"][f"{module}.weight"]
        np.testing.assert_allclose(gained, expected, atol=2e-6, rtol=0)
        assert np.abs(gained).max() > 1e-2
    # All of every fused jump has arrived somewhere.
    squared = sum(float((g**2).sum()) for g in found["gained"].values())
    wanted = [[j[n] for j in found["jumps"]] for n in found["jumps"][0]]
    total = sum(8.0 + 2 * 4.0 * float(x.u @ y.u) * float(x.v @ y.v) for x, y in wanted)
    assert squared == pytest.approx(total, rel=1e-4)
