"""The process that workers are forked from, and the workers. Runs by itself, next to the driver, not in it.

The server has one thread, imports what verifiers need (seconds) and then only forks and kills (milliseconds), on
requests over a socket. A fork of the driver would copy locks that its threads hold; `multiprocessing`'s own fork
server would run the driver's main module again and is shared by the whole process.

Nobody outlives the driver: its death closes the socket, which ends the server, whose death kills the workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from lora_rl.rewards.types import RewardReason, RewardResult, ScoreRequest, Verifier, failed

FORK, KILL = b"F", b"K"
_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE = 64 * 1024


def main(fd: int) -> None:
    """Serve requests on a SOCK_SEQPACKET socket until its other end closes.

    First the names of the verifiers to prepare, separated by blanks; answered by "ready", or by what went wrong. Then
    FORK with a descriptor, answered by the worker's pid; KILL and a pid, answered by its wait status.
    """
    from lora_rl.rewards.verifier import warm_up

    # Ctrl-C reaches every process of the terminal; how the run ends is the driver's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = socket.socket(fileno=fd)
    names = server.recv(_MAX_MESSAGE).decode().split()
    try:
        for name in names:
            warm_up(name)
    except Exception as error:
        traceback.print_exc()
        server.send(f"{type(error).__name__}: {error}".encode()[:_MAX_MESSAGE])
        return
    gc.freeze()  # a collection in a worker need not copy what is shared
    server.send(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(server, 16, 1)
        if not message:
            return
        if message[:1] == FORK:
            pid = os.fork()
            if pid == 0:
                server.close()
                serve(descriptors[0])
            os.close(descriptors[0])
            server.send(struct.pack("i", pid))
        else:
            (pid,) = struct.unpack("i", message[1:])
            # The group: whatever the worker started goes as well.
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
            server.send(struct.pack("i", os.waitpid(pid, 0)[1]))


def serve(fd: int) -> NoReturn:
    """Be a worker: build the verifiers, then score requests one by one, until the connection closes.

    Receives (verifier configurations, longest answer, GiB of memory or None) and answers None, or what went wrong as
    text. Then receives (index of the verifier, whether only to check) and a pickled request, and answers a
    `RewardResult`, or of a check None or what is wrong.
    """
    code = 1
    try:
        _die_with_parent()
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _work(Connection(fd))
        code = 0
    except (EOFError, ConnectionError):
        code = 0  # the driver went away
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Without the clean-up of an interpreter that is a copy of another.
        os._exit(code)


def _work(connection: Connection) -> None:
    from lora_rl.rewards.verifier import build_verifier

    configs, max_chars, memory_gib = connection.recv()
    try:
        verifiers = [build_verifier(config, max_chars) for config in configs]
    except BaseException as error:
        traceback.print_exc()
        connection.send(str(error) or type(error).__name__)
        return
    if memory_gib is not None:
        _limit_memory(int(memory_gib * 2**30))
    connection.send(None)
    while True:
        index, only_check = connection.recv()
        connection.send(_answer(verifiers[index], connection.recv_bytes(), only_check))


def _answer(verifier: Verifier, pickled: bytes, only_check: bool) -> RewardResult | str | None:
    """The result; a raised exception is one, too. Of a check: None, or what is wrong as text."""
    try:
        request: ScoreRequest = pickle.loads(pickled)
        if not only_check:
            return verifier.score(request)
        verifier.check(request)
    except BaseException as error:  # a function that calls sys.exit raises, too
        message = f"{type(error).__name__}: {error}"
        if only_check:
            return str(error) if isinstance(error, ValueError) else message
        traceback.print_exc()
        return failed(RewardReason.ERROR, message[:2000])
    return None


def _die_with_parent() -> None:
    server = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(0)  # it died before it was asked for a signal


def _limit_memory(extra: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + extra
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
