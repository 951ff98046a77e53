"""Models that are named by their id on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from lora_rl.config.model_files import Part, find_folder, missing_files
from lora_rl.config.schema import PolicyConfig
from lora_rl.data.tokenizer import Tokenizer, load_tokenizer

# Weights in other formats, and folders with other variants, are left there.
_PATTERNS: dict[Part, list[str]] = {
    "tokenizer": ["*.json", "*.jinja", "*.txt"],
    "weights": ["*.json", "*.jinja", "*.txt", "*.safetensors"],
}


def model_folder(model_name: str, part: Part = "weights") -> Path:
    """The folder with files of a model; those of a hub id are downloaded into the hub's cache, unless all are there.

    Nothing is asked of the hub for a model that is there, so that a run goes on with the files that it began with.

    Args:
        part: what must be there.

    Raises:
        FileNotFoundError: files are missing, and the hub does not have them or cannot be reached.
        ValueError: the index of the weights is damaged.
    """
    folder = find_folder(model_name, part)
    if folder is not None:
        # Of the hub's cache only what is complete is found.
        if part == "weights" and (lacking := missing_files(folder, part)):
            raise FileNotFoundError(f"model {folder} has no {', '.join(lacking)}: the folder is not a whole model")
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model_name, allow_patterns=_PATTERNS[part], ignore_patterns="*/*"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"model {model_name}: there is no such folder, and the files of a hub id of that name cannot "
            f"be had: {reason}. Use the folder of a Hugging Face model, or an id whose files are in the hub's cache"
        ) from error
    if lacking := missing_files(folder, part):
        raise FileNotFoundError(
            f"model {model_name}: {', '.join(lacking)} cannot be had from the hub, nor is it in {folder}"
        )
    return folder


def fetch_model(policy: PolicyConfig) -> Tokenizer:
    """See that the model's files are on this machine, where ranks and engines look for them; its tokenizer.

    Raises:
        FileNotFoundError: see `model_folder` and `load_tokenizer`.
        ValueError: see `load_tokenizer`.
    """
    model = model_folder(policy.model_name)
    folder = model_folder(policy.tokenizer_name, "tokenizer")
    return load_tokenizer(folder, policy.tokenizer.chat_template, model=model)
