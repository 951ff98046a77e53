"""Weights that change while requests run: which token was sampled by what, and whose keys and values it saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lora_rl.config import derive_layout
from lora_rl.lora.merge import AdapterTensors
from lora_rl.rollout.launch import engine_settings
from lora_rl.rollout.types import Completion, GenerationRequest, SamplingSettings
from lora_rl.sync.errors import SyncError
from tests.support.configs import tiny_config
from tests.support.engine_process import EngineProcess
from tests.support.hf import load_hf
from tests.support.lab import Survey
from tests.support.pushes import Pusher, adapter_names

pytestmark = pytest.mark.e2e
TOKENS, BEFORE = 12, 5
SAMPLING = SamplingSettings(temperature=0.6, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=["keep", "recompute"])
def serving(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[tuple[EngineProcess, bool]]:
    """An engine whose weights may change in flight, and whether it then recomputes keys and values."""
    recompute = request.param == "recompute"
    config = tiny_config(models["tied"], "policy.max_total_sequence_length=320")
    settings = replace(
        engine_settings(config, derive_layout(config)), in_flight_updates=True, recompute_kv_cache=recompute
    )
    process = EngineProcess(settings)
    yield process, recompute
    process.close()


class Driver:
    """Pushes the base weights as odd versions and those with adapters as even ones."""

    def __init__(self, engine: EngineProcess, survey: Survey) -> None:
        self._engine = engine
        self.weights = (survey.base_weights, survey.weights)
        self._pusher = Pusher.for_weights(engine, survey.weights)
        self.version = 0

    def push(self, version: int) -> None:
        self._pusher.push(version, self.weights[1 - version % 2])

    def run(self, requests: Sequence[GenerationRequest], pushes: dict[int, int]) -> list[Completion]:
        """Add the requests, make their steps, and push version `pushes[n]` after step n."""
        for n, request in enumerate(requests):
            self._engine.call("add", str(n), request, SAMPLING)
        done: dict[str, Completion] = {}
        for step in range(1, TOKENS + 5):
            done.update(self._engine.call("step"))
            if step in pushes:
                self.push(pushes[step])
        return [done[str(n)] for n in range(len(requests))]


@pytest.fixture
def driver(serving: tuple[EngineProcess, bool], surveys: Callable[..., Survey]) -> Driver:
    return Driver(serving[0], surveys("tp1"))


def requests(count: int, *, length: int = 6, seed: int = 0) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    return [GenerationRequest(tuple(rng.integers(3, 259, length).tolist()), seed=500 + n) for n in range(count)]


def logprobs(models: dict[str, Path], weights: Any, request: GenerationRequest, completion: Completion) -> np.ndarray:
    """Of the completion's tokens under given weights, all keys and values computed with them."""
    model = load_hf(models["tied"], weights)
    ids = torch.tensor([request.prompt_ids + completion.token_ids])
    with torch.no_grad():
        table = torch.log_softmax(model(input_ids=ids).logits[0].double() / SAMPLING.temperature, dim=-1)
    start = len(request.prompt_ids)
    return table[start - 1 : -1].gather(-1, ids[0, start:, None])[:, 0].numpy()


def test_what_ends_while_probes_are_scored_is_not_forgotten(serving: tuple[EngineProcess, bool]) -> None:
    engine = serving[0]
    first, second = requests(2, seed=3)
    short = replace(SAMPLING, max_tokens=1)
    for name, request in (("first", first), ("second", second)):
        engine.call("add", name, request, short)
    engine.call("score", [tuple(range(5, 40)), tuple(range(5, 60))])
    # A server makes no step of an engine that is not busy.
    assert engine.call("busy.__bool__")
    engine.call("abort", ["second"])
    assert [name for name, _ in engine.call("step")] == ["first"]
    assert not engine.call("busy.__bool__")


def test_each_token_knows_who_sampled_it(
    serving: tuple[EngineProcess, bool], driver: Driver, models: dict[str, Path]
) -> None:
    recompute = serving[1]
    driver.push(1)
    asked = requests(4)
    for request, completion in zip(asked, driver.run(asked, {BEFORE: 2}), strict=True):
        assert completion.version_spans == ((1, BEFORE), (2, TOKENS - BEFORE))
        assert (completion.weight_version, completion.newest_version) == (1, 2)
        assert len(completion.logprobs) == TOKENS
        said = np.asarray(completion.logprobs)
        old, new = (logprobs(models, weights, request, completion) for weights in driver.weights)
        np.testing.assert_allclose(said[:BEFORE], old[:BEFORE], atol=1e-4, rtol=0)
        assert np.abs(said[BEFORE:] - old[BEFORE:]).max() > 0.01
        # Recomputed, everything behind the push is as if the new weights had read the whole sequence; otherwise they
        # continue on what the old ones remember.
        difference = np.abs(said[BEFORE:] - new[BEFORE:]).max()
        assert difference < 1e-4 if recompute else difference > 1e-3


def test_a_push_of_equal_weights_disturbs_nothing(driver: Driver) -> None:
    driver.push(1)
    asked = requests(6, seed=1)
    quiet = driver.run(asked, {})
    assert all(c.spans == ((1, TOKENS),) for c in quiet)
    disturbed = driver.run(asked, {2: 3, 3: 5, 7: 7})
    assert [c.token_ids for c in disturbed] == [c.token_ids for c in quiet]
    np.testing.assert_allclose([c.logprobs for c in disturbed], [c.logprobs for c in quiet], atol=1e-5, rtol=0)
    assert all(c.spans == ((1, 2), (3, 1), (5, 4), (7, 5)) for c in disturbed)


def test_new_requests_never_see_keys_and_values_of_old_weights(
    serving: tuple[EngineProcess, bool], driver: Driver, models: dict[str, Path]
) -> None:
    """The long prompt fills a block of the prefix cache, which cannot be emptied while a request runs."""
    engine = serving[0]
    driver.push(1)
    [long] = requests(1, length=200, seed=2)
    engine.call("add", "a", long, SAMPLING)
    for _ in range(3):
        engine.call("step")
    driver.push(2)
    engine.call("add", "b", long, SAMPLING)
    done: dict[str, Completion] = {}
    while len(done) < 2:
        done.update(engine.call("step"))
    assert done["b"].spans == ((2, TOKENS),)
    expected = logprobs(models, driver.weights[1], long, done["b"])
    np.testing.assert_allclose(done["b"].logprobs, expected, atol=1e-4, rtol=0)


def test_scoring_does_not_end_what_runs(serving: tuple[EngineProcess, bool], driver: Driver) -> None:
    engine = serving[0]
    driver.push(1)
    [request] = requests(1, seed=3)
    [alone] = driver.run([request], {})
    engine.call("add", "0", request, SAMPLING)
    engine.call("step")
    [scores] = engine.call("score", [request.prompt_ids])
    assert len(scores) == len(request.prompt_ids) - 1
    done: dict[str, Completion] = {}
    while not done:
        done.update(engine.call("step"))
    assert done["0"].token_ids == alone.token_ids


def test_aborted_requests_end_and_their_names_are_free(serving: tuple[EngineProcess, bool], driver: Driver) -> None:
    engine = serving[0]
    driver.push(1)
    first, second = requests(2, seed=4)
    [alone] = driver.run([second], {})
    engine.call("add", "0", first, SAMPLING)
    engine.call("step")
    engine.call("abort", ["0", "unknown"])
    [completion] = driver.run([second], {})
    assert completion.token_ids == alone.token_ids


def test_an_engine_that_may_not_be_disturbed_refuses_the_push(
    engine: EngineProcess, surveys: Callable[..., Survey]
) -> None:
    survey = surveys("tp1")
    pusher = Pusher.for_weights(engine, survey.weights)
    pusher.push(1, survey.weights)
    engine.call("add", "0", requests(1)[0], SAMPLING)
    push = pusher.write(2, survey.weights).to_dict()
    with pytest.raises(SyncError, match=r"1 requests are running.*in_flight_weight_updates"):
        engine.call("load_push", push)
    engine.call("abort", ["0"])
    engine.call("load_push", push)


# -- adapters served natively ------------------------------------------------------------------------------------------


def random_adapters(folder: Path, seed: int) -> dict[str, AdapterTensors]:
    """Large random adapters on the output projections of attention."""
    generator = torch.Generator().manual_seed(seed)
    adapters = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith("o_proj.weight"):
            a = torch.randn(8, weight.shape[1], generator=generator) * 0.2
            b = torch.randn(weight.shape[0], 8, generator=generator)
            adapters[name.removesuffix(".weight")] = AdapterTensors(a, b, 0.5)
    return adapters


def merged(folder: Path, adapters: dict[str, AdapterTensors]) -> dict[str, np.ndarray]:
    weights = load_file(folder / "model.safetensors")
    for module, adapter in adapters.items():
        weights[f"{module}.weight"] += adapter.scale * adapter.b @ adapter.a
    return {name: tensor.numpy() for name, tensor in weights.items()}


def test_a_request_keeps_its_adapter_to_its_end(models: dict[str, Path]) -> None:
    """Three versions are in use at once; each answer is that of the version it began with, and says so."""
    folder = models["tied"]
    config = tiny_config(folder, "policy.generation.weight_sync.mode=adapter", target_modules=["linear_proj"])
    settings = replace(engine_settings(config, derive_layout(config)), in_flight_updates=True, max_adapters=3)
    engine = EngineProcess(settings)
    try:
        versions = {n: random_adapters(folder, n) for n in (1, 2, 3, 4)}
        pusher = Pusher(engine, adapter_names(versions[1]), 1 << 20)
        asked = requests(3, seed=9)
        done: dict[str, Completion] = {}
        for version in (1, 2, 3):
            engine.call("load_push", pusher.write_adapters(version, "adapter", versions[version]).to_dict())
            engine.call("add", str(version), asked[version - 1], SAMPLING)
            done.update(engine.call("step"))
        # Every place is taken by a version that is still in use.
        push = pusher.write_adapters(4, "adapter", versions[4]).to_dict()
        with pytest.raises(SyncError, match=r"no room for adapter version 4: versions \[1, 2, 3\] still have requests"):
            engine.call("load_push", push)
        while len(done) < 3:
            done.update(engine.call("step"))
        for version, request in zip((1, 2, 3), asked, strict=True):
            completion = done[str(version)]
            assert completion.spans == ((version, TOKENS),)
            expected = logprobs(models, merged(folder, versions[version]), request, completion)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4, rtol=0)
        engine.call("load_push", push)
        assert engine.call("llm.llm_engine.list_loras") == {4}
    finally:
        engine.close()
