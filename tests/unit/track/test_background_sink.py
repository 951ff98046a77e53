"""A tracker that is slow, hangs or raises: the run does not notice, and the user is told once."""

import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from lora_rl.track import RunRecorder, read_metrics
from lora_rl.track.trackers import BackgroundSink, TrackerProcess


class Recording:
    """A sink that keeps what it gets, waits at `gate` when it has one, and raises from a step on."""

    def __init__(self, gate: threading.Event | None = None, fails_from: int | None = None):
        self.got, self.closed, self.abandoned = [], 0, 0
        self.began, self._gate, self._fails_from = threading.Event(), gate, fails_from

    def log(self, step, metrics):
        self.began.set()
        if self._gate is not None:
            self._gate.wait()
        if self._fails_from is not None and step >= self._fails_from:
            raise ConnectionError("no route")
        self.got.append((step, dict(metrics)))

    def close(self):
        self.closed += 1

    def abandon(self):
        self.abandoned += 1
        if self._gate is not None:
            self._gate.set()


def test_everything_arrives_in_order_and_the_sink_is_closed():
    sink, warnings = Recording(), []
    background = BackgroundSink(sink, "it", warnings.append)
    for step in range(100):
        metrics = {"train/reward": float(step)}
        background.log(step, metrics)
        metrics["train/reward"] = -1.0  # the caller may use its mapping again
    background.close()
    assert sink.got == [(step, {"train/reward": float(step)}) for step in range(100)]
    assert (sink.closed, sink.abandoned, warnings) == (1, 0, [])


def test_a_sink_that_does_not_keep_up_loses_counted_steps():
    gate = threading.Event()
    sink, warnings = Recording(gate), []
    background = BackgroundSink(sink, "it", warnings.append, queue_steps=4)
    background.log(0, {})
    assert sink.began.wait(10)  # step 0 is out of the queue, so it holds 1 to 4
    for step in range(1, 11):
        background.log(step, {})
    assert warnings == ["it does not keep up: steps are left out there. metrics.jsonl has all of them."]
    gate.set()
    background.close()
    assert [step for step, _ in sink.got] == [0, 1, 2, 3, 4]
    assert warnings[1:] == ["it left some out: it has 5 of 11 steps. metrics.jsonl has all of them."]


def test_a_sink_that_hangs_is_given_up_at_the_end():
    sink, warnings = Recording(threading.Event()), []
    background = BackgroundSink(sink, "it", warnings.append, close_timeout_s=0.2)
    background.log(1, {})
    background.log(2, {})
    background.close()
    assert sink.abandoned == 1
    assert warnings == [
        "it did not end within 0.2 s and is given up: it has 0 of 2 steps. metrics.jsonl has all of them."
    ]


def test_a_sink_that_raises_is_switched_off_once(tmp_path: Path):
    sink, warnings = Recording(fails_from=2), []
    with RunRecorder(tmp_path, sinks=[BackgroundSink(sink, "it", warnings.append)]) as recorder:
        for step in range(5):
            recorder.log(step, {"train/reward": 0.5})
    assert warnings == ["it is switched off after ConnectionError: no route. metrics.jsonl goes on."]
    assert [step for step, _ in sink.got] == [0, 1]
    assert len(read_metrics(recorder.path)) == 5


def test_the_error_of_a_tracker_process_comes_back(tmp_path: Path):
    warnings, told = [], []
    sink = BackgroundSink(TrackerProcess("nothing", {}, tmp_path / "logs/x.log", told.append), "X", warnings.append)
    sink.log(1, {})
    sink.close()
    assert warnings == [
        "X is switched off after TrackerError: ValueError: unknown tracker 'nothing'. metrics.jsonl goes on."
    ]
    assert told == []


@pytest.mark.parametrize("how", ["hangs", "dies"])
def test_a_tracker_process_that_hangs_or_dies_holds_nothing_up(tmp_path: Path, monkeypatch, how: str):
    """The real child with a library that never comes back, or ends the process, in the place of the real one."""
    body = {"hangs": "time.sleep(3600)", "dies": "os._exit(7)"}[how]
    (tmp_path / "wandb.py").write_text(f"import os, time\n{body}\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(filter(None, sys.path))}")
    settings = dict.fromkeys(("folder", "project", "entity", "name", "mode", "config", "continues"))
    process, warnings = TrackerProcess("wandb", settings, tmp_path / "wandb.log", lambda _: None), []
    sink = BackgroundSink(process, "W&B", warnings.append, queue_steps=2, close_timeout_s=3.0)
    begin = time.monotonic()
    for step in range(50):
        sink.log(step, {"train/reward": 0.5})
    if how == "dies":
        while not warnings and time.monotonic() < begin + 60:
            time.sleep(0.05)
    sink.close()
    ending = {
        "hangs": "W&B did not end within 3 s and is given up: it has 0 of 50 steps. metrics.jsonl has all of them.",
        "dies": f"W&B is switched off after TrackerError: its process ended with status 7; see {tmp_path}/wandb.log. "
        "metrics.jsonl goes on.",
    }[how]
    assert warnings[-1] == ending
    assert process._process.wait(timeout=30) == {"hangs": -signal.SIGKILL, "dies": 7}[how]
