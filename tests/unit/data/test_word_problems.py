"""The word problems that come with the examples: what their script writes, and right."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples/make_word_problems.py"


def test_the_file_is_what_the_script_writes(tmp_path: Path) -> None:
    out = tmp_path / "new/problems.jsonl"
    subprocess.run([sys.executable, SCRIPT, "--out", out], check=True, capture_output=True)
    assert out.read_bytes() == (ROOT / "examples/data/word_problems.jsonl").read_bytes()
    problems = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len({p["question"] for p in problems}) == len(problems) == 2000
    for p in problems:
        a, sign, b, result = re.fullmatch(r"(\d+) ([+-]) (\d+) = (\d+)", p["equation"]).groups()
        assert int(result) == int(a) + (1 if sign == "+" else -1) * int(b) > 0
        assert p["answer"] == result
        # In this order, as the one is taken from the other in a difference.
        assert re.findall(r"\d+", p["question"]) == [a, b]


@pytest.mark.parametrize("options", [["--count", "0"], ["--largest", "2"], ["--count", "9000000", "--largest", "3"]])
def test_what_cannot_be_written_is_refused(tmp_path: Path, options: list[str]) -> None:
    out = tmp_path / "problems.jsonl"
    ended = subprocess.run([sys.executable, SCRIPT, "--out", out, *options], capture_output=True, text=True)
    assert ended.returncode == 2 and options[0] in ended.stderr and not out.exists()
