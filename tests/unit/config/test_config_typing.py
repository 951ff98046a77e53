"""Values get their type from the schema, in YAML and on the command line alike."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest

from lora_rl.config import load_config
from lora_rl.config.keys import all_keys, all_sections


def read(path: Path, *overrides: str, key: str) -> Any:
    return operator.attrgetter(key)(load_config(path, overrides))


TYPED = [
    ("grpo.max_num_steps", "50", 50),
    ("grpo.normalize_rewards", "false", False),
    ("grpo.normalize_rewards", "off", False),
    ("policy.megatron_cfg.optimizer.lr", "1e-3", 1e-3),
    ("policy.megatron_cfg.optimizer.lr", "2E-5", 2e-5),
    ("policy.megatron_cfg.peft.alpha", "8", 8.0),
    ("policy.generation.top_k", "-1", -1),
    ("policy.precision", "bfloat16", "bfloat16"),
    ("logger.wandb.name", "007", "007"),
    ("logger.wandb.name", "1e-3", "1e-3"),
    ("logger.wandb.name", "yes", "yes"),
    ("logger.wandb.name", "12:30:45", "12:30:45"),
    ("logger.wandb.name", "'null'", "null"),
    ("policy.megatron_cfg.peft.target_modules", "[linear_qkv, linear_fc1]", ["linear_qkv", "linear_fc1"]),
    ("policy.generation.stop_token_ids", "[3, 257]", [3, 257]),
    ("policy.generation.stop_strings", r'["\n", "7", "null"]', ["\n", "7", "null"]),
    ("policy.generation.stop_strings", "[]", []),
]


@pytest.mark.parametrize(("key", "text", "value"), TYPED)
def test_override_is_typed_by_the_schema(config_file, key, text, value):
    got = read(config_file, f"{key}={text}", key=key)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(("key", "text", "value"), TYPED)
def test_yaml_is_typed_by_the_schema(tmp_path, config_file, key, text, value):
    child = tmp_path / "child.yaml"
    *sections, name = key.split(".")
    lines = [f"{'  ' * depth}{section}:" for depth, section in enumerate(sections)]
    child.write_text("defaults: run.yaml\n" + "\n".join([*lines, f"{'  ' * len(sections)}{name}: {text}"]))
    got = read(child, key=key)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize("spelling", ["null", "Null", "NULL", "none", "None", "NONE", "~", ""])
@pytest.mark.parametrize("key", ["policy.max_grad_norm", "policy.generation.stop_strings", "logger.wandb.name"])
def test_every_spelling_of_null(tmp_path, config_file, spelling, key):
    assert read(config_file, f"{key}={spelling}", key=key) is None
    child = tmp_path / "child.yaml"
    *sections, name = key.split(".")
    child.write_text(f"defaults: run.yaml\n{sections[0]}: {nested([*sections[1:], name], spelling)}\n")
    assert read(child, key=key) is None


def nested(names: list[str], text: str) -> str:
    """A flow mapping `{a: {b: text}}`."""
    for name in reversed(names):
        text = f"{{{name}: {text}}}"
    return text


def test_text_override_is_taken_as_it_is(config_file):
    assert read(config_file, "logger.log_dir=out/a b: [c] {d} #e", key="logger.log_dir") == "out/a b: [c] {d} #e"
    assert read(config_file, "logger.log_dir=a=b", key="logger.log_dir") == "a=b"


def test_later_override_wins_and_hydra_prefixes_are_accepted(config_file):
    overrides = ("grpo.seed=1", "+grpo.seed=2", "++grpo.seed=3")
    assert read(config_file, *overrides, key="grpo.seed") == 3


def test_a_whole_section_is_merged(config_file):
    config = load_config(config_file, ["policy.generation={temperature: 0.7, vllm_cfg: {max_num_seqs: 64}}"])
    assert config.policy.generation.temperature == 0.7
    assert config.policy.generation.vllm_cfg.max_num_seqs == 64
    assert config.policy.generation.max_new_tokens == 8  # from the file


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("grpo.max_num_steps=fifty", "expected int > 0"),
        ("grpo.max_num_steps=2.5", "expected int > 0"),
        ("grpo.max_num_steps=0", "expected int > 0"),
        ("grpo.max_num_steps=null", "expected int > 0"),
        ("grpo.normalize_rewards=maybe", "expected true | false"),
        ("policy.megatron_cfg.optimizer.lr=nan", "expected number > 0"),
        ("policy.megatron_cfg.optimizer.lr=-inf", "expected number > 0"),
        ("policy.max_grad_norm=big", "expected number > 0 | null"),
        ("policy.megatron_cfg.peft.target_modules=linear_qkv", "expected list of text"),
        ("policy.generation.stop_token_ids=[1, two]", "expected list of int >= 0 | null"),
        ("policy.generation.stop_token_ids=[1, 2", "not valid YAML"),
        ("policy.generation.top_p=1.5", "expected number > 0 and <= 1"),
        ("policy.megatron_cfg.peft.dropout=1", "expected number >= 0 and < 1"),
        ("loss_fn.reference_policy_kl_penalty=-0.1", "expected number >= 0"),
        ("data.addition.digits=4", "expected int >= 1 and <= 3"),
        ("grpo=5", "this is a section; expected its keys (num_prompts_per_step,"),
        ("policy=5", "this is a section; expected its keys (model_name,"),
    ],
)
def test_wrong_value_names_what_is_valid(refused, override, expected):
    key, _, text = override.partition("=")
    violations = refused(override)
    assert list(violations) == [key]
    assert violations[key].problem.startswith(expected)
    assert violations[key].origin == "command line"
    assert violations[key].value is None if text == "null" else violations[key].value is not None


def test_wrong_word_gets_the_nearest_one(refused):
    assert refused("policy.precision=float3")["policy.precision"].hints == ("float32",)
    assert refused("loss_fn.importance_sampling_type=icepop2")["loss_fn.importance_sampling_type"].hints == ("icepop",)


def test_every_key_refuses_a_mapping_under_its_own_name(refused):
    for key in all_keys():
        violations = refused(f"{key.rpartition('.')[0]}={{{key.rpartition('.')[2]}: {{a: {{b: 1}}}}}}")
        assert key in violations, key
        assert violations[key].problem.startswith("expected"), key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("policy.tokenizer.name", "${policy.model_name}"),
        ("logger.log_dir", "results/${policy.precision}"),
        ("checkpointing.checkpoint_dir", "${HOME}/checkpoints"),
        ("logger.log_dir", "${oc.env:RUNS,/tmp}/x"),
        ("checkpointing.checkpoint_dir", "${HOME:-/tmp}"),
        ("logger.wandb.name", "${now:%Y-%m-%d}"),
    ],
)
def test_reference_to_another_key_is_refused(refused, key, value):
    problem = refused(f"{key}={value}")[key].problem
    assert "references to other keys or to the environment are not supported" in problem


def test_a_text_may_have_what_looks_like_a_reference(config_file):
    config = load_config(config_file, ["policy.generation.stop_strings=['${x}']", "logger.wandb.name='a ${b} c'"])
    assert config.policy.generation.stop_strings == ["${x}"]
    assert config.logger.wandb.name == "a ${b} c"


def test_a_home_folder_is_meant(config_file, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    folders = ["logger.log_dir=~/runs/x", "checkpointing.checkpoint_dir=~/kept", "checkpointing.enabled=true"]
    config = load_config(config_file, folders)
    assert config.logger.log_dir == "/home/somebody/runs/x"
    assert config.checkpointing.checkpoint_dir == "/home/somebody/kept"


def test_every_key_is_described_in_one_line():
    assert len(all_keys()) > 100
    for key in all_keys().values():
        assert key.description.endswith("."), key.path
        assert "\n" not in key.description, key.path
        assert key.valid, key.path
    for path, section in all_sections().items():
        assert f"`{path}`" in (section.__doc__ or ""), path
