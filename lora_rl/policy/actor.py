"""The Ray actor that hosts one Megatron rank. Imports nothing heavy until it is told to."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from lora_rl.cluster.nodes import this_node
from lora_rl.cluster.threads import keep_float32, set_threads
from lora_rl.track.logs import capture_to_file

if TYPE_CHECKING:
    from lora_rl.algorithm import Row
    from lora_rl.config import RunConfig
    from lora_rl.lora.peft_io import PeftAdapter
    from lora_rl.policy.offload import FrozenWeights
    from lora_rl.rollout.types import TrainBatch
    from lora_rl.sync.manifest import Transfer


class PolicyActor:
    """One rank; the methods mirror `PolicyRank` and `WeightSender`."""

    def __init__(self, config: RunConfig, rank: int, world_size: int, platform: str, threads: int, log: str) -> None:
        self._log = capture_to_file(log)
        logging.warning("rank %d of %d, process %d, %s", rank, world_size, os.getpid(), this_node())
        self._config = config
        self._rank, self._world_size = rank, world_size
        self._platform_name, self._threads = platform, threads
        set_threads(threads)
        if platform == "cuda" and config.policy.precision == "float32":
            keep_float32()
        os.environ["LOCAL_RANK"] = str(rank % (config.cluster.gpus_per_node or world_size))

    def ping(self) -> bool:
        """Answer when the process is alive and idle."""
        return True

    def import_stack(self) -> None:
        """Import Megatron, patched for the platform: most of the start-up time."""
        from lora_rl.policy.platform import prepare

        self._platform = prepare(self._platform_name, num_threads=self._threads)
        import lora_rl.policy.trainer
        import lora_rl.sync.sender  # noqa: F401

    def open_rendezvous(self) -> str:
        """Bind the store that the ranks meet at, and return its URL. Called on rank 0 only."""
        import socket

        from torch.distributed import TCPStore

        host = self._address()
        # Left to itself, the store would listen on every interface. Port 0 lets the system choose a free one.
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        # The store stays open in this process.
        self._store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return f"tcp://{host}:{port}"

    def build(self, rendezvous: str, start: PeftAdapter | None = None) -> dict[str, Any]:
        """Join the other ranks and build the model; returns `PolicyRank.describe`.

        Args:
            start: adapter that the run starts from.
        """
        from lora_rl.cluster.network import interface_of

        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(self._address()))
        from lora_rl.policy.model import initialise_parallel
        from lora_rl.policy.trainer import PolicyRank

        megatron = self._config.policy.megatron_cfg
        initialise_parallel(
            self._platform,
            rank=self._rank,
            world_size=self._world_size,
            tp=megatron.tensor_model_parallel_size,
            pp=megatron.pipeline_model_parallel_size,
            seed=self._config.grpo.seed,
            init_method=rendezvous,
            ep=megatron.expert_model_parallel_size,
            store=getattr(self, "_store", None),
        )
        self.rank = PolicyRank(self._config, self._platform)
        if start is not None:
            from lora_rl.policy.export import import_peft
            from lora_rl.policy.spectral import decompose_adapters

            import_peft(self.rank.model, start)
            if megatron.peft.svd.enabled:
                decompose_adapters(self.rank.model, megatron.peft.svd.mode)
            self.rank.freeze_reference()
        return self.rank.describe()

    def _address(self) -> str:
        """Where the other ranks reach this one: on loopback, unless some are on other nodes."""
        from lora_rl.config.layout import engine_nodes

        if self._config.cluster.num_nodes - engine_nodes(self._config) == 1:
            return "127.0.0.1"
        import ray.util

        return ray.util.get_node_ip_address()

    # -- training ----------------------------------------------------------------------------------------------

    def train_step(self, shard: TrainBatch, microbatches: list[list[Row]], **logprobs: Any) -> Any:
        """See `PolicyRank.train_step`."""
        return self.rank.train_step(shard, microbatches, **logprobs)

    def logprobs(self, shard: TrainBatch, microbatches: list[list[Row]], **options: Any) -> Any:
        """See `PolicyRank.logprobs`."""
        return self.rank.logprobs(shard, microbatches, **options)

    def attention_tokens(self) -> float | None:
        """See `PolicyRank.attention_tokens`."""
        return self.rank.attention_tokens()

    # -- checkpoints -------------------------------------------------------------------------------------------

    def state(self) -> Any:
        """(adapter, training state) of the whole policy on rank 0, None on the others. Collective."""
        from lora_rl.policy.export import export_peft
        from lora_rl.policy.state import gather_state

        adapter, state = export_peft(self.rank.model), gather_state(self.rank)
        return None if state is None else (adapter, state)

    def load_state(self, adapter: Any, state: Any, *, with_random: bool) -> None:
        """Continue from what `state` returned, at any layout. Collective."""
        from lora_rl.policy.export import import_peft
        from lora_rl.policy.state import load_state

        if not state.svd:
            import_peft(self.rank.model, adapter)
        load_state(self.rank, state, with_random=with_random)

    # -- extrapolation -----------------------------------------------------------------------------------------

    def extrapolation(self, method: str, *args: Any) -> Any:
        """See the method of `RankExtrapolation`. Collective."""
        from lora_rl.policy.extrapolation import RankExtrapolation

        if not hasattr(self, "_extrapolation"):
            section = self._config.grpo.next
            self._extrapolation = RankExtrapolation(
                self.rank,
                capacity=section.snapshots + 1,
                horizon=section.horizon,
                merge=section.write_back == "merge",
            )
        return getattr(self._extrapolation, method)(*args)

    # -- memory ------------------------------------------------------------------------------------------------

    def offload(self) -> None:
        """See `FrozenWeights.offload`."""
        self._frozen().offload()

    def reload(self) -> None:
        """See `FrozenWeights.reload`."""
        self._frozen().reload()

    def give_back(self) -> None:
        """Give the device what was freed on it: engines on the same device cannot use what torch keeps for later."""
        import torch

        # Nothing, where there is no device.
        torch.cuda.empty_cache()

    def memory(self) -> int:
        """Bytes this rank holds, see `held_memory`."""
        from lora_rl.cluster.memory import held_memory

        return held_memory(self._platform_name)

    def _frozen(self) -> FrozenWeights:
        from lora_rl.policy.offload import FrozenWeights

        if not hasattr(self, "_frozen_weights"):
            self._frozen_weights = FrozenWeights(self.rank.model.chunks)
        return self._frozen_weights

    # -- weights -----------------------------------------------------------------------------------------------

    def open_transfer(self) -> Transfer | None:
        """Allocate the buffer for pushes; see `WeightSender.open`."""
        from lora_rl.policy.senders import make_sender

        self._sender = make_sender(self._config, self.rank.model, is_sender=self._rank == 0)
        return self._sender.open()

    def save_adapter(self, path: str, base_model: str) -> bool:
        """Write the adapters as a PEFT directory. Collective; rank 0 writes and answers True."""
        from pathlib import Path

        from lora_rl.lora.peft_io import write_peft
        from lora_rl.policy.export import export_peft

        adapter = export_peft(self.rank.model)
        if self._rank != 0:
            return False
        adapter = self.rank.merged.onto(adapter)
        write_peft(Path(path), adapter, base_model=base_model)
        return True

    def save_model(self, path: str) -> None:
        """See `save_model` in `lora_rl.policy.export`."""
        from pathlib import Path

        from lora_rl.config.model_files import folder_or_id
        from lora_rl.policy.export import save_model

        save_model(self.rank.model, Path(path), Path(folder_or_id(self._config.policy.model_name)))

    def open_stream(self, backend: str, engines: list[Any], engine_tp: int, address: str, port: int) -> None:
        """Connect to the engines over `nccl` or `ipc`; see `DeviceSender.open`. Collective."""
        from functools import partial

        import ray
        import torch

        from lora_rl.policy.export import adapters, base_weights
        from lora_rl.sync.device import DeviceSender, EngineClient, MergedSource

        source = MergedSource(
            partial(base_weights, self.rank.model, cpu=False),
            partial(adapters, self.rank.model),
            dtype=getattr(torch, self._config.engine_precision),
            rounding=self._config.policy.generation.weight_sync.rounding,
            seed=self._config.grpo.seed,
        )
        self._sender = DeviceSender(source, is_sender=self._rank == 0)
        self._sender.open(backend, self._rank, EngineClient(engines, engine_tp, ray.get), address=address, port=port)

    def free_address(self) -> tuple[str, int]:
        """An address and a free port of this host."""
        import socket

        import ray.util

        address = ray.util.get_node_ip_address()
        with socket.socket() as listener:
            listener.bind((address, 0))
            return address, listener.getsockname()[1]

    def host(self) -> str:
        """The Ray node this process runs on."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def close_transfer_name(self) -> None:
        """Remove the buffer's file name: every engine worker has mapped it."""
        self._sender.close_name()

    def payload(self, *, changed: bool = False) -> Any:
        """The bytes of the last push, uint8, for an engine on another host; see `WeightSender.payload`."""
        return self._sender.payload(changed=changed)

    def send(self, version: int, *, must_differ: bool) -> Any:
        """See `WeightSender.send`."""
        return self._sender.send(version, must_differ=must_differ)
