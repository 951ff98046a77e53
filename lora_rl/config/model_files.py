"""What the configuration needs to know of a Hugging Face model, read from its config.json alone.

Of a hub id that is not on this machine, the sizes of well-known models are in `architectures/`: the part of their
public config.json that is used here.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Source = Literal["folder", "cache", "description"]
Part = Literal["weights", "tokenizer"]
_DESCRIPTIONS = Path(__file__).parent / "architectures"
# Whose queries, keys and values have biases whatever config.json says.
_BIASED_QUERIES = ("qwen2",)
_NORMED_QUERIES = ("qwen3", "qwen3_moe")
# The number of experts has a name of its own in each family.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class ModelFileError(ValueError):
    """A config.json that cannot be used."""


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model; None where config.json does not state them under the usual name.

    Attributes:
        source: where they are from: the model's own folder, the hub's cache on this machine, or the description of a
            well-known model that comes with this package.
        head_dim: width of one attention head; hidden_size / num_heads where it is not stated.
        qkv_bias: queries, keys and values have biases.
        qk_norm: queries and keys are normalised, each head by itself.
        num_experts: experts per layer; None for a dense model.
        experts_per_token, expert_size: experts that a token goes through, and the inner width of one.
    """

    source: Source
    model_type: str | None
    hidden_size: int | None
    intermediate_size: int | None
    num_layers: int | None
    num_heads: int | None
    num_kv_heads: int | None
    max_positions: int | None
    tied_embeddings: bool | None
    vocab_size: int | None
    head_dim: int | None
    qkv_bias: bool
    qk_norm: bool
    num_experts: int | None
    experts_per_token: int | None
    expert_size: int | None

    def module_names(self) -> list[str]:
        """Full Megatron names of all linears that can carry an adapter; empty if the depth is unknown."""
        mlp = "mlp.experts" if self.num_experts else "mlp"
        return [
            f"decoder.layers.{layer}.{linear}"
            for layer in range(self.num_layers or 0)
            for linear in (
                "self_attention.linear_qkv",
                "self_attention.linear_proj",
                f"{mlp}.linear_fc1",
                f"{mlp}.linear_fc2",
            )
        ]


def find_config(model_name: str) -> tuple[Path, Source] | None:
    """The config.json of a model: in its folder, in the hub's cache, or the description of a well-known model."""
    own = Path(model_name) / "config.json"
    if own.is_file():
        return own, "folder"
    if (snapshot := _cached(model_name)) and (snapshot / "config.json").is_file():
        return snapshot / "config.json", "cache"
    description = _DESCRIPTIONS / f"{_flat(model_name)}.json"
    return (description, "description") if description.is_file() else None


def find_folder(model_name: str, part: Part = "weights") -> Path | None:
    """The folder with files of a model: its own, or that of a hub id in the hub's cache.

    Args:
        part: what must be there; a cache may hold a part of a model.

    Returns:
        None for a hub id whose files are not all on this machine.
    """
    if Path(model_name).is_dir():
        return Path(model_name)
    snapshot = _cached(model_name)
    return snapshot if snapshot and not missing_files(snapshot, part) else None


def folder_or_id(model_name: str, part: Part = "weights") -> str:
    """What to load a model from on this machine. Of a hub id, the files that the driver found or fetched; on another
    node they may have to be fetched, by the id."""
    return str(find_folder(model_name, part) or model_name)


def missing_files(folder: Path, part: Part) -> list[str]:
    """Names of the files that a part of a model consists of and the folder has not."""
    if part == "tokenizer":
        needed = ["tokenizer.json", "tokenizer_config.json"]
    else:
        needed = ["config.json", *weight_files(folder)]
    return [name for name in needed if not (folder / name).is_file()]


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files that hold a model's weights; a folder may have others beside them, such as the
    same weights under other names.

    Raises:
        ValueError: the index of the files is damaged.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: no weight_map from tensors to files in it: {error!r}") from error


def _flat(model_name: str) -> str:
    return model_name.replace("/", "--")


def _cached(model_name: str) -> Path | None:
    """Folder of a hub id's newest snapshot in the hub's cache; parts may be missing."""
    # As the hub's own client finds it.
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or Path(home) / "hub"
    repository = Path(os.path.expandvars(cache)).expanduser() / f"models--{_flat(model_name)}"
    if not (ref := repository / "refs/main").is_file():
        return None
    snapshot = repository / "snapshots" / ref.read_text(encoding="utf-8").strip()
    return snapshot if snapshot.is_dir() else None


def read_model_facts(model_name: str) -> ModelFacts | None:
    """Facts about a model.

    Returns:
        None if no config.json of it is known here, see `find_config`.

    Raises:
        ModelFileError: config.json is not a JSON object, or a size in it is not a positive whole number.
    """
    found = find_config(model_name)
    if found is None:
        return None
    file, source = found
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

    heads, hidden, kind = size("num_attention_heads"), size("hidden_size"), text_model.get("model_type")
    return ModelFacts(
        source=source,
        model_type=kind,
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads") or heads,
        max_positions=size("max_position_embeddings"),
        tied_embeddings=content.get("tie_word_embeddings", text_model.get("tie_word_embeddings")),
        vocab_size=size("vocab_size"),
        head_dim=size("head_dim") or (hidden // heads if hidden and heads else None),
        qkv_bias=kind in _BIASED_QUERIES or bool(text_model.get("attention_bias")),
        qk_norm=kind in _NORMED_QUERIES,
        num_experts=next((n for name in _EXPERT_COUNTS if (n := size(name))), None),
        experts_per_token=size("num_experts_per_tok"),
        expert_size=size("moe_intermediate_size"),
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
