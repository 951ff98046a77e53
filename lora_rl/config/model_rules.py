"""Rules between the configuration and the model it names.

Sizes come from the config.json of a local model; for a hub id (`facts` is None) only names can be checked.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from lora_rl.config.errors import Violation
from lora_rl.config.layout import platform_of
from lora_rl.config.model_files import ModelFacts
from lora_rl.config.schema import PeftConfig, RunConfig

ModelRule = Callable[[RunConfig, ModelFacts | None], Iterator[Violation]]

ADAPTABLE = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
EXPERT_LINEARS = ("linear_fc1", "linear_fc2")
OUTPUT_LAYER = ("output_layer", "lm_head")
# Megatron fuses what Hugging Face keeps apart.
MEGATRON_NAMES = {
    "q_proj": "linear_qkv",
    "k_proj": "linear_qkv",
    "v_proj": "linear_qkv",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1",
    "up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
}
_TARGETS = "policy.megatron_cfg.peft.target_modules"
_EXCLUDED = "policy.megatron_cfg.peft.exclude_modules"


def model_exists(config: RunConfig, facts: ModelFacts | None) -> Iterator[Violation]:
    """The model is a directory with a config.json, or has the form of a hub id."""
    name = config.policy.model_name
    if facts is None:
        problem, hints = _missing_model(name)
        if problem:
            yield Violation("policy.model_name", problem, name, hints)


def sizes_divide(config: RunConfig, facts: ModelFacts | None) -> Iterator[Violation]:
    """Every rank and every engine process gets a whole share of the model."""
    if facts is None:
        return
    megatron, vllm = config.policy.megatron_cfg, config.policy.generation.vllm_cfg
    tp_key = "policy.megatron_cfg.tensor_model_parallel_size"
    pp_key = "policy.megatron_cfg.pipeline_model_parallel_size"
    engine_key = "policy.generation.vllm_cfg.tensor_parallel_size"
    checks = (
        (tp_key, megatron.tensor_model_parallel_size, "num_attention_heads", facts.num_heads),
        (tp_key, megatron.tensor_model_parallel_size, "num_key_value_heads", facts.num_kv_heads),
        (tp_key, megatron.tensor_model_parallel_size, *_inner_size(facts)),
        # Nothing is padded.
        (tp_key, megatron.tensor_model_parallel_size, "vocab_size", facts.vocab_size),
        (pp_key, megatron.pipeline_model_parallel_size, "num_hidden_layers", facts.num_layers),
        (engine_key, vllm.tensor_parallel_size, "num_attention_heads", facts.num_heads),
    )
    for key, parts, name, size in checks:
        if size is not None and size % parts:
            yield Violation(key, f"must divide the model's {name} = {size}", parts)


def _inner_size(facts: ModelFacts) -> tuple[str, int | None]:
    """Name and value of the inner width of an MLP, or of an expert."""
    if facts.num_experts:
        return "moe_intermediate_size", facts.expert_size
    return "intermediate_size", facts.intermediate_size


def experts_are_supported(config: RunConfig, facts: ModelFacts | None) -> Iterator[Violation]:
    """What a mixture of experts needs, and cannot do."""
    if facts is None or not facts.num_experts:
        return
    megatron, peft = config.policy.megatron_cfg, config.policy.megatron_cfg.peft
    if megatron.tensor_model_parallel_size > 1 and not megatron.sequence_parallel:
        problem = "Megatron trains a mixture of experts over tensor-parallel ranks only with it; set it to true"
        yield Violation("policy.megatron_cfg.sequence_parallel", problem, False)
    if config.policy.generation.weight_sync.mode == "merged" and platform_of(config) == "cpu":
        problem = (
            "vLLM's CPU build rearranges experts when it loads them and cannot load them again; use adapter_merge or "
            "adapter, which leave them alone"
        )
        yield Violation("policy.generation.weight_sync.mode", problem, "merged")
    on_experts = [name for name in EXPERT_LINEARS if adapted_layers(facts, peft)[name]]
    if on_experts:
        problem = (
            f"{' and '.join(on_experts)} of this model are in its experts, and adapters there are not available: "
            f"with Transformer Engine all experts of a rank would share one; use [linear_qkv, linear_proj]"
        )
        yield Violation(_TARGETS, problem, peft.target_modules)


def adapted_layers(facts: ModelFacts, peft: PeftConfig) -> dict[str, int]:
    """How many layers have an adapter on each linear."""
    counts = dict.fromkeys(ADAPTABLE, 0)
    targets, excluded = peft.target_modules, peft.exclude_modules
    for module in facts.module_names():
        if any(matches(t, module) for t in targets) or (not targets and not any(matches(e, module) for e in excluded)):
            counts[module.rpartition(".")[2]] += 1
    return counts


def positions_suffice(config: RunConfig, facts: ModelFacts | None) -> Iterator[Violation]:
    """Sequences stay within the positions the model was made for."""
    longest = facts.max_positions if facts else None
    lengths = {
        "policy.max_total_sequence_length": config.policy.max_total_sequence_length,
        "policy.generation.vllm_cfg.max_model_len": config.policy.generation.vllm_cfg.max_model_len,
    }
    for key, length in lengths.items():
        if longest is not None and length is not None and length > longest:
            yield Violation(key, f"the model's max_position_embeddings is {longest}; use at most that", length)


def targets_are_real(config: RunConfig, facts: ModelFacts | None) -> Iterator[Violation]:
    """Every target names a linear of the model; one that matches nothing would silently train nothing."""
    peft = config.policy.megatron_cfg.peft
    if not peft.target_modules and not peft.exclude_modules:
        problem = f"names nothing to adapt; use some of {', '.join(ADAPTABLE)}"
        yield Violation(_TARGETS, problem, peft.target_modules)
    for target in peft.target_modules:
        yield from _check_target(_TARGETS, target, facts)


def exclusions_are_real(config: RunConfig, facts: ModelFacts | None) -> Iterator[Violation]:
    """Exclusions apply to "every linear that can carry an adapter", so they replace a list of targets."""
    peft = config.policy.megatron_cfg.peft
    if not peft.exclude_modules:
        return
    if peft.target_modules:
        problem = "only applies when target_modules is empty ([]); list what to adapt in target_modules instead"
        yield Violation(_EXCLUDED, problem, peft.exclude_modules)
        return
    for name in peft.exclude_modules:
        yield from _check_target(_EXCLUDED, name, facts)
    if set(ADAPTABLE) <= set(peft.exclude_modules):
        yield Violation(_EXCLUDED, "nothing is left to adapt; leave one of them out", peft.exclude_modules)


def _check_target(key: str, target: str, facts: ModelFacts | None) -> Iterator[Violation]:
    name = target.rpartition(".")[2].lstrip("*")
    if name in OUTPUT_LAYER:
        tied = facts is not None and facts.tied_embeddings
        reason = (
            "this model ties the output layer to the input embedding (tie_word_embeddings), and an adapter on it "
            "would change only one of the two uses"
            if tied
            else "adapters on the output layer are not available"
        )
        yield Violation(key, f"{reason}; leave it out", target)
    elif name not in ADAPTABLE:
        translated = MEGATRON_NAMES.get(name)
        near = (translated,) if translated else tuple(difflib.get_close_matches(name, ADAPTABLE, n=1))
        note = f"{name} is a Hugging Face name; " if translated else ""
        expected = f"{note}expected {', '.join(ADAPTABLE)}, or a wildcard that ends in one, *.layers.0.*.linear_qkv"
        yield Violation(key, expected, target, near)
    elif target != name and facts is not None and facts.num_layers:
        modules = facts.module_names()
        if any(matches(target, module) for module in modules):
            return
        problem = (
            f"matches no module; the model has layers 0 to {facts.num_layers - 1}, and modules such as "
            f"{modules[0]} and {modules[2]}"
        )
        yield Violation(key, problem, target)


def matches(pattern: str, module: str) -> bool:
    """Whether a pattern names a module: its last part, or with wildcards all of it.

    Only `*` is special, and stands for any text.
    """
    if "*" in pattern:
        return re.fullmatch(".*".join(re.escape(part) for part in pattern.split("*")), module) is not None
    return module == pattern or module.endswith(f".{pattern}")


def _missing_model(name: str) -> tuple[str, tuple[str, ...]]:
    """Why a name without a config.json is no model, and what it may have meant; ("", ()) for a hub id."""
    path = Path(name).expanduser()
    if path.is_dir():
        inside = sorted(str(file.parent) for file in path.glob("*/config.json"))
        return "the folder has no config.json; name the folder of a Hugging Face model", tuple(inside[:3])
    if path.exists():
        return "this is a file; name the folder of a Hugging Face model", ()
    is_hub_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name) is not None
    if is_hub_id and not ("/" in name and path.parent.is_dir()):
        return "", ()
    siblings = [file.parent.name for file in path.parent.glob("*/config.json")]
    near = tuple(str(path.parent / sibling) for sibling in difflib.get_close_matches(path.name, siblings, n=3))
    problem = "no such folder here or in the configuration file's project"
    if not near:
        problem += "; name the folder of a Hugging Face model, or a hub id such as Qwen/Qwen3-0.6B"
    return problem, near


MODEL_RULES: tuple[ModelRule, ...] = (
    model_exists,
    sizes_divide,
    experts_are_supported,
    positions_suffice,
    targets_are_real,
    exclusions_are_real,
)
