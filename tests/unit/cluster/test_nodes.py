"""What a node must have in common with the driver, found out from real folders; interfaces of addresses."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lora_rl.cluster import facts
from lora_rl.cluster.network import interface_of

ROOT = Path(__file__).parents[3]


def problems(driver: dict[str, Any], node: dict[str, Any]) -> list[str]:
    return [f"{d.what} {d.problem}" for d in facts.differences(driver, node, "/run")]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / ".cache").mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "weights.safetensors").write_bytes(bytes(5 * 1024**2))
    return folder


def look(model: Path, marker: str = __file__) -> dict[str, Any]:
    return facts.node_facts([str(model)], marker)


def test_the_same_machine_is_like_itself(model: Path) -> None:
    assert problems(look(model), look(model)) == []


def test_models_are_compared_file_by_file(model: Path) -> None:
    before = look(model)
    (model / "config.json").write_text("[]")
    assert problems(before, look(model)) == [f"{model} has with other content config.json"]
    (model / "config.json").write_text("{}")
    with (model / "sub" / "weights.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert problems(before, look(model)) == [f"{model} has with other content sub/weights.safetensors"]
    (model / "sub" / "weights.safetensors").rename(model / "sub" / "other.safetensors")
    assert problems(before, look(model)) == [
        f"{model} lacks sub/weights.safetensors",
        f"{model} has besides sub/other.safetensors",
    ]
    shutil.rmtree(model)
    assert problems(before, look(model)) == [f"{model} is not there"]


def test_hidden_files_are_not_compared(model: Path) -> None:
    before = look(model)
    (model / ".cache" / "lock").write_text("")
    assert problems(before, look(model)) == []


def test_the_run_folder_must_be_the_drivers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_PATIENCE_SECONDS", 0.3)
    [problem] = problems(look(model), look(model, str(model / "no-such-file")))
    assert problem.startswith("/run is not the driver's; logs and results need logger.log_dir on a file system")


def test_versions_and_code_are_compared(model: Path, tmp_path: Path) -> None:
    """As another process with other code sees it; the facts are sent as code, so it needs none of ours."""
    copy = tmp_path / "elsewhere" / "lora_rl"
    copy.mkdir(parents=True)
    (copy / "__init__.py").write_text("# not the same\n")
    program = (
        "import json, sys\nexec(sys.stdin.read())\nprint(json.dumps(node_facts([], __import__('sys').executable)))"
    )

    def seen_from(folder: Path | None) -> dict[str, Any]:
        import json

        # Without site packages nothing is installed.
        environment = {} if folder is None else {"PYTHONPATH": str(folder)}
        code = (ROOT / "lora_rl/cluster/facts.py").read_text().replace("from __future__ import annotations\n", "")
        process = subprocess.run(
            [sys.executable, "-S", "-c", program],
            input=code,
            capture_output=True,
            text=True,
            env=environment,
            check=True,
            cwd="/",
        )
        return json.loads(process.stdout)

    driver = facts.node_facts([], __file__)
    lines = problems(driver, seen_from(copy.parent))
    assert lines[0] == f"{copy} is not the source code that the driver runs ({ROOT / 'lora_rl'})"
    assert f"torch is not installed, on the driver {driver['versions']['torch']}" in lines
    lines = problems(driver, seen_from(None))
    assert lines[0] == f"lora_rl cannot be imported; the driver has it in {ROOT / 'lora_rl'}"
    assert not any(line.startswith("lora-rl") for line in lines)


def test_an_interface_is_found_by_its_address_or_network() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.7")
    names = {name for _, name in socket.if_nameindex()}
    assert interface_of("127.0.0.1") in names
    with pytest.raises(OSError, match=r"no network interface of this machine has the address 203\.0\.113\.9"):
        interface_of("203.0.113.9")
