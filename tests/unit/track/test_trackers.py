"""W&B and MLflow, the real libraries, without a server: what they hold is what was recorded."""

import json
import math
import os
import socket
import struct
from collections.abc import Iterator
from importlib import import_module, util
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import run_records

from lora_rl.config import RunConfig, load_config
from lora_rl.track import RunRecorder
from lora_rl.track.trackers import BackgroundSink, open_sinks

ROOT = Path(__file__).parents[3]


def needs(library: str) -> pytest.MarkDecorator:
    missing = util.find_spec(library) is None
    return pytest.mark.skipif(missing, reason=f"{library} is not installed; `uv sync --extra trackers` installs it")


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Neither a login nor a server of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


def config_with(*overrides: str) -> RunConfig:
    return load_config(
        ROOT / "examples/configs/grpo_tiny_cpu.yaml",
        [f"policy.model_name={ROOT}/examples/models/tiny-adder", "logger.tensorboard_enabled=false", *overrides],
    )


def record(config: RunConfig, run_dir: Path, records: list[dict], resume_step: int | None = None) -> tuple[list, list]:
    """Records of a run through the sinks of its configuration; what the user was warned of and told."""
    warnings, told = [], []
    sinks = open_sinks(
        config,
        run_dir,
        warn=warnings.append,
        tell=told.append,
        first_step=None if resume_step is None else resume_step + 1,
    )
    with RunRecorder(run_dir, sinks=sinks, resume_step=resume_step, warn=warnings.append) as recorder:
        for entry in records:
            recorder.log(entry["step"], {name: value for name, value in entry.items() if "/" in name})
    return warnings, told


@needs("wandb")
def test_wandb_offline_holds_what_was_recorded(tmp_path: Path):
    config = config_with("logger.wandb_enabled=true", "logger.wandb.mode=offline", "logger.wandb.project=sums")
    records = run_records(steps=8)
    records[3]["train/loss"] = math.nan
    warnings, told = record(config, tmp_path / "my run", records)
    assert warnings == []
    (folder,) = (tmp_path / "my run/wandb").glob("offline-run-*")
    assert told == [f"W&B run offline; `wandb sync {folder}` uploads it"]
    history, facts = read_wandb(folder)
    assert [row["_step"] for row in history] == list(range(9))
    for row, entry in zip(history, records, strict=True):
        assert row["val/accuracy"] == entry["val/accuracy"] if "val/accuracy" in entry else "val/accuracy" not in row
    assert math.isnan(float(history[3]["train/loss"]))
    assert (facts.project, facts.display_name) == ("sums", "my run")
    values = {update.key: json.loads(update.value_json) for update in facts.config.update}
    assert values["grpo"]["num_generations_per_prompt"] == config.grpo.num_generations_per_prompt


def read_wandb(folder: Path) -> tuple[list[dict], Any]:
    """Rows and facts in a run file."""
    message = import_module("wandb.proto.wandb_internal_pb2").Record
    (file,) = folder.glob("*.wandb")
    rows, facts = [], None
    for data in log_records(file.read_bytes()):
        entry = message()
        entry.ParseFromString(data)
        if entry.HasField("history"):
            items = entry.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        if entry.HasField("run") and facts is None:
            facts = entry.run
    return rows, facts


def log_records(data: bytes, block: int = 32768, head: int = 7) -> Iterator[bytes]:
    """Records of a log in LevelDB's format (its doc/log_format.md), behind W&B's own head of 7 bytes."""
    at, record = head, b""
    while at + head <= len(data):
        if block - at % block < head:
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + head : at + head + length]
        at += head + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@needs("wandb")
def test_a_server_that_never_answers_costs_only_the_wait_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(120)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setitem(BackgroundSink.__init__.__kwdefaults__, "close_timeout_s", 0.5)
    config, warnings, told = config_with("logger.wandb_enabled=true"), [], []
    (sink,) = open_sinks(config, tmp_path, warn=warnings.append, tell=told.append)
    for step in range(4):
        sink.log(step, {"train/reward": 0.5})
    with server, server.accept()[0]:  # it was asked, and does not answer
        sink.close()
    assert warnings == [
        "W&B did not end within 0.5 s and is given up: it has 0 of 4 steps. metrics.jsonl has all of them."
    ]
    assert told == []


@needs("wandb")
def test_wandb_without_a_login_is_a_warning(tmp_path: Path):
    warnings, _ = record(config_with("logger.wandb_enabled=true"), tmp_path, run_records(steps=2))
    (warning,) = warnings
    assert warning.startswith("W&B is switched off after TrackerError: UsageError: ")
    assert "wandb login" in warning


@needs("mlflow")
def test_mlflow_holds_what_was_recorded_and_a_resumed_run_goes_on_in_it(tmp_path: Path, monkeypatch):
    config = config_with(
        "logger.mlflow_enabled=true", "logger.mlflow.experiment_name=sums", "logger.mlflow.run_name=one"
    )
    records = run_records(steps=8)
    for entry in records:
        entry["val/pass@4"] = entry["step"] / 10
    records[3]["train/loss"] = math.nan
    warnings, told = record(config, tmp_path / "run", records[:6])
    assert warnings == []
    run_id = (tmp_path / "run/mlflow_run_id").read_text().strip()
    store = tmp_path / "run/mlruns"
    assert told == [f"MLflow run {run_id} of experiment sums in {store}"]
    assert record(config, tmp_path / "run", records[5:], resume_step=4)[0] == []

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = import_module("mlflow").MlflowClient(tracking_uri=str(store))
    (experiment,) = [e for e in client.search_experiments() if e.name == "sums"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.run_name, run.info.status) == (run_id, "one", "FINISHED")
    assert run.data.params["grpo.num_generations_per_prompt"] == str(config.grpo.num_generations_per_prompt)

    def history(name: str) -> dict[int, float]:
        return {metric.step: metric.value for metric in client.get_metric_history(run_id, name)}

    assert history("val/pass_at_4") == {entry["step"]: entry["step"] / 10 for entry in records}
    assert history("train/reward") == {r["step"]: r["train/reward"] for r in records if "train/reward" in r}
    assert math.isnan(history("train/loss")[3])


def test_tensorboard_hides_steps_that_a_continued_run_records_anew(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_with("logger.tensorboard_enabled=true")
    for first_step, steps, value in ((None, (1, 2, 3, 4), 0.1), (3, (3, 4), 0.9)):
        (sink,) = open_sinks(config, tmp_path, warn=print, tell=print, first_step=first_step)
        for step in steps:
            sink.log(step, {"train/reward": value})
        sink.close()
        if first_step is None:
            (old,) = (tmp_path / "tensorboard").iterdir()
            old.rename(old.with_name("events.out.tfevents.0000000001.earlier"))  # names sort by start time in seconds
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = [(e.step, round(e.value, 3)) for e in events.Scalars("train/reward")]
    assert shown == [(1, 0.1), (2, 0.1), (3, 0.9), (4, 0.9)]
