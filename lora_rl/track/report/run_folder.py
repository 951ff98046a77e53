"""What a report needs of a run folder, read once."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_rl.track import names
from lora_rl.track import run_info as info_file
from lora_rl.track.recorder import FILE_NAME, read_metrics, series
from lora_rl.track.run_info import read_run_info
from lora_rl.track.samples import FILE_NAME as SAMPLES_NAME
from lora_rl.track.samples import Validation, first_and_last

RECENT_STEPS = 10


@dataclass(frozen=True)
class Run:
    """A run folder.

    Attributes:
        name: of the folder.
        records: of metrics.jsonl, at least one.
        info: of run.json; empty for a run of a version that did not write it.
        config_text: config.yaml as it is, empty without one.
        config: its values by dotted key, as text.
        validations: the first and the last with their samples, None when there are not two.
    """

    folder: Path
    name: str
    records: list[dict[str, Any]]
    info: dict[str, Any]
    config_text: str
    config: dict[str, str]
    validations: tuple[Validation, Validation] | None

    @property
    def trained(self) -> list[dict[str, Any]]:
        """Records of training steps."""
        return [record for record in self.records if record["step"] > 0]

    @property
    def last_step(self) -> int:
        return self.records[-1]["step"]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric."""
        return series(self.records, name)

    def values(self, name: str) -> list[float]:
        """Finite values of a metric."""
        return [value for value in self.series(name)[1] if math.isfinite(value)]

    def recent(self, name: str) -> float | None:
        """Mean of the last RECENT_STEPS finite values, None without any."""
        values = self.values(name)[-RECENT_STEPS:]
        return math.fsum(values) / len(values) if values else None

    def median(self, name: str) -> float | None:
        """Median of the finite values, None without any."""
        values = self.values(name)
        return statistics.median(values) if values else None

    def best(self, name: str, lowest: bool = False) -> tuple[int, float] | None:
        """Step and value of the highest (`lowest`: the lowest) finite value, the earliest of equals."""
        points = [(step, value) for step, value in zip(*self.series(name), strict=True) if math.isfinite(value)]
        pick = min if lowest else max
        return pick(points, key=lambda point: point[1], default=None)

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase over the whole run, in the order of display."""
        totals: dict[str, float] = {}
        for record in self.records:
            for phase, spent in names.phase_seconds(record).items():
                totals[phase] = totals.get(phase, 0.0) + spent
        return {phase: totals[phase] for phase in sorted(totals, key=names.phase_order)}

    def tokens(self) -> dict[str, float]:
        """Tokens of each phase over the whole run."""
        totals: dict[str, float] = {}
        for record in self.records:
            for name, count in record.items():
                if name.startswith(names.TOKENS):
                    phase = name.removeprefix(names.TOKENS)
                    totals[phase] = totals.get(phase, 0.0) + count
        return totals


def read_run(folder: Path | str) -> Run:
    """Read a run folder.

    Raises:
        FileNotFoundError: no such folder, or it is not that of a run; names run folders below it.
        ValueError: a file in it is damaged, or there is no record yet.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder; give the folder of a run, as logger.log_dir named it")
    metrics = folder / FILE_NAME
    if not metrics.exists():
        below = sorted(str(path.parent) for path in folder.glob(f"*/{FILE_NAME}"))
        hint = f"; run folders in it: {', '.join(below)}" if below else ""
        raise FileNotFoundError(f"{folder} holds no {FILE_NAME}, so it is not the folder of a run{hint}")
    records = read_metrics(metrics)
    if not records:
        raise ValueError(f"{metrics} holds no record yet: the run has not come to its first step")
    config_file = folder / "config.yaml"
    config_text = config_file.read_text(encoding="utf-8") if config_file.exists() else ""
    return Run(
        folder,
        folder.resolve().name,
        records,
        read_run_info(folder),
        config_text,
        dict(_flat(_parse(config_file, config_text))),
        first_and_last(folder / SAMPLES_NAME),
    )


def outcome(run: Run) -> tuple[str, str, str]:
    """How a run ended: a word, the class of its badge, and a sentence, empty when there is nothing to add."""
    step, total = run.last_step, run.info.get("total_steps")
    of = f"step {step}" + (f" of {total}" if total else "")
    kind = run.info.get("outcome")
    if kind == info_file.FAILED:
        return f"failed after {of}", "bad", str(run.info.get("error") or "")
    if kind == info_file.INTERRUPTED:
        return f"interrupted after {of}", "warn", ""
    if kind == info_file.RUNNING:
        return f"no end recorded, {of}", "warn", "The run is still going on, or it was killed."
    if kind is None:
        return f"{step} steps", "", ""
    if total and step < total:
        return f"stopped at {of}", "good", ""
    return f"finished, {step} steps", "good", ""


def _parse(path: Path, text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {error}") from error


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, part in value.items():
            yield from _flat(part, f"{prefix}.{name}" if prefix else str(name))
    elif prefix:
        yield prefix, _shown(value)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return str(value)
