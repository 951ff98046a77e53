"""Adapters as Hugging Face PEFT directories: `adapter_model.safetensors` and `adapter_config.json`."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from lora_rl.lora.merge import AdapterTensors
from lora_rl.lora.tensor_files import write_tensors

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTORS = {".lora_A.weight": "A", ".lora_B.weight": "B"}
# Settings of PEFT that change what the adapter computes, each with the values under which it computes plain LoRA.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    # The others (pissa, olora, corda, loftq, ...) also change the base weights that the adapter sits on.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}


@dataclass(frozen=True)
class PeftAdapter:
    """A set of adapters on one Hugging Face model.

    Attributes:
        tensors: by Hugging Face module name, such as `model.layers.0.self_attn.q_proj`.
        base_model_name_or_path: the model it belongs to, as far as known.
    """

    tensors: Mapping[str, AdapterTensors]
    base_model_name_or_path: str | None = None


def read_peft(path: Path) -> PeftAdapter:
    """Read a PEFT LoRA directory. Ranks and alphas per module, and rank-stabilised scaling, are understood.

    Scales are alpha / r (Hu et al. 2021), or alpha / sqrt(r) with `use_rslora` (Kalajdzievski 2023).

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: what PEFT can do and this cannot (DoRA, modules_to_save, ...), named with its value; or tensors
            that do not fit the configuration.
    """
    config_path, weights_path = path / CONFIG_FILE, path / WEIGHTS_FILE
    for file in (config_path, weights_path):
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist; a PEFT adapter has {CONFIG_FILE} and {WEIGHTS_FILE}")
    try:
        config = json.loads(config_path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{config_path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{config_path}: must be a JSON object, not {type(config).__name__}")
    _refuse_unsupported(config, config_path)
    try:
        state = load_file(weights_path)
    except SafetensorError as error:
        raise ValueError(f"{weights_path}: not a readable safetensors file: {error}") from error
    factors: dict[str, dict[str, Any]] = {}
    for name, tensor in state.items():
        suffix = next((s for s in _FACTORS if name.endswith(s)), None)
        if suffix is None or tensor.ndim != 2:
            raise ValueError(
                f"{weights_path}: {name} {list(tensor.shape)} is not a LoRA factor; supported are matrices "
                "<module>.lora_A.weight and <module>.lora_B.weight of linear layers"
            )
        module = name.removesuffix(suffix).removeprefix(_PREFIX)
        factors.setdefault(module, {})[_FACTORS[suffix]] = tensor.float()
    if not factors:
        raise ValueError(f"{weights_path}: no adapter in it")
    tensors = {}
    for module in sorted(factors):
        parts = factors[module]
        if len(parts) != 2:
            raise ValueError(f"{weights_path}: {module} has only {'A' if 'A' in parts else 'B'}, not both factors")
        rank = _by_pattern(config.get("rank_pattern"), module, config.get("r"))
        alpha = _by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha"))
        a, b = parts["A"], parts["B"]
        if (a.shape[0], b.shape[1]) != (rank, rank):
            raise ValueError(
                f"{weights_path}: {module} has A {list(a.shape)} and B {list(b.shape)}, but {CONFIG_FILE} gives rank "
                f"{rank}"
            )
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise ValueError(f"{config_path}: lora_alpha of {module} is {alpha!r}, not a number")
        scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
        tensors[module] = AdapterTensors(a, b, scale)
    return PeftAdapter(tensors, config.get("base_model_name_or_path") or None)


def write_peft(path: Path, adapter: PeftAdapter, *, base_model: str) -> None:
    """Write a PEFT LoRA directory, float32. It appears under its name only when complete.

    The commonest rank and scale become `r` and `lora_alpha`; modules that differ are listed in the patterns.
    `target_modules` holds full module names: exactly these modules, whatever else the model calls alike.

    Raises:
        FileExistsError: `path` exists.
        ValueError: there is no adapter to write.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists; choose a directory that does not")
    if not adapter.tensors:
        raise ValueError(f"there is no adapter to write to {path}")
    kinds = {module: (t.rank, t.scale * t.rank) for module, t in sorted(adapter.tensors.items())}
    (rank, alpha), _ = Counter(kinds.values()).most_common(1)[0]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": _plain_number(alpha),
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": list(kinds),
        "rank_pattern": {m: r for m, (r, _) in kinds.items() if r != rank},
        "alpha_pattern": {m: _plain_number(a) for m, (_, a) in kinds.items() if a != alpha},
    }
    state = {}
    for module, tensors in adapter.tensors.items():
        for suffix, factor in zip(_FACTORS, (tensors.a, tensors.b), strict=True):
            # A copy: modules that were one fused matrix share an A, which the file format refuses.
            state[f"{_PREFIX}{module}{suffix}"] = factor.detach().float().cpu().contiguous().clone()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as temporary:
        folder = Path(temporary) / "adapter"
        folder.mkdir()
        write_tensors(state, folder / WEIGHTS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        os.rename(folder, path)


def _refuse_unsupported(config: Mapping[str, Any], path: Path) -> None:
    problems = [
        f"{key}: {config[key]!r} is not supported; it must be {' or '.join(repr(v) for v in plain[:2])}"
        for key, plain in _PLAIN.items()
        if key in config and not any(config[key] == v and type(config[key]) is type(v) for v in plain)
    ]
    rank = config.get("r")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        problems.append(f"r: {rank!r} is not a rank; it must be a whole number of at least 1")
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            problems.append(f"{key}: {config[key]!r} is not a map from module patterns to numbers")
    if problems:
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems))


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern, a regular expression, that matches the end of a module's path, as in PEFT."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _plain_number(value: float) -> int | float:
    return int(value) if value == int(value) else value
