"""Around the loop: the run folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lora_rl.config import RunConfig, derive_layout, resolved_yaml
from lora_rl.track import RunRecorder, read_metrics
from lora_rl.track.recorder import FILE_NAME
from lora_rl.train.checkpoint import CheckpointStore
from lora_rl.train.run import begin_with, find_run, free_run_dir, run
from lora_rl.train.run_lock import FolderLocks
from tests.support.configs import tiny_config
from tests.support.hub import put_into_cache
from tests.unit.train.test_checkpoint import Warnings, make

PEFT = "policy.megatron_cfg.peft"


@pytest.fixture
def locks() -> Iterator[FolderLocks]:
    with FolderLocks() as taken:
        yield taken


def test_run_folders_are_numbered_past_those_with_records(tmp_path: Path, locks: FolderLocks) -> None:
    wanted = tmp_path / "results" / "run"
    assert free_run_dir(wanted, locks) == wanted
    assert free_run_dir(wanted, locks) == wanted, "a folder without records holds nothing to lose"
    for expected in ("run-2", "run-3"):
        folder = free_run_dir(wanted, locks)
        (folder / FILE_NAME).touch()
        assert free_run_dir(wanted, locks) == wanted.with_name(expected)


def saving(model: Path, log_dir: Path, *more: str) -> RunConfig:
    return tiny_config(model, "checkpointing.enabled=true", f"logger.log_dir={log_dir}", *more)


def test_a_saving_run_goes_on_in_its_own_folder_only(
    models: dict[str, Path], tmp_path: Path, locks: FolderLocks
) -> None:
    wanted = tmp_path / "run"
    config, warnings = saving(models["tied"], wanted), Warnings()
    assert find_run(config, warnings, locks) == (wanted, None, False)
    (wanted / FILE_NAME).write_text("another run, without checkpoints")
    second = tmp_path / "run-2"
    assert find_run(config, warnings, locks) == (second, None, False)
    # Killed before its first checkpoint: it takes over its own folder, and later its checkpoint.
    (second / "checkpoints").mkdir(parents=True)
    (second / FILE_NAME).touch()
    assert find_run(config, warnings, locks) == (second, None, True)
    CheckpointStore(second / "checkpoints", keep=None, higher_is_better=True, warn=warnings).save(make(10))
    folder, resume, continues = find_run(config, warnings, locks)
    assert (folder, resume.step, continues) == (second, 10, True)


def test_checkpoints_elsewhere_belong_to_the_run_with_their_records(
    models: dict[str, Path], tmp_path: Path, locks: FolderLocks
) -> None:
    wanted, elsewhere = tmp_path / "run", tmp_path / "checkpoints"
    config, warnings = saving(models["tied"], wanted, f"checkpointing.checkpoint_dir={elsewhere}"), Warnings()
    elsewhere.mkdir()
    wanted.mkdir()
    (wanted / FILE_NAME).write_text("another run")
    second = tmp_path / "run-2"
    assert find_run(config, warnings, locks) == (second, None, False)
    given = make(10)
    CheckpointStore(elsewhere, keep=None, higher_is_better=True, warn=warnings).save(given)
    folder, resume, _ = find_run(config, warnings, locks)
    assert (folder, resume.step) == (second, 10)
    (second / FILE_NAME).write_bytes(given.metrics + b"and more")
    folder, resume, continues = find_run(config, warnings, locks)
    assert (folder, resume.step, continues) == (second, 10, True)


def test_a_folder_in_between_that_was_removed_hides_nothing(
    models: dict[str, Path], tmp_path: Path, locks: FolderLocks
) -> None:
    wanted, second = tmp_path / "run", tmp_path / "run-3"
    config, warnings = saving(models["tied"], wanted), Warnings()
    for name, of in {
        "run-3": wanted,
        "run-2024": tmp_path / "run-2024",
        "run-2-eval": wanted,
        "run-04": wanted,
    }.items():
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(resolved_yaml(saving(models["tied"], of)))
    CheckpointStore(second / "checkpoints", keep=None, higher_is_better=True, warn=warnings).save(make(10))
    folder, resume, _ = find_run(config, warnings, locks)
    assert (folder, resume.step) == (second, 10)


def test_a_run_whose_records_lost_their_end_is_still_that_run(
    models: dict[str, Path], tmp_path: Path, locks: FolderLocks
) -> None:
    wanted, elsewhere = tmp_path / "run", tmp_path / "checkpoints"
    config, warnings = saving(models["tied"], wanted, f"checkpointing.checkpoint_dir={elsewhere}"), Warnings()
    given = make(10)
    CheckpointStore(elsewhere, keep=None, higher_is_better=True, warn=warnings).save(given)
    wanted.mkdir()
    (wanted / FILE_NAME).write_bytes(given.metrics[: len(given.metrics) // 2])
    assert find_run(config, warnings, locks)[0] == wanted


def test_rules_that_need_the_model_see_one_that_was_just_downloaded(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the download nothing is known of it, and any layout is accepted."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    config = tiny_config("someone/tiny", f"logger.log_dir={tmp_path / 'run'}", f"{PEFT}.dim=9", tp=3)
    layout = derive_layout(config)

    def download(config: RunConfig, warn: Callable[[str], None]) -> None:
        put_into_cache(models["tied"], "someone/tiny", tmp_path / "cache")

    monkeypatch.setattr("lora_rl.train.run.load_data", download)
    assert run(config, layout) == 1
    said = capsys.readouterr().err
    assert "tensor_model_parallel_size = 3" in said and "must divide the model's num_attention_heads = 4" in said
    assert not (tmp_path / "run").exists()


HOLDER = """
import sys
from pathlib import Path
from lora_rl.train.run_lock import FolderLocks
with FolderLocks() as locks:
    print(*[locks.take(Path(folder)) for folder in sys.argv[1:]], flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[int]:
    """The folder `run` is locked by another process, whose number this is."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "None\n"
        yield holder.pid
        holder.stdin.close()


def test_a_folder_that_another_process_writes_to_is_not_touched(
    models: dict[str, Path], tmp_path: Path, locks: FolderLocks, held: int
) -> None:
    """The same command started twice: the second must neither clean up after the first nor take over its records."""
    wanted = tmp_path / "run"
    # Its first record is still to come.
    assert free_run_dir(wanted, locks) == tmp_path / "run-2"
    (wanted / "checkpoints" / ".step_5.half").mkdir(parents=True)
    (wanted / FILE_NAME).write_text('{"step": 0}\n')
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=rf"run is in use by process {held} on .*another logger\.log_dir"):
        find_run(saving(models["tied"], wanted), Warnings(), FolderLocks())
    elsewhere = saving(models["tied"], tmp_path / "other", f"checkpointing.checkpoint_dir={wanted}")
    with pytest.raises(ValueError, match=rf"run is in use by process {held} "):
        find_run(elsewhere, Warnings(), FolderLocks())
    assert sorted(tmp_path.rglob("*")) == before


def test_a_lock_ends_with_its_process_or_its_block(tmp_path: Path) -> None:
    first, second = FolderLocks(), FolderLocks()
    with first:
        assert first.take(tmp_path) is None
        assert first.take(tmp_path) is None
        assert second.take(tmp_path).startswith("process ")
    assert second.take(tmp_path) is None
    second.give_back(tmp_path)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "None\n"
    assert FolderLocks().take(tmp_path) == f"process {holder.pid} on {__import__('socket').gethostname()}"
    holder.kill()
    holder.communicate()
    with FolderLocks() as third:
        assert third.take(tmp_path) is None


@pytest.mark.parametrize("left", ["two records", "half a record", "nothing", "all and more"])
def test_records_up_to_a_checkpoint_come_from_it(tmp_path: Path, left: str) -> None:
    """They were on disk with it; the file beside it may have lost its end with the power."""
    lines = [f'{{"step": {n}, "wall_time": 1.0, "elapsed_s": {n}.0}}\n' for n in range(6)]
    saved = "".join(lines[:5]).encode()
    file = tmp_path / FILE_NAME
    content = {"two records": lines[:2], "half a record": [*lines[:2], lines[2][:9] + "\n"], "all and more": lines}
    if left in content:
        file.write_text("".join(content[left]))
    warnings = Warnings()
    begin_with(file, saved, warnings)
    with RunRecorder(tmp_path, resume_step=4) as recorder:
        assert [r["step"] for r in recorder.earlier] == [0, 1, 2, 3, 4]
    assert [r["step"] for r in read_metrics(file)] == [0, 1, 2, 3, 4]
    assert bool(warnings) == (tmp_path / "metrics.damaged.jsonl").exists() == (left in ("two records", "half a record"))
