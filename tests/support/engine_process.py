"""A real vLLM engine in a process of its own, driven over a pipe.

vLLM is imported in the child only: it takes ten seconds, and an in-process engine crashes the interpreter at exit.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any

from lora_rl.rollout.engine import EngineSettings
from lora_rl.sync.errors import SyncError

START_SECONDS, CALL_SECONDS = 300, 120
ERRORS = {"SyncError": SyncError, "ValueError": ValueError}


class EngineFailed(AssertionError):
    """The engine's process ended, hung, or raised something unforeseen; the message holds its traceback."""


class EngineProcess:
    """`call` runs a method of `Engine`, or of a part of it such as `llm.sleep`, in the child; `trial` runs several in a
    fork of it and throws the fork away."""

    def __init__(self, settings: EngineSettings) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # With several workers the engine has children of its own, which a daemonic process may not have.
        single = settings.tensor_parallel_size == 1
        self._process = context.Process(target=_serve, args=(settings, theirs), daemon=single)
        self._process.start()
        theirs.close()
        self._started = False

    def call(self, method: str, *args: Any) -> Any:
        """The method's result; its SyncError or ValueError is raised here."""
        return self._ask("call", [(method, args)])[0]

    def trial(self, *calls: Sequence[Any]) -> list[Any]:
        """Results of several `(method, *args)` in a copy of the engine, which keeps nothing of it: a push that is
        refused half-way leaves an engine unusable."""
        return self._ask("trial", [(method, args) for method, *args in calls])

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _ask(self, how: str, calls: Any) -> list[Any]:
        if not self._started:
            self._answer(START_SECONDS)
            self._started = True
        self._pipe.send((how, calls))
        return self._answer(CALL_SECONDS)

    def _answer(self, timeout: float) -> Any:
        if not self._pipe.poll(timeout):
            raise EngineFailed(f"no answer from the engine process within {timeout:.0f} s")
        try:
            kind, value, trace = self._pipe.recv()
        except EOFError:
            raise EngineFailed("the engine process ended") from None
        if kind == "ok":
            return value
        raise ERRORS[kind](value) if kind in ERRORS else EngineFailed(trace)


def _serve(settings: EngineSettings, pipe: Connection) -> None:
    try:
        from lora_rl.rollout.engine import Engine

        engine = Engine(settings)
        pipe.send(("ok", None, ""))
        while True:
            how, calls = pipe.recv()
            if how == "call":
                pipe.send(_run(engine, calls))
            elif (child := os.fork()) == 0:
                pipe.send(_run(engine, calls))
                os._exit(0)
            else:
                os.waitpid(child, 0)
    except EOFError:
        pass
    except BaseException as error:
        pipe.send((type(error).__name__, str(error), traceback.format_exc()))
    finally:
        # vLLM crashes the interpreter when it is torn down in the usual way.
        os._exit(0)


def _run(engine: Any, calls: Any) -> tuple[str, Any, str]:
    try:
        return "ok", [attrgetter(method)(engine)(*args) for method, args in calls], ""
    except Exception as error:
        return type(error).__name__, str(error), traceback.format_exc()
