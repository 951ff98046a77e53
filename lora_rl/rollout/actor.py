"""The Ray actor that hosts one vLLM engine. Imports nothing heavy until it is told to."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lora_rl.cluster.nodes import this_node
from lora_rl.cluster.threads import set_threads
from lora_rl.rollout.serving import EngineServer, Heartbeat, Job, JobResult
from lora_rl.track.logs import capture_to_file

if TYPE_CHECKING:
    import numpy as np

    from lora_rl.rollout.engine import EngineSettings
    from lora_rl.sync.manifest import Transfer

# Results that end within this many seconds of each other travel together.
_GATHER_SECONDS = 0.01


@dataclass(frozen=True)
class Collected:
    """Answer of `EngineActor.collect`."""

    results: list[JobResult]
    heartbeat: Heartbeat


class EngineActor:
    """One engine behind a server thread. The methods answer while it generates; most mirror those of `Engine`."""

    def __init__(self, settings: EngineSettings, log: str) -> None:
        self._log = capture_to_file(log)
        logging.warning("engine for %s, process %d, %s", settings.model, os.getpid(), this_node())
        self._settings = settings
        set_threads(settings.num_threads)

    def new_engine(self) -> Any:
        """Import vLLM and load the model; called in the server's thread."""
        from lora_rl.rollout.engine import Engine

        return Engine(self._settings)

    async def ping(self) -> bool:
        """Answer when the process is alive."""
        return True

    async def build(self) -> None:
        """Import vLLM and load the model."""
        loop, self._ready = asyncio.get_running_loop(), asyncio.Event()
        self._server = EngineServer(self.new_engine, lambda: loop.call_soon_threadsafe(self._ready.set))
        await self._call("build", lambda engine: None)

    async def submit(self, jobs: list[Job]) -> None:
        """Start jobs; `collect` brings their results."""
        self._server.submit(jobs)

    async def abort(self, numbers: list[int]) -> None:
        """See `EngineServer.abort`."""
        self._server.abort(numbers)

    async def collect(self, wait_s: float) -> Collected:
        """Results since the last call, as soon as there are any, and a sign of life after `wait_s` seconds at most."""
        try:
            await asyncio.wait_for(self._ready.wait(), wait_s)
            await asyncio.sleep(_GATHER_SECONDS)
        except TimeoutError:
            pass
        self._ready.clear()
        return Collected(self._server.results(), self._server.heartbeat())

    async def score(self, sequences: list[tuple[int, ...]]) -> list[list[float]]:
        """See `Engine.score`."""
        return await self._call("score", lambda engine: engine.score(sequences))

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        await self._call("sleep", lambda engine: engine.sleep())

    async def wake(self, parts: list[str]) -> None:
        """See `Engine.wake`."""
        await self._call("wake", lambda engine: engine.wake(parts))

    async def memory(self) -> int:
        """See `Engine.memory`."""
        return await self._call("memory", lambda engine: engine.memory())

    async def open_transfer(self, transfer: Transfer) -> None:
        """See `Engine.open_transfer`."""
        await self._call("open_transfer", lambda engine: engine.open_transfer(transfer))

    async def transfer(self, method: str, *args: Any) -> None:
        """See `Engine.transfer`; no step comes between the calls of one push."""
        if method == "start_weight_update":
            self._server.hold(True)
        await self._call(method, lambda engine: engine.transfer(method, *args))

    async def confirm_push(self, manifest: dict[str, Any]) -> Any:
        """See `Engine.confirm_push`."""
        reports = await self._call("confirm_push", lambda engine: engine.confirm_push(manifest))
        self._server.hold(False)
        return reports

    async def open_relay(self, transfer: Transfer) -> None:
        """Like `open_transfer` where the trainer's buffer cannot be mapped: its bytes come with each push."""
        from lora_rl.sync.shared_memory import SharedBuffer

        self._relay = SharedBuffer.create(transfer.nbytes)
        try:
            await self.open_transfer(replace(transfer, path=str(self._relay.path)))
        finally:
            self._relay.unlink()

    async def host(self) -> str:
        """The Ray node this process runs on."""
        import ray

        return ray.get_runtime_context().get_node_id()

    async def load_push(self, manifest: dict[str, Any], payload: np.ndarray | None = None) -> Any:
        """See `Engine.load_push`; `payload` is the content of the trainer's buffer where that is not mapped."""

        def load(engine: Any) -> Any:
            if payload is not None:
                # It may be only the front, where the rest is still there from an earlier push.
                self._relay.bytes.numpy()[: len(payload)] = payload
            return engine.load_push(manifest)

        return await self._call("load_push", load)

    async def _call(self, name: str, function: Any) -> Any:
        return await asyncio.wrap_future(self._server.call(name, function))
