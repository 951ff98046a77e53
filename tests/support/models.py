"""Tiny Hugging Face checkpoints with random weights: big enough to have every feature, small enough for a test."""

from __future__ import annotations

import json
from pathlib import Path

import torch


def make_model(
    folder: Path,
    *,
    tied: bool = True,
    layers: int = 4,
    seed: int = 0,
    vocab_size: int = 264,
    hidden_size: int | None = None,
) -> Path:
    """Write a checkpoint with grouped-query attention (4 query, 2 key-value heads) and perturbed norms.

    The tied one is a Qwen3, which normalises queries and keys, with heads wider than hidden size / heads; the untied
    one a Qwen2, whose queries, keys and values have biases.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    make_config, make = (Qwen3Config, Qwen3ForCausalLM) if tied else (Qwen2Config, Qwen2ForCausalLM)
    config = make_config(
        vocab_size=vocab_size,
        hidden_size=hidden_size or (64 if tied else 128),
        intermediate_size=2 * hidden_size if hidden_size else 96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM attends with on CPUs
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        rope_theta=10000.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = make(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: ids 0-2 are padding, start and end, then one id per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<start>", "<end>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(special + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
