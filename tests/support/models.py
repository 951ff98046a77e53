"""Tiny Hugging Face checkpoints with random weights: big enough to have every feature, small enough for a test."""

from __future__ import annotations

from pathlib import Path

import torch


def make_model(folder: Path, *, tied: bool = True, layers: int = 4, seed: int = 0, vocab_size: int = 264) -> Path:
    """Write a Qwen3 checkpoint with grouped-query attention (4 query, 2 key-value heads) and perturbed norms."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        rope_theta=10000.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(folder)
    return folder
