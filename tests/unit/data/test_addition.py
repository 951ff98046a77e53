import subprocess
import sys
from pathlib import Path

import pytest

from lora_rl.data import addition_pairs, addition_prompts, load_tokenizer

MODEL_DIR = Path(__file__).parents[3] / "examples" / "models" / "tiny-adder"


def test_split_is_complete_and_disjoint():
    train, held_out = addition_pairs()
    assert (len(train), len(held_out)) == (7290, 810)
    assert set(train) | set(held_out) == {(a, b) for a in range(10, 100) for b in range(10, 100)}
    assert not set(train) & set(held_out)


def test_split_depends_on_the_seed_alone():
    assert addition_pairs(split_seed=3) == addition_pairs(split_seed=3)
    assert addition_pairs(split_seed=3)[1] != addition_pairs(split_seed=4)[1]


def test_default_split_never_changes():
    # The shipped model was trained on this split: another one would leak its training pairs into evaluation.
    assert addition_pairs()[1][:3] == [(10, 26), (10, 34), (10, 45)]


@pytest.mark.parametrize(("digits", "first", "last"), [(1, (0, 0), (9, 9)), (3, (100, 100), (999, 999))])
def test_digits(digits, first, last):
    train, held_out = addition_pairs(digits=digits, held_out_pairs=10)
    pairs = sorted(train + held_out)
    assert (pairs[0], pairs[-1], len(pairs)) == (first, last, (last[0] - first[0] + 1) ** 2)


@pytest.mark.parametrize("kwargs", [{"digits": 0}, {"digits": 4}, {"held_out_pairs": 0}, {"held_out_pairs": 8100}])
def test_bad_arguments_are_named(kwargs):
    ((key, value),) = kwargs.items()
    with pytest.raises(ValueError, match=f"{key} is {value}"):
        addition_pairs(**kwargs)


def test_prompts():
    tokenizer = load_tokenizer(MODEL_DIR)
    train, held_out = addition_prompts(tokenizer)
    assert len({prompt.id for prompt in train + held_out}) == 8100
    for prompt in held_out:
        a, b = prompt.metadata["a"], prompt.metadata["b"]
        assert prompt.text == f"{a}+{b}="
        assert prompt.answer == str(a + b)
        assert tokenizer.decode(prompt.token_ids) == prompt.text


def test_data_package_stays_light():
    code = "import sys, lora_rl.data; print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
