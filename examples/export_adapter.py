"""Turn a trained adapter into a merged Hugging Face model, or copy it out as a PEFT directory.

uv run examples/export_adapter.py --adapter results/grpo_tiny_cpu/adapter --out merged-model
uv run examples/export_adapter.py --adapter results/grpo_tiny_cpu/adapter --out my-adapter --format peft
"""

import argparse
import sys
from pathlib import Path


def main() -> int:
    """Parse, read, write; wrong input ends with one message and code 2."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapter", type=Path, required=True, help="PEFT directory, such as a run folder's adapter/")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; must not exist")
    parser.add_argument("--format", choices=("merged", "peft"), default="merged")
    parser.add_argument("--base", help="base model, a directory or hub id; default: the one named in the adapter")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "base"), default="base", help="of merged weights")
    arguments = parser.parse_args()
    from lora_rl.data import model_folder
    from lora_rl.lora.export import export_merged
    from lora_rl.lora.peft_io import read_peft, write_peft

    try:
        adapter = read_peft(arguments.adapter)
        base = arguments.base or adapter.base_model_name_or_path or ""
        if arguments.format == "peft":
            write_peft(arguments.out, adapter, base_model=base)
        elif not base:
            raise ValueError(f"{arguments.adapter} does not name its base model: use --base")
        else:
            export_merged(model_folder(base), adapter, arguments.out, dtype=arguments.dtype)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{arguments.format} written to {arguments.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
