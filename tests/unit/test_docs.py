"""The documentation says what the code does: generated parts are current, links lead somewhere, quotes are real."""

from __future__ import annotations

import ast
import os
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "3rdparty/README.md", *DOCS]
SOURCES = sorted((ROOT / "lora_rl").rglob("*.py"))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def generator() -> dict[str, Any]:
    """The names that docs/generate_config_reference.py defines."""
    return runpy.run_path(str(ROOT / "docs/generate_config_reference.py"))


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get on GitHub."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def string_constants() -> set[str]:
    """Every piece of text in the package's code; an f-string is the pieces between its braces."""
    trees = (ast.parse(source.read_text(encoding="utf-8")) for source in SOURCES)
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_the_configuration_page_is_what_the_generator_writes() -> None:
    script = generator()
    page = script["PAGE"].read_text(encoding="utf-8")
    assert script["render"](page) == page, "run: uv run docs/generate_config_reference.py"


def test_the_generator_refuses_a_page_without_its_marker() -> None:
    with pytest.raises(ValueError, match="0 times"):
        generator()["render"]("# Configuration\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    broken = []
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_every_page_is_reachable_from_the_index() -> None:
    linked = {target.partition("#")[0] for target in LINK.findall((ROOT / "docs/index.md").read_text(encoding="utf-8"))}
    assert {page.name for page in DOCS} - {"index.md"} <= linked


def test_messages_in_troubleshooting_are_in_the_code() -> None:
    """Headings quote a message; an ellipsis stands for what differs."""
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^### `(.+)`$", text, re.MULTILINE)
    constants = string_constants()
    pieces = [(message, piece) for message in messages for piece in message.split("…") if piece]
    assert len(messages) > 20
    assert not [(message, piece) for message, piece in pieces if not any(piece in text for text in constants)]


def test_every_paper_that_the_code_cites_is_on_the_page() -> None:
    cited = {number for s in SOURCES for number in re.findall(r"arXiv:(\d+\.\d+)", s.read_text(encoding="utf-8"))}
    assert cited
    assert cited <= set(re.findall(r"arXiv:(\d+\.\d+)", (ROOT / "docs/papers.md").read_text(encoding="utf-8")))


def test_every_quick_functional_script_exists_and_can_be_run() -> None:
    folder = ROOT / "tests/functional"
    listed = (folder / "quick.txt").read_text(encoding="utf-8").split()
    assert listed and len(listed) == len(set(listed))
    assert all(os.access(folder / name, os.X_OK) for name in listed)
