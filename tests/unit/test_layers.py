"""The layers of the package: an import may only point downwards, and the lower layers need no heavy libraries."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# From the top down. A package may import itself and those after it.
LAYERS = [
    "train",
    "rollout",
    "policy",
    "sync",
    "lora",
    "next",
    "cluster",
    "rewards",
    "data",
    "algorithm",
    "track",
    "config",
]
LIGHT = ["config", "algorithm", "next", "rewards", "data", "track"]
HEAVY = {"ray", "vllm", "megatron"}
EXAMPLE_LINES = 120


def imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in the source, inside functions too, except those for type checkers only."""

    def visit(node: ast.AST) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                yield from visit(child)
            return
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the layer; write the full name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    yield from visit(ast.parse(source))


def upward(layer: str, source: str) -> list[str]:
    """Imports in a file of `layer` that point to a layer above it, or to no known layer."""
    below = LAYERS[LAYERS.index(layer) :]
    names = [(line, name) for line, name in imports(source) if name.split(".")[0] == "lora_rl"]
    return [f"line {line}: {name}" for line, name in names if name.split(".")[1] not in below]


def heavy(source: str) -> list[str]:
    """Imports of Ray, vLLM or Megatron."""
    return [f"line {line}: {name}" for line, name in imports(source) if name.split(".")[0] in HEAVY]


def test_every_package_has_its_layer() -> None:
    packages = {path.parent.name for path in (ROOT / "lora_rl").glob("*/__init__.py")}
    assert packages == set(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_downwards(layer: str) -> None:
    files = sorted((ROOT / "lora_rl" / layer).rglob("*.py"))
    problems = {str(path.relative_to(ROOT)): found for path in files if (found := upward(layer, path.read_text()))}
    assert files
    assert not problems


@pytest.mark.parametrize("layer", LIGHT)
def test_light_layers_import_neither_ray_nor_vllm_nor_megatron(layer: str) -> None:
    files = sorted((ROOT / "lora_rl" / layer).rglob("*.py"))
    assert not {str(path.relative_to(ROOT)): found for path in files if (found := heavy(path.read_text()))}


def test_examples_are_thin() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "examples").glob("run_*.py")}
    assert lengths
    assert all(length < EXAMPLE_LINES for length in lengths.values()), lengths


def test_the_check_itself_sees_late_and_aliased_imports() -> None:
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import lora_rl.train.job\n"
        "def late():\n    from lora_rl import rollout\n    import ray as r\n    import lora_rl.config\n"
    )
    assert upward("policy", source) == ["line 5: lora_rl.rollout"]
    assert heavy(source) == ["line 6: ray"]
