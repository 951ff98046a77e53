"""However a run ends, its folder says so and holds a report; neither can fail the run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from lora_rl.track import Console, RunRecorder
from lora_rl.track.run_info import read_run_info
from lora_rl.train.reporting import reporting


def ended(folder: Path, error: BaseException | None) -> tuple[dict, str]:
    """run.json and the output of a run of two steps that ends with this error, which must come through."""
    stream = io.StringIO()
    with Console("quiet", 5, stream=stream) as console, RunRecorder(folder) as recorder:
        try:
            with reporting(folder, "grpo", console):
                assert read_run_info(folder)["outcome"] == "running"
                for step in (1, 2):
                    recorder.log(step, {"train/reward": 0.25 * step})
                if error is not None:
                    raise error
        except BaseException as caught:
            assert caught is error
    return read_run_info(folder), stream.getvalue()


@pytest.mark.parametrize(
    ("error", "outcome", "text"),
    [
        (None, "finished", "stopped at step 2 of 5"),
        (KeyboardInterrupt(), "interrupted", "interrupted after step 2 of 5"),
        (RuntimeError("a <bug>"), "failed", "RuntimeError: a &lt;bug&gt;"),
    ],
)
def test_every_end_has_a_report(tmp_path: Path, error: BaseException | None, outcome: str, text: str) -> None:
    info, output = ended(tmp_path, error)
    assert (info["outcome"], info["total_steps"]) == (outcome, 5)
    assert info["ended"] >= info["started"]
    assert text in (tmp_path / "report.html").read_text()
    assert "could not be" not in output


def test_a_report_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "val_samples.jsonl").write_text("damaged\n")
    info, output = ended(tmp_path, None)
    assert info["outcome"] == "finished"
    assert "report.html could not be made" in output
    assert f"lora-rl report {tmp_path}" in output.replace("\n", " ").replace("            ", "")
    assert "line 1: not JSON" in " ".join(output.split())


def test_a_run_json_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()
    stream = io.StringIO()
    with (
        Console("quiet", 5, stream=stream) as console,
        RunRecorder(tmp_path) as recorder,
        reporting(tmp_path, "sft", console),
    ):
        recorder.log(1, {"train/nll": 0.5})
    assert "run.json could not be written" in stream.getvalue()


def test_the_environment_names_what_a_run_depends_on(tmp_path: Path) -> None:
    facts = ended(tmp_path, None)[0]["environment"]
    assert {"processor", "cores", "memory", "GPUs", "Python", "torch", "megatron-core", "ray"} <= facts.keys()
    assert json.dumps(facts).count("null") == 0
