"""report.html of a run, and the comparison of several: self-contained pages, readable without JavaScript."""

from collections.abc import Sequence
from pathlib import Path

REPORT_NAME = "report.html"


def write_report(folder: Path | str, out: Path | str | None = None) -> Path:
    """Write the report of a run.

    Args:
        folder: the run folder.
        out: the page; None: report.html in the run folder.

    Returns:
        Where the page is.

    Raises:
        FileNotFoundError, ValueError: see `read_run`.
        OSError: the page cannot be written.
    """
    from lora_rl.track.report.run_folder import read_run
    from lora_rl.track.report.run_page import run_page

    return _write(Path(out) if out else Path(folder) / REPORT_NAME, run_page(read_run(folder)))


def write_comparison(folders: Sequence[Path | str], out: Path | str) -> Path:
    """Write the comparison of two or more runs.

    Args:
        folders: run folders.
        out: the page.

    Returns:
        Where the page is.

    Raises:
        FileNotFoundError, ValueError: see `read_run`; fewer than two folders.
        OSError: the page cannot be written.
    """
    from lora_rl.track.report.compare_page import compare_page
    from lora_rl.track.report.run_folder import read_run

    if len(folders) < 2:
        raise ValueError(f"a comparison needs two run folders or more; given: {len(folders)}")
    return _write(Path(out), compare_page([read_run(folder) for folder in folders]))


def _write(path: Path, text: str) -> Path:
    """Write a page in one go: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return path
