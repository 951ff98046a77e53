"""The command `lora-rl`, as it is installed."""

import subprocess
import sys
from pathlib import Path

import pytest
from made_run import make_run

from lora_rl.track.command import main


def test_the_installed_command_writes_reports_and_comparisons(tmp_path: Path):
    command = [str(Path(sys.executable).with_name("lora-rl"))]
    runs = [str(make_run(tmp_path / name, steps=6)) for name in ("a", "b")]

    def call(*arguments: str) -> list[str]:
        done = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    assert call("report", *runs) == [f"{run}/report.html" for run in runs]
    assert call("report", runs[0], "-o", "new/page.html") == ["new/page.html"]
    assert call("compare", *runs) == ["compare-a-b.html"]
    assert (tmp_path / "compare-a-b.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "new/page.html").read_text() == (tmp_path / "a/report.html").read_text()


def test_what_is_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made = str(make_run(tmp_path / "a", steps=2))
    assert main(["compare", made, str(tmp_path / "missing")]) == 1
    assert capsys.readouterr().err.startswith(f"lora-rl compare: {tmp_path}/missing is no folder")
    (tmp_path / "file").touch()
    assert main(["report", made, "-o", str(tmp_path / "file" / "page.html")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err
    for wrong in (["compare", made], ["report", made, made, "-o", "x.html"], ["report"], ["draw", made]):
        with pytest.raises(SystemExit) as exit_info:
            main(wrong)
        assert exit_info.value.code == 2
        assert capsys.readouterr().err
