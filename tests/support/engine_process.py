"""A real vLLM engine in a process of its own, driven over a pipe.

vLLM is imported in children only: an in-process engine crashes the interpreter at exit. It takes most of an engine's
start, so that it is done once: engines are forks of a template process that has imported it.
"""

from __future__ import annotations

import atexit
import os
import signal
import traceback
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any

from lora_rl.rollout.engine import EngineSettings, set_environment
from lora_rl.sync.errors import SyncError
from tests.support.processes import wait_gone

START_SECONDS, CALL_SECONDS = 300, 120
ERRORS = {"SyncError": SyncError, "ValueError": ValueError}
_templates: dict[tuple[Any, ...], Template] = {}
# Much of vLLM is imported as the first engine is built.
IMPORTS = (
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.qwen3",
    "vllm.lora.worker_manager",
    "lora_rl.rollout.worker",
    "lora_rl.sync.receiver",
)


class EngineFailed(AssertionError):
    """The engine's process ended, hung, or raised something unforeseen; the message holds its traceback."""


class EngineProcess:
    """`call` runs a method of `Engine`, or of a part of it such as `llm.sleep`, in the child; `trial` runs several in a
    fork of it and throws the fork away."""

    def __init__(self, settings: EngineSettings) -> None:
        # In a fork of a process whose OpenMP has several threads, the first parallel loop waits for threads that are
        # not there: with one thread `trial` works whatever OMP_NUM_THREADS says.
        settings = replace(settings, num_threads=1)
        # What `set_environment` makes of the settings is read by the import.
        key = (settings.platform, settings.kv_cache_gib, settings.enforce_eager)
        if key not in _templates:
            _templates[key] = Template(settings)
        self._pipe, self._pid = _templates[key].fork(settings)
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
        if wait_gone([self._pid], 10):
            os.kill(self._pid, signal.SIGKILL)
            wait_gone([self._pid])

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


class Template:
    """A process that has imported vLLM for engines like this one, and forks them."""

    def __init__(self, settings: EngineSettings) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # Not daemonic: engines may have children of their own.
        self._process = context.Process(target=_be_template, args=(settings, theirs))
        self._process.start()
        theirs.close()
        atexit.register(self._pipe.close)

    def fork(self, settings: EngineSettings) -> tuple[Connection, int]:
        """A new engine's pipe and process id."""
        ours, theirs = get_context("spawn").Pipe()
        self._pipe.send((settings, theirs))
        if not self._pipe.poll(START_SECONDS):
            raise EngineFailed(f"no answer from the template process within {START_SECONDS} s")
        pid = self._pipe.recv()
        theirs.close()
        return ours, pid


def _be_template(settings: EngineSettings, pipe: Connection) -> None:
    # The end of an engine is nobody's business; its own children are its own.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    set_environment(settings)
    for module in IMPORTS:
        import_module(module)
    while True:
        try:
            asked, theirs = pipe.recv()
        except EOFError:
            return
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            pipe.close()
            _serve(asked, theirs)
        theirs.close()
        pipe.send(pid)


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
