"""Reading files: inheritance, and everything that can be wrong with a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lora_rl.config import ConfigError, load_config, resolved_yaml
from lora_rl.config.yaml_source import NULL_SPELLINGS

REPOSITORY = Path(__file__).parents[3]


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_child_wins_sections_merge_and_lists_are_replaced(tmp_path, config_file):
    write(
        tmp_path,
        "base.yaml",
        "defaults: run.yaml\ngrpo: {seed: 1, val_period: 5}\npolicy: {megatron_cfg: {peft: {dim: 4, alpha: 4}}}\n",
    )
    child = write(
        tmp_path,
        "sub/child.yaml",
        "defaults: ../base.yaml\ngrpo: {seed: 2}\npolicy: {megatron_cfg: {peft: {target_modules: [linear_fc2]}}}\n",
    )
    config = load_config(child)
    assert (config.grpo.seed, config.grpo.val_period, config.grpo.max_num_steps) == (2, 5, 100)
    assert config.policy.megatron_cfg.peft.target_modules == ["linear_fc2"]
    assert config.policy.megatron_cfg.peft.dim == 4


def test_later_defaults_win(tmp_path, config_file):
    write(tmp_path, "a.yaml", "grpo: {seed: 1, val_period: 1}\n")
    write(tmp_path, "b.yaml", "grpo: {seed: 2}\n")
    config = load_config(write(tmp_path, "c.yaml", "defaults: [run.yaml, a.yaml, b.yaml]\n"))
    assert (config.grpo.seed, config.grpo.val_period) == (2, 1)
    config = load_config(write(tmp_path, "d.yaml", "defaults: [run.yaml, b.yaml, a.yaml]\n"))
    assert config.grpo.seed == 1


def test_the_same_base_twice_is_no_cycle(tmp_path, config_file):
    write(tmp_path, "a.yaml", "defaults: run.yaml\ngrpo: {seed: 1}\n")
    write(tmp_path, "b.yaml", "defaults: run.yaml\ngrpo: {val_period: 3}\n")
    config = load_config(write(tmp_path, "c.yaml", "defaults: [a.yaml, b.yaml]\n"))
    assert (config.grpo.seed, config.grpo.val_period) == (1, 3)


def test_a_cycle_names_the_chain(tmp_path):
    a = write(tmp_path, "a.yaml", "defaults: b.yaml\n")
    write(tmp_path, "b.yaml", "defaults: [c.yaml]\n")
    write(tmp_path, "c.yaml", "defaults: a.yaml\n")
    with pytest.raises(ConfigError) as caught:
        load_config(a)
    chain = " -> ".join(str(tmp_path / name) for name in ("a.yaml", "b.yaml", "c.yaml", "a.yaml"))
    assert chain in str(caught.value)


def test_wrong_defaults_are_refused(tmp_path, refused, model_dir):
    path = write(tmp_path, "x.yaml", f"defaults: {{a: b}}\npolicy: {{model_name: {model_dir}}}\n")
    assert "expected a file relative to" in refused(path=path)["defaults"].problem


def test_syntax_error_names_file_line_and_column(tmp_path):
    path = write(tmp_path, "x.yaml", "grpo:\n  seed: 1\n  val_period: [1, 2\npolicy: {}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    [violation] = caught.value.violations
    assert violation.key.startswith(f"{path}:4:")
    assert "not valid YAML at line 4, column" in violation.problem


def test_missing_file_suggests_near_ones(tmp_path, config_file):
    write(tmp_path, "grpo_tiny_cpu.yaml", "{}")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "grpo_tiny.yaml")
    [violation] = caught.value.violations
    assert violation.key == str(tmp_path / "grpo_tiny.yaml")
    assert violation.problem == "no such file"
    assert violation.hints == (str(tmp_path / "grpo_tiny_cpu.yaml"),)


def test_missing_file_without_a_near_one_lists_what_is_there(tmp_path, config_file):
    with pytest.raises(ConfigError, match=r"no such file; .* has run\.yaml"):
        load_config(tmp_path / "zzzzzzz")


def test_missing_folder_and_folder_instead_of_file(tmp_path, config_file):
    with pytest.raises(ConfigError, match=r"the folder .* does not exist either"):
        load_config(tmp_path / "nowhere" / "run.yaml")
    with pytest.raises(ConfigError, match=r"this is a folder; name a YAML file; .* has run\.yaml"):
        load_config(tmp_path)


def test_missing_parent_is_reported_under_its_own_name(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        load_config(write(tmp_path, "x.yaml", "defaults: gone.yaml\n"))


def test_duplicate_key_names_both_lines(tmp_path, refused, model_dir):
    text = f"policy: {{model_name: {model_dir}}}\ncluster: {{platform: cpu}}\ngrpo:\n  seed: 1\n  seed: 2\n"
    path = write(tmp_path, "x.yaml", text)
    violation = refused(path=path)["grpo.seed"]
    assert violation.origin == f"{path}:5"
    assert f"first at {path}:4" in violation.problem


def test_violations_carry_file_and_line_even_when_inherited(tmp_path, refused, config_file):
    base = write(tmp_path, "base.yaml", "defaults: run.yaml\ngrpo:\n  max_steps: 5\n  num_generations_per_prompt: 1\n")
    violations = refused(path=write(tmp_path, "x.yaml", "defaults: base.yaml\n"))
    assert violations["grpo.max_steps"].origin == f"{base}:3"
    assert violations["grpo.num_generations_per_prompt"].origin == f"{base}:4"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- a\n- b\n", "expected sections with keys"),
        (b"just text\n", "expected sections with keys"),
        (b"grpo: \xff\xfe\n", "not a UTF-8 YAML file"),
        (b"a: 1\n---\nb: 2\n", "not valid YAML at line 2"),
    ],
)
def test_other_unreadable_files(tmp_path, content, message):
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_key_that_is_not_text_and_alias_that_contains_itself(tmp_path, refused, model_dir):
    text = f"policy: {{model_name: {model_dir}}}\ncluster: {{platform: cpu}}\n"
    path = write(tmp_path, "x.yaml", text + "? [a, b]\n: 1\n")
    assert refused(path=path)[str(path)].problem == "a key must be text"
    path = write(tmp_path, "y.yaml", text + "grpo: &loop\n  seed: *loop\n")
    with pytest.raises(ConfigError, match="the alias contains itself"):
        load_config(path)


def test_empty_file_lacks_the_model(tmp_path, refused):
    path = write(tmp_path, "x.yaml", "")
    assert "required, but not set" in refused(path=path)["policy.model_name"].problem


def test_log_dir_follows_the_file_unless_it_is_set(config_file):
    assert load_config(config_file).logger.log_dir == "results/run"
    assert load_config(config_file.rename(config_file.with_name("my.yaml"))).logger.log_dir == "results/my"
    assert load_config(config_file.with_name("my.yaml"), ["logger.log_dir=out"]).logger.log_dir == "out"
    assert load_config(config_file.with_name("my.yaml"), ["logger.log_dir=null"]).logger.log_dir == "results/my"


def test_model_path_is_found_from_the_current_directory_and_from_the_project(tmp_path, config_file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config(config_file, ["policy.model_name=model"]).policy.model_name == str(tmp_path / "model")
    (tmp_path / "pyproject.toml").touch()
    deep = write(tmp_path, "a/b/deep.yaml", config_file.read_text())
    monkeypatch.chdir("/")
    config = load_config(deep, ["policy.model_name=model"])
    assert config.policy.model_name == str(tmp_path / "model")
    assert config.policy.tokenizer_name == config.policy.model_name


def test_round_trip(tmp_path, config_file):
    overrides = [
        "policy.megatron_cfg.optimizer.lr=1e-5",
        "policy.max_grad_norm=null",
        r'policy.generation.stop_strings=["\n", "null", "None", "~", " ", "é: #"]',
        "logger.wandb.name='none'",
        "logger.wandb.project=007",
        "policy.generation.stop_token_ids=[1, 2]",
    ]
    config = load_config(config_file, overrides)
    again = write(tmp_path, "resolved.yaml", resolved_yaml(config))
    assert load_config(again) == config
    assert resolved_yaml(load_config(again)) == resolved_yaml(config)


@settings(max_examples=50, deadline=None)
@example(text="\x85")
@example(text="a\u2028b\r")
@given(text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00"), max_size=20))
def test_any_text_survives_the_round_trip(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("text")
    base = load_config(write(folder, "run.yaml", "policy: {model_name: Qwen/Qwen3-0.6B}\ncluster: {platform: cpu}\n"))
    wandb = base.logger.wandb.model_copy(update={"name": text})
    config = base.model_copy(update={"logger": base.logger.model_copy(update={"wandb": wandb})})
    assert load_config(write(folder, "resolved.yaml", resolved_yaml(config))).logger.wandb.name == text


def test_null_spellings_as_text_survive_the_round_trip(tmp_path, config_file):
    for spelling in NULL_SPELLINGS:
        config = load_config(config_file, [f"logger.wandb.name='{spelling}'"])
        assert config.logger.wandb.name == spelling
        again = write(tmp_path, "resolved.yaml", resolved_yaml(config))
        assert load_config(again).logger.wandb.name == spelling


def test_every_shipped_configuration_loads(model_dir):
    files = sorted((REPOSITORY / "examples" / "configs").glob("grpo*.yaml"))
    assert files
    for path in files:
        config = load_config(path, [f"policy.model_name={model_dir}"])
        assert config.logger.log_dir == f"results/{path.stem}"


def test_the_default_job(model_dir):
    config = load_config(REPOSITORY / "examples/configs/grpo_tiny_cpu.yaml", [f"policy.model_name={model_dir}"])
    assert config.sequences_per_step == 512
    assert config.num_optimizer_steps == 4 * config.grpo.max_num_steps
    assert config.policy.megatron_cfg.optimizer.lr == 1e-3
    assert config.policy.megatron_cfg.scheduler.lr_warmup_iters == 20
    assert config.policy.max_total_sequence_length == 32
    assert config.policy.precision == "float32"
