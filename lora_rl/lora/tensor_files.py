"""Tensors on disk, for others to read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file


def write_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write a safetensors file that everyone may read; the library itself lets only the owner.

    Raises:
        OSError: it could not be written.
    """
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file} could not be written: {error}") from error
    file.chmod(0o644)
