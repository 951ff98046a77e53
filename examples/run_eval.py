"""Accuracy of a base model, an adapter or a checkpoint on held-out prompts.

uv run examples/run_eval.py --config examples/configs/grpo_tiny_cpu.yaml [--adapter PATH] [--k 1,4] [key.sub=value ...]
"""

import argparse
import sys
from pathlib import Path

from lora_rl.config import check_machine, derive_layout, exit_on_config_error, parse_command_line
from lora_rl.config.errors import ConfigError, Violation


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is evaluated, and how it is reported."""
    parser.add_argument("--adapter", type=Path, metavar="PATH", help="PEFT directory, checkpoint, or folder of them")
    parser.add_argument("--k", type=_numbers, default=[1], metavar="K,K", help="report pass@k for these k, such as 1,4")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results; default: <log_dir>-eval")


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 1,4") from None


def main() -> int:
    """Parse, check, evaluate, print the summary."""
    with exit_on_config_error():
        command = parse_command_line(
            sys.argv[1:], prog="run_eval.py", description=__doc__.splitlines()[0], add_options=add_options
        )
        config, options = command.config, command.options
        layout = derive_layout(config)
        samples = config.grpo.val_num_generations
        if wrong := [k for k in options.k if not 1 <= k <= samples]:
            problem = f"must be between 1 and grpo.val_num_generations = {samples}"
            raise ConfigError([Violation("--k", problem, wrong)], "the command line")
        if command.dry_run:
            sys.stdout.write(command.dry_run_report(plan=False))
            return 0
        check_machine(config, layout, plan=False)
    from lora_rl.train.run import run_evaluation

    return run_evaluation(config, layout, adapter_path=options.adapter, ks=options.k, out=options.out)


if __name__ == "__main__":
    sys.exit(main())
