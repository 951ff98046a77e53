"""Rows of local files: JSON lines, parquet, and folders that `save_to_disk` of Hugging Face's datasets wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lora_rl.config.data_rules import JSON_LINES, PARQUET, SAVED_DATASET

Row = tuple[str, dict[str, Any]]
_BATCH_ROWS = 4096


def read_rows(path: Path) -> Iterator[Row]:
    """Every row as (where it stands, columns with their values), in the order of the file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: naming file and, where there is one, line and column: not UTF-8, not JSON, not an object, not a
            parquet file, a kind of file that is not read; or no rows at all.
    """
    if path.is_dir():
        rows = _saved_dataset(path)
    elif not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    elif path.suffix in JSON_LINES:
        rows = _json_lines(path)
    elif path.suffix in PARQUET:
        rows = _parquet(path)
    else:
        raise ValueError(f"{path}: expected a file that ends in {', '.join((*JSON_LINES, *PARQUET))}")
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise ValueError(f"{path}: there are no rows in it")


def _json_lines(path: Path) -> Iterator[Row]:
    # Bytes, so that a byte that is not UTF-8 can be reported with its line.
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}, line {number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                place = f"column {error.start + 1}: the byte 0x{raw[error.start]:02x}"
                raise ValueError(f"{where}, {place} is not UTF-8; save the file as UTF-8") from error
            if not line.strip():
                continue
            try:
                record = json.loads(line.rstrip("\r\n"))
            except json.JSONDecodeError as error:
                # A whole document, or objects over several lines.
                hint = "; each line must be one whole object" if number == 1 and line.lstrip()[0] in "[{" else ""
                raise ValueError(f"{where}, column {error.colno}: not JSON: {error.msg}{hint}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{where}: a {type(record).__name__}; each line must be an object")
            yield where, record


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield from _rows(path, file.iter_batches(batch_size=_BATCH_ROWS))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read as parquet: {_first_line(error)}") from error


def _saved_dataset(path: Path) -> Iterator[Row]:
    """The arrow streams that state.json lists; `save_to_disk` writes the rows themselves, without an index."""
    import pyarrow as pa

    state = path / SAVED_DATASET
    if not state.is_file():
        raise ValueError(f"{path}: a folder without {SAVED_DATASET}; name one that datasets' save_to_disk wrote")
    try:
        names = [entry["filename"] for entry in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{state}: not what datasets' save_to_disk writes: {error!r}") from error
    number = 0
    for name in names:
        try:
            with pa.memory_map(str(path / name)) as source, pa.ipc.open_stream(source) as stream:
                for _, row in _rows(path / name, stream):
                    number += 1
                    yield f"{path}, row {number}", row
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path / name}: cannot be read as arrow: {_first_line(error)}") from error


def _rows(path: Path, batches: Any) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", row


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
