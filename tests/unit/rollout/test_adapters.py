"""Adapters served natively: the ranks an engine has, the versions it holds, and what a real one answers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from lora_rl.config import derive_layout
from lora_rl.config.rules import MAX_ENGINE_RANK
from lora_rl.lora.merge import AdapterTensors
from lora_rl.rollout.adapters import ENGINE_RANKS, AdapterVersions, engine_rank
from lora_rl.rollout.launch import engine_settings
from lora_rl.rollout.types import GenerationRequest, SamplingSettings
from lora_rl.sync.errors import SyncError
from tests.support.configs import tiny_config
from tests.support.engine_process import EngineProcess
from tests.support.pushes import Pusher, adapter_names


def test_an_adapter_is_served_at_the_next_rank_that_vllm_has() -> None:
    ranks = {1: 1, 2: 8, 8: 8, 9: 16, 64: 64, 65: 128, 257: 320, 321: 512, 512: 512}
    assert {rank: engine_rank(rank) for rank in ranks} == ranks
    with pytest.raises(ValueError, match=r"policy\.megatron_cfg\.peft\.dim=513: vLLM serves adapters up to rank 512"):
        engine_rank(513)


def test_the_ranks_are_those_of_the_installed_vllm() -> None:
    # Read, not imported: vLLM takes ten seconds and changes the process.
    [package] = find_spec("vllm").submodule_search_locations
    tree = ast.parse((Path(package) / "config" / "lora.py").read_text())
    [theirs] = [
        node.value.slice
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MaxLoRARanks"
    ]
    assert ast.literal_eval(theirs) == ENGINE_RANKS
    assert ENGINE_RANKS[-1] == MAX_ENGINE_RANK


# -- versions --------------------------------------------------------------------------------------------------------


def test_new_requests_take_the_newest_version_and_idle_ones_go() -> None:
    versions = AdapterVersions(capacity=2)
    assert versions.publish(1) == []
    assert versions.acquire() == 1
    assert versions.release(1) == []
    assert versions.loaded == {1}, "the newest stays although nobody uses it"
    assert versions.publish(2) == [1]
    assert versions.acquire() == versions.current == 2
    assert versions.loaded == {2}


def test_an_older_version_goes_exactly_when_its_last_request_ends() -> None:
    versions = AdapterVersions(capacity=2)
    versions.publish(1)
    assert [versions.acquire(), versions.acquire()] == [1, 1]
    assert versions.publish(2) == []
    assert versions.acquire() == 2
    assert versions.loaded == {1, 2}
    assert versions.release(1) == []
    assert versions.loaded == {1, 2}
    assert versions.release(1) == [1]
    assert versions.loaded == {2}
    assert versions.release(2) == []


def test_no_room_names_the_versions_in_the_way() -> None:
    versions = AdapterVersions(capacity=2)
    for version in (3, 4):
        versions.publish(version)
        versions.acquire()
    with pytest.raises(SyncError, match=r"no room for adapter version 5: versions \[3, 4\] still have requests"):
        versions.publish(5)
    # Nothing was given up for it, and as soon as there is room it goes.
    assert (versions.loaded, versions.current) == ({3, 4}, 4)
    versions.release(3)
    versions.publish(5)
    assert versions.loaded == {4, 5}


def test_what_cannot_be_published_or_acquired() -> None:
    versions = AdapterVersions(capacity=2)
    with pytest.raises(SyncError, match="no adapter was pushed yet"):
        versions.acquire()
    versions.publish(1)
    with pytest.raises(SyncError, match="adapter version 1 was published twice"):
        versions.publish(1)


# -- a real engine ---------------------------------------------------------------------------------------------------

SAMPLING = SamplingSettings(max_tokens=6, ignore_eos=True)
# Output and input sizes in the tied model.
SHAPES = {"self_attn.q_proj": (128, 64), "mlp.down_proj": (64, 96)}


def new_adapters(seed: int) -> dict[str, AdapterTensors]:
    """Large ones, on two linears of two layers."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    return {
        f"model.layers.{layer}.{module}": AdapterTensors(random(8, columns), random(rows, 8), 4.0)
        for layer in (0, 2)
        for module, (rows, columns) in SHAPES.items()
    }


@pytest.fixture(scope="module")
def native(models: dict[str, Path]) -> Iterator[EngineProcess]:
    """An engine that was given no adapter yet."""
    config = tiny_config(models["tied"], "policy.generation.weight_sync.mode=adapter")
    process = EngineProcess(engine_settings(config, derive_layout(config)))
    yield process
    process.close()


@pytest.mark.e2e
def test_each_push_replaces_the_adapter_that_is_served(native: EngineProcess) -> None:
    asked = [GenerationRequest(tuple(range(10 + n, 16 + n)), seed=n) for n in range(4)]
    with pytest.raises(SyncError, match="no adapter was pushed yet"):
        native.call("generate", asked, SAMPLING)
    pusher = Pusher(native, adapter_names(new_adapters(0)), 1 << 20)
    answers = []
    for version in (1, 2, 3):
        native.call("load_push", pusher.write_adapters(version, "adapter", new_adapters(version)).to_dict())
        assert native.call("llm.llm_engine.list_loras") == {version}
        completions = native.call("generate", asked, SAMPLING)
        assert {c.weight_version for c in completions} == {version}
        scores = native.call("score", [r.prompt_ids + c.token_ids for r, c in zip(asked, completions, strict=True)])
        for request, completion, line in zip(asked, completions, scores, strict=True):
            np.testing.assert_allclose(completion.logprobs, line[len(request.prompt_ids) - 1 :], atol=1e-4, rtol=0)
        answers.append([c.logprobs for c in completions])
    assert np.abs(np.array(answers[0]) - answers[1]).min() > 1e-3, "the adapters must matter"
    with pytest.raises(SyncError, match="adapter version 3 was published twice"):
        native.call("load_push", pusher.write_adapters(3, "adapter", new_adapters(4)).to_dict())
