"""What the schema has a key for but this version cannot do. To lift a limit, delete its entry."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lora_rl.config.errors import Violation, show
from lora_rl.config.schema import RunConfig


@dataclass(frozen=True)
class Capability:
    """One key of which only some values work.

    Attributes:
        key: dotted path.
        works: the values that work.
        missing: what is not available, as the subject of a sentence.
    """

    key: str
    works: tuple[Any, ...]
    missing: str

    def check(self, config: RunConfig) -> Iterator[Violation]:
        value = operator.attrgetter(self.key)(config)
        if value not in self.works:
            remedy = " or ".join(show(word) for word in self.works)
            yield Violation(self.key, f"not available in this version: {self.missing}; set it to {remedy}", value)


_MEGATRON = "policy.megatron_cfg"
_GENERATION = "policy.generation"

CAPABILITIES = (
    Capability(f"{_MEGATRON}.enabled", (True,), "any trainer but Megatron-Core"),
    Capability(
        f"{_MEGATRON}.context_parallel_size",
        (1,),
        "context parallelism, as Megatron's own attention (the one on CPUs) refuses it, and logprobs are of whole "
        "sequences",
    ),
    Capability(f"{_MEGATRON}.expert_model_parallel_size", (1,), "expert parallelism"),
    Capability(
        "policy.sequence_packing.enabled",
        (False,),
        "packed sequences, as Megatron's own attention (the one on CPUs) refuses them; policy.dynamic_batching fills "
        "microbatches by tokens",
    ),
    Capability(f"{_MEGATRON}.peft.enabled", (True,), "training without adapters"),
    Capability(f"{_GENERATION}.vllm_cfg.async_engine", (True,), "an engine that serves whole batches only"),
)
