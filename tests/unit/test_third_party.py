"""Optional submodules: official sources, pinned commits, and nothing that needs them."""

from __future__ import annotations

import configparser
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    "3rdparty/Megatron-Bridge": (
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git",
        "51885cf132b2814188b6855c25a8588254274c2a",
    ),
    "3rdparty/Megatron-LM": (
        "https://github.com/NVIDIA/Megatron-LM.git",
        "cd4afffa648426a959dc7cb1e24b5ce7d0c3ff54",
    ),
}


def test_submodules_are_the_official_repositories_and_optional() -> None:
    file = configparser.ConfigParser()
    file.read_string((ROOT / ".gitmodules").read_text(encoding="utf-8"))
    sections = [file[name] for name in file.sections()]
    assert {part["path"]: part["url"] for part in sections} == {path: url for path, (url, _) in SOURCES.items()}
    # Otherwise a recursive clone, also one that an installer makes, would fetch them.
    assert all(part["update"] == "none" for part in sections)


def test_submodules_are_pinned_and_the_readme_names_the_commits() -> None:
    text = (ROOT / "3rdparty/README.md").read_text(encoding="utf-8")
    for url, commit in SOURCES.values():
        assert commit in text and url.removesuffix(".git") in text
    if not (ROOT / ".git").exists():
        pytest.skip("this tree is no git checkout, so there are no recorded commits to compare")
    listed = subprocess.run(
        ["git", "ls-files", "--stage", "3rdparty"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    recorded = [line.split() for line in listed.splitlines() if line.startswith("160000 ")]
    assert {path: commit for _, commit, _, path in recorded} == {path: commit for path, (_, commit) in SOURCES.items()}


def test_no_package_and_no_tool_looks_into_the_submodules() -> None:
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    places = [str(package["source"]) for package in lock["package"]]
    assert places and not [place for place in places if "3rdparty" in place]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "3rdparty" in project["tool"]["ruff"]["extend-exclude"]
    assert project["tool"]["pytest"]["ini_options"]["testpaths"] == ["tests"]
    assert project["tool"]["hatch"]["build"]["targets"]["sdist"]["exclude"] == ["3rdparty/Megatron-*"]
