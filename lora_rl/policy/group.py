"""The driver's view of the policy: all ranks as one object."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_rl.algorithm import (
    MetricSum,
    Normaliser,
    Row,
    finalise,
    merge,
    num_microbatches_for_all,
    pad_microbatches,
    row_length,
    shard_sequences,
    share_prompts,
    split_microbatches,
)
from lora_rl.cluster.workers import Call, Worker, wait
from lora_rl.sync.manifest import Transfer
from lora_rl.sync.sender import Push

if TYPE_CHECKING:
    from lora_rl.config import RunConfig
    from lora_rl.config.layout import Layout
    from lora_rl.lora.peft_io import PeftAdapter
    from lora_rl.policy.state import PolicyState
    from lora_rl.rollout.types import TrainBatch


def start_ranks(
    config: RunConfig, layout: Layout, logs: Path, options: Sequence[dict[str, Any]], nodes: Sequence[str] = ()
) -> list[Worker]:
    """Create one actor per Megatron rank; returns at once, while the processes start.

    Args:
        logs: folder for `rank_<n>.log`.
        options: Ray options of each rank, see `lora_rl.cluster.placement`.
        nodes: name of the node of each rank, where there are several.
    """
    import ray

    from lora_rl.policy.actor import PolicyActor

    workers = []
    for rank in range(layout.world_size):
        tp, pp, dp = layout.coordinates(rank)
        log = logs / f"rank_{rank}.log"
        handle = (
            ray.remote(PolicyActor)
            .options(max_restarts=0, **options[rank])
            # An actor's current directory is that of its node.
            .remote(config, rank, layout.world_size, layout.platform, layout.threads_per_rank, str(log.absolute()))
        )
        where = f" on {nodes[rank]}" if nodes else ""
        workers.append(Worker(f"rank {rank} (tp {tp}, pp {pp}, dp {dp}){where}", handle, log))
    return workers


class PolicyGroup:
    """Shards batches over data-parallel ranks, agrees on microbatches, merges what the ranks report.

    Attributes:
        moved: whether the last training step changed the adapters; not when its learning rate had decayed to 0.
        scored_tokens: tokens, prompts included, that all calls of `logprobs` ran over.
    """

    def __init__(self, config: RunConfig, layout: Layout, workers: Sequence[Worker]) -> None:
        self.config, self.layout, self.workers = config, layout, list(workers)
        self._timeout = config.cluster.step_timeout_s
        self.moved = False
        self.scored_tokens = 0

    def hurry(self, timeout_s: float) -> None:
        """From here on ranks count as hung after so many seconds, if not earlier."""
        self._timeout = min(self._timeout, timeout_s)

    def train(
        self, batch: TrainBatch, minibatches: Sequence[Sequence[int]], *, old_logprobs: np.ndarray | None = None
    ) -> dict[str, float]:
        """One optimizer step per minibatch of rows of `batch`; metrics over all of them.

        The old logprobs of the first minibatch are the current ones, and one forward pass does everything. Those of the
        others are computed before the first update, and so are reference logprobs when the KL needs them. With dropout
        the pass that trains is not the policy that sampled, and all old logprobs come from a pass without it.

        Args:
            old_logprobs: float32 [B, T] of the policy as it is now, where they are known already.
        """
        first = 0 if self.config.policy.megatron_cfg.peft.dropout else 1
        later = [row for rows in minibatches[first:] for row in rows]
        if later and old_logprobs is None:
            values = self.logprobs(batch.minibatch(later))
            old_logprobs = np.zeros(batch.token_ids.shape, dtype=np.float32)
            old_logprobs[later, : values.shape[1]] = values
        reference = self.logprobs(batch, reference=True) if self.config.loss_fn.kl_in_loss else None
        parts: list[dict[str, MetricSum]] = []
        norms, rates, tokens, sequences, microbatches = [], [], 0, 0, 0
        for number, rows in enumerate(minibatches):
            old = old_logprobs if number >= first else None
            step = batch.minibatch(rows)
            shards, cuts = self._cut(step)
            calls = self._call_all(
                "train_step",
                lambda dp, step=step, shards=shards, cuts=cuts, rows=rows, old=old: (
                    (step.take(shards[dp]), cuts[dp]),
                    {
                        "old_logprobs": _rows(old, rows, shards[dp]),
                        "reference_logprobs": _rows(reference, rows, shards[dp]),
                    },
                ),
            )
            results = wait(calls, timeout_s=self._timeout, doing="training")
            parts += [r.metrics for r in results if r.metrics]
            norms.append(results[0].grad_norm)
            rates.append(results[0].learning_rate)
            tokens, sequences = tokens + step.global_tokens, sequences + step.global_sequences
            microbatches += len(cuts[0])
        # Importance weights may all be 0, as those that icepop masks: then nothing moves, unless moments do it.
        self.moved = any(rate > 0 and norm > 0 for rate, norm in zip(rates, norms, strict=True))
        metrics = finalise(merge(parts), Normaliser(tokens=float(tokens), sequences=float(sequences)))
        return {
            **metrics,
            "grad_norm": float(np.mean(norms)),
            "lr": rates[-1],
            "microbatches": microbatches,
            "optimizer_steps": len(minibatches),
        }

    def train_supervised(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step that raises the likelihood of the batch's completions.

        Returns:
            `nll` (negative log-likelihood per token, nats), `entropy`, `grad_norm`, `lr`, `microbatches`.
        """
        shards, cuts = self._cut(batch)
        calls = self._call_all("train_step", lambda dp: ((batch.take(shards[dp]), cuts[dp]), {"supervised": True}))
        results = wait(calls, timeout_s=self._timeout, doing="training")
        total = Normaliser(tokens=float(batch.global_tokens), sequences=float(batch.global_sequences))
        return {
            **finalise(merge([r.metrics for r in results if r.metrics]), total),
            "grad_norm": results[0].grad_norm,
            "lr": results[0].learning_rate,
            "microbatches": len(cuts[0]),
        }

    def logprobs(self, batch: TrainBatch, *, reference: bool = False, temperature: float | None = None) -> np.ndarray:
        """float32 [B, T] logprobs of completion tokens under the current or the reference policy.

        Args:
            temperature: divides the logits; None: the sampling temperature.
        """
        self.scored_tokens += int(batch.lengths.sum())
        shards, cuts = self._cut(batch, sequences=self.config.policy.logprob_batch_size)
        options = {"reference": reference, "temperature": temperature}
        calls = self._call_all("logprobs", lambda dp: ((batch.take(shards[dp]), cuts[dp]), options))
        doing = "computing reference logprobs" if reference else "computing logprobs"
        results = wait(calls, timeout_s=self._timeout, doing=doing)
        out = np.zeros(batch.token_ids.shape, dtype=np.float32)
        for rank, values in enumerate(results):
            if values is not None and values.size:
                rows = shards[self.layout.coordinates(rank)[2]]
                out[rows, : values.shape[1]] = values
        return out

    def open_transfer(self) -> tuple[Transfer, str]:
        """Allocate the buffer for pushes on rank 0; what engines must know of it, and rank 0's host."""
        doing = "start-up: allocating the transfer buffer"
        timeout = self.config.cluster.startup_timeout_s
        transfer = wait([w.call("open_transfer") for w in self.workers], timeout_s=timeout, doing=doing)[0]
        [host] = wait([self.workers[0].call("host")], timeout_s=timeout, doing=doing)
        return transfer, host

    def open_stream(self, backend: str, engines: Sequence[Worker]) -> None:
        """Connect all ranks to the engines, so that pushes go from device to device."""
        doing, timeout = "start-up: connecting ranks and engines", self.config.cluster.startup_timeout_s
        [(address, port)] = wait([self.workers[0].call("free_address")], timeout_s=timeout, doing=doing)
        handles = [w.handle for w in engines]
        arguments = (backend, handles, self.layout.engine_tp, address, port)
        wait([w.call("open_stream", *arguments) for w in self.workers], timeout_s=timeout, doing=doing)

    def close_transfer_name(self) -> None:
        """Remove the buffer's file name: every engine has mapped it."""
        timeout = self.config.cluster.startup_timeout_s
        wait([self.workers[0].call("close_transfer_name")], timeout_s=timeout, doing="start-up: opening the transfer")

    def payload(self, *, changed: bool = False) -> Any:
        """A Ray reference to the bytes of the last push, for engines on other hosts; see `WeightSender.payload`."""
        return self.workers[0].call("payload", changed=changed).ref

    def send(self, version: int, *, must_differ: bool) -> Push:
        """Write the weights of `version` where the engines read them."""
        calls = [w.call("send", version, must_differ=must_differ) for w in self.workers]
        push = wait(calls, timeout_s=self._timeout, doing="sending weights")[0]
        assert push is not None
        return push

    def state(self) -> tuple[PeftAdapter, PolicyState]:
        """The adapters and the training state of the whole policy."""
        calls = [w.call("state") for w in self.workers]
        return wait(calls, timeout_s=self._timeout, doing="gathering the checkpoint")[0]

    def load_state(self, adapter: PeftAdapter, state: PolicyState, *, same_layout: bool) -> None:
        """Continue from a checkpoint.

        Args:
            same_layout: it was taken on the same tp x pp x dp, so that random generators can be restored.
        """
        import ray

        shared = (ray.put(adapter), ray.put(state))
        calls = [w.call("load_state", *shared, with_random=same_layout) for w in self.workers]
        wait(calls, timeout_s=self._timeout, doing="restoring the checkpoint")

    def extrapolation(self, method: str, *args: Any) -> Any:
        """What the method of `lora_rl.policy.extrapolation.RankExtrapolation` returns on rank 0."""
        import ray

        shared = [ray.put(argument) for argument in args]
        calls = [w.call("extrapolation", method, *shared) for w in self.workers]
        return wait(calls, timeout_s=self._timeout, doing=f"extrapolating: {method}")[0]

    def save_adapter(self, path: Path) -> None:
        """Write the current adapters as a PEFT directory, which must not exist yet."""
        model = self.config.policy.model_name
        calls = [w.call("save_adapter", str(path.absolute()), model) for w in self.workers]
        wait(calls, timeout_s=self._timeout, doing="saving the adapter")

    def save_model(self, path: Path) -> None:
        """Write the weights, without adapters, as a Hugging Face directory, which must not exist yet."""
        calls = [w.call("save_model", str(path.absolute())) for w in self.workers]
        wait(calls, timeout_s=self._timeout, doing="saving the model")

    def _cut(self, batch: TrainBatch, *, sequences: int | None = None) -> tuple[list[list[int]], list[list[list[Row]]]]:
        """Sequences of each data-parallel shard, and the microbatches of each, equally many everywhere.

        Args:
            sequences: most per microbatch; None: as configured for training.
        """
        policy = self.config.policy
        limits = {
            "max_tokens": policy.dynamic_batching.train_mb_tokens if policy.dynamic_batching.enabled else None,
            "max_sequences": sequences or policy.train_micro_batch_size,
        }
        rows: list[tuple[int, ...]] = [(index,) for index in range(len(batch))]
        positions = batch.lengths.tolist()
        attention_tokens = self._shared_prompts
        # A limit in sequences is about one row for each.
        if attention_tokens is not None and limits["max_sequences"] is None:
            prompts = batch.prompt_lengths.tolist()
            rows = share_prompts(
                batch.group_ids.tolist(),
                prompts,
                positions,
                attention_tokens=attention_tokens,
                max_tokens=limits["max_tokens"],
                shards=self.layout.dp,
            )
            # Rows of one sequence may come to a microbatch in which none shares, where they are laid out whole.
            positions = [
                row_length(prompts[r[0]], [positions[i] for i in r]) if len(r) > 1 else positions[r[0]] for r in rows
            ]
        dealt = shard_sequences(positions, self.layout.dp)
        lengths = [[positions[n] for n in numbers] for numbers in dealt]
        count = num_microbatches_for_all(lengths, **limits)
        shards, cuts = [], []
        for numbers, own in zip(dealt, lengths, strict=True):
            shard = [index for n in numbers for index in rows[n]]
            ends = list(accumulate(len(rows[n]) for n in numbers))
            local = [tuple(range(end - len(rows[n]), end)) for n, end in zip(numbers, ends, strict=True)]
            shards.append(shard)
            cuts.append([[local[k] for k in m] for m in pad_microbatches(split_microbatches(own, **limits), count)])
        return shards, cuts

    @cached_property
    def _shared_prompts(self) -> float | None:
        """`attention_tokens` of `share_prompts`; None: prompts are not shared."""
        if self.config.policy.share_prompts is False:
            return None
        ask = [self.workers[0].call("attention_tokens")]
        return wait(ask, timeout_s=self._timeout, doing="asking for the model's sizes")[0]

    def _call_all(self, method: str, arguments: Any) -> list[Call]:
        calls = []
        for rank, worker in enumerate(self.workers):
            args, kwargs = arguments(self.layout.coordinates(rank)[2])
            calls.append(worker.call(method, *args, **kwargs))
        return calls


def _rows(values: np.ndarray | None, rows: Sequence[int], shard: Sequence[int]) -> np.ndarray | None:
    return None if values is None else values[np.asarray(rows)[np.asarray(shard, dtype=np.int64)]]
