"""The check for GPUs keeps to the time that its page promises."""

from __future__ import annotations

import re
from pathlib import Path

from tests.gpu.check import CHECKS, groups, longest_s

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
