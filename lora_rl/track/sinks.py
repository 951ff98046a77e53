"""Where metrics go besides metrics.jsonl.

A sink for another tracker (W&B, MLflow, ...) is a class with the two methods of `Sink`, handed to
`RunRecorder(sinks=[...])`. It may raise: the recorder warns once, switches the sink off, and the run goes on.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Sink(Protocol):
    """A destination for metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one step. Values are plain int or float and may be NaN or infinite."""

    def close(self) -> None:
        """Write what is still buffered. Called once, also when `log` never was."""


class TensorBoardSink:
    """Scalars in TensorBoard event files, written by the `tensorboard` package alone.

    Args:
        log_dir: directory for the event file; made at the first `log`.
        purge_from_step: on resume, the first step that runs again. TensorBoard then hides what an earlier
            process wrote for that step and later ones.
    """

    def __init__(self, log_dir: Path | str, purge_from_step: int | None = None):
        self.log_dir = Path(log_dir)
        self._purge_from_step = purge_from_step
        self._writer = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            self._writer = self._open()
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()  # steps are seconds apart, and a killed run should leave its last curve

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        writer = EventFileWriter(str(self.log_dir))
        if self._purge_from_step is not None:
            start = SessionLog(status=SessionLog.START)
            writer.add_event(Event(wall_time=time.time(), step=self._purge_from_step, session_log=start))
        return writer
