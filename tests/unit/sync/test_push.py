"""Pushes into a real vLLM engine: it computes what the trainer computes, and every way to get that wrong is noticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lora_rl.rollout.types import GenerationRequest, SamplingSettings
from lora_rl.sync.errors import SyncError
from lora_rl.sync.manifest import Manifest, SyncReport
from tests.support.batches import make_batch
from tests.support.engine_process import EngineProcess
from tests.support.hf import hf_logprobs, load_hf
from tests.support.lab import Survey
from tests.support.pushes import Pusher, score_error, sequences
from tests.unit.conftest import BATCH_SEED, LAYOUTS

pytestmark = pytest.mark.e2e
TOLERANCE = 1e-4
REQUEST = GenerationRequest(tuple(np.random.default_rng(1).integers(3, 259, 200).tolist()), seed=4)
SAMPLING = SamplingSettings(max_tokens=6, ignore_eos=True)
GATE, UP = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def pusher(engine: EngineProcess, surveys: Callable[..., Survey]) -> Pusher:
    return Pusher.for_weights(engine, surveys("tp1").weights)


def error_after(pusher: Pusher, weights: dict[str, np.ndarray], logprobs: np.ndarray, version: int = 1) -> float:
    """Push in a copy of the engine and compare its scores with the given logprobs."""
    batch = make_batch(BATCH_SEED)
    manifest = pusher.write(version, weights).to_dict()
    _, scores = pusher.engine.trial(("load_push", manifest), ("score", sequences(batch)))
    return score_error(scores, batch, logprobs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engine_equals_trainer_after_a_push(pusher: Pusher, surveys: Callable[..., Survey], layout: str) -> None:
    survey, batch = surveys(layout), make_batch(BATCH_SEED)
    errors = []
    for version, weights in enumerate([survey.base_weights, survey.weights, survey.base_weights], start=1):
        pusher.push(version, weights)
        errors.append(score_error(pusher.engine.call("score", sequences(batch)), batch, survey.logprobs))
    assert errors[1] <= TOLERANCE
    assert min(errors[0], errors[2]) > 1.0, "base and merged weights must be far apart, and both must arrive"


def test_a_forgotten_merge_or_the_previous_version_fails_the_comparison(
    pusher: Pusher, surveys: Callable[..., Survey]
) -> None:
    survey = surveys("tp1")
    assert error_after(pusher, survey.weights, survey.logprobs) <= TOLERANCE
    assert error_after(pusher, survey.base_weights, survey.logprobs) > 1.0


def test_swapped_gate_and_up_fail_the_comparison(pusher: Pusher, surveys: Callable[..., Survey]) -> None:
    survey = surveys("tp1")
    swapped = {**survey.weights, GATE: survey.weights[UP], UP: survey.weights[GATE]}
    assert error_after(pusher, swapped, survey.logprobs) > 100 * TOLERANCE


def test_a_tied_output_layer_follows_the_embedding(
    pusher: Pusher, surveys: Callable[..., Survey], models: dict[str, Path]
) -> None:
    weights, batch = dict(surveys("tp1").base_weights), make_batch(BATCH_SEED)
    rng = np.random.default_rng(0)
    name = "model.embed_tokens.weight"
    old = weights[name]
    weights[name] = (old + rng.normal(0, 0.1, old.shape)).astype(np.float32)
    expected = hf_logprobs(load_hf(models["tied"], weights), batch).detach().numpy()
    assert error_after(pusher, weights, expected) <= TOLERANCE
    # The same model with the output layer left behind is far away, so the check above means something.
    stale = load_hf(models["tied"], weights)
    stale.lm_head.weight = type(stale.lm_head.weight)(stale.lm_head.weight.detach().new_tensor(old))
    assert np.abs(hf_logprobs(stale, batch).detach().numpy() - expected).max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(UP), r"missing 1 \(model\.layers\.1\.mlp\.up_proj\.weight\)"),
        (lambda w: w.update(extra=np.zeros(3, np.float32)), r"unexpected 1 \(extra\)"),
        (lambda w: w.update({"model.norm": w.pop("model.norm.weight")}), r"missing 1 .*unexpected 1 \(model\.norm\)"),
    ],
)
def test_a_push_of_other_tensors_is_refused(
    pusher: Pusher, surveys: Callable[..., Survey], change: Callable[[dict], object], message: str
) -> None:
    weights = dict(surveys("tp1").weights)
    change(weights)
    with pytest.raises(SyncError, match=message):
        pusher.engine.trial(("load_push", pusher.write(1, weights).to_dict()))


def test_a_changed_byte_is_refused_by_name(pusher: Pusher, surveys: Callable[..., Survey]) -> None:
    manifest = pusher.write(1, surveys("tp1").weights)
    entry = next(e for e in manifest.entries if e.name == GATE)
    pusher.buffer.bytes[entry.offset + 17] ^= 1
    with pytest.raises(SyncError, match=GATE + ": checksum"):
        pusher.engine.trial(("load_push", manifest.to_dict()))


def test_a_repeated_tensor_is_refused(pusher: Pusher, surveys: Callable[..., Survey]) -> None:
    push = pusher.write(1, surveys("tp1").weights).to_dict()
    push["entries"].append(push["entries"][0])
    with pytest.raises(SyncError, match="repeated 1"):
        pusher.engine.trial(("load_push", push))


def test_reports_echo_version_bytes_and_contents(pusher: Pusher, surveys: Callable[..., Survey]) -> None:
    weights = surveys("tp1").weights
    manifest = pusher.write(41, weights)
    [reports], [again] = (pusher.engine.trial(("load_push", manifest.to_dict())) for _ in range(2))
    assert reports == again == [SyncReport(41, manifest.digest, len(weights), sum(w.nbytes for w in weights.values()))]
    [completion] = pusher.engine.trial(("load_push", manifest.to_dict()), ("generate", [REQUEST], SAMPLING))[1]
    assert completion.weight_version == 41


def test_cached_prefixes_do_not_survive_a_push(pusher: Pusher, surveys: Callable[..., Survey]) -> None:
    """The prompt fills a cache block; a stale one would mix keys and values of the old weights into the new ones."""
    survey, engine = surveys("tp1"), pusher.engine
    pusher.push(1, survey.base_weights)
    old = engine.call("generate", [REQUEST, REQUEST], SAMPLING)
    pusher.push(2, survey.weights)
    new = engine.call("generate", [REQUEST, REQUEST], SAMPLING)
    assert [c.weight_version for c in old + new] == [1, 1, 2, 2]
    for completion in new:
        [scores] = engine.call("score", [REQUEST.prompt_ids + completion.token_ids])
        np.testing.assert_allclose(completion.logprobs, scores[len(REQUEST.prompt_ids) - 1 :], atol=TOLERANCE)
    [stale] = engine.call("score", [REQUEST.prompt_ids + old[0].token_ids])
    assert np.abs(np.array(old[0].logprobs) - stale[len(REQUEST.prompt_ids) - 1 :]).max() > 100 * TOLERANCE


def test_a_rank_sends_what_the_bridge_merges(pusher: Pusher, surveys: Callable[..., Survey]) -> None:
    """Our merge, from adapters and base tensors apart, against Megatron-Bridge's own."""
    survey = surveys("tp1")
    assert survey.sent is not None
    manifest = Manifest.from_dict(survey.sent.manifest)
    assert {entry.name for entry in manifest.entries} == survey.weights.keys()
    pusher.put(survey.sent, 1)
    for entry in manifest.entries:
        sent = pusher.buffer.view(entry.offset, entry.shape, torch.float32).numpy()
        np.testing.assert_allclose(sent, survey.weights[entry.name], atol=2e-6, rtol=0, err_msg=entry.name)
