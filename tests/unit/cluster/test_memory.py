"""What is freed stays with the process: counted in page faults, in a process of its own."""

import platform
import subprocess
import sys

import pytest

ROUNDS = """
import resource, sys
if sys.argv[1] == "keep":
    from lora_rl.cluster.memory import keep_freed_memory
    keep_freed_memory()
def round():
    for tensor in [bytearray(24 * 2**20) for _ in range(3)]:
        tensor[::4096] = bytes(len(tensor) // 4096)
for _ in range(3):
    round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_memory_that_was_freed_is_used_again() -> None:
    faults = {
        what: int(subprocess.run([sys.executable, "-c", ROUNDS, what], check=True, capture_output=True).stdout)
        for what in ("leave", "keep")
    }
    assert faults["leave"] > 20_000 and faults["keep"] < 1_000, faults
