"""Rules of the sections `data` and `sft`: one source of prompts, files that are there, keys that have an effect."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from lora_rl.config.errors import Violation
from lora_rl.config.schema import RunConfig

JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet",)
SAVED_DATASET = "state.json"  # what `save_to_disk` of Hugging Face's datasets leaves in each split's folder
_KINDS = "a .jsonl or .parquet file, or a folder that datasets' save_to_disk wrote"


def data_files_are_there(config: RunConfig) -> Iterator[Violation]:
    """Files of prompts and examples exist and are of a kind that can be read."""
    for section in ("data", "sft"):
        for key in ("train_path", "val_path"):
            value = getattr(getattr(config, section), key)
            problem, near = ("", ()) if value is None else _unreadable(Path(value))
            if problem:
                yield Violation(f"{section}.{key}", problem, value, near)


def one_source_of_prompts(config: RunConfig) -> Iterator[Violation]:
    """Either a built-in task or files; a key that would be ignored is refused."""
    data, sft = config.data, config.sft
    if data.task is None and data.train_path is None and sft.train_path is None:
        problem = f"needed when data.task is null; give {_KINDS}"
        yield Violation("data.train_path", problem, None)
    if data.task is not None:
        for key in ("train_path", "val_path"):
            if (value := getattr(data, key)) is not None:
                problem = f"has no effect with data.task {data.task}; set data.task to null to read files"
                yield Violation(f"data.{key}", problem, value)
    if sft.val_path is not None and sft.train_path is None:
        problem = "has no effect without sft.train_path: the source of data has its own held-out part; leave it null"
        yield Violation("sft.val_path", problem, sft.val_path)
    for key in ("prompt_key", "answer_key"):
        if getattr(sft, key) is not None and sft.train_path is None and data.task is not None:
            problem = f"has no effect: data.task {data.task} has no columns; leave it null, or give sft.train_path"
            yield Violation(f"sft.{key}", problem, getattr(sft, key))
    pairs = [(data.train_path, data.val_path)] * (data.task is None) + [(sft.train_path, sft.val_path)]
    files = [(train, val) for train, val in pairs if train is not None]
    if data.validation_split and all(val is not None for _, val in files):
        instead = "of a val_path" if files else f"of data.task {data.task}, which holds prompts out itself"
        yield Violation("data.validation_split", f"has no effect because {instead}; set it to 0", data.validation_split)
    if data.drop_overlap and all(val is None for _, val in files):
        yield Violation("data.drop_overlap", "has no effect without a val_path; leave it false", True)


def prompt_files_are_there(config: RunConfig) -> Iterator[Violation]:
    """Templates are files, and only chats have system messages."""
    for key in ("prompt_file", "system_prompt_file"):
        value = getattr(config.data, key)
        if value is not None and not Path(value).is_file():
            yield Violation(
                f"data.{key}", "there is no such file; give a text file, or null", value, _near(Path(value))
            )
    if config.data.system_prompt_file is not None and config.data.prompt_mode == "raw":
        problem = "raw prompts have no system message; put the text into data.prompt_file, or use data.prompt_mode chat"
        yield Violation("data.system_prompt_file", problem, config.data.system_prompt_file)


def reasoning_gym_has_datasets(config: RunConfig) -> Iterator[Violation]:
    """A mixture of nothing has no prompts. Which names there are, only the package itself knows."""
    section = config.data.reasoning_gym
    if config.data.task == "reasoning_gym" and not section.datasets:
        problem = "needed when data.task is reasoning_gym; name what to draw from, such as [chain_sum]"
        yield Violation("data.reasoning_gym.datasets", problem, section.datasets)


def held_out_pairs_leave_training_pairs(config: RunConfig) -> Iterator[Violation]:
    """One-digit numbers start at 0, longer ones have no leading zero."""
    addition = config.data.addition
    numbers = 10 if addition.digits == 1 else 9 * 10 ** (addition.digits - 1)
    if config.data.task == "addition" and addition.held_out_pairs >= numbers**2:
        problem = (
            f"there are only {numbers**2} pairs of {addition.digits}-digit numbers; use fewer, to train on the rest"
        )
        yield Violation("data.addition.held_out_pairs", problem, addition.held_out_pairs)


def _unreadable(path: Path) -> tuple[str, tuple[str, ...]]:
    """Why a path cannot be read, and what it may have meant; ("", ()) if it can."""
    if path.is_file():
        if path.suffix in (*JSON_LINES, *PARQUET):
            return "", ()
        return f"a file of an unknown kind; give {_KINDS}", ()
    if path.is_dir():
        if (path / SAVED_DATASET).is_file():
            return "", ()
        splits = sorted(str(state.parent) for state in path.glob(f"*/{SAVED_DATASET}"))
        if splits:
            return "the folder holds several splits; name the folder of one", tuple(splits[:3])
        return f"the folder has no {SAVED_DATASET}; give {_KINDS}", ()
    return f"there is no such file; give {_KINDS}", _near(path)


def _near(path: Path) -> tuple[str, ...]:
    """Files beside `path` with almost its name."""
    names = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    return tuple(str(path.parent / name) for name in difflib.get_close_matches(path.name, names, n=3))


DATA_RULES = (
    data_files_are_there,
    one_source_of_prompts,
    prompt_files_are_there,
    reasoning_gym_has_datasets,
    held_out_pairs_leave_training_pairs,
)
