"""Questions about the CPU platform, each asked in a process of its own because the answers change the process.

`python -m tests.support.platform_probe QUESTION [ARGUMENT]` prints the answer as JSON on its last line.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def logits(folder: str) -> list[float]:
    """Logits of Hugging Face's model on fixed tokens, in an unpatched process."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 40)[None]).logits.flatten().tolist()


def cuda_without_transformer_engine() -> dict[str, Any]:
    """Whether a GPU platform without it can import the adapters; of a GPU only its number is asked here."""
    import torch

    from lora_rl.policy.platform import prepare

    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
    torch.cuda.set_device = lambda index: None
    platform = prepare("cuda")
    from megatron.bridge.peft import utils
    from megatron.bridge.peft.lora import LoRA

    return {
        "engine": platform.transformer_engine,
        "in bridge": utils.HAVE_TE,
        "fused": [name for name, value in platform.provider_overrides.items() if value],
        "overrides": len(platform.provider_overrides),
        "lora": LoRA.__name__,
        "left": "transformer_engine" in sys.modules,
    }


def cuda_without_a_gpu() -> dict[str, Any]:
    """What asking for `cuda` says and changes where there is none."""
    import torch

    from lora_rl.policy.platform import prepare

    before = _patchable(torch)
    message = ""
    try:
        prepare("cuda")
    except RuntimeError as error:
        message = str(error)
    return {
        "message": message,
        "changed": [name for name, value in _patchable(torch).items() if value is not before[name]],
        "megatron": "megatron" in sys.modules,
    }


def unknown() -> str:
    """The message for a platform that does not exist."""
    from lora_rl.policy.platform import prepare

    try:
        prepare("tpu")
    except ValueError as error:
        return str(error)
    return ""


def too_late() -> str:
    """The message when Megatron came first."""
    import megatron.core  # noqa: F401

    from lora_rl.policy.platform import prepare

    try:
        prepare("cpu")
    except RuntimeError as error:
        return str(error)
    return ""


def _patchable(torch: Any) -> dict[str, Any]:
    places = {"torch": torch, "cuda": torch.cuda, "Tensor": torch.Tensor, "Module": torch.nn.Module}
    return {
        f"{place}.{name}": getattr(holder, name)
        for place, holder in places.items()
        for name in (
            "zeros",
            "empty",
            "tensor",
            "to",
            "cuda",
            "current_device",
            "get_rng_state",
            "synchronize",
            "Stream",
        )
        if hasattr(holder, name)
    }


if __name__ == "__main__":
    answer = globals()[sys.argv[1]](*sys.argv[2:])
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
