"""Around the loop: the run folder."""

from __future__ import annotations

from pathlib import Path

from lora_rl.track.recorder import FILE_NAME
from lora_rl.train.run import free_run_dir


def test_run_folders_are_numbered_past_those_with_records(tmp_path: Path) -> None:
    wanted = tmp_path / "results" / "run"
    assert free_run_dir(wanted) == wanted
    wanted.mkdir(parents=True)
    assert free_run_dir(wanted) == wanted, "a folder without records holds nothing to lose"
    for expected in ("run-2", "run-3"):
        folder = free_run_dir(wanted)
        folder.mkdir(exist_ok=True)
        (folder / FILE_NAME).touch()
        assert free_run_dir(wanted) == wanted.with_name(expected)
