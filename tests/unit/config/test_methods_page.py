"""docs/methods.md: the files, tests and configurations it names exist, and the configurations are valid."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lora_rl.config import load_config

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "examples/configs"
BASE = "grpo_tiny_cpu.yaml"
PAGE = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
LINK = re.compile(r"\[`([^`]+)`\]\(\.\./([^)]+)\)")


@dataclass(frozen=True)
class Row:
    method: str
    paper: str
    configuration: str
    code: str
    test: str

    @property
    def file_and_overrides(self) -> tuple[str, tuple[str, ...]]:
        """The configuration file, and the overrides on top of it."""
        linked = LINK.findall(self.configuration)
        return (linked[0][0], ()) if linked else (BASE, tuple(re.findall(r"`([^`]+)`", self.configuration)))


def rows() -> Iterator[Row]:
    # The last section has results in its table.
    for line in PAGE.partition("## What they do on the tiny task")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 5 and cells[0] not in ("method", "---"):
            yield Row(*cells)


ROWS = list(rows())
# Configurations of something else than an algorithm.
NO_METHODS = {"sft_tiny_cpu.yaml", "grpo_async_tiny_cpu.yaml", "grpo_next_tiny_cpu.yaml"}
each_row = pytest.mark.parametrize("row", ROWS, ids=[row.method.partition(":")[0] for row in ROWS])


def test_the_page_has_its_tables() -> None:
    assert len(ROWS) > 20
    headings = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert headings[:4] == ["Advantages", "Policy losses", "Corrections and penalties", "Rewards"]


@each_row
def test_each_method_has_a_configuration_that_loads(row: Row, model_dir: Path) -> None:
    file, overrides = row.file_and_overrides
    assert overrides or file.endswith(".yaml"), row.configuration
    load_config(CONFIGS / file, [f"policy.model_name={model_dir}", *overrides])


@each_row
def test_each_method_names_its_code(row: Row) -> None:
    files = LINK.findall(row.code)
    assert files
    for shown, target in files:
        assert target == f"lora_rl/{shown}"
        assert (ROOT / target).is_file()


@each_row
def test_each_method_names_a_test_that_exists(row: Row) -> None:
    [(_, target)] = LINK.findall(row.test)
    names = re.findall(r"`(test_\w+)`", row.test)
    assert names
    source = (ROOT / target).read_text(encoding="utf-8")
    assert all(f"def {name}(" in source for name in names)


@each_row
def test_each_paper_is_on_the_page_of_papers(row: Row) -> None:
    papers = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
    for number in re.findall(r"\[(\d+\.\d+)\]\(https://arxiv.org/abs/\1\)", row.paper):
        assert f"arXiv:{number}" in papers


def test_every_small_grpo_configuration_is_on_the_page_and_differs_from_the_base(model_dir: Path) -> None:
    shown = {row.file_and_overrides[0] for row in ROWS}
    files = {path.name for path in CONFIGS.glob("*_tiny_cpu.yaml")} - NO_METHODS
    assert len(files) >= 8
    assert files == shown
    base = load_config(CONFIGS / BASE, [f"policy.model_name={model_dir}"])
    for file in files - {BASE}:
        config = load_config(CONFIGS / file, [f"policy.model_name={model_dir}"])
        assert (config.grpo, config.loss_fn) != (base.grpo, base.loss_fn), file
        # Comparable: the same task, and as many completions per step.
        assert (config.data, config.reward, config.sequences_per_step) == (
            base.data, base.reward, base.sequences_per_step,
        )  # fmt: skip
        assert config.logger.log_dir == f"results/{file.removesuffix('.yaml')}"


def test_every_method_of_the_benchmark_loads_and_is_on_the_page(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    methods = runpy.run_path(str(ROOT / "benchmarks/methods.py"))["METHODS"]
    on_page = {row.file_and_overrides[0] for row in ROWS}
    named = {override for row in ROWS for override in row.file_and_overrides[1]}
    assert {file for file, _ in methods.values()} == on_page
    for file, overrides in methods.values():
        load_config(CONFIGS / file, [f"policy.model_name={model_dir}", *overrides])
        assert set(overrides) <= named
