"""Procedural questions: the same in every process, none twice, none on both sides, mixtures by weight."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lora_rl.config.schema import DataConfig, ReasoningGymConfig
from lora_rl.data import load_prompts, load_tokenizer
from lora_rl.data import reasoning_gym as module
from lora_rl.data.reasoning_gym import reasoning_gym_examples
from lora_rl.data.reasoning_gym_worker import create, interleave, shares
from tests.support.made_tokenizers import write_tokenizer

SUMS = {"name": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "max_digits": 1}}


def silent(message: str) -> None:
    raise AssertionError(f"unexpected warning: {message}")


def draw(*datasets: Any, warn: Any = silent, **settings: Any) -> tuple[list, list]:
    module._last.clear()  # so that equality is that of two processes
    section = ReasoningGymConfig(datasets=list(datasets), **{"size": 40, "val_size": 10, **settings})
    return reasoning_gym_examples(section, warn)


def test_questions_are_seeded_and_apart_although_seeds_are_neighbours() -> None:
    # Item i of a dataset comes from seed + i: these two streams hold the same questions, one place apart.
    train, held_out = draw(SUMS, seed=5, val_seed=6)
    again, held_out_again = draw(SUMS, seed=5, val_seed=6)
    assert (train, held_out) == (again, held_out_again)
    assert (len(train), len(held_out)) == (40, 10)
    assert len({e.key for e in train + held_out}) == len({e.id for e in train + held_out}) == 50
    other, same = draw(SUMS, seed=77, val_seed=6, size=20)
    assert same == held_out  # validation does not depend on what is trained on
    assert {e.id for e in other} != {e.id for e in train}


def test_metadata_is_what_a_scorer_needs() -> None:
    import reasoning_gym

    (first, *_), _ = draw(SUMS)
    found = first.metadata["reasoning_gym"]
    assert (found["dataset"], found["config"]) == ("chain_sum", SUMS["config"])
    assert json.loads(json.dumps(found))["item"]["answer"] == first.answer
    dataset = reasoning_gym.create_dataset(found["dataset"], **found["config"])
    assert dataset.score_answer(first.answer, found["item"]) == 1.0
    assert dataset.score_answer(str(int(first.answer) + 1), found["item"]) < 1.0
    assert first.content == found["item"]["question"]


def test_datasets_that_go_through_sets_are_reproducible_too() -> None:
    names = ["ransom_note", "isomorphic_strings", "list_functions", "word_ladder"]
    first, second = (draw(*names, size=16, val_size=4) for _ in range(2))
    assert first == second
    assert {e.metadata["reasoning_gym"]["dataset"] for e in first[0]} == set(names)


def test_mixtures_follow_the_weights_everywhere() -> None:
    train, held_out = draw(SUMS | {"weight": 3}, {"name": "gcd"}, size=40, val_size=8)
    for part in (train, held_out, train[:8], train[20:28]):
        counts = Counter(e.metadata["reasoning_gym"]["dataset"] for e in part)
        assert counts == {"chain_sum": len(part) * 3 // 4, "gcd": len(part) // 4}


def test_shares_and_interleaving() -> None:
    assert shares([1, 1, 1], 10) == [4, 3, 3]
    assert shares([0.5, 2.5], 5) == [1, 4]
    assert shares([1, 1e-9], 3) == [3, 0]
    mixed = interleave([[{"n": 0}, {"n": 1}, {"n": 2}, {"n": 3}], [], [{"n": 9}, {"n": 8}]])
    assert [(which, item["n"]) for which, item in mixed] == [(0, 0), (2, 9), (0, 1), (0, 2), (2, 8), (0, 3)]


def test_a_small_space_is_used_up_and_reported() -> None:
    warnings: list[str] = []
    tiny = {"name": "chain_sum", "config": {"min_terms": 1, "max_terms": 1, "max_digits": 1}}  # ten questions
    train, held_out = draw(tiny, size=50, val_size=4, warn=warnings.append)
    assert sorted(int(e.answer) for e in train + held_out) == list(range(10))
    assert warnings == ["data.reasoning_gym.size=50: only 6 different questions were found"]
    with pytest.raises(ValueError, match="no question is left to train on after 10 for validation"):
        draw(tiny, size=5, val_size=50, warn=warnings.append)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("chain_sums", r"no dataset 'chain_sums'; did you mean chain_sum"),
        ("zzz", r"no dataset 'zzz'; there are ab, acre, advanced_geometry"),
        ({"name": "gcd", "config": {"min_number": 1}}, r"gcd has no setting 'min_number'.*did you mean min_numbers\?"),
        ({"name": "gcd", "config": {"seed": 1}}, r"gcd: seed is not set in config but by data\.reasoning_gym\.seed"),
        ({"name": "chain_sum", "config": {"max_terms": 0}}, r"chain_sum refuses its config .*max_terms must be >="),
        ({"name": "chain_sum", "config": {"max_terms": "many"}}, r"chain_sum refuses its config .*not supported"),
    ],
)
def test_wrong_datasets_and_settings_are_named(dataset: Any, message: str) -> None:
    (task,) = ReasoningGymConfig(datasets=[dataset]).datasets
    with pytest.raises(ValueError, match=message):
        create(task.model_dump(), seed=0, size=1)


def test_what_the_process_refuses_is_an_error_here() -> None:
    with pytest.raises(ValueError, match=r"data\.reasoning_gym\.datasets: .* did you mean chain_sum"):
        draw("chain_sums")


def test_a_process_that_fails_is_an_error_with_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "worker.py"
    broken.write_text("raise RuntimeError('out of questions')")
    monkeypatch.setattr(module, "_WORKER", broken)
    with pytest.raises(ValueError, match=r"making the questions failed: RuntimeError: out of questions"):
        draw(SUMS)


def test_slow_datasets_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.01)
    warnings: list[str] = []
    train, _ = draw(SUMS, size=3, val_size=1, warn=warnings.append)
    assert len(train) == 3
    assert warnings[0].startswith("chain_sum: making 3 + 1 questions takes more than")


def test_prompts_of_a_configuration(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    (tmp_path / "shots.txt").write_text("1 + 1 = 2\n{}")
    section = ReasoningGymConfig(datasets=[SUMS], size=5, val_size=2)
    data = DataConfig(task="reasoning_gym", reasoning_gym=section, prompt_file=str(tmp_path / "shots.txt"))
    train, held_out = load_prompts(data, tokenizer, silent)
    assert (len(train), len(held_out)) == (5, 2)
    for prompt in train:
        assert prompt.text == "1 + 1 = 2\n" + prompt.metadata["reasoning_gym"]["item"]["question"]
        assert prompt.id.startswith("reasoning_gym/chain_sum/")


def test_the_package_is_imported_by_nobody_else() -> None:
    code = (
        "import sys, lora_rl.data; from lora_rl.config.schema import ReasoningGymConfig; "
        "lora_rl.data.load.reasoning_gym_examples(ReasoningGymConfig(datasets=['gcd'], size=2, val_size=1), print); "
        "print([m for m in ('reasoning_gym', 'pyarrow', 'sympy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
