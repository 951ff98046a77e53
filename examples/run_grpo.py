"""Train a language model with GRPO through LoRA adapters.

uv run examples/run_grpo.py --config examples/configs/grpo_tiny_cpu.yaml [key.sub=value ...]
"""

import sys

from lora_rl.config import check_machine, derive_layout, exit_on_config_error, parse_command_line


def main() -> int:
    """Parse, check, run; the exit code is that of the job."""
    with exit_on_config_error():
        command = parse_command_line(sys.argv[1:], prog="run_grpo.py", description=__doc__.splitlines()[0])
        layout = derive_layout(command.config)
        if command.dry_run:
            sys.stdout.write(command.dry_run_report())
            return 0
        check_machine(command.config, layout)
    from lora_rl.train.run import run

    return run(command.config, layout)


if __name__ == "__main__":
    sys.exit(main())
