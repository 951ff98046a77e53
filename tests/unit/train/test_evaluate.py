"""Evaluation: pass@k, what the summary counts, and where an adapter is found."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from lora_rl.algorithm.passk import pass_at_k
from lora_rl.lora.peft_io import write_peft
from lora_rl.train.checkpoint import CheckpointError
from lora_rl.train.evaluate import _merging, describe, find_adapter, summarise
from tests.support.configs import tiny_config
from tests.support.rollouts import rollout
from tests.unit.train.test_checkpoint import QUERY, make, make_store


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int) -> None:
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
        assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 2, 0), (4, 2, 5), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_outside_its_range(n: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {n} samples, {correct} correct"):
        pass_at_k(n, correct, k)


def test_summary() -> None:
    rewards = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    rollouts = [rollout(i // 2, i % 2, reward) for i, reward in enumerate(rewards)]
    summary = summarise(rollouts, 2, [1, 2])
    assert summary["prompts"] == 3
    assert summary["accuracy"] == summary["pass@1"] == 0.5
    assert summary["pass@2"] == pytest.approx(2 / 3)
    assert summary["reasons"] == {"correct": 0.5, "wrong": 0.5}
    line = describe(rollouts[1])
    assert (line["sample"], line["reward"], line["expected"]) == (1, 0.0, rollouts[1].prompt.answer)
    assert line["tokens"] == len(rollouts[1].completion.token_ids)


def test_an_adapter_is_found_in_each_place(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    store.save(make(10))
    newest = store.save(make(20))
    for path, source in (
        (newest, newest / "adapter"),
        (newest / "adapter", newest / "adapter"),
        (store.folder, newest / "adapter"),
        (store.folder / "step_10", store.folder / "step_10" / "adapter"),
    ):
        adapter, found = find_adapter(path)
        assert found == source
        assert set(adapter.tensors) == {QUERY}
    write_peft(tmp_path / "plain", make(5).adapter, base_model="base")
    assert find_adapter(tmp_path / "plain")[0].tensors[QUERY].a.equal(make(5).adapter.tensors[QUERY].a)


def test_what_is_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is no adapter, checkpoint or folder of checkpoints"):
        find_adapter(tmp_path)
    store, _ = make_store(tmp_path)
    path = store.save(make(10))
    (path / "config.yaml").write_text("changed")
    for wrong in (path, store.folder):
        with pytest.raises(CheckpointError, match=r"config\.yaml has"):
            find_adapter(wrong)


@pytest.mark.parametrize("mode", ["merged", "adapter"])
def test_engines_load_the_model_they_evaluate(models: dict[str, Path], mode: str) -> None:
    """In a run that pushes all weights they may start from random ones; here nothing else is pushed."""
    overrides = [f"policy.generation.weight_sync.mode={mode}"]
    if mode == "merged":
        overrides.append("policy.generation.vllm_cfg.load_format=dummy")
    generation = _merging(tiny_config(models["tied"], *overrides)).policy.generation
    assert (generation.weight_sync.mode, generation.vllm_cfg.load_format) == ("adapter_merge", "auto")
