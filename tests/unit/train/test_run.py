"""Around the loop: the run folder."""

from __future__ import annotations

from pathlib import Path

from lora_rl.config import RunConfig
from lora_rl.track.recorder import FILE_NAME
from lora_rl.train.checkpoint import CheckpointStore
from lora_rl.train.run import find_run, free_run_dir
from tests.support.configs import tiny_config
from tests.unit.train.test_checkpoint import Warnings, make


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


def saving(model: Path, log_dir: Path, *more: str) -> RunConfig:
    return tiny_config(model, "checkpointing.enabled=true", f"logger.log_dir={log_dir}", *more)


def test_a_saving_run_goes_on_in_its_own_folder_only(models: dict[str, Path], tmp_path: Path) -> None:
    wanted = tmp_path / "run"
    config, warnings = saving(models["tied"], wanted), Warnings()
    assert find_run(config, warnings) == (wanted, None, False)
    wanted.mkdir()
    (wanted / FILE_NAME).write_text("another run, without checkpoints")
    second = tmp_path / "run-2"
    assert find_run(config, warnings) == (second, None, False)
    # Killed before its first checkpoint: it takes over its own folder, and later its checkpoint.
    (second / "checkpoints").mkdir(parents=True)
    (second / FILE_NAME).touch()
    assert find_run(config, warnings) == (second, None, True)
    CheckpointStore(second / "checkpoints", keep=None, higher_is_better=True, warn=warnings).save(make(10))
    folder, resume, continues = find_run(config, warnings)
    assert (folder, resume.step, continues) == (second, 10, True)


def test_checkpoints_elsewhere_belong_to_the_run_with_their_records(models: dict[str, Path], tmp_path: Path) -> None:
    wanted, elsewhere = tmp_path / "run", tmp_path / "checkpoints"
    config, warnings = saving(models["tied"], wanted, f"checkpointing.checkpoint_dir={elsewhere}"), Warnings()
    elsewhere.mkdir()
    wanted.mkdir()
    (wanted / FILE_NAME).write_text("another run")
    second = tmp_path / "run-2"
    assert find_run(config, warnings) == (second, None, False)
    given = make(10)
    CheckpointStore(elsewhere, keep=None, higher_is_better=True, warn=warnings).save(given)
    folder, resume, _ = find_run(config, warnings)
    assert (folder, resume.step) == (second, 10)
    second.mkdir()
    (second / FILE_NAME).write_bytes(given.metrics + b"and more")
    folder, resume, continues = find_run(config, warnings)
    assert (folder, resume.step, continues) == (second, 10, True)
