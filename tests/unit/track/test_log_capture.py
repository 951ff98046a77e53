"""Redirection below Python, in processes of their own because it takes over descriptors 1 and 2."""

import subprocess
import sys
from pathlib import Path

from lora_rl.track import tail


def run(code: str, *arguments: object) -> subprocess.CompletedProcess:
    program = "import ctypes, os, subprocess, sys\nfrom lora_rl.track.logs import capture_to_file\n" + code
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, timeout=30
    )


def test_python_c_and_child_output_go_to_the_file_in_order(tmp_path: Path):
    log = tmp_path / "logs" / "rank0.log"
    result = run(
        """
libc = ctypes.CDLL(None)
libc.printf(b"C before\\n")           # still in C's buffer when the redirection begins
print("python before")
with capture_to_file(sys.argv[1]) as capture:
    print("python out")
    print("python err", file=sys.stderr)
    libc.printf(b"C out\\n"); libc.fflush(None)
    os.write(2, b"descriptor 2\\n")
    subprocess.run(["echo", "child"])
    capture.stderr.write("for the person\\n")
print("python after")
print("err after", file=sys.stderr)
""",
        log,
    )
    assert result.returncode == 0, result.stderr
    assert log.read_text().splitlines() == ["python out", "python err", "C out", "descriptor 2", "child"]
    assert sorted(result.stdout.splitlines()) == ["C before", "python after", "python before"]
    assert result.stderr.splitlines() == ["for the person", "err after"]


def test_a_replaced_sys_stdout_is_captured_and_put_back(tmp_path: Path):
    result = run(
        """
import io
sys.stdout = replaced = io.StringIO()  # as in a worker whose streams somebody wrapped
capture = capture_to_file(sys.argv[1])
print("inside")
capture.restore()
capture.restore()
print("outside")
assert sys.stdout is replaced and replaced.getvalue() == "outside\\n"
""",
        tmp_path / "log",
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "log").read_text() == "inside\n"


def test_the_file_is_appended_to_and_a_crash_keeps_the_last_lines(tmp_path: Path):
    log = tmp_path / "log"
    log.write_text("from an earlier process\n")
    result = run('capture_to_file(sys.argv[1])\nprint("about to die")\nos.abort()', log)
    assert result.returncode != 0
    assert log.read_text() == "from an earlier process\nabout to die\n"


def test_nothing_is_redirected_when_the_file_cannot_be_opened(tmp_path: Path):
    result = run(
        """
try:
    capture_to_file(sys.argv[1])
except OSError as error:
    print("refused:", type(error).__name__)
""",
        tmp_path,  # a directory
    )
    assert result.stdout == "refused: IsADirectoryError\n"


def test_tail(tmp_path: Path):
    log = tmp_path / "engine.log"
    assert tail(log) == f"(no log file at {log})"
    log.write_bytes(b"".join(b"line %d\n" % i for i in range(100)) + b"bad byte \xff\nno newline")
    assert tail(log, 3) == "line 99\nbad byte \\xff\nno newline"
    assert len(tail(log, 1000).splitlines()) == 102
