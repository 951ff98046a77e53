"""The prompts that a configuration asks for, from whichever source: one way for every job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from lora_rl.config.schema import DataConfig
from lora_rl.data.addition import addition_examples
from lora_rl.data.examples import Columns, Example, Warn, keep_apart, read_examples, shorten, split_examples
from lora_rl.data.prompt_format import PromptFormat, read_template, read_text
from lora_rl.data.reasoning_gym import reasoning_gym_examples
from lora_rl.data.source import Prompt
from lora_rl.data.tokenizer import Tokenizer


def load_prompts(data: DataConfig, tokenizer: Tokenizer, warn: Warn) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held out) of the source that `data` names, as the model gets them. No prompt is in both.

    `held_out` is empty for a file without `val_path` and `validation_split`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the data or a template is faulty, naming file, line and column; see `lora_rl.data.examples`,
            `lora_rl.data.prompt_format` and `lora_rl.data.reasoning_gym`.
    """
    form = PromptFormat(
        tokenizer,
        data.prompt_mode,
        None if data.prompt_file is None else read_template(Path(data.prompt_file)),
        None if data.system_prompt_file is None else read_text(Path(data.system_prompt_file)),
    )
    train, held_out = _examples(data, warn)
    return form.prompts(train), form.prompts(held_out)


def drop_too_long(
    prompts: Sequence[Prompt], limit: int, what: str, warn: Warn, *, length: Callable[[Prompt], int] | None = None
) -> list[Prompt]:
    """The prompts of at most `limit` tokens; the others are reported.

    Args:
        what: the keys that the limit comes from, with their values.
        length: tokens that count; default: those of the prompt.

    Raises ValueError if none of them fits.
    """
    lengths = [len(prompt.token_ids) if length is None else length(prompt) for prompt in prompts]
    long = [(n, prompt) for n, prompt in zip(lengths, prompts, strict=True) if n > limit]
    if not long:
        return list(prompts)
    longest, example = max(long, key=lambda pair: pair[0])
    message = (
        f"{len(long)} of {len(prompts)} prompts have more than {limit} tokens ({what}); the longest has {longest}: "
        f"{example.id} ({shorten(example.text)})"
    )
    if len(long) == len(prompts):
        raise ValueError(f"{message}. None is left: raise the limit")
    warn(f"{message}. They are left out")
    return [prompt for n, prompt in zip(lengths, prompts, strict=True) if n <= limit]


def _examples(data: DataConfig, warn: Warn) -> tuple[list[Example], list[Example]]:
    if data.task == "addition":
        task = data.addition
        return addition_examples(task.digits, task.held_out_pairs, task.split_seed)
    if data.task == "reasoning_gym":
        return reasoning_gym_examples(data.reasoning_gym, warn)
    if data.train_path is None:
        raise ValueError("data.train_path is null; it must name a file when data.task is null")
    columns = Columns(data.input_key, data.output_key, data.id_key)
    examples = read_examples(Path(data.train_path), columns, warn)
    if data.val_path is None:
        return split_examples(examples, data.validation_split)
    held_out = read_examples(Path(data.val_path), columns, warn)
    return keep_apart(examples, held_out, drop_overlap=data.drop_overlap, warn=warn), held_out
