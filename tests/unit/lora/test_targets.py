"""Choosing modules by name: what matches, and what is refused."""

from __future__ import annotations

import pytest

from lora_rl.lora.targets import TargetError, global_name, matches, select_targets

LINEARS = ["self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"]
MODEL = [f"decoder.layers.{n}.{linear}" for n in range(12) for linear in LINEARS]
MODEL += ["embedding.word_embeddings", "output_layer", "decoder.layers.0.self_attention", "decoder.final_layernorm"]


def select(*patterns: str, excluded: tuple[str, ...] = (), tied: bool = False) -> set[str]:
    return select_targets(patterns, excluded, MODEL, tied_output=tied)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("linear_qkv", "decoder.layers.0.self_attention.linear_qkv", True),
        ("linear_qkv", "linear_qkv", True),
        ("qkv", "decoder.layers.0.self_attention.linear_qkv", False),
        ("linear_fc1", "decoder.layers.0.mlp.linear_fc12", False),
        ("*.layers.1.*.linear_qkv", "decoder.layers.1.self_attention.linear_qkv", True),
        ("*.layers.1.*.linear_qkv", "decoder.layers.11.self_attention.linear_qkv", False),
        ("*.layers.*.linear_qkv", "decoder.layers.1.self_attention.linear_q.v", False),
        ("*.linear_fc?", "decoder.layers.1.mlp.linear_fc1", False),
    ],
)
def test_matching(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


def test_names_and_wildcards_select() -> None:
    assert select("linear_qkv") == {f"decoder.layers.{n}.self_attention.linear_qkv" for n in range(12)}
    assert select("*.layers.1.*") == {f"decoder.layers.1.{linear}" for linear in LINEARS}
    assert select("output_layer") == {"output_layer"}


def test_nothing_named_means_every_adaptable_linear_except_the_excluded() -> None:
    assert select() == set(MODEL[:48])
    chosen = select(excluded=("linear_fc1", "*.layers.0.*"))
    assert chosen == {n for n in MODEL[:48] if ".layers.0." not in n and not n.endswith("linear_fc1")}


@pytest.mark.parametrize(
    ("patterns", "excluded", "parts"),
    [
        (("linear_qvk",), (), ["target_modules", "'linear_qvk' matches no module", "did you mean 'linear_qkv'", "fc1"]),
        (("q_proj",), (), ["'q_proj' matches no module", "linear_qkv"]),
        (("*.layers.12.*.linear_qkv",), (), ["'*.layers.12.*.linear_qkv' matches no module"]),
        ((), ("linear_fc3",), ["exclude_modules", "'linear_fc3'", "did you mean 'linear_fc"]),
        (("linear_qkv", "linaer_proj", "fc9"), (), ["'linaer_proj'", "'fc9'"]),
    ],
)
def test_a_name_that_adapts_nothing_is_refused(patterns, excluded, parts: list[str]) -> None:
    with pytest.raises(TargetError) as error:
        select(*patterns, excluded=excluded)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("name", ["lm_head", "output_layer", "*.output_layer"])
def test_the_output_layer_of_a_tied_model_is_refused(name: str) -> None:
    with pytest.raises(TargetError, match="shares its weight with the input embedding"):
        select("linear_qkv", name, tied=True)


def test_layer_numbers_become_global() -> None:
    numbers = {"module.module.decoder.layers.0": 6, "module.module.decoder.layers.1": 7}
    name = global_name("module.module.decoder.layers.1.mlp.linear_fc1", numbers)
    assert name == "decoder.layers.7.mlp.linear_fc1"
    assert global_name("module.output_layer", numbers) == "output_layer"
    # `layers.1` is no prefix of `layers.10`.
    assert global_name("decoder.layers.10.mlp", {"decoder.layers.1": 0}) == "decoder.layers.10.mlp"


@pytest.mark.parametrize("patterns", [(), ("linear_fc1",), ("*.experts.*",)])
def test_experts_are_refused_by_name(patterns: tuple[str, ...]) -> None:
    """Also where the configuration could not know of them: a model that was not on this machine yet."""
    model = [*MODEL, "decoder.layers.3.mlp.experts.linear_fc1", "decoder.layers.3.mlp.experts.linear_fc2"]
    with pytest.raises(TargetError, match=r"layers\.3\.mlp\.experts\.linear_fc1 is in the experts of this model"):
        select_targets(patterns, (), model, tied_output=False)
    assert select_targets(("linear_qkv",), (), model, tied_output=False)
