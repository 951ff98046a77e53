"""Fixtures that several folders share because they are slow: models, surveys of the policy, a vLLM engine, a Ray."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_rl.cluster.local import ray_session
from lora_rl.cluster.workers import Worker
from lora_rl.config import derive_layout
from lora_rl.rollout.launch import engine_settings
from tests.support.configs import tiny_config, with_peft
from tests.support.engine_process import EngineProcess
from tests.support.lab import Survey, survey
from tests.support.models import make_model
from tests.support.ranks import run_ranks

BATCH_SEED = 3
# Pushes of each survey.
EXPORTS = 3
LAYOUTS = {"tp1": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "tp2_pp2": (2, 2)}
# Every part of the loss takes part: temperature, KL, clipping; the norm is too large to clip gradients.
SURVEY_OVERRIDES = (
    "policy.generation.temperature=0.6",
    "loss_fn.reference_policy_kl_penalty=0.1",
    # The tests compare with the checkpoint; that the start is frozen otherwise is tested with PEFT adapters.
    "loss_fn.reference_policy=base",
    "policy.max_grad_norm=1e9",
    "grpo.normalize_rewards=false",
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint with tied embeddings and one without."""
    folder = tmp_path_factory.mktemp("models")
    return {name: make_model(folder / name, tied=name == "tied") for name in ("tied", "untied")}


@pytest.fixture(scope="session")
def surveys(models: dict[str, Path]) -> Callable[[str, str], Survey]:
    """`surveys(layout, "tied" | "untied")`, each made once per test run."""

    @functools.cache
    def made(layout: str, kind: str) -> Survey:
        tp, pp = LAYOUTS[layout]
        config = tiny_config(models[kind], *SURVEY_OVERRIDES, tp=tp, pp=pp)
        # B must start somewhere to compare layouts.
        config = with_peft(config, lora_B_init_method="normal")
        answers = run_ranks(survey, config, BATCH_SEED, EXPORTS, tp=tp, pp=pp)
        return next(answer for answer in answers if answer is not None)

    def get(layout: str, kind: str = "tied") -> Survey:
        return made(layout, kind)

    return get


@pytest.fixture(scope="session")
def engine(models: dict[str, Path]) -> Iterator[EngineProcess]:
    """One vLLM engine on the tied model. Whoever pushes weights must not rely on what was pushed before."""
    # Room for prompts that fill a block of the prefix cache, which holds 128 tokens on CPUs.
    config = tiny_config(models["tied"], "policy.max_total_sequence_length=320")
    process = EngineProcess(engine_settings(config, derive_layout(config)))
    yield process
    process.close()


@pytest.fixture(scope="session")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Ray of four logical CPUs."""
    with ray_session(address=None, num_cpus=4, num_gpus=0, log_file=tmp_path_factory.mktemp("ray") / "ray.log"):
        yield


@pytest.fixture
def start_worker(local_ray: None, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """`start_worker(name, kind, *args, **options)`: an actor of the class `kind` for the length of the test."""
    started = []

    # Not at the top: Ray reads part of its environment, which `ray_session` sets, when it is imported.
    import ray

    def start(name: str, kind: type, *args: Any, **options: Any) -> Worker:
        handle = ray.remote(kind).options(**{"num_cpus": 0, "max_restarts": 0, **options}).remote(*args)
        started.append(Worker(name, handle, tmp_path / f"{name}.log"))
        return started[-1]

    yield start
    for worker in started:
        ray.kill(worker.handle)
