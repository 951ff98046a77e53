"""The command line, in this process and as a program of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lora_rl.config import ConfigError, exit_on_config_error, load_config, parse_command_line
from lora_rl.config.keys import all_keys

PROGRAM = textwrap.dedent(
    """
    import sys
    from lora_rl.config import exit_on_config_error, parse_command_line

    with exit_on_config_error():
        command = parse_command_line(sys.argv[1:], prog="run_grpo.py", description="Train.")
        if command.dry_run:
            sys.stdout.write(command.dry_run_report())
    heavy = {"torch", "transformers", "ray", "vllm", "megatron", "numpy"} & set(sys.modules)
    sys.exit(f"imported {heavy}" if heavy else 0)
    """
)


def parse(*argv: str):
    return parse_command_line(argv, prog="run_grpo.py", description="Train with GRPO.")


def run(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM, *map(str, argv)], capture_output=True, text=True)


def test_options_and_overrides_may_be_mixed(config_file):
    command = parse("grpo.seed=1", "--config", str(config_file), "grpo.val_period=2", "--dry-run", "grpo.seed=3")
    assert command.config == load_config(config_file, ["grpo.val_period=2", "grpo.seed=3"])
    assert command.config_path == config_file
    assert command.overrides == ("grpo.seed=1", "grpo.val_period=2", "grpo.seed=3")
    assert command.dry_run
    assert not parse(f"--config={config_file}").dry_run


def test_help_shows_usage_and_examples(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for part in ("Train with GRPO.", "--config FILE", "--dry-run", "--list-keys", "key=value", "examples:"):
        assert part in out


def test_list_keys_prints_every_key(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--list-keys")
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for key in all_keys().values():
        assert f"{key.path}  ({key.valid}; " in out
        assert key.description in out
    assert "policy.model_name  (text; required)" in out
    assert "grpo.num_prompts_per_step  (int > 0; default 32)" in out
    assert "policy.max_grad_norm  (number > 0 | null; default 1.0)" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--config\n    required, for example --config examples/configs/grpo_tiny_cpu.yaml"),
        (["--config"], "argument --config: expected one argument"),
        (["--cofig", "x.yaml"], "did you mean --config?"),
        (["--config", "FILE", "--dryrun"], "--dryrun\n    unknown option; did you mean --dry-run?"),
        (["--config", "FILE", "--grpo.seed=3"], "write overrides without dashes: grpo.seed=3"),
        (["--config", "FILE", "grpo.seed"], "grpo.seed  (command line)\n    expected key=value"),
    ],
)
def test_wrong_command_lines(config_file, argv, message):
    with pytest.raises(ConfigError) as caught:
        parse(*[str(config_file) if argument == "FILE" else argument for argument in argv])
    assert message in str(caught.value)


def test_config_errors_become_exit_code_two(capsys):
    with pytest.raises(SystemExit) as caught, exit_on_config_error():
        parse()
    assert caught.value.code == 2
    assert "1 mistake in the command line:" in capsys.readouterr().err


def test_other_exceptions_pass_through():
    with pytest.raises(ZeroDivisionError), exit_on_config_error():
        raise ZeroDivisionError


def test_dry_run_prints_configuration_and_processes_without_heavy_imports(config_file):
    result = run("--config", config_file, "--dry-run", "cluster.gpus_per_node=2")
    assert result.returncode == 0, result.stderr
    assert "max_num_steps: 100" in result.stdout
    assert "rank 1: tp 0, pp 0, dp 1" in result.stdout
    assert result.stderr == ""


def test_errors_have_no_traceback(config_file):
    result = run("--config", config_file, "grpo.max_steps=5", "grpo.seed=x", "policy.generation.max_new_tokens=99")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"3 mistakes in {config_file}:\n")
    assert "Traceback" not in result.stderr
