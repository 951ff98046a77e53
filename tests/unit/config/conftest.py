"""A small local model (its config.json is all that the configuration reads) and a valid configuration file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_rl.config import ConfigError, Violation, load_config

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


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def config_file(tmp_path: Path, model_dir: Path) -> Path:
    return write_config(tmp_path, model_dir)


@pytest.fixture
def refused(config_file: Path):
    """Load the valid file with overrides that must be refused; the violations by key."""

    def load(*overrides: str, path: Path = config_file) -> dict[str, Violation]:
        with pytest.raises(ConfigError) as caught:
            load_config(path, overrides)
        keys = [violation.key for violation in caught.value.violations]
        assert len(keys) == len(set(keys)), f"a key is reported twice: {keys}"
        return {violation.key: violation for violation in caught.value.violations}

    return load


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
