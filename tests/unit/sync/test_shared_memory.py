"""The block of memory that both sides map."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
import torch

from lora_rl.sync.shared_memory import ALIGNMENT, SharedBuffer, aligned


def test_alignment() -> None:
    assert [aligned(n) for n in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]
    assert ALIGNMENT % 16 == 0


def test_both_sides_see_the_same_bytes_after_the_name_is_gone() -> None:
    ours = SharedBuffer.create(256)
    theirs = SharedBuffer(ours.path, 256)
    ours.unlink()
    ours.unlink()
    assert not ours.path.exists()
    ours.view(64, (2, 3), torch.float32).copy_(torch.arange(6).reshape(2, 3))
    assert theirs.view(64, (6,), torch.float32).tolist() == [0, 1, 2, 3, 4, 5]
    theirs.view(64, (1,), torch.float32).fill_(9.0)
    assert ours.view(64, (2, 3), torch.float32)[0, 0] == 9.0


def test_another_process_writes_into_it() -> None:
    buffer = SharedBuffer.create(64)
    code = (
        "import sys, torch; from pathlib import Path; from lora_rl.sync.shared_memory import SharedBuffer;"
        "SharedBuffer(Path(sys.argv[1]), 64).view(0, (2,), torch.int64).fill_(77)"
    )
    subprocess.run([sys.executable, "-c", code, str(buffer.path)], check=True)
    buffer.unlink()
    assert buffer.view(0, (2,), torch.int64).tolist() == [77, 77]


@pytest.mark.parametrize(("offset", "shape"), [(-4, (1,)), (60, (2,)), (0, (17,)), (64, (1,))])
def test_views_outside_the_block_are_refused(offset: int, shape: tuple[int, ...]) -> None:
    buffer = SharedBuffer.create(64)
    buffer.unlink()
    with pytest.raises(ValueError, match="outside the block of 64 bytes"):
        buffer.view(offset, shape, torch.float32)
    assert buffer.view(64, (0,), torch.float32).numel() == 0


def test_no_room_is_an_error_that_says_how_much_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    created = []

    def full(descriptor: int, offset: int, length: int) -> None:
        created.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no room for 12,345 bytes") as error:
        SharedBuffer.create(12345)
    assert error.value.errno == errno.ENOSPC
    assert not os.path.exists(created[0])


def test_pages_are_reserved_at_once() -> None:
    """A sparse file would be killed with SIGBUS at the first write into a full memory file system."""
    buffer = SharedBuffer.create(1 << 20)
    try:
        assert os.stat(buffer.path).st_blocks * 512 >= 1 << 20
    finally:
        buffer.unlink()


def test_an_empty_model_still_has_a_block() -> None:
    buffer = SharedBuffer.create(0)
    buffer.unlink()
    assert len(buffer.bytes) == 1
