"""The command line of a job: `run.py --config X.yaml [--dry-run] key.sub=value ...`."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from lora_rl.config.errors import NO_VALUE, ConfigError, Violation, show
from lora_rl.config.hardware import missing, missing_violations, model_files
from lora_rl.config.keys import REQUIRED, all_keys
from lora_rl.config.layout import Layout, derive_layout
from lora_rl.config.load import load_config, resolved_yaml
from lora_rl.config.memory_plan import memory_plan
from lora_rl.config.schema import RunConfig

EXIT_CODE = 2  # what argparse, and most tools, return for a wrong command line

_EPILOG = """\
examples:
  {prog} --config examples/configs/grpo_tiny_cpu.yaml
  {prog} --config examples/configs/grpo_tiny_cpu.yaml grpo.max_num_steps=50 policy.megatron_cfg.peft.dim=8
  {prog} --config examples/configs/grpo_tiny_cpu.yaml --dry-run

Overrides are dotted.key=value, applied in order. Lists are written as in YAML: key=[a, b]. null, none and ~ are null.
A file inherits from others by `defaults: base.yaml` or a list, relative to itself; later files win.
--list-keys prints every key with its valid values, default and meaning.
"""


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line.

    Attributes:
        config: the checked configuration.
        config_path: the file it came from.
        overrides: the `key=value` arguments, in order.
        dry_run: print what would run, and end.
        options: all arguments as parsed, with those of `add_options`.
    """

    config: RunConfig
    config_path: Path
    overrides: tuple[str, ...]
    dry_run: bool
    options: argparse.Namespace = field(default_factory=argparse.Namespace)

    def dry_run_report(self, *, plan: bool = True) -> str:
        """The resolved configuration, the processes it asks for, the memory they need, and what this machine lacks.

        Args:
            plan: with the memory plan, which is that of GRPO.

        Raises:
            ConfigError: the ranks do not divide evenly.
        """
        layout = derive_layout(self.config)
        lacks = missing(self.config, layout)
        parts = [
            layout.describe(engines=plan),
            *([memory_plan(self.config, layout).describe()] if plan else []),
            model_files(self.config),
            "missing on this machine:\n" + "\n".join(f"  {line}" for line in lacks) if lacks else "nothing is missing",
        ]
        return "\n".join([resolved_yaml(self.config), *parts, ""])


def parse_command_line(
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> CommandLine:
    """Parse arguments and load the configuration.

    Args:
        argv: arguments without the program's name.
        prog, description: for the usage text.
        add_options: adds a program's own options; their values are in `CommandLine.options`.

    Raises:
        ConfigError: a wrong option, or any violation in the configuration.
        SystemExit: with code 0 after `--help` or `--list-keys`, which print to standard output.
    """
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=_EPILOG.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with the configuration (required)")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, and end")
    parser.add_argument("--list-keys", action="store_true", help="print every configuration key, and end")
    add_options(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the file")
    arguments, unknown = parser.parse_known_intermixed_args(list(argv))
    if arguments.list_keys:
        sys.stdout.write(list_keys())
        raise SystemExit(0)
    violations = [_unknown_option(option) for option in unknown]
    if arguments.config is None:
        problem = "required, for example --config examples/configs/grpo_tiny_cpu.yaml"
        violations.append(Violation("--config", problem))
    if violations:
        raise ConfigError(violations, "the command line")
    overrides = tuple(arguments.overrides)
    config = load_config(arguments.config, overrides)
    return CommandLine(config, Path(arguments.config), overrides, arguments.dry_run, arguments)


@contextlib.contextmanager
def exit_on_config_error() -> Iterator[None]:
    """Turn a ConfigError into its list on standard error and exit code 2, without a traceback."""
    try:
        yield
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(EXIT_CODE) from None


def check_machine(config: RunConfig, layout: Layout, *, plan: bool = True) -> None:
    """Refuse a run that cannot begin on this machine; a dry run says the same and goes on.

    Args:
        plan: also look at the memory plan, which is that of GRPO.

    Raises:
        ConfigError: GPUs or packages are missing, or weights alone are larger than the memory they must be in.
    """
    violations = missing_violations(config, layout)
    for holder, problem in memory_plan(config, layout).too_large() if plan else ():
        advice = f"use more GPUs (tensor_model_parallel_size), or raise {holder.key}"
        violations.append(Violation("policy.model_name", f"{problem}; {advice}", config.policy.model_name))
    if violations:
        raise ConfigError(violations)


def list_keys() -> str:
    """Every key with its valid values, default and meaning, one paragraph each."""
    lines = []
    for key in all_keys().values():
        default = "required" if key.default is REQUIRED else f"default {show(key.default)}"
        lines.append(f"{key.path}  ({key.valid}; {default})\n    {key.description}\n")
    return "".join(lines)


class _Parser(argparse.ArgumentParser):
    """Reports what argparse refuses as a ConfigError."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([Violation(self.prog, f"{message}; --help shows the usage")], "the command line")


def _unknown_option(option: str) -> Violation:
    name, equals, _ = option.partition("=")
    if equals and name.lstrip("-") in all_keys():
        return Violation(option, f"write overrides without dashes: {option.lstrip('-')}")
    near = difflib.get_close_matches(name, ("--config", "--dry-run", "--list-keys", "--help"), n=1)
    return Violation(option, "unknown option", NO_VALUE, tuple(near))
