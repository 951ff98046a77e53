"""PEFT adapters into and out of the policy, at every layout: `peft` itself is the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from lora_rl.config import RunConfig
from lora_rl.lora.peft_io import read_peft
from tests.support.batches import make_batch, one_microbatch
from tests.support.configs import tiny_config
from tests.support.hf import hf_logprobs, load_hf
from tests.support.lab import fingerprint, import_and_export, new_rank
from tests.support.ranks import RankFailed, run_ranks
from tests.unit.conftest import BATCH_SEED, LAYOUTS

pytestmark = pytest.mark.multiprocess
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    # Every part of a fused linear has an A of its own: together they need three times the rank.
    "all": {"r": 2, "lora_alpha": 6, "target_modules": ALL},
    "rank_stabilised": {"r": 2, "lora_alpha": 3, "use_rslora": True, "target_modules": ALL},
    "patterns": {
        "r": 1,
        "lora_alpha": 2,
        "target_modules": ALL,
        "rank_pattern": {"down_proj": 8, "v_proj": 3},
        "alpha_pattern": {"o_proj": 5},
    },
    "query_only": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]},
    "one_layer": {"r": 4, "lora_alpha": 16, "target_modules": r".*layers\.1\..*(gate|up|o)_proj"},
}


def make_adapter(model: Path, folder: Path, **settings: object) -> np.ndarray:
    """An adapter made and saved by `peft`, with large random B; its logprobs on the test batch."""
    torch.manual_seed(0)
    peft = get_peft_model(load_hf(model), LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
        peft.save_pretrained(str(folder))
        return hf_logprobs(peft, make_batch(BATCH_SEED)).numpy()


def reference_of(model: Path, folder: Path) -> np.ndarray:
    with torch.no_grad():
        return hf_logprobs(PeftModel.from_pretrained(load_hf(model), str(folder)), make_batch(BATCH_SEED)).numpy()


CASES = [*(("all", layout) for layout in LAYOUTS), *((name, "tp2_pp2") for name in ADAPTERS if name != "all")]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_peft_to_megatron_to_peft(models: dict[str, Path], tmp_path: Path, name: str, layout: str) -> None:
    model, (tp, pp) = models["tied"], LAYOUTS[layout]
    want = make_adapter(model, tmp_path / "theirs", **ADAPTERS[name])
    base = hf_logprobs(load_hf(model), make_batch(BATCH_SEED)).detach().numpy()
    assert np.abs(want - base).max() > 0.5, "the adapter must matter"
    config = tiny_config(model, tp=tp, pp=pp)
    answers = run_ranks(import_and_export, config, tmp_path / "theirs", BATCH_SEED, tmp_path / "ours", tp=tp, pp=pp)
    imported, again = next(answer for answer in answers if answer[0] is not None)
    np.testing.assert_allclose(imported, want, atol=1e-4, rtol=0)
    np.testing.assert_allclose(reference_of(model, tmp_path / "ours"), want, atol=1e-4, rtol=0)
    # Our own export comes back bit for bit.
    np.testing.assert_array_equal(again, imported)
    ours = read_peft(tmp_path / "ours")
    assert {t.rank for t in ours.tensors.values()} == {8}
    assert {t.scale for t in ours.tensors.values()} == {4.0}


@pytest.mark.parametrize(
    ("settings", "peft", "message"),
    [
        (
            {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "k_proj", "v_proj"]},
            {},
            r"policy\.megatron_cfg\.peft\.dim: 8 is too small for the adapter: .*q_proj, .* need together rank 9",
        ),
        (
            {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]},
            {"target_modules": ["linear_qkv"]},
            r"the adapter has model\.layers\.0\.mlp\.down_proj, which policy\.megatron_cfg\.peft\.target_modules does",
        ),
    ],
    ids=["rank", "targets"],
)
def test_an_adapter_that_does_not_fit_is_refused(
    models: dict[str, Path], tmp_path: Path, settings: dict, peft: dict, message: str
) -> None:
    make_adapter(models["tied"], tmp_path / "theirs", **settings)
    config = tiny_config(models["tied"], pp=2, **peft)
    with pytest.raises(RankFailed, match=message):
        run_ranks(import_and_export, config, tmp_path / "theirs", BATCH_SEED, tmp_path / "ours", pp=2)


def test_an_adapter_of_another_model_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    make_adapter(models["untied"], tmp_path / "theirs", r=2, lora_alpha=6, target_modules=["q_proj"])
    with pytest.raises(RankFailed, match=r"with A \[2, 128\] and B .* does not fit a 128 x 64 matrix"):
        run_ranks(import_and_export, tiny_config(models["tied"]), tmp_path / "theirs", BATCH_SEED, tmp_path / "ours")


def warm_start(config: RunConfig, path: Path, batch_seed: int) -> dict[str, Any]:
    """Start from an adapter as the actor does, compare policy and reference, train a step, compare again."""
    from lora_rl.lora.peft_io import read_peft
    from lora_rl.policy.export import import_peft

    rank = new_rank(config)
    import_peft(rank.model, read_peft(path))
    rank.freeze_reference()
    batch = make_batch(batch_seed)
    (shard,), (cut,) = one_microbatch(batch, 1)
    before = fingerprint(rank)
    first = rank.logprobs(shard, cut, temperature=1.0), rank.logprobs(shard, cut, reference=True, temperature=1.0)
    untouched = fingerprint(rank) == before
    own = rank.logprobs(shard, cut, reference=True)
    result = rank.train_step(shard, cut, reference_logprobs=own)
    later = rank.logprobs(shard, cut, temperature=1.0), rank.logprobs(shard, cut, reference=True, temperature=1.0)
    return {"first": first, "later": later, "untouched": untouched, "metrics": result.metrics}


@pytest.mark.parametrize("layout", ["tp1", "tp2", "tp2_pp2"])
@pytest.mark.parametrize("reference", ["start", "base"])
def test_warm_start_and_its_reference(models: dict[str, Path], tmp_path: Path, layout: str, reference: str) -> None:
    model, (tp, pp) = models["tied"], LAYOUTS[layout]
    want = make_adapter(model, tmp_path / "sft", r=2, lora_alpha=6, target_modules=ALL)
    config = tiny_config(
        model,
        "loss_fn.reference_policy_kl_penalty=0.1",
        f"loss_fn.reference_policy={reference}",
        f"policy.megatron_cfg.peft.adapter_path={tmp_path / 'sft'}",
        tp=tp,
        pp=pp,
    )
    answers = run_ranks(warm_start, config, tmp_path / "sft", BATCH_SEED, tp=tp, pp=pp)
    answer = next(a for a in answers if a["first"][0] is not None)
    assert all(a["untouched"] for a in answers)
    policy, frozen = answer["first"]
    base = hf_logprobs(load_hf(model), make_batch(BATCH_SEED)).detach().numpy()
    np.testing.assert_allclose(policy, want, atol=1e-5 if tp == 1 else 2e-5, rtol=0)
    metrics = next(a["metrics"] for a in answers if a["metrics"])
    if reference == "start":
        # The KL of the first step is exactly 0, not nearly.
        np.testing.assert_array_equal(frozen, policy)
        assert metrics["kl"].value == 0
    else:
        np.testing.assert_allclose(frozen, base, atol=1e-4, rtol=0)
        assert metrics["kl"].value > 0.1
    moved, still = answer["later"]
    assert np.abs(moved - policy).max() > 1e-3
    np.testing.assert_array_equal(still, frozen)
