"""Fine-tune LoRA adapters, or all weights, on prompts with answers.

uv run examples/run_sft.py --config examples/configs/sft_tiny_cpu.yaml [key.sub=value ...]
"""

import sys
from dataclasses import replace

from lora_rl.config import as_sft, check_machine, derive_sft_layout, exit_on_config_error, parse_command_line


def main() -> int:
    """Parse, check, run; the exit code is that of the job."""
    with exit_on_config_error():
        command = parse_command_line(sys.argv[1:], prog="run_sft.py", description=__doc__.splitlines()[0])
        config = as_sft(command.config)
        command = replace(command, config=config)
        layout = derive_sft_layout(config)
        if command.dry_run:
            sys.stdout.write(command.dry_run_report(plan=False))
            return 0
        check_machine(config, layout, plan=False)
    from lora_rl.train.run import run

    return run(config, layout, "sft")


if __name__ == "__main__":
    sys.exit(main())
