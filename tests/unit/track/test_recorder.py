"""metrics.jsonl and the sinks."""

import json
import math
import os
import resource
import struct
from pathlib import Path

import numpy as np
import pytest
from synthetic_run import run_records

from lora_rl.track import RunRecorder, TensorBoardSink, read_metrics, series


class ListSink:
    def __init__(self, fails_from: int | None = None):
        self.logged, self.calls, self.closed, self.fails_from = [], 0, 0, fails_from

    def log(self, step, metrics):
        self.calls += 1
        if self.fails_from is not None and step >= self.fails_from:
            raise ConnectionError("no route to the tracker")
        self.logged.append((step, dict(metrics)))

    def close(self):
        self.closed += 1


def test_a_record_is_one_flushed_line_of_strict_json(tmp_path: Path):
    recorder = RunRecorder(tmp_path / "run", clock=iter([100.0, 107.5]).__next__)
    record = recorder.log(1, {"train/reward": np.float32(0.5), "train/skipped": True}, {"sync/bytes": 12})
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()  # before close: it was flushed
    assert json.loads(line) == {
        "step": 1, "wall_time": 107.5, "elapsed_s": 7.5, "train/reward": 0.5, "train/skipped": 1, "sync/bytes": 12,
    }  # fmt: skip
    assert record == json.loads(line)


def test_nonfinite_values_are_null_in_the_file_and_nan_when_read(tmp_path: Path):
    with RunRecorder(tmp_path) as recorder:
        returned = recorder.log(3, {"train/loss": math.nan, "train/grad_norm": -math.inf, "train/lr": 1e-5})
        path = recorder.path
    assert math.isnan(returned["train/loss"])

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record["train/loss"] is None
    assert record["train/grad_norm"] is None
    assert record["nonfinite"] == ["train/loss", "train/grad_norm"]
    (back,) = read_metrics(path)
    assert math.isnan(back["train/loss"])
    assert back["train/lr"] == 1e-5
    assert "nonfinite" not in back


def test_repeated_names_and_steps_are_refused_and_nothing_is_written(tmp_path: Path):
    recorder = RunRecorder(tmp_path)
    with pytest.raises(ValueError, match="step 1: metrics given twice: train/kl"):
        recorder.log(1, {"train/kl": 0.1}, {"train/kl": 0.2})
    assert recorder.path.read_bytes() == b""
    recorder.log(1, {"train/kl": 0.1})
    with pytest.raises(ValueError, match="step 1 logged after step 1"):
        recorder.log(1, {"train/kl": 0.1})
    assert len(read_metrics(recorder.path)) == 1


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("reward", 1.0, ValueError, "metric name 'reward'"),
        ("train/mean reward", 1.0, ValueError, "metric name 'train/mean reward'"),
        ("train/reward", "0.5", TypeError, "train/reward is str '0.5'"),
        ("train/reward", None, TypeError, "train/reward is NoneType"),
        ("train/reward", np.zeros(2), TypeError, "train/reward has several elements"),
    ],
)
def test_bad_metrics_are_refused_by_name(tmp_path: Path, name, value, error, message):
    with pytest.raises(error, match=message):
        RunRecorder(tmp_path).log(1, {name: value})


def test_read_leaves_out_a_record_still_being_written_but_not_a_broken_one(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/reward": 0.5}\n{"step": 2, "train/rew')
    assert [record["step"] for record in read_metrics(path)] == [1]
    path.write_text('{"step": 1}\n{"step": 2, "tr\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2: not JSON"):
        read_metrics(path)
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1: a record is an object with a step"):
        read_metrics(path)


def test_resume_keeps_earlier_records_and_sets_later_ones_aside(tmp_path: Path):
    clock = iter([0.0, 1.0, 2.0, 3.0, 1000.0, 1004.0]).__next__
    with RunRecorder(tmp_path, clock=clock) as recorder:
        for step, loss in ((1, 0.5), (2, math.nan), (3, 0.3)):
            recorder.log(step, {"train/loss": loss})
    with recorder.path.open("a") as file:
        file.write('{"step": 4, "tra')  # killed while writing
    with pytest.raises(FileExistsError, match="already holds 3 records"):
        RunRecorder(tmp_path)
    with RunRecorder(tmp_path, resume_step=2, clock=clock) as recorder:
        assert [record["step"] for record in recorder.earlier] == [1, 2]
        recorder.log(3, {"train/loss": 0.25})
    records = read_metrics(recorder.path)
    assert [record["step"] for record in records] == [1, 2, 3]
    assert math.isnan(records[1]["train/loss"])
    assert records[2]["train/loss"] == 0.25
    assert records[2]["elapsed_s"] == 2.0 + 4.0  # the time between the two processes does not count
    (superseded,) = read_metrics(tmp_path / "metrics.superseded.jsonl")
    assert superseded["train/loss"] == 0.3


def test_a_full_disk_raises_and_leaves_whole_records(tmp_path: Path):
    recorder = RunRecorder(tmp_path)
    recorder.log(1, {"train/reward": 0.5})
    size = recorder.path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))  # the kernel takes 20 more bytes of this file
    try:
        with pytest.raises(OSError, match="too large"):
            recorder.log(2, {"train/reward": 0.6})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert recorder.path.stat().st_size == size
    recorder.log(2, {"train/reward": 0.6})  # the loop may try again
    assert series(read_metrics(recorder.path), "train/reward") == ([1, 2], [0.5, 0.6])


def test_a_failing_sink_warns_once_and_the_run_goes_on(tmp_path: Path):
    good, bad, warnings = ListSink(), ListSink(fails_from=2), []
    with RunRecorder(tmp_path, sinks=[bad, good], warn=warnings.append) as recorder:
        for step in (1, 2, 3, 4):
            recorder.log(step, {"train/reward": step / 10})
    assert [step for step, _ in good.logged] == [1, 2, 3, 4]
    assert good.logged[0][1] == {"train/reward": 0.1}
    assert bad.calls == 2
    assert warnings == [
        "ListSink is switched off after ConnectionError: no route to the tracker. metrics.jsonl goes on."
    ]
    assert (good.closed, len(read_metrics(recorder.path))) == (1, 4)


def test_a_sink_whose_place_cannot_be_written_is_only_a_warning(tmp_path: Path):
    (tmp_path / "tb").write_text("a file where the directory should be")
    warnings = []
    with RunRecorder(tmp_path, sinks=[TensorBoardSink(tmp_path / "tb")], warn=warnings.append) as recorder:
        recorder.log(1, {"train/reward": 0.5})
        recorder.log(2, {"train/reward": 0.5})
    assert len(warnings) == 1
    assert warnings[0].startswith("TensorBoardSink is switched off after")


def test_tensorboard_reads_back_what_was_recorded(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = run_records(steps=12)
    with RunRecorder(tmp_path, sinks=[TensorBoardSink(tmp_path / "tb")]) as recorder:
        for record in records:
            recorder.log(record["step"], {name: value for name, value in record.items() if "/" in name})
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    scalars = events.Scalars("train/reward")
    steps, rewards = series(records, "train/reward")
    assert [event.step for event in scalars] == steps
    assert [event.value for event in scalars] == [struct.unpack("f", struct.pack("f", x))[0] for x in rewards]
    assert "val/accuracy" in events.Tags()["scalars"]


def test_tensorboard_hides_steps_that_a_resumed_run_repeats(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardSink(tmp_path)
    for step in (1, 2, 3, 4):
        first.log(step, {"train/reward": 0.1 * step})
    first.close()
    (old,) = tmp_path.iterdir()
    os.rename(old, tmp_path / "events.out.tfevents.0000000001.earlier")  # names sort by start time in seconds
    second = TensorBoardSink(tmp_path, purge_from_step=3)
    second.log(3, {"train/reward": 0.9})
    second.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, round(e.value, 3)) for e in events.Scalars("train/reward")] == [(1, 0.1), (2, 0.2), (3, 0.9)]
