"""Adapters in a real Megatron model: where they sit, what trains, in which precision, and with recomputation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lora_rl.config import RunConfig
from tests.support.batches import make_batch, one_microbatch
from tests.support.configs import tiny_config, with_peft
from tests.support.lab import LARGE_B, adapters, new_rank
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess
CHECKPOINTED = "policy.megatron_cfg.activation_checkpointing=true"
BFLOAT16 = "policy.precision=bfloat16"


def facts(config: RunConfig) -> dict[str, Any] | str:
    """What a model looks like and what one training step does to it; the message when it is refused."""
    from lora_rl.lora.targets import TargetError

    try:
        rank = new_rank(config, b_std=LARGE_B if config.policy.precision == "float32" else 0.02)
    except TargetError as error:
        return str(error)
    batch = make_batch(seed=1)
    shards, cuts = one_microbatch(batch, 1)
    parameters = dict(rank.model.module.named_parameters())
    before = {name: p.detach().clone() for name, p in parameters.items()}
    result = rank.train_step(shards[0], cuts[0])
    return {
        "dtypes": {
            "adapter": {str(p.dtype) for n, p in parameters.items() if ".adapter." in n},
            # PyTorch's norm, which Megatron's local layers use, keeps its few weights in float32.
            "base": {str(p.dtype) for n, p in parameters.items() if ".adapter." not in n and "norm" not in n},
        },
        "trainable": {n for n, p in parameters.items() if p.requires_grad},
        "changed": {n for n, p in parameters.items() if not p.equal(before[n])},
        "adapters": list(adapters(rank)),
        "gradients": adapters(rank, gradients=True),
        "loss": {name: m.value for name, m in result.metrics.items()}.get("loss"),
        "grad_norm": result.grad_norm,
    }


def all_facts(configs: dict[str, RunConfig]) -> dict[str, dict[str, Any] | str]:
    return {name: facts(config) for name, config in configs.items()}


@pytest.fixture(scope="module")
def on_one(models: dict[str, Path]) -> dict[str, Any]:
    """Facts of several configurations on one rank, in a single start."""
    tied, untied = models["tied"], models["untied"]
    configs = {
        # First, because Megatron-Bridge remembers which models it prepared for recomputation by their address.
        "checkpointed": tiny_config(tied, CHECKPOINTED),
        "plain": tiny_config(tied),
        "no clipping": tiny_config(tied, "policy.max_grad_norm=null"),
        "bfloat16": tiny_config(tied, BFLOAT16),
        "bfloat16 checkpointed": tiny_config(tied, BFLOAT16, CHECKPOINTED),
        "excluded": tiny_config(tied, target_modules=[], exclude_modules=["linear_fc2", "*.layers.3.*.linear_qkv"]),
        "typo": with_peft(tiny_config(tied), target_modules=["linear_qkv", "linear_fcl"]),
        "tied head": with_peft(tiny_config(tied), target_modules=["linear_qkv", "output_layer"]),
        "untied": tiny_config(untied, target_modules=["linear_proj"]),
    }
    return run_ranks(all_facts, configs)[0]


def test_exactly_the_declared_adapters_train(on_one: dict[str, Any]) -> None:
    plain = on_one["plain"]
    linears = ["self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"]
    names = {f"decoder.layers.{n}.{linear}" for n in range(4) for linear in linears}
    assert set(plain["adapters"]) == names
    assert plain["trainable"] == {f"{n}.adapter.{part}.weight" for n in names for part in ("linear_in", "linear_out")}
    assert plain["changed"] == plain["trainable"]


def test_exclusion_and_untied_output(on_one: dict[str, Any]) -> None:
    chosen = on_one["excluded"]["adapters"]
    assert len(chosen) == 11
    assert not any(name.endswith(("linear_fc2", "layers.3.self_attention.linear_qkv")) for name in chosen)
    assert on_one["untied"]["adapters"] == [f"decoder.layers.{n}.self_attention.linear_proj" for n in range(4)]


def test_refusals_name_what_could_be_meant(on_one: dict[str, Any]) -> None:
    assert "'linear_fcl' matches no module (did you mean 'linear_fc" in on_one["typo"]
    assert "policy.megatron_cfg.peft.target_modules: 'output_layer'" in on_one["tied head"]
    assert "shares its weight" in on_one["tied head"]


def test_adapters_are_float32_over_a_bfloat16_base(on_one: dict[str, Any]) -> None:
    for name in ("bfloat16", "bfloat16 checkpointed"):
        assert on_one[name]["dtypes"] == {"adapter": {"torch.float32"}, "base": {"torch.bfloat16"}}
        assert on_one[name]["changed"] == on_one[name]["trainable"] == on_one["plain"]["trainable"]
        for module, pair in on_one[name]["gradients"].items():
            for gradient in pair:
                assert gradient.dtype == np.float32
                assert np.abs(gradient).max() > 0, module


@pytest.mark.parametrize(("plain", "recomputed"), [("plain", "checkpointed"), ("bfloat16", "bfloat16 checkpointed")])
def test_recomputation_changes_neither_loss_nor_gradients(on_one: dict[str, Any], plain: str, recomputed: str) -> None:
    one, other = on_one[plain], on_one[recomputed]
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
    for name, pair in one["gradients"].items():
        for want, got in zip(pair, other["gradients"][name], strict=True):
            assert np.abs(want).max() > 0, name
            np.testing.assert_allclose(got, want, atol=1e-6, rtol=1e-4, err_msg=name)


def test_gradient_norm_is_reported_without_clipping(on_one: dict[str, Any]) -> None:
    assert on_one["no clipping"]["grad_norm"] == pytest.approx(on_one["plain"]["grad_norm"], rel=1e-6)
    assert on_one["plain"]["grad_norm"] > 1.0, "the configured norm of 1 must have clipped something"


def test_wildcards_count_layers_over_the_whole_pipeline(models: dict[str, Path]) -> None:
    configs = {
        "first": tiny_config(models["tied"], pp=2, target_modules=["*.layers.0.*.linear_qkv", "linear_proj"]),
        "last": tiny_config(
            models["tied"], pp=2, target_modules=["*.layers.3.*.linear_qkv", "*.layers.0.*.linear_fc1"]
        ),
        "typo": with_peft(tiny_config(models["tied"], pp=2), target_modules=["*.layers.4.*.linear_qkv"]),
    }
    for answer in run_ranks(all_facts, configs, pp=2):
        qkv = {key: [n for n in answer[key]["adapters"] if "linear_qkv" in n] for key in ("first", "last")}
        assert qkv["first"] == ["decoder.layers.0.self_attention.linear_qkv"]
        assert qkv["last"] == ["decoder.layers.3.self_attention.linear_qkv"]
        assert "'*.layers.4.*.linear_qkv' matches no module" in answer["typo"]
