"""Sections `data` and `sft`: where prompts and examples come from."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from lora_rl.config.schema.base import BelowOne, Fraction, Section


def _typed(value: Any) -> Any:
    """Numbers and booleans for text that reads as one: nothing else says which type a procedural task expects."""
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_typed(item) for item in value]
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+", value):
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", value, re.IGNORECASE):
        return float(value)
    return value


def _named(value: Any) -> Any:
    """A bare name in the list of tasks stands for the task with its default settings."""
    return [{"name": item} if isinstance(item, str) else item for item in value] if isinstance(value, list) else value


class AdditionConfig(Section):
    """`data.addition`: prompts `a+b=` over all pairs of numbers with the given digits."""

    digits: Annotated[int, Ge(1), Le(3)] = Field(2, description="Digits of both summands.")
    held_out_pairs: PositiveInt = Field(810, description="Pairs kept for validation and never trained on.")
    split_seed: NonNegativeInt = Field(0, description="Seed of the split into training and held-out pairs.")


class ReasoningGymTask(Section):
    """One entry of `data.reasoning_gym.datasets`."""

    name: str = Field(description="Name of the procedural dataset in reasoning-gym, such as chain_sum.")
    weight: PositiveFloat = Field(1.0, description="Share of the prompts, relative to the other entries.")
    config: Annotated[dict[str, Any], BeforeValidator(_typed)] = Field(
        default_factory=dict, description="Settings of the dataset, such as max_terms; not its seed and size."
    )


class ReasoningGymConfig(Section):
    """`data.reasoning_gym`: procedural, verifiable questions of the package reasoning-gym."""

    datasets: Annotated[list[ReasoningGymTask], BeforeValidator(_named)] = Field(
        [], description="What to draw from: names, or entries with a weight and a config of their own."
    )
    size: PositiveInt = Field(1000, description="Different questions to train on.")
    seed: NonNegativeInt = Field(0, description="Seed of the training questions.")
    val_size: NonNegativeInt = Field(100, description="Different questions for validation, none of them trained on.")
    val_seed: NonNegativeInt = Field(1_000_000_007, description="Seed of the validation questions.")


class DataConfig(Section):
    """`data`: where prompts come from, and what is made of them."""

    task: Literal["addition", "reasoning_gym"] | None = Field(
        "addition", description="Built-in source of prompts; null: the files of train_path and val_path."
    )
    train_path: str | None = Field(
        None,
        description="Prompts to train on: a .jsonl or .parquet file, or a folder that datasets' save_to_disk wrote.",
    )
    val_path: str | None = Field(
        None, description="Prompts to validate on, of the same kind; null: validation_split of train_path."
    )
    validation_split: BelowOne = Field(
        0.0, description="Share of the prompts of train_path that is held out, chosen by a hash of the prompt."
    )
    drop_overlap: bool = Field(
        False, description="Leave prompts out of training that are in val_path too; false: refuse such files."
    )
    input_key: str = Field("prompt", description="Column of the prompt: text, or a list of chat messages.")
    output_key: str = Field("answer", description="Column of the reference answer: text.")
    id_key: str | None = Field(None, description="Column of a unique id; null: a hash of prompt and answer.")
    prompt_mode: Literal["raw", "chat"] = Field(
        "raw", description="raw: the model gets the prompt's text; chat: it gets what the chat template makes of it."
    )
    prompt_file: str | None = Field(
        None, description="Text around each prompt, with {} where the prompt goes; null: the prompt alone."
    )
    system_prompt_file: str | None = Field(
        None, description="Text of a system message before each prompt, in prompt_mode chat; null: none."
    )
    addition: AdditionConfig = Field(default_factory=AdditionConfig)
    reasoning_gym: ReasoningGymConfig = Field(default_factory=ReasoningGymConfig)
    shuffle: bool = Field(True, description="Draw the prompts of each epoch in a new random order.")
    seed: NonNegativeInt | None = Field(None, description="Seed of that order; null: grpo.seed.")


class SFTConfig(Section):
    """`sft`: what `run_sft.py` takes instead of `grpo`, of which it has seed, val_at_start and sizes of validation."""

    train_path: str | None = Field(
        None, description="Examples to train on, a file or folder as data.train_path; null: the source of data."
    )
    val_path: str | None = Field(
        None, description="The same for validation; null: data.validation_split of train_path, or the source of data."
    )
    prompt_key: str | None = Field(None, description="Column of the prompt in that source; null: data.input_key.")
    answer_key: str | None = Field(None, description="Column of the answer in that source; null: data.output_key.")
    batch_size: PositiveInt = Field(64, description="Examples per step, which is one optimizer step.")
    max_num_steps: PositiveInt = Field(200, description="Steps after which the run ends.")
    max_num_epochs: PositiveInt | None = Field(
        None, description="Passes over the examples after which the run ends, if earlier; null: no such limit."
    )
    val_period: NonNegativeInt = Field(20, description="Steps between validations; 0: none while training.")
    train_all_weights: bool = Field(
        False, description="Train every weight of the model instead of adapters; for small models in float32."
    )
    target_answer_probability: Fraction | None = Field(
        None, description="val/answer_probability at which the run ends early; null: never."
    )
