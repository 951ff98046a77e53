"""Choosing the modules that receive an adapter, and refusing names that would silently adapt nothing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# The linears of a Megatron transformer layer that can carry an adapter.
ADAPTABLE = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


# What they are made of in Hugging Face's models of the Llama and Qwen families.
HF_LINEARS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
    "output_layer": ("lm_head",),
}


class TargetError(ValueError):
    """A target module name that matches nothing, or must not be adapted."""


def matches(pattern: str, name: str) -> bool:
    """Whether a target pattern names the module: its last path component, or a wildcard over the full path.

    `linear_qkv` matches every `...linear_qkv`; `*.layers.0.*.linear_qkv` matches that of layer 0.
    """
    if "*" in pattern:
        regex = ".*".join(re.escape(part) for part in pattern.split("*"))
        return re.fullmatch(regex, name) is not None
    return name == pattern or name.endswith("." + pattern)


def select_targets(
    patterns: Sequence[str],
    excluded: Sequence[str],
    module_names: Iterable[str],
    *,
    tied_output: bool,
    where: str = "policy.megatron_cfg.peft",
) -> set[str]:
    """The modules that get an adapter.

    Args:
        patterns: target names or wildcards; empty means every adaptable linear that is not excluded.
        excluded: names or wildcards to leave out when `patterns` is empty.
        module_names: full names of all modules of the model, over all pipeline stages, with global layer numbers.
        tied_output: the output layer shares its weight with the input embedding.
        where: configuration section to name in messages.

    Raises:
        TargetError: naming every pattern that matches no linear, the output layer of a tied model, and experts.
    """
    linears = [n for n in module_names if n.rsplit(".", 1)[-1] in (*ADAPTABLE, "output_layer")]
    candidates = sorted({n.rsplit(".", 1)[-1] for n in linears})
    problems = []
    for key, names in (("target_modules", patterns), ("exclude_modules", excluded)):
        for pattern in names:
            last = pattern.rsplit(".", 1)[-1]
            if key == "target_modules" and last in ("lm_head", "output_layer") and tied_output:
                problems.append(
                    f"{where}.{key}: {pattern!r} is the output layer, which shares its weight with the input "
                    "embedding on this model; an adapter on it would change only one of the two uses. Leave it out"
                )
            elif not any(matches(pattern, n) for n in linears):
                near = difflib.get_close_matches(last, candidates, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                problems.append(f"{where}.{key}: {pattern!r} matches no module{hint}; this model has {candidates}")
    if problems:
        raise TargetError("\n".join(problems))
    if patterns:
        selected = {n for n in linears if any(matches(p, n) for p in patterns)}
    else:
        adaptable = [n for n in linears if n.rsplit(".", 1)[-1] in ADAPTABLE]
        selected = {n for n in adaptable if not any(matches(p, n) for p in excluded)}
    if on_experts := sorted(n for n in selected if ".experts." in n):
        raise TargetError(
            f"{where}.target_modules: {on_experts[0]} is in the experts of this model, and adapters there are not "
            "available: all experts of a rank would share one; use [linear_qkv, linear_proj]"
        )
    return selected


def hf_linears(patterns: Sequence[str], excluded: Sequence[str]) -> list[str]:
    """Last names of the Hugging Face linears that `select_targets` may adapt; wildcards may make them fewer.

    An engine that serves adapters is built for these only: it slows every linear that it prepares for one.
    """
    names = {p.rsplit(".", 1)[-1] for p in patterns}
    if not names or any("*" in name for name in names):
        names = {n for n in ADAPTABLE if n not in excluded} | (names & HF_LINEARS.keys())
    return sorted(hf for name in names for hf in HF_LINEARS.get(name, ()))


def adapter_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """All adapters below `model`, by the name of the linear they sit on, with *global* layer numbers.

    The names do not depend on the pipeline split: layer 0 of the second stage of two is `...layers.<L/2>...`.

    Args:
        model: one Megatron model chunk, wrapped or not.
    """
    numbers = layer_numbers(model)
    return {
        global_name(name.removesuffix(".adapter"), numbers): module
        for name, module in model.named_modules()
        if name.endswith(".adapter") and hasattr(module, "linear_in")
    }


def layer_numbers(model: torch.nn.Module) -> dict[str, int]:
    """Global number, from 0, of each transformer layer below `model`, keyed by its local module name."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    return {n: m.layer_number - 1 for n, m in model.named_modules() if isinstance(m, TransformerLayer)}


def global_name(name: str, numbers: dict[str, int]) -> str:
    """Rewrite the local layer number in `name` to the global one, and drop wrapper prefixes.

    Args:
        name: module name as `named_modules` gives it.
        numbers: `layer_numbers` of the model.
    """
    for local, number in numbers.items():
        if name == local or name.startswith(local + "."):
            name = re.sub(r"\.\d+$", f".{number}", local) + name.removeprefix(local)
            break
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
