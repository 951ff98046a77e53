"""How pushes reach engines on the trainer's host and elsewhere: real actors and buffers, without vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lora_rl.cluster.workers import Worker, WorkerError, wait
from lora_rl.rollout.actor import EngineActor
from lora_rl.rollout.pool import EnginePool
from lora_rl.sync.errors import SyncError
from lora_rl.sync.manifest import Manifest, SyncReport, Transfer
from lora_rl.sync.reading import read_push
from lora_rl.sync.sender import WeightSender
from lora_rl.sync.shared_memory import SharedBuffer

WEIGHTS = {"q": torch.arange(6, dtype=torch.float32).reshape(2, 3), "k": torch.ones(5)}


class ReadingEngine:
    """Stands where `Engine` does: maps the buffer, reads and checks each push, and loads it nowhere."""

    busy = False

    def open_transfer(self, transfer: Transfer) -> None:
        self.path, self._names = transfer.path, transfer.names
        self.buffer = SharedBuffer(Path(transfer.path), transfer.nbytes)

    def load_push(self, manifest: dict[str, Any]) -> list[SyncReport]:
        push = Manifest.from_dict(manifest)
        self.tensors = read_push(self.buffer, push, self._names)
        return [SyncReport(push.version, push.digest, len(self.tensors), push.nbytes)]


class ReadingActor(EngineActor):
    """The real actor around a `ReadingEngine`; it can be told to say that it runs on another host."""

    def __init__(self) -> None:
        self._host: str | None = None

    def new_engine(self) -> Any:
        return ReadingEngine()

    async def start_on(self, host: str | None) -> None:
        self._host = host
        await self.build()

    async def host(self) -> str:
        return self._host or await super().host()

    async def path(self) -> str:
        return await self._call("path", lambda engine: engine.path)

    async def read(self) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        return await self._call("read", lambda engine: (engine.tensors, engine.buffer.bytes.numpy().copy()))


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    weights = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    sender = WeightSender(mode="merged", base=weights.items, adapters=dict, is_sender=True, dtype=torch.float32)
    yield sender
    sender.close_name()


# -- the actor alone -------------------------------------------------------------------------------------------------


def test_an_actor_on_the_trainers_host_reads_the_trainers_buffer(sender: WeightSender) -> None:
    async def check() -> None:
        actor, transfer = ReadingActor(), sender.open()
        await actor.start_on(None)
        await actor.open_transfer(transfer)
        assert await actor.path() == transfer.path
        push = sender.send(1, must_differ=False).manifest
        await actor.load_push(push.to_dict())
        tensors, _ = await actor.read()
        assert all(tensors[name].equal(tensor) for name, tensor in WEIGHTS.items())

    asyncio.run(check())


def test_an_actor_elsewhere_copies_the_payload_into_a_buffer_of_its_own(sender: WeightSender) -> None:
    async def check() -> None:
        actor, transfer = ReadingActor(), sender.open()
        await actor.start_on(None)
        await actor.open_relay(transfer)
        path = await actor.path()
        assert path != transfer.path
        assert not Path(path).exists(), "the engine has mapped it, so no file may be left behind"
        push = sender.send(1, must_differ=False).manifest
        payload = sender.payload().copy()
        # As they come out of Ray's object store.
        payload.flags.writeable = False
        await actor.load_push(push.to_dict(), payload)
        # A copy: what the trainer writes next does not reach it before it is sent.
        sender.payload()[:] = 0
        tensors, held = await actor.read()
        assert all(tensors[name].equal(tensor) for name, tensor in WEIGHTS.items())
        np.testing.assert_array_equal(held, payload)

    asyncio.run(check())


# -- over Ray --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workers(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    """Two processes, which import torch once."""
    import ray

    logs = tmp_path_factory.mktemp("logs")
    actor = ray.remote(ReadingActor).options(num_cpus=0, max_restarts=0)
    started = [Worker(f"engine {n}", actor.remote(), logs / f"engine_{n}.log") for n in range(2)]
    yield started
    for worker in started:
        ray.kill(worker.handle)


@pytest.fixture
def new_pool(workers: list[Worker]) -> Callable[..., EnginePool]:
    """`new_pool(host, ...)`: engines as new on these hosts; None is this one."""

    def new(*hosts: str | None) -> EnginePool:
        used = workers[: len(hosts)]
        calls = [w.call("start_on", host) for w, host in zip(used, hosts, strict=True)]
        wait(calls, timeout_s=60, doing="starting")
        return EnginePool(used, timeout_s=60)

    return new


def this_host() -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


def paths(pool: EnginePool) -> list[str]:
    return wait([w.call("path") for w in pool.workers], timeout_s=60, doing="asking")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("transport", "hosts", "relayed"),
    [
        ("auto", (None, None), [False, False]),
        ("auto", (None, "elsewhere"), [False, True]),
        ("shared_memory", (None, None), [False, False]),
        ("object_store", (None, None), [True, True]),
    ],
)
def test_every_engine_gets_the_bytes(
    new_pool: Callable[..., EnginePool],
    sender: WeightSender,
    transport: str,
    hosts: tuple[str | None, ...],
    relayed: list[bool],
) -> None:
    import ray

    pool, transfer = new_pool(*hosts), sender.open()
    pool.open_transfer(transfer, this_host(), transport)
    sender.close_name()
    assert [path != transfer.path for path in paths(pool)] == relayed
    assert pool.needs_payload == any(relayed)
    for version in (1, 2):
        for _, tensor in sender.base():
            tensor.add_(version)
        push = sender.send(version, must_differ=True).manifest
        payload = ray.put(sender.payload()) if pool.needs_payload else None
        # Reading compares every tensor's checksum.
        want = SyncReport(version, push.digest, len(WEIGHTS), push.nbytes)
        assert pool.load(push, payload) == [want] * 2
        assert pool.weight_version == version


@pytest.mark.e2e
def test_a_push_whose_bytes_do_not_come_along_is_noticed(
    new_pool: Callable[..., EnginePool], sender: WeightSender
) -> None:
    pool = new_pool("elsewhere")
    pool.open_transfer(sender.open(), this_host(), "auto")
    with pytest.raises(WorkerError, match=r"loading weights into the engines: engine 0 failed: SyncError: q: checksum"):
        pool.load(sender.send(1, must_differ=False).manifest)
    assert pool.weight_version == 0


@pytest.mark.e2e
def test_shared_memory_does_not_reach_another_host(new_pool: Callable[..., EnginePool], sender: WeightSender) -> None:
    pool = new_pool(None, "elsewhere")
    with pytest.raises(SyncError) as error:
        pool.open_transfer(sender.open(), this_host(), "shared_memory")
    assert "policy.generation.weight_sync.transport: shared_memory" in str(error.value)
    assert "engine 1 run" in str(error.value)
    assert "engine 0" not in str(error.value)
