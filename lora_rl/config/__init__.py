"""Strict configuration: a typed schema, YAML inheritance, dotted overrides, rules between keys.

Nothing here imports torch, transformers, ray or vllm, so `--help`, `--dry-run` and every error answer at once.
Read in this order: `schema/` (every key), `load` (file + overrides -> RunConfig), `rules`, `model_rules` and
`capabilities` (what is refused and why), `layout` (the processes a configuration asks for), `memory_plan` (what they
need of a GPU), `command_line`.
"""

from lora_rl.config.command_line import CommandLine, check_machine, exit_on_config_error, parse_command_line
from lora_rl.config.errors import ConfigError, Violation
from lora_rl.config.layout import Layout, derive_layout
from lora_rl.config.load import load_config, resolved_yaml
from lora_rl.config.schema import RunConfig
from lora_rl.config.sft import as_sft, derive_sft_layout

__all__ = [
    "CommandLine",
    "ConfigError",
    "Layout",
    "RunConfig",
    "Violation",
    "as_sft",
    "check_machine",
    "derive_layout",
    "derive_sft_layout",
    "exit_on_config_error",
    "load_config",
    "parse_command_line",
    "resolved_yaml",
]
