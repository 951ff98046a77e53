"""The same model in plain PyTorch: Hugging Face's own implementation, and the fused matrices that Megatron makes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from lora_rl.rollout.types import TrainBatch


def load_hf(folder: Path, weights: Mapping[str, np.ndarray] | None = None) -> torch.nn.Module:
    """The checkpoint in float32, or another set of weights in its place. Missing and extra names are errors."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if weights is not None:
        state = {name: torch.from_numpy(value) for name, value in weights.items()}
        if model.config.tie_word_embeddings:
            state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
        model.load_state_dict(state)
    return model


def hf_logprobs(model: torch.nn.Module, batch: TrainBatch, temperature: float = 1.0) -> torch.Tensor:
    """float32 [B, T] logprobs of completion tokens, 0 elsewhere; one sequence at a time, so without any padding."""
    rows = []
    for row in range(len(batch)):
        length, start = int(batch.lengths[row]), int(batch.prompt_lengths[row])
        tokens = torch.from_numpy(batch.token_ids[row, :length])[None]
        table = torch.log_softmax(model(input_ids=tokens).logits[0].double() / temperature, dim=-1)
        picked = table[start - 1 : length - 1].gather(-1, tokens[0, start:, None])[:, 0].float()
        rows.append(torch.nn.functional.pad(picked, (start, batch.token_ids.shape[1] - length)))
    return torch.stack(rows)


def hf_adapters(
    adapters: Mapping[str, tuple[np.ndarray, np.ndarray]], config
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B by Hugging Face module name, from those of the fused Megatron linears."""
    result = {}
    for name, (a, b) in adapters.items():
        layer, linear = name.split(".")[2], name.rsplit(".", 1)[-1]
        for module, rows in _split(torch.from_numpy(b), linear, config).items():
            result[f"model.layers.{layer}.{module}"] = (torch.from_numpy(a), rows)
    return result


def _split(b: torch.Tensor, linear: str, config) -> dict[str, torch.Tensor]:
    if linear == "linear_proj":
        return {"self_attn.o_proj": b}
    if linear == "linear_fc2":
        return {"mlp.down_proj": b}
    if linear == "linear_fc1":
        gate, up = b.chunk(2)
        return {"mlp.gate_proj": gate, "mlp.up_proj": up}
    groups = config.num_key_value_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    by_group = b.reshape(groups, -1, head, b.shape[1])
    parts = {"q": by_group[:, :-2], "k": by_group[:, -2:-1], "v": by_group[:, -1:]}
    return {f"self_attn.{part}_proj": rows.reshape(-1, b.shape[1]) for part, rows in parts.items()}


def peft_model(
    folder: Path, adapters: Mapping[str, tuple[torch.Tensor, torch.Tensor]], alpha: float, rank: int
) -> torch.nn.Module:
    """The checkpoint with these adapters in Hugging Face's own PEFT, not merged."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(adapters))
    model = get_peft_model(load_hf(folder), config).eval()
    with torch.no_grad():
        for name, (a, b) in adapters.items():
            module = model.get_submodule(f"base_model.model.{name}")
            module.lora_A["default"].weight.copy_(a)
            module.lora_B["default"].weight.copy_(b)
    return model


def completion_mask(batch: TrainBatch) -> np.ndarray:
    """bool [B, T]."""
    time = np.arange(batch.token_ids.shape[1])
    return (time >= batch.prompt_lengths[:, None]) & (time < batch.lengths[:, None])


def fused(tensors: Mapping[str, torch.Tensor], layer: int, linear: str, config) -> torch.Tensor:
    """One fused Megatron matrix [out, in] from the Hugging Face matrices of a layer.

    Query, key and value are interleaved by key-value group: its queries, its key, its value. Gate comes before up.
    """
    prefix = f"model.layers.{layer}."
    if linear == "linear_proj":
        return tensors[prefix + "self_attn.o_proj.weight"]
    if linear == "linear_fc2":
        return tensors[prefix + "mlp.down_proj.weight"]
    if linear == "linear_fc1":
        return torch.cat([tensors[prefix + f"mlp.{part}_proj.weight"] for part in ("gate", "up")])
    groups = config.num_key_value_heads
    parts = [tensors[prefix + f"self_attn.{part}_proj.weight"] for part in "qkv"]
    return torch.cat([p.reshape(groups, -1, p.shape[1]) for p in parts], dim=1).reshape(-1, parts[0].shape[1])
