"""Sampling with a real vLLM engine: logprobs, seeds, every sampling key, stop reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lora_rl.rollout.engine import Engine
from lora_rl.rollout.types import Completion, GenerationRequest, SamplingSettings, StopReason
from lora_rl.sync.errors import SyncError
from tests.support.engine_process import EngineProcess
from tests.support.hf import load_hf
from tests.support.lab import Survey
from tests.support.pushes import Pusher

pytestmark = pytest.mark.e2e
EOS = 2
LONG = SamplingSettings(temperature=0.6, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def pushed(engine: EngineProcess, surveys: Callable[..., Survey]) -> EngineProcess:
    """The engine with merged weights of large random adapters, version 1."""
    weights = surveys("tp1").weights
    Pusher.for_weights(engine, weights).push(1, weights)
    return engine


@pytest.fixture(scope="module")
def trainer(surveys: Callable[..., Survey], models: dict[str, Path]) -> torch.nn.Module:
    """The same weights in Hugging Face's model, which the policy's own tests hold against the policy."""
    return load_hf(models["tied"], surveys("tp1").weights)


def requests(count: int, seed: int = 0) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    return [
        GenerationRequest(tuple(rng.integers(3, 259, rng.integers(2, 9)).tolist()), seed=1000 + n) for n in range(count)
    ]


def generate(engine: EngineProcess, sampling: SamplingSettings, asked: list[GenerationRequest]) -> list[Completion]:
    return engine.call("generate", asked, sampling)


def tables(model: torch.nn.Module, request: GenerationRequest, completion: Completion, temperature: float):
    """[tokens, V] log distributions of each completion token."""
    ids = torch.tensor([request.prompt_ids + completion.token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].double()
    return torch.log_softmax(logits[len(request.prompt_ids) - 1 : -1] / temperature, dim=-1)


def test_behaviour_logprobs_are_those_of_the_tempered_policy(pushed: EngineProcess, trainer: torch.nn.Module) -> None:
    asked = requests(8)
    for request, completion in zip(asked, generate(pushed, LONG, asked), strict=True):
        assert len(completion.logprobs) == len(completion.token_ids) == 12
        assert completion.weight_version == 1
        table = tables(trainer, request, completion, 0.6)
        ours = table.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, ours, atol=1e-4, rtol=0)


def test_samples_of_a_long_prompt_are_computed_behind_one_copy_of_it(
    pushed: EngineProcess, trainer: torch.nn.Module
) -> None:
    rng = np.random.default_rng(8)
    prompts = [tuple(rng.integers(3, 259, length).tolist()) for length in (33, 64, 70, 100)]
    asked = [GenerationRequest(p, seed=n, cache="a") for p in prompts for n in range(5)]
    drawn = generate(pushed, LONG, asked)
    for request, completion in zip(asked, drawn, strict=True):
        ours = tables(trainer, request, completion, 0.6).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, ours, atol=1e-4, rtol=0)
    # All but the last token of a prompt can be shared, in whole blocks of 32.
    assert [c.cached_prompt_tokens for c in drawn] == [n for n in (32, 32, 64, 96) for n in (0, n, n, n, n)]
    [other] = generate(pushed, LONG, [dataclasses.replace(asked[-1], cache="b")])
    assert other.cached_prompt_tokens == 0


def test_equal_seeds_give_equal_tokens_in_any_company(pushed: EngineProcess) -> None:
    asked = requests(12)
    together = [c.token_ids for c in generate(pushed, LONG, asked)]
    assert [c.token_ids for c in generate(pushed, LONG, asked)] == together
    assert [c.token_ids for c in generate(pushed, LONG, asked[::-1])] == together[::-1]
    assert [generate(pushed, LONG, [r])[0].token_ids for r in asked[:3]] == together[:3]
    reseeded = [dataclasses.replace(r, seed=r.seed + 1) for r in asked]
    assert all(a.token_ids != b for a, b in zip(generate(pushed, LONG, reseeded), together, strict=True))


def test_more_prompts_than_one_iteration_holds(pushed: EngineProcess) -> None:
    """None is split over two iterations: on the CPU vLLM cannot take back the random numbers of its first part."""
    rng = np.random.default_rng(5)
    asked = [GenerationRequest(tuple(rng.integers(3, 259, 240 + n).tolist()), seed=n) for n in range(24)]
    assert sum(len(r.prompt_ids) for r in asked) > 4096
    short = dataclasses.replace(LONG, max_tokens=3)
    together = generate(pushed, short, asked)
    alone = [generate(pushed, short, [request])[0] for request in asked[14:20]]
    assert [c.token_ids for c in together[14:20]] == [c.token_ids for c in alone]


def test_samples_of_one_prompt_differ_and_follow_the_distribution(
    pushed: EngineProcess, trainer: torch.nn.Module
) -> None:
    """First tokens of 600 samples against the exact distribution."""
    prompt = requests(1)[0].prompt_ids
    asked = [GenerationRequest(prompt, seed=n) for n in range(600)]
    drawn = generate(pushed, dataclasses.replace(LONG, max_tokens=1), asked)
    table = tables(trainer, asked[0], drawn[0], 0.6)[0].exp()
    expected = (600 * table).numpy()
    counts = np.bincount([c.token_ids[0] for c in drawn], minlength=len(expected))
    common = expected > 5
    statistic = float((np.square(counts - expected)[common] / expected[common]).sum())
    degrees = int(common.sum())
    assert degrees >= 5
    # Mean and four standard deviations of the chi-square distribution.
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5


@pytest.mark.parametrize(
    ("change", "takes_effect"),
    [
        ({"temperature": 0.0}, lambda c, table: c.token_ids[0] == int(table.argmax())),
        ({"top_k": 1}, lambda c, table: c.token_ids[0] == int(table.argmax())),
        ({"top_p": 1e-6}, lambda c, table: c.token_ids[0] == int(table.argmax())),
        ({"max_tokens": 3}, lambda c, table: len(c.token_ids) == 3 and c.stop_reason is StopReason.LENGTH),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_sampling_keys_take_effect(
    pushed: EngineProcess, trainer: torch.nn.Module, change: dict, takes_effect: Callable[..., bool]
) -> None:
    asked = requests(16, seed=5)
    base = SamplingSettings(max_tokens=8, ignore_eos=True)

    def effective(sampling: SamplingSettings) -> list[bool]:
        answers = zip(asked, generate(pushed, sampling, asked), strict=True)
        return [takes_effect(c, tables(trainer, r, c, 1.0)[0]) for r, c in answers]

    assert all(effective(dataclasses.replace(base, **change)))
    assert not all(effective(base)), "without the key it must be different"


def test_stop_token_ids_end_a_completion_and_stay_in_it(pushed: EngineProcess) -> None:
    [request] = requests(1, seed=6)
    [free] = generate(pushed, LONG, [request])
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    [stopped] = generate(pushed, dataclasses.replace(LONG, stop_token_ids=(stop,)), [request])
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.stop_reason is StopReason.STOP
    assert free.stop_reason is StopReason.LENGTH
    assert len(stopped.logprobs) == first + 1


def test_stop_strings_end_a_completion(pushed: EngineProcess, models: dict[str, Path]) -> None:
    from lora_rl.data import load_tokenizer

    tokenizer = load_tokenizer(models["tied"])
    asked = requests(24, seed=7)
    free = generate(pushed, LONG, asked)
    # One printable byte of some completion; a string of a single byte is found as soon as its token is sampled.
    texts = [[tokenizer.decode([t]) for t in c.token_ids] for c in free]
    row, place = next(
        (r, i)
        for r, pieces in enumerate(texts)
        for i, piece in enumerate(pieces)
        if i and piece.isascii() and piece.isalnum()
    )
    text = texts[row][place]
    [stopped] = generate(pushed, dataclasses.replace(LONG, stop_strings=(text,)), [asked[row]])
    end = texts[row].index(text) + 1
    assert stopped.token_ids == free[row].token_ids[:end]
    assert stopped.stop_reason is StopReason.STOP


def test_the_end_token_ends_unless_ignored(engine: EngineProcess, surveys: Callable[..., Survey]) -> None:
    """A model that says nothing but the end token: its embedding row is what every hidden state points at."""
    weights = dict(surveys("tp1").base_weights)
    name = "model.embed_tokens.weight"
    rigged = weights[name].copy()
    rigged[:, 0], rigged[EOS, 0] = 0.0, 50.0
    norm = weights["model.norm.weight"].copy()
    # Every position reads channel 0 through a constant: all inputs carry the same large value there.
    rigged[3:, 0] = 5.0
    norm[0] = 10.0
    weights |= {name: rigged, "model.norm.weight": norm}
    pusher = Pusher.for_weights(engine, weights)
    push = pusher.write(1, weights).to_dict()
    asked = requests(4)
    sampling = SamplingSettings(max_tokens=5)
    _, ended, ignored = engine.trial(
        ("load_push", push),
        ("generate", asked, sampling),
        ("generate", asked, dataclasses.replace(sampling, ignore_eos=True)),
    )
    for completion in ended:
        assert completion.token_ids == (EOS,)
        assert completion.stop_reason is StopReason.STOP
    for completion in ignored:
        assert completion.token_ids == (EOS,) * 5
        assert completion.stop_reason is StopReason.LENGTH


def test_an_engine_that_is_half_awake_goes_back_to_sleep() -> None:
    """After a push only the weights are on the device; they must leave it before the trainer computes again."""
    calls: list[str] = []
    engine = Engine.__new__(Engine)
    engine._asleep = set()
    engine.llm = SimpleNamespace(
        sleep=lambda level: calls.append("sleep"), wake_up=lambda tags: calls.append("+".join(tags))
    )
    engine.sleep()
    engine.sleep()
    engine.wake(["weights"])
    engine.sleep()
    engine.wake(["weights", "kv_cache"])
    assert calls == ["sleep", "weights", "sleep", "kv_cache+weights"]


def test_an_engine_that_sleeps_neither_generates_nor_takes_weights() -> None:
    """Its memory is unmapped, or somebody else's."""
    engine = object.__new__(Engine)
    engine._asleep, engine._running, engine._adapters = {"kv_cache", "weights"}, {}, None
    with pytest.raises(RuntimeError, match="kv_cache and weights sleep: wake them to generate"):
        engine._start("0", (3, 4), None)
    for push in (lambda: engine.load_push({}), lambda: engine.transfer("start_weight_update")):
        with pytest.raises(SyncError, match="weights sleep: wake them before they are replaced"):
            push()
