"""A small local model (its config.json is all that the configuration reads) and a valid configuration file."""

from __future__ import annotations

import json
from pathlib import Path

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def write_model(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**MODEL, **changes}))
    return folder


def write_config(folder: Path, model_dir: Path) -> Path:
    path = folder / "run.yaml"
    path.write_text(
        f"""\
grpo:
  max_num_steps: 100
policy:
  model_name: {model_dir}
  precision: float32
  max_total_sequence_length: 32
  generation:
    max_new_tokens: 8
cluster:
  platform: cpu
"""
    )
    return path
