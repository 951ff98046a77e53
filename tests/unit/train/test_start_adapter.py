"""The adapter that a run starts from, as far as the driver judges it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lora_rl.lora.merge import AdapterTensors
from lora_rl.lora.peft_io import PeftAdapter, write_peft
from lora_rl.train.job import model_sizes, start_adapter
from tests.support.configs import tiny_config


@pytest.mark.parametrize("b", [0.0, 1.0])
def test_svd_lora_needs_an_adapter_that_was_trained(models: dict[str, Path], tmp_path: Path, b: float) -> None:
    tensors = AdapterTensors(torch.ones(2, 64), torch.full((64, 2), b), 1.0)
    write_peft(tmp_path / "adapter", PeftAdapter({"model.layers.0.mlp.down_proj": tensors}), base_model="base")
    path = f"policy.megatron_cfg.peft.adapter_path={tmp_path / 'adapter'}"
    plain, svd = (
        tiny_config(models["tied"], path, *more) for more in ([], ["policy.megatron_cfg.peft.svd.enabled=true"])
    )
    assert start_adapter(tiny_config(models["tied"])) is None
    assert start_adapter(plain) is not None
    if b:
        assert start_adapter(svd) is not None
        return
    with pytest.raises(ValueError, match=r"svd needs a trained adapter, but every B in .*adapter is 0; train it first"):
        start_adapter(svd)


def test_directions_that_are_missing_are_told() -> None:
    told: list[str] = []
    ranks = [{"parameters": 10, "trainable": 8, "adapters": 1, "directions": 8}] * 4
    assert model_sizes(ranks, 2, told.append) == {"parameters": 20, "trainable": 16, "directions": 16}
    plain = [{"parameters": 10, "trainable": 8, "adapters": 1}]
    assert model_sizes(plain, 1, told.append) == {"parameters": 10, "trainable": 8}
    assert told == []
    model_sizes([*ranks[:1], {**ranks[0], "directions": 3}], 1, told.append)
    assert told[0].startswith("the starting adapter has only 11 of the 16 singular values of its rank")
