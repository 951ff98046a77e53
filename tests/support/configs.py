"""Small configurations, made by the real loader."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml

from lora_rl.config import RunConfig, load_config


def tiny_config(model: Path, *overrides: str, tp: int = 1, pp: int = 1, dp: int = 1, **peft: Any) -> RunConfig:
    """A CPU configuration for a model made by `make_model`; `overrides` are dotted keys as on the command line."""
    document = {
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": 10, "seed": 7},
        "policy": {
            "model_name": str(model),
            "precision": "float32",
            "max_total_sequence_length": 64,
            "generation": {"max_new_tokens": 8},
            "megatron_cfg": {
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                "peft": {"dim": 8, "alpha": 32, **peft},
                "optimizer": {"lr": 1e-2},
            },
        },
        "cluster": {"platform": "cpu", "gpus_per_node": tp * pp * dp},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.yaml"
        path.write_text(yaml.safe_dump(document))
        return load_config(path, overrides)


def with_peft(config: RunConfig, **changes: Any) -> RunConfig:
    """Other adapter settings, past the checks of the loader."""
    peft = config.policy.megatron_cfg.peft.model_copy(update=changes)
    megatron = config.policy.megatron_cfg.model_copy(update={"peft": peft})
    return config.model_copy(update={"policy": config.policy.model_copy(update={"megatron_cfg": megatron})})
