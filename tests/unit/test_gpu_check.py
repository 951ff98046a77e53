"""The check for GPUs keeps to the time that its page promises."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.gpu import check as gpu_check
from tests.gpu.check import CHECKS, Failed, groups, longest_s
from tests.support.processes import wait_gone

ROOT = Path(__file__).parents[2]
NUMBERS = {"seven": 7, "eight": 8, "nine": 9, "ten": 10}


def test_the_limits_on_one_gpu_add_up_to_less_than_is_promised() -> None:
    on_one_gpu = [check for check in CHECKS if check.gpus <= 1]
    jobs = [check for check in on_one_gpu if check.name.startswith("job")]
    [ranks] = [group for group in groups(on_one_gpu) if len(group) > 1]
    assert len(jobs) == 3 and len(ranks) == 6 and len(on_one_gpu) == 1 + len(ranks) + len(jobs)
    assert longest_s(on_one_gpu) == sum(c.limit_s for c in on_one_gpu) - 5 * ranks[0].limit_s
    for page in ("docs/gpu.md", "README.md"):
        promised = re.findall(
            r"in less than (\w+) minutes", (ROOT / page).read_text(encoding="utf-8").replace("\n", " ")
        )
        assert promised, page
        assert longest_s(on_one_gpu) < 60 * min(NUMBERS[word] for word in promised)


# A process that starts another one; both sleep, and the first may be deaf to the request to end.
SLEEPERS = """
import os, signal, subprocess, sys, time
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
if sys.argv[1] != "deaf":
    signal.signal(signal.SIGTERM, lambda *_: (child.kill(), child.wait(), print("ended it", flush=True), sys.exit(1)))
print(os.getpid(), child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("manner", ["polite", "deaf"])
def test_what_is_over_its_limit_leaves_no_process(monkeypatch: pytest.MonkeyPatch, manner: str) -> None:
    monkeypatch.setattr(gpu_check, "GRACE_S", 1)
    with pytest.raises(Failed, match="not done after 2 s") as failure:
        gpu_check._output([sys.executable, "-c", SLEEPERS, manner], 2)
    said = str(failure.value).splitlines()
    assert ("ended it" in said) == (manner == "polite")
    pids = [int(pid) for pid in said[1].split()]
    left = wait_gone(pids)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(pids) == 2 and not left


def test_versions_are_counted_as_the_loop_does() -> None:
    """One push at the start and one after each step."""
    [steps] = [int(o.partition("=")[2]) for o in gpu_check.SHORT if o.startswith("grpo.max_num_steps=")]
    assert f"last(sync/version) == {steps + 1}" in gpu_check.EXACT
    assert f"count(train/reward) == {steps}" in gpu_check.EXACT
