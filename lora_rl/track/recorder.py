"""metrics.jsonl: one strict JSON record per step, whatever other trackers are switched on.

A record is flat: `step`, `wall_time` (Unix seconds), `elapsed_s` (seconds since the run began, interruptions
left out), then the metrics under their `/` names, and `nonfinite`, a list of the metrics whose value was NaN
or infinite and stands as null.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from lora_rl.config.metric_names import ALLOWED, METRIC_NAME
from lora_rl.track.sinks import Sink

logger = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"
SUPERSEDED_NAME = "metrics.superseded.jsonl"
DAMAGED_NAME = "metrics.damaged.jsonl"


class RunRecorder:
    """Writes the metrics of a run, to metrics.jsonl first and then to every sink.

    Args:
        run_dir: directory of the run; made when missing.
        sinks: further destinations. One that raises is reported once, closed, and left out from then on.
        resume_step: the step whose checkpoint the run goes on from; None for a new run. Records of later steps
            will be computed again, so they move to metrics.superseded.jsonl.
        monitor: called at each step for further metrics.
        warn: called with one line when a sink fails.
        clock: Unix time in seconds.

    Attributes:
        path: metrics.jsonl.
        earlier: the records that a resumed run keeps.

    Raises:
        FileExistsError: a new run in a directory that already holds records.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        sinks: Sequence[Sink] = (),
        resume_step: int | None = None,
        monitor: Callable[[], Mapping[str, float]] = dict,
        warn: Callable[[str], None] = logger.warning,
        clock: Callable[[], float] = time.time,
    ):
        self.path = Path(run_dir) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        earlier = read_metrics(self.path) if self.path.exists() else []
        if earlier and resume_step is None:
            raise FileExistsError(
                f"{self.path} already holds {len(earlier)} records; resume that run or choose a new directory"
            )
        kept = self.earlier = [r for r in earlier if resume_step is not None and r["step"] <= resume_step]
        if self.path.exists():
            self._rewrite(kept, superseded=earlier[len(kept) :])
        self._last_step = kept[-1]["step"] if kept else None
        self._elapsed_before = kept[-1]["elapsed_s"] if kept else 0.0
        self._sinks = list(sinks)
        self._monitor = monitor
        self._warn = warn
        self._clock = clock
        self._start = clock()
        # Unbuffered: what `log` wrote is in the file when it returns, and a failed write leaves nothing behind
        # in a buffer that would come out later.
        self._file = self.path.open("ab", buffering=0)

    def log(self, step: int, *metrics: Mapping[str, float]) -> dict:
        """Append the record of one step and pass the metrics on to the sinks.

        Args:
            step: greater than any step logged before.
            metrics: mappings from `group/name` to a number (int, float, bool, or an array or tensor of one
                element). Several may be given; no name may be in two of them.

        Returns:
            the record with plain Python numbers; NaN and infinities are kept as they are.

        Raises:
            ValueError: a repeated or malformed name, or a step out of order.
            TypeError: a value that is not one number.
            OSError: metrics.jsonl cannot be written, for instance because the disk is full. The file then still
                ends with the previous whole record.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} logged after step {self._last_step}; each step has one record")
        values = _merge(step, (*metrics, self._monitor()))
        now = self._clock()
        elapsed = self._elapsed_before + now - self._start
        record = {"step": step, "wall_time": now, "elapsed_s": elapsed, **values}
        self._append(_encode(record))
        self._last_step = step
        for sink in list(self._sinks):
            self._guarded(sink, lambda sink=sink: sink.log(step, values))
        return record

    def close(self) -> None:
        """Close the file and every sink."""
        self._file.close()
        for sink in list(self._sinks):
            self._guarded(sink, sink.close)
        self._sinks = []

    def __enter__(self) -> "RunRecorder":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        end = os.fstat(self._file.fileno()).st_size
        rest = line
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(end)
            raise

    def _rewrite(self, kept: list[dict], superseded: list[dict]) -> None:
        if superseded:
            with (self.path.parent / SUPERSEDED_NAME).open("ab") as file:
                file.writelines(map(_encode, superseded))
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.writelines(map(_encode, kept))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)

    def _guarded(self, sink: Sink, call: Callable[[], None]) -> None:
        """A tracker is a convenience: whatever it raises is reported, and the run goes on without it."""
        try:
            call()
        except Exception as error:
            self._sinks.remove(sink)
            name = type(sink).__name__
            self._warn(f"{name} is switched off after {type(error).__name__}: {error}. {FILE_NAME} goes on.")


def read_metrics(path: Path | str) -> list[dict]:
    """Records of a metrics.jsonl in the order of their steps; values that were not finite come back as NaN.

    A last line without its newline is a record still being written and is left out.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line is not a record, with its line number.
    """
    records = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(record, dict) or "step" not in record:
                raise ValueError(f"{path}, line {number}: a record is an object with a step")
            record.pop("nonfinite", None)
            records.append({name: math.nan if value is None else value for name, value in record.items()})
    return records


def series(records: Iterable[Mapping], name: str) -> tuple[list[int], list[float]]:
    """Steps at which metric `name` was recorded, and its values (NaN where it was not finite)."""
    points = [(record["step"], record[name]) for record in records if name in record]
    return [step for step, _ in points], [value for _, value in points]


def nonfinite_names(record: Mapping) -> list[str]:
    """Metrics of a record whose value is NaN or infinite."""
    return [name for name, value in record.items() if "/" in name and not math.isfinite(value)]


def _merge(step: int, mappings: Sequence[Mapping[str, float]]) -> dict[str, int | float]:
    values: dict[str, int | float] = {}
    repeated = []
    for mapping in mappings:
        for name, value in mapping.items():
            if not METRIC_NAME.fullmatch(name):
                raise ValueError(f"step {step}: metric name {name!r}; a name is group/name in {ALLOWED}")
            if name in values:
                repeated.append(name)
            values[name] = _number(step, name, value)
    if repeated:
        raise ValueError(f"step {step}: metrics given twice: {', '.join(repeated)}")
    return values


def _number(step: int, name: str, value) -> int | float:
    try:
        number = value.item() if hasattr(value, "item") else value  # NumPy and torch, without importing them
    except (ValueError, RuntimeError) as error:
        raise TypeError(f"step {step}: {name} has several elements; a metric is one number") from error
    if not isinstance(number, int | float):
        raise TypeError(f"step {step}: {name} is {type(number).__name__} {number!r}; a metric is one number")
    return int(number) if isinstance(number, bool) else number


def _encode(record: Mapping) -> bytes:
    nonfinite = nonfinite_names(record)
    line = {name: (None if name in nonfinite else value) for name, value in record.items()}
    if nonfinite:
        line["nonfinite"] = nonfinite
    return json.dumps(line, allow_nan=False, separators=(", ", ": ")).encode() + b"\n"
