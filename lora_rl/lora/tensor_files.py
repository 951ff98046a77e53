"""Tensors on disk, for others to read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file


def write_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write a safetensors file with the permissions of any new file; the library itself lets only the owner read it.

    Raises:
        OSError: it could not be written.
    """
    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file} could not be written: {error}") from error
    if file.stat().st_mode != mode:
        file.chmod(mode)
