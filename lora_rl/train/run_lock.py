"""One process per run folder: another start of the same command must not touch what the first is writing."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

LOCK_NAME = ".lock"
# Of file systems that have no locks.
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class FolderLocks:
    """Locks on folders, held until the end of the block; the system gives them back when the process ends.

    Args:
        warn: told once when a file system has no locks.
    """

    def __init__(self, warn: Callable[[str], None] = lambda _: None) -> None:
        self._warn = warn
        self._held: dict[Path, int] = {}

    def __enter__(self) -> FolderLocks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def take(self, folder: Path) -> str | None:
        """Lock a folder, which is made when missing.

        Returns:
            None, or who has it: `process 12 on host`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = (folder / LOCK_NAME).resolve()
        if path in self._held:
            return None
        # Python's descriptors are closed in programs that are started: no process of the job keeps the lock alive.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            os.close(descriptor)
            return holder or "another process"
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                os.close(descriptor)
                raise
            self._warn(f"{path} cannot be locked ({error.strerror}): see that no other run writes there")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._held[path] = descriptor
        return None

    def give_back(self, folder: Path) -> None:
        """Unlock a folder that was not used after all."""
        os.close(self._held.pop((folder / LOCK_NAME).resolve()))


def in_use(folder: Path, holder: str) -> str:
    """The message for a folder that another process has."""
    return (
        f"{folder} is in use by {holder}: wait for its end, or set another logger.log_dir (and "
        "checkpointing.checkpoint_dir)"
    )
