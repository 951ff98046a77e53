"""The sinks that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rl.track.sinks import Sink, TensorBoardSink
from lora_rl.track.trackers.background import BackgroundSink
from lora_rl.track.trackers.process import TrackerProcess

if TYPE_CHECKING:
    from lora_rl.config import RunConfig


def open_sinks(
    config: RunConfig,
    run_dir: Path,
    *,
    warn: Callable[[str], None],
    tell: Callable[[str], None],
    first_step: int | None = None,
) -> list[Sink]:
    """Every tracker that `logger` enables, each behind its own queue; nothing is started before the first step.

    Args:
        warn, tell: take a line for the user, from any thread.
        first_step: of a run that continues where an earlier start was recorded, the first step that is recorded anew.
    """
    settings = config.logger
    # Everything that was set, as the run folder's config.yaml has it.
    shared = {"folder": str(run_dir), "config": config.model_dump(mode="json"), "continues": first_step is not None}
    sinks: list[Sink] = []
    if settings.tensorboard_enabled:
        sinks.append(BackgroundSink(TensorBoardSink(run_dir / "tensorboard", first_step), "TensorBoard", warn))
    if settings.wandb_enabled:
        wandb = settings.wandb
        own = {"project": wandb.project, "entity": wandb.entity, "mode": wandb.mode, "name": wandb.name or run_dir.name}
        sinks.append(_in_process("wandb", "W&B", shared | own, run_dir, warn, tell))
    if settings.mlflow_enabled:
        mlflow = settings.mlflow
        own = {
            "experiment_name": mlflow.experiment_name,
            "run_name": mlflow.run_name or run_dir.name,
            "tracking_uri": mlflow.tracking_uri,
        }
        sinks.append(_in_process("mlflow", "MLflow", shared | own, run_dir, warn, tell))
    return sinks


def _in_process(
    kind: str, name: str, settings: dict, run_dir: Path, warn: Callable[[str], None], tell: Callable[[str], None]
) -> Sink:
    return BackgroundSink(TrackerProcess(kind, settings, run_dir / "logs" / f"{kind}.log", tell), name, warn)
