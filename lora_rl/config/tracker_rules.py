"""Rules of the trackers in `logger`."""

from __future__ import annotations

from collections.abc import Iterator

from lora_rl.config.errors import Violation
from lora_rl.config.hardware import is_installed
from lora_rl.config.schema import RunConfig

# Packages that have the tracker's client, any of which will do.
PACKAGES = {"wandb": ("wandb",), "mlflow": ("mlflow-skinny", "mlflow")}
TITLES = {"wandb": "Weights & Biases", "mlflow": "MLflow"}


def trackers_are_installed(config: RunConfig) -> Iterator[Violation]:
    """A tracker that is enabled must be there, or the user would look for the curves in vain."""
    for tracker, packages in PACKAGES.items():
        key = f"{tracker}_enabled"
        if getattr(config.logger, key) and not any(map(is_installed, packages)):
            problem = (
                f"{TITLES[tracker]} is not installed; install it with uv sync --extra trackers, or set this to false"
            )
            yield Violation(f"logger.{key}", problem, True)


TRACKER_RULES = (trackers_are_installed,)
