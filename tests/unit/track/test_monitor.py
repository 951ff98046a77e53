"""How busy the machine is."""

import os
import stat
import time
from pathlib import Path

import psutil
import pytest

from lora_rl.track import RunRecorder, read_metrics
from lora_rl.track.monitor import GIB, Monitor, gpu_metrics


def test_cpu_and_memory_are_those_of_the_machine(tmp_path: Path):
    with Monitor(print) as monitor, RunRecorder(tmp_path, monitor=monitor.take) as recorder:
        before = psutil.cpu_times()
        end = time.perf_counter() + 0.3
        while time.perf_counter() < end:
            pass
        recorder.log(1, {"train/reward": 0.5})
        after = psutil.cpu_times()
        used = psutil.virtual_memory().used / GIB
    (record,) = read_metrics(recorder.path)
    busy = sum(after) - sum(before) - (after.idle - before.idle) - (after.iowait - before.iowait)
    assert record["host/cpu_utilization"] == pytest.approx(busy / (sum(after) - sum(before)), abs=0.15)
    assert record["host/cpu_utilization"] > 0.5 / psutil.cpu_count()
    assert record["host/memory_gib"] == pytest.approx(used, abs=1.0)


def test_the_table_of_gpus_is_read():
    # As the driver prints it for two GPUs, one of which does not tell its utilization.
    table = "0, 37, 40960\n1, [N/A], 512\n"
    assert gpu_metrics(table) == {
        "gpu/0/utilization": 0.37, "gpu/0/memory_gib": 40.0, "gpu/1/memory_gib": 0.5,
    }  # fmt: skip
    assert gpu_metrics("") == {}
    with pytest.raises(ValueError, match="nvidia-smi printed 'No devices were found'"):
        gpu_metrics("No devices were found\n")


@pytest.mark.parametrize(("script", "gpus"), [("echo 0, 50, 2048", True), ("echo driver mismatch >&2; exit 9", False)])
def test_gpus_are_sampled_until_they_cannot_be(tmp_path: Path, monkeypatch, script: str, gpus: bool):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    warnings, seen = [], {}
    with Monitor(warnings.append, interval_s=0.01) as monitor:
        assert monitor.sees_gpus
        end = time.monotonic() + 30
        while time.monotonic() < end and not (warnings or "gpu/0/utilization" in seen):
            time.sleep(0.05)
            seen = monitor.take()
    if gpus:
        assert (seen["gpu/0/utilization"], seen["gpu/0/memory_gib"], warnings) == (0.5, 2.0, [])
    else:
        assert not [name for name in seen if name.startswith("gpu/")]
        assert len(warnings) == 1
        assert warnings[0].startswith("logger.monitor_gpus: GPUs are not recorded any more: ")
