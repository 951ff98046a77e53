"""GRPO over three Ray nodes: two data-parallel ranks and an engine, each on a node of its own, against one node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from lora_rl.track import read_metrics
from tests.support.ray_cluster import RayCluster

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "examples/configs/grpo_tiny_cpu.yaml"
APART = "policy.generation.colocated"
JOB = (
    "grpo.num_prompts_per_step=16",
    "policy.train_global_batch_size=null",
    "grpo.max_num_steps=2",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
    f"{APART}.enabled=false",
    "policy.generation.weight_sync.probe_period=1",
    "logger.console=plain",
    "logger.tensorboard_enabled=false",
)


def train(folder: str, *overrides: str) -> tuple[int, list[bool]]:
    """A whole run, as `run_grpo.py` does it; its exit code, and for each push whether its bytes went through Ray."""
    from lora_rl.config import derive_layout, load_config
    from lora_rl.rollout.pool import EnginePool
    from lora_rl.train.run import run

    load, pushes = EnginePool.load, []

    def noted(self, manifest, payload=None):
        pushes.append(payload is not None)
        return load(self, manifest, payload)

    EnginePool.load = noted
    config = load_config(CONFIG, [*JOB, f"logger.log_dir={folder}", *overrides])
    return run(config, derive_layout(config)), pushes


def train_elsewhere(folder: Path, *overrides: str) -> tuple[int, list[bool]]:
    """The same in a process of its own, as this one may have a Ray already."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(train, str(folder), *overrides).result(timeout=280)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    cluster = RayCluster(3)
    yield cluster
    cluster.close()


def node_in(log: Path) -> str:
    """The node a process says it is on."""
    return re.search(r", process \d+, node (\S+) ", log.read_text())[1]


@pytest.mark.e2e
@pytest.mark.slow
def test_three_nodes_train_like_one(cluster: RayCluster, tmp_path: Path) -> None:
    nodes = ("cluster.num_nodes=3", "cluster.gpus_per_node=1", f"{APART}.resources.num_nodes=1")
    spread = tmp_path / "three"
    assert train_elsewhere(spread, f"cluster.address={cluster.address}", *nodes) == (0, [True] * 3)
    cluster.wait_until_free()
    assert sorted(cluster.resources()) == cluster.nodes
    where = [node_in(spread / "logs" / f"{name}.log") for name in ("rank_0", "rank_1", "engine_0")]
    assert sorted(where) == cluster.nodes
    assert where[0] < where[1]

    assert train_elsewhere(tmp_path / "one", "cluster.gpus_per_node=2") == (0, [False] * 3)
    one, three = read_metrics(tmp_path / "one" / "metrics.jsonl"), read_metrics(spread / "metrics.jsonl")
    assert [record["step"] for record in three] == [0, 1, 2]
    for alone, record in zip(one[1:], three[1:], strict=True):
        assert record["train/reward"] == alone["train/reward"]
        assert record["train/loss"] == pytest.approx(alone["train/loss"], abs=1e-6)
        assert record["train/grad_norm"] == pytest.approx(alone["train/grad_norm"], rel=1e-6)
        assert record["sync/version"] == alone["sync/version"]
        # What the engine on the third node computes is what the ranks hold.
        assert record["sync/parity"] < 1e-5
        assert record["train/token_mult_prob_error"] < 1.0001
    adapters = [(tmp_path / run / "adapter" / "adapter_model.safetensors").read_bytes() for run in ("one", "three")]
    assert adapters[0] == adapters[1]
