"""Weights & Biases. Imported in the tracker's process only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

ID_NAME = "wandb_run_id"


class WandbSink:
    """A W&B run.

    Args:
        folder: the run folder; W&B's files go into `wandb/` there, its id into `wandb_run_id`.
        project, entity, name: of the W&B run.
        mode: `online`, `offline`, or None for what WANDB_MODE says.
        config: shown beside the curves.
        continues: go on in the W&B run of that id.

    Raises:
        wandb.Error: no login, no such entity, no connection.
    """

    def __init__(
        self,
        folder: str,
        project: str,
        entity: str | None,
        name: str,
        mode: str | None,
        config: dict[str, Any],
        continues: bool,
    ):
        self._id_file = Path(folder) / ID_NAME
        known = self._id_file.read_text(encoding="utf-8").strip() if continues and self._id_file.exists() else None
        self._run = wandb.init(
            project=project,
            entity=entity,
            name=name,
            dir=folder,
            mode=mode,
            config=config,
            id=known,
            resume="allow" if known else None,
            settings=wandb.Settings(console="off", silent=True),
        )
        self._id_file.write_text(f"{self._run.id}\n", encoding="utf-8")

    @property
    def place(self) -> str:
        """Where the run is, or how it gets there."""
        if self._run.url:
            return f"W&B run {self._run.url}"
        return f"W&B run offline; `wandb sync {Path(self._run.dir).parent}` uploads it"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Wait for the upload and finish the run."""
        self._run.finish()
