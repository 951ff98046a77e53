"""Checks of one Megatron rank on the platform at hand: python -m tests.gpu.trainer cuda|cpu CHECK FOLDER.

Each prints one line for the table, or ends with a traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lora_rl.config import RunConfig, derive_layout
from tests.support.batches import make_batch, one_microbatch
from tests.support.configs import tiny_config
from tests.support.models import make_model

if TYPE_CHECKING:
    from lora_rl.policy.trainer import PolicyRank

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/models/tiny-adder"
BFLOAT16 = "policy.precision=bfloat16"
LARGE_B = 0.1
# Of cuBLAS, kept by torch and by Transformer Engine.
WORKSPACES = 80 * 2**20


def new_rank(platform: str, folder: Path, *overrides: str, model: Path = MODEL) -> PolicyRank:
    """The only rank of its world, with random B."""
    from lora_rl.policy.model import initialise_parallel
    from lora_rl.policy.platform import prepare
    from lora_rl.policy.trainer import PolicyRank
    from tests.support.lab import randomise_b

    prepared = prepare(platform)
    url = f"file://{folder}/rendezvous"
    initialise_parallel(prepared, rank=0, world_size=1, tp=1, pp=1, seed=1, init_method=url)
    rank = PolicyRank(config(platform, *overrides, model=model), prepared)
    randomise_b(rank, LARGE_B)
    return rank


def config(platform: str, *overrides: str, model: Path = MODEL) -> RunConfig:
    return tiny_config(model, f"cluster.platform={platform}", "policy.max_grad_norm=1e9", *overrides)


def gradients_of_a_step(rank: PolicyRank) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], float]:
    """Gradients of all adapters, and their norm, of one step on a fixed batch."""
    from tests.support.lab import adapters

    batch = make_batch(3)
    norm = rank.train_step(batch, one_microbatch(batch, 1)[1][0]).grad_norm
    return adapters(rank, gradients=True), norm


def largest_difference(got: np.ndarray, want: np.ndarray) -> float:
    """Relative to the largest value."""
    return float(np.abs(got - want).max() / np.abs(want).max())


def parity(platform: str, folder: Path) -> str:
    """Against Hugging Face's model with the merged weights, and autograd, on the CPU."""
    import torch

    from tests.support.hf import hf_logprobs, load_hf
    from tests.support.lab import adapters, exported

    rank, batch, linear = new_rank(platform, folder), make_batch(3), "decoder.layers.0.mlp.linear_fc2"
    model, (a, b) = load_hf(MODEL, exported(rank)), adapters(rank)[linear]
    logprobs = rank.logprobs(batch, one_microbatch(batch, 1)[1][0])
    reference = hf_logprobs(model, batch)
    error = float((torch.from_numpy(logprobs) - reference.detach()).abs().max())
    assert error < 1e-3, f"logprobs differ by {error}"
    # On-policy the clipped loss has the gradient of -advantage x logprob, averaged over tokens.
    advantage, mask = torch.from_numpy(batch.advantages)[:, None], torch.from_numpy(batch.behaviour_logprobs != 0)
    (-(advantage * reference)[mask].sum() / batch.global_tokens).backward()
    whole = model.model.layers[0].mlp.down_proj.weight.grad.numpy()
    gradients, norm = gradients_of_a_step(rank)
    scale = rank.model.lora.alpha / rank.model.lora.dim
    # W + s B A: dA = s B' G, dB = s G A'.
    differences = [
        largest_difference(gradients[linear][0], scale * b.T @ whole),
        largest_difference(gradients[linear][1], scale * whole @ a.T),
    ]
    assert max(differences) < 1e-2, f"gradients of A and B differ by {differences} of the largest"
    return f"logprobs {error:.0e}, gradients {max(differences):.0e} of the largest, norm {norm:.3f}"


def transformer_engine(platform: str, folder: Path) -> str:
    """Linears, attention and norms come from it."""
    rank = new_rank(platform, folder)
    kinds = {type(module).__name__ for module in rank.model.module.modules()}
    wanted = {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention"}
    assert rank.platform.transformer_engine and wanted <= kinds, sorted(kinds)
    return ", ".join(sorted(wanted))


def bfloat16(platform: str, folder: Path) -> str:
    """A step moves every adapter, and no weight of the base."""
    import torch

    from lora_rl.lora.targets import adapter_modules

    rank = new_rank(platform, folder, BFLOAT16)
    parameters = dict(rank.model.module.named_parameters())
    trained = {p.dtype for p in parameters.values() if p.requires_grad}
    frozen = {p.dtype for p in parameters.values() if not p.requires_grad}
    # Norms are float32 in Megatron's local layers.
    assert trained == {torch.float32} and torch.bfloat16 in frozen, (trained, frozen)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    gradients, norm = gradients_of_a_step(rank)
    assert len(gradients) == len(adapter_modules(rank.model.module)) > 0
    moved = {name for name, p in parameters.items() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in parameters.items() if p.requires_grad}, sorted(moved)
    return f"{len(gradients)} adapters moved, norm {norm:.3f}"


def recompute(platform: str, folder: Path) -> str:
    """Activation checkpointing changes no gradient."""
    import torch.distributed as dist

    plain, _ = gradients_of_a_step(new_rank(platform, folder))
    # Not before the platform is prepared.
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    (folder / "rendezvous").unlink(missing_ok=True)
    again, _ = gradients_of_a_step(new_rank(platform, folder, "policy.megatron_cfg.activation_checkpointing=true"))
    worst = max(largest_difference(again[n][i], plain[n][i]) for n in plain for i in (0, 1))
    assert worst < 1e-4, worst
    return f"{worst:.0e} of the largest"


def offload(platform: str, folder: Path) -> str:
    """The device gets their memory back, and computes the same afterwards."""
    import torch

    from lora_rl.policy.offload import FrozenWeights

    rank, batch = new_rank(platform, folder, BFLOAT16), make_batch(3)
    cut = one_microbatch(batch, 1)[1][0]
    before = rank.logprobs(batch, cut)
    frozen = FrozenWeights(rank.model.chunks)
    size = frozen.nbytes
    held = torch.cuda.memory_allocated() if platform == "cuda" else 0
    frozen.offload()
    freed = held - torch.cuda.memory_allocated() if platform == "cuda" else size
    assert freed >= 0.99 * size, f"{freed} of {size} bytes were freed"
    frozen.reload()
    assert np.array_equal(rank.logprobs(batch, cut), before)
    return f"{freed:,} of {size:,} bytes freed"


def memory(platform: str, folder: Path) -> str:
    """Weights, adapters, gradients and moments to 5 %; activations are printed beside their estimate."""
    import torch

    from lora_rl.config import memory_parts as parts
    from lora_rl.config.memory_plan import trainer_of
    from lora_rl.config.model_files import read_model_facts
    from lora_rl.config.parameters import Shape, shape_of

    # Libraries keep a workspace of up to 32 MiB each, which the tiny model would drown in.
    model = make_model(folder / "model", layers=8, hidden_size=1024)
    settings, facts = config(platform, BFLOAT16, model=model), read_model_facts(str(model))
    shape = shape_of(facts)
    assert isinstance(shape, Shape)
    trainer = trainer_of(settings, derive_layout(settings), shape, facts)
    planned = shape.on_stage(0, tp=1, pp=1) * 2 + parts.adapter_parameters(shape, trainer) * 4 * 4
    rank = new_rank(platform, folder, BFLOAT16, model=model)
    gradients_of_a_step(rank)
    if platform == "cpu":
        return f"planned {planned:,} bytes; measured on GPUs only"
    held = torch.cuda.memory_allocated()
    assert -0.05 * planned < held - planned < 0.05 * planned + WORKSPACES, f"held {held}, planned {planned}"
    return f"{held:,} bytes held, {planned:,} planned; peak {torch.cuda.max_memory_allocated():,}"


if __name__ == "__main__":
    platform, name, folder = sys.argv[1:]
    print(globals()[name](platform, Path(folder)))
