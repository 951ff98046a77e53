"""A key that does not exist is refused, and the one that was meant is named."""

from __future__ import annotations

import string

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lora_rl.config import ConfigError, load_config
from lora_rl.config.keys import all_keys, all_sections
from tests.unit.config.sample_files import write_config, write_model


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("grpo.max_steps", "grpo.max_num_steps"),
        ("policy.temperature", "policy.generation.temperature"),
        ("grpo.num_generation_per_prompt", "grpo.num_generations_per_prompt"),
        ("grppo.seed", "grpo.seed"),
        ("policy.peft.dim", "policy.megatron_cfg.peft.dim"),
        ("policy.generation.max_model_len", "policy.generation.vllm_cfg.max_model_len"),
        ("policy.optimizer.lr", "policy.megatron_cfg.optimizer.lr"),
        ("lr", "policy.megatron_cfg.optimizer.lr"),
        ("policy.megatron_cfg.peft.lora_a_init_method", "policy.megatron_cfg.peft.lora_A_init_method"),
        ("grpo.seed.value", "grpo.seed"),
    ],
)
def test_the_first_hint_is_the_right_key(refused, wrong, right):
    violations = refused(f"{wrong}=1")
    assert list(violations) == [wrong]
    if wrong != "grpo.seed.value":
        assert violations[wrong].hints[0] == right
    assert f"{wrong} = 1  (command line)\n    unknown key" in str(violations[wrong])


def test_unknown_key_in_a_file_is_refused_with_its_line(tmp_path, refused, config_file):
    path = tmp_path / "child.yaml"
    path.write_text(
        "defaults: run.yaml\ngrppo:\n  seed: 3\npolicy:\n  megatron_cgf:\n    num_threads: 1\n    peft: {}\n"
    )
    violations = refused(path=path)
    assert violations["grppo.seed"].hints[0] == "grpo.seed"
    assert violations["grppo.seed"].origin == f"{path}:2"
    assert violations["policy.megatron_cgf"].hints[0] == "policy.megatron_cfg"
    assert len(violations) == 2


def test_nothing_alike_says_where_keys_are_listed(refused):
    violation = refused("zzzz.qqqq=1")["zzzz.qqqq"]
    assert violation.hints == ()
    assert "--list-keys" in violation.problem


def test_misspelt_required_key_is_one_mistake(tmp_path, refused):
    path = tmp_path / "x.yaml"
    path.write_text("policy: {model_nam: ./somewhere}\n")
    violations = refused(path=path)
    assert list(violations) == ["policy.model_nam"]
    assert violations["policy.model_nam"].hints[0] == "policy.model_name"


def test_rules_are_silent_about_a_key_that_was_misspelt(refused):
    overrides = ("policy.megatron_cfg.scheduler.lr_warmup_iters=150", "grpo.max_steps=200")
    assert list(refused(*overrides)) == ["grpo.max_steps"]  # not: the warm-up is longer than the default run


ALPHABET = string.ascii_letters + string.digits + "_."


@st.composite
def one_edit(draw: st.DrawFn) -> tuple[str, str]:
    """(an existing key, the key with one character dropped, added, changed or swapped with the next)."""
    key = draw(st.sampled_from(sorted(all_keys())))
    kind = draw(st.sampled_from(["drop", "add", "change", "swap"]))
    at = draw(st.integers(0, len(key) - (2 if kind == "swap" else 1)))
    character = draw(st.sampled_from(ALPHABET))
    edited = {
        "drop": key[:at] + key[at + 1 :],
        "add": key[:at] + character + key[at:],
        "change": key[:at] + character + key[at + 1 :],
        "swap": key[:at] + key[at + 1 : at + 2] + key[at] + key[at + 2 :],
    }[kind]
    return key, edited


@pytest.fixture(scope="module")
def shared_config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unknown")
    return write_config(folder, write_model(folder / "model"))


@settings(max_examples=150, deadline=None)
@given(pair=one_edit())
def test_any_single_slip_is_refused_and_corrected(shared_config, pair):
    key, edited = pair
    assume(edited not in all_keys() and edited not in all_sections())
    with pytest.raises(ConfigError) as caught:
        load_config(shared_config, [f"{edited}=1"])
    [violation] = caught.value.violations
    assert violation.key == edited
    assert key in violation.hints
