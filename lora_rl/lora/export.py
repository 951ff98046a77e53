"""A merged Hugging Face model from a base checkpoint and an adapter, file by file, without building the model."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lora_rl.config.model_files import weight_files
from lora_rl.lora.merge import merge
from lora_rl.lora.peft_io import PeftAdapter
from lora_rl.lora.tensor_files import write_tensors


def export_merged(base: Path, adapter: PeftAdapter, out: Path, *, dtype: str = "base") -> None:
    """Write `base` with the adapter merged in float32 and cast once; all other files are copied.

    Args:
        base: Hugging Face directory with safetensors files.
        adapter: what to merge.
        out: directory to write; appears only when complete.
        dtype: `base` keeps each tensor's type, otherwise a torch type name.

    Raises:
        FileExistsError: `out` exists.
        FileNotFoundError: `base` has no safetensors file.
        ValueError: the adapter has modules that the base model does not have, or a file of the base is damaged.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists; choose a directory that does not")
    files = [base / name for name in weight_files(base)]
    if lacking := [file.name for file in files if not file.is_file()]:
        raise FileNotFoundError(f"{base} has no {lacking[0]}: not a Hugging Face model directory (see --base)")
    unused = set(adapter.tensors)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        for path in base.iterdir():
            if path.is_file() and path.suffix != ".safetensors":
                shutil.copy2(path, folder / path.name)
        for file in files:
            tensors: dict[str, torch.Tensor] = {}
            with _opened(file) as handle:
                for name in handle.keys():  # noqa: SIM118 - not a dict
                    tensor = handle.get_tensor(name)
                    target = tensor.dtype if dtype == "base" else getattr(torch, dtype)
                    module = name.removesuffix(".weight")
                    unused.discard(module)
                    try:
                        tensors[name], _ = merge(
                            tensor, adapter.tensors.get(module), dtype=target, rounding="nearest", seed=0
                        )
                    except ValueError as error:
                        raise ValueError(f"{module}: {error}") from error
            write_tensors(tensors, folder / file.name)
        if unused:
            raise ValueError(f"{base} has no weights for the adapter's modules {', '.join(sorted(unused)[:4])}")
        if dtype != "base":
            _note_dtype(folder, dtype)
        os.replace(folder, out)


def _opened(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file}: not a readable safetensors file: {error}") from error


def _note_dtype(folder: Path, dtype: str) -> None:
    """Keep what config.json and the shards' index say about the weights true."""
    config = json.loads((folder / "config.json").read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    (folder / "config.json").write_text(json.dumps({**config, key: dtype}, indent=2) + "\n")
    for index in folder.glob("*.safetensors.index.json"):
        content = json.loads(index.read_text())
        size = 0
        for file in folder.glob("*.safetensors"):
            with safe_open(str(file), framework="pt") as handle:
                size += sum(handle.get_tensor(n).nbytes for n in handle.keys())  # noqa: SIM118 - not a dict
        content.setdefault("metadata", {})["total_size"] = size
        index.write_text(json.dumps(content, indent=2) + "\n")
