"""What the configuration needs to know of a local Hugging Face model, read from its config.json alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ModelFileError(ValueError):
    """A config.json that cannot be used."""


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model; None where config.json does not state them under the usual name."""

    hidden_size: int | None
    intermediate_size: int | None
    num_layers: int | None
    num_heads: int | None
    num_kv_heads: int | None
    max_positions: int | None
    tied_embeddings: bool | None

    def module_names(self) -> list[str]:
        """Full Megatron names of all linears that can carry an adapter; empty if the depth is unknown."""
        return [
            f"decoder.layers.{layer}.{linear}"
            for layer in range(self.num_layers or 0)
            for linear in (
                "self_attention.linear_qkv",
                "self_attention.linear_proj",
                "mlp.linear_fc1",
                "mlp.linear_fc2",
            )
        ]


def read_model_facts(model_name: str) -> ModelFacts | None:
    """Facts about a local model.

    Returns:
        None if `model_name` is not a directory with a config.json, as a hub id is not.

    Raises:
        ModelFileError: config.json is not a JSON object, or a size in it is not a positive whole number.
    """
    file = Path(model_name) / "config.json"
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFileError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFileError(f"{file} holds no JSON object")
    text_model = content.get("text_config", content)  # multimodal models nest their language model

    def size(name: str) -> int | None:
        value: Any = text_model.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ModelFileError(f"{file}: {name} = {value!r} is not a positive whole number")
        return value

    heads = size("num_attention_heads")
    return ModelFacts(
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads") or heads,
        max_positions=size("max_position_embeddings"),
        tied_embeddings=content.get("tie_word_embeddings", text_model.get("tie_word_embeddings")),
    )


def resolve_path(name: str, config_file: Path) -> Path | None:
    """Absolute path of a file or directory that a configuration names, or None if there is none.

    Looked up from the current directory, then from the configuration file's folder upwards to its project's root:
    the nearest folder with a pyproject.toml or .git. Without such a root only the file's own folder counts.
    """
    path = Path(name).expanduser()
    folder = config_file.resolve().parent
    above = [folder, *folder.parents]
    root = next((i for i, f in enumerate(above) if (f / "pyproject.toml").exists() or (f / ".git").exists()), 0)
    bases = [Path.cwd(), *above[: root + 1]]
    return next((base / path for base in bases if (base / path).exists()), None)
