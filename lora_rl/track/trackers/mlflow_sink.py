"""MLflow. Imported in the tracker's process only."""

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ID_NAME = "mlflow_run_id"
# Limits of one request (MLflow's REST API).
METRICS_PER_REQUEST, PARAMS_PER_REQUEST, PARAM_LENGTH = 1000, 100, 500


class MlflowSink:
    """An MLflow run.

    Args:
        folder: the run folder; the id of the MLflow run goes into `mlflow_run_id` there.
        tracking_uri: of the server or store; None: MLFLOW_TRACKING_URI, or `mlruns/` in the run folder.
        experiment_name: made when missing.
        run_name: of the MLflow run.
        config: becomes its parameters, by dotted key.
        continues: go on in the MLflow run of that id.

    Raises:
        mlflow.exceptions.MlflowException: the store cannot be reached or refuses.
    """

    def __init__(
        self,
        folder: str,
        tracking_uri: str | None,
        experiment_name: str,
        run_name: str,
        config: dict[str, Any],
        continues: bool,
    ):
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or str((Path(folder) / "mlruns").absolute())
        if "://" not in uri or uri.startswith("file:"):
            # MLflow refuses folders, which it no longer develops, unless told that they are meant.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(experiment_name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(experiment_name)
        id_file = Path(folder) / ID_NAME
        if continues and id_file.exists():
            self._id = id_file.read_text(encoding="utf-8").strip()
            self._client.set_terminated(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(experiment_id, run_name=run_name).info.run_id
            params = [Param(key, value[:PARAM_LENGTH]) for key, value in _flat(config)]
            for first in range(0, len(params), PARAMS_PER_REQUEST):
                self._client.log_batch(self._id, params=params[first : first + PARAMS_PER_REQUEST])
        id_file.write_text(f"{self._id}\n", encoding="utf-8")
        self.place = f"MLflow run {self._id} of experiment {experiment_name} in {uri}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step."""
        now = int(time.time() * 1000)
        entries = [self._metric(metric_name(name), float(value), now, step) for name, value in metrics.items()]
        for first in range(0, len(entries), METRICS_PER_REQUEST):
            self._client.log_batch(self._id, metrics=entries[first : first + METRICS_PER_REQUEST])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


def metric_name(name: str) -> str:
    """`name` in the characters that MLflow allows: `val/pass@4` becomes `val/pass_at_4`."""
    return re.sub(r"[^\w.\-: /]", "_", name.replace("@", "_at_"), flags=re.ASCII)


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, part in value.items():
            yield from _flat(part, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, str(value)
