"""The memory plan against what real Megatron ranks and a real engine hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lora_rl.config import RunConfig, derive_layout
from lora_rl.config import memory_parts as parts
from lora_rl.config.memory_plan import trainer_of
from lora_rl.config.model_files import read_model_facts
from lora_rl.config.parameters import Shape, shape_of
from lora_rl.rollout.types import TrainBatch
from tests.support.configs import tiny_config
from tests.support.engine_process import EngineProcess
from tests.support.lab import new_rank
from tests.support.ranks import run_ranks

SEQUENCES, LENGTH, PROMPT = 8, 64, 56
SPLIT = "policy.megatron_cfg.sequence_parallel=true"
RECOMPUTE = "policy.megatron_cfg.activation_checkpointing=true"
CASES = [
    ("tied", 1, 1, ()),
    ("untied", 1, 1, ()),
    ("tied", 2, 1, ()),
    ("untied", 1, 2, ()),
    ("tied", 1, 1, (RECOMPUTE,)),
    ("tied", 2, 1, (SPLIT,)),
]


def full_batch() -> TrainBatch:
    """Sequences without padding, so that a microbatch has as many tokens as the plan counts."""
    rng = np.random.default_rng(0)
    shape = (SEQUENCES, LENGTH)
    completion = np.broadcast_to(np.arange(LENGTH) >= PROMPT, shape)
    return TrainBatch(
        token_ids=rng.integers(3, 264, shape),
        lengths=np.full(SEQUENCES, LENGTH),
        prompt_lengths=np.full(SEQUENCES, PROMPT),
        behaviour_logprobs=np.where(completion, -5, 0).astype(np.float32),
        advantages=rng.normal(size=SEQUENCES).astype(np.float32),
        group_ids=np.arange(SEQUENCES) // 4,
        global_tokens=int(completion.sum()),
        global_sequences=SEQUENCES,
    )


def holdings(config: RunConfig, group: int = 1) -> dict[str, Any]:
    """Bytes that one rank holds, and keeps for the backward pass of one microbatch; `group` sequences share a row."""
    import torch

    rank = new_rank(config, b_std=0.5)
    parameters = list(rank.model.module.parameters())
    weights = {p.untyped_storage().data_ptr() for p in parameters}
    kept: dict[int, torch.Tensor] = {}
    batch = full_batch()
    batch.token_ids[:, :PROMPT] = batch.token_ids[0, :PROMPT]

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        # Alive, so that its address is not given to another tensor; a storage counts once.
        if tensor.untyped_storage().data_ptr() not in weights:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rank.train_step(batch, [[tuple(range(n, n + group)) for n in range(0, SEQUENCES, group)]])
    states = [t for s in rank.optimizer.optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.ndim]
    trained = [p for p in parameters if p.requires_grad]
    return {
        "base": sum(p.nbytes for p in parameters if not p.requires_grad),
        "trained": sum(t.nbytes for t in (*trained, *(p.main_grad for p in trained), *states)),
        "kept": sum(t.untyped_storage().nbytes() for t in kept.values()),
        "softmax": sum(t.nbytes for t in kept.values() if t.shape == (SEQUENCES * (LENGTH - PROMPT), 264 // rank_tp())),
    }


def rank_tp() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_world_size()


@pytest.mark.multiprocess
@pytest.mark.parametrize(("kind", "tp", "pp", "overrides"), CASES)
def test_ranks_hold_what_the_plan_says(
    models: dict[str, Path], kind: str, tp: int, pp: int, overrides: tuple[str, ...]
) -> None:
    tokens = f"policy.dynamic_batching.train_mb_tokens={SEQUENCES * LENGTH}"
    config = tiny_config(models[kind], tokens, "policy.share_prompts=false", *overrides, tp=tp, pp=pp)
    facts = read_model_facts(str(models[kind]))
    shape = shape_of(facts)
    assert isinstance(shape, Shape)
    trainer = trainer_of(config, derive_layout(config), shape, facts)
    for rank, held in enumerate(run_ranks(holdings, config, tp=tp, pp=pp)):
        stage = rank // tp
        assert held["base"] == shape.on_stage(stage, tp=tp, pp=pp) * 4
        # A parameter, its gradient, and two moments.
        assert held["trained"] == parts.adapter_parameters(shape, trainer) * 4 * 4
        # One microbatch is in flight here, however many stages there are.
        planned = parts.activations(shape, trainer, stage=pp - 1)
        if RECOMPUTE in overrides:
            # Each layer is computed again in the backward pass; what it keeps then is seen here for all, one by one.
            planned += (shape.layers - 1) * parts.layer_activations(shape, trainer)
        assert planned == pytest.approx(held["kept"] - held["softmax"], rel=0.08)


@pytest.mark.multiprocess
def test_a_rank_holds_what_the_plan_says_of_shared_prompts(models: dict[str, Path]) -> None:
    group = SEQUENCES // 2
    row = PROMPT + group * (LENGTH - PROMPT - 1)
    config = tiny_config(
        models["tied"],
        f"policy.dynamic_batching.train_mb_tokens={2 * row}",
        f"policy.max_total_sequence_length={LENGTH}",
        f"policy.generation.max_new_tokens={LENGTH - PROMPT}",
        f"grpo.num_generations_per_prompt={group}",
    )
    shape = shape_of(read_model_facts(str(models["tied"])))
    assert isinstance(shape, Shape)
    trainer = trainer_of(config, derive_layout(config), shape, read_model_facts(str(models["tied"])))
    assert (trainer.tokens, trainer.length) == (2 * row, row)
    [held] = run_ranks(holdings, config, group)
    assert parts.activations(shape, trainer, stage=0) == pytest.approx(held["kept"] - held["softmax"], rel=0.08)


@pytest.mark.parametrize("kind", ["tied"])
def test_an_engine_caches_what_the_plan_says(engine: EngineProcess, models: dict[str, Path], kind: str) -> None:
    shape = shape_of(read_model_facts(str(models[kind])))
    assert isinstance(shape, Shape)
    [specs] = engine.call("llm.collective_rpc", "get_kv_cache_spec")
    per_token = sum(spec.page_size_bytes / spec.block_size for spec in specs.values())
    assert per_token == parts.kv_cache_per_token(shape, tp=1, precision=4)
