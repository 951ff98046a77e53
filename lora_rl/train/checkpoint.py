"""Checkpoints on disk: self-contained folders that appear only when complete, and are trusted only when verified.

    <folder>/step_20/checkpoint.json        what this is; names, sizes and SHA-256 of all other files
                     config.yaml            the resolved configuration
                     metrics.jsonl          the records so far
                     adapter/               the adapter, as Hugging Face PEFT
                     start/                 the adapter the run started from, if it did
                     optimizer.safetensors  moments, whole matrices
                     svd.safetensors        singular vectors and values, with SVD-LoRA
                     random.safetensors     random generators of each rank
                     next.safetensors       snapshots of the trajectory, where it is extrapolated
    <folder>/latest                         name of the newest complete checkpoint

Only safetensors, JSON, YAML: loading one executes nothing. One process, the driver, writes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lora_rl.lora.peft_io import PeftAdapter, read_peft, write_peft

FORMAT = 2
CHECKPOINT_FILE, LATEST, NEXT = "checkpoint.json", "latest", "next.safetensors"
_STEP = re.compile(r"step_(\d+)")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or does not fit the run that wants to continue from it."""


@dataclass
class Checkpoint:
    """Everything a run needs to continue as if it had never stopped.

    Attributes:
        step: finished steps.
        weight_version: of the last push.
        payload_digest: `Manifest.digest` of that push, which the first push after a resume must reproduce.
        adapter: the adapters.
        moments, counters, flags, random, svd: see `lora_rl.policy.state.PolicyState`.
        cursor: `PromptSource.state_dict`.
        identity: what must be the same when a run continues: base model, adapter settings, data.
        layout: ranks it was taken on, {"tp", "pp", "dp"}.
        config: the resolved configuration, YAML.
        metrics: content of metrics.jsonl.
        start: the adapter that the run started from, which is its reference policy.
        extrapolation: (numbers, tensors), see `lora_rl.train.extrapolation_state`.
        score: value of the metric that ranks checkpoints, None when it was not measured at this step.
    """

    step: int
    weight_version: int
    payload_digest: str
    adapter: PeftAdapter
    moments: dict[str, torch.Tensor]
    counters: dict[str, float]
    flags: dict[str, bool]
    random: dict[str, torch.Tensor]
    cursor: dict[str, Any]
    identity: dict[str, Any]
    layout: dict[str, int]
    config: str
    metrics: bytes
    score: float | None = None
    start: PeftAdapter | None = None
    extrapolation: tuple[dict[str, Any], dict[str, torch.Tensor]] | None = None
    svd: dict[str, torch.Tensor] = field(default_factory=dict)
    path: Path | None = field(default=None, compare=False)


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: where they are.
        keep: how many to keep by score, besides the newest; None keeps all.
        higher_is_better: order of scores; checkpoints without a score rank last, newer before older.
        warn: shows a warning to the user.
    """

    def __init__(self, folder: Path, *, keep: int | None, higher_is_better: bool, warn: Callable[[str], None]) -> None:
        self.folder, self._keep, self._higher, self._warn = folder, keep, higher_is_better, warn

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, verify it, make it the latest, and only then remove superseded ones.

        Raises:
            CheckpointError: it could not be written; what was there before is untouched.
        """
        name = f"step_{checkpoint.step}"
        target = self.folder / name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(
                prefix=f".{name}.", dir=self.folder, ignore_cleanup_errors=True
            ) as temporary:
                staged = Path(temporary) / name
                _write(checkpoint, staged)
                problem = verify(staged)
                if problem:
                    raise CheckpointError(f"{target}: {problem} right after it was written")
                if target.exists():
                    # Left by a run that went on from an earlier step.
                    shutil.rmtree(target)
                os.rename(staged, target)
            _sync(self.folder)
            self._point_latest(name)
        except (OSError, SafetensorError) as error:
            last = self.newest_name()
            raise CheckpointError(
                f"checkpoint {target} could not be written: {getattr(error, 'strerror', None) or error}; "
                + (f"{self.folder / last} is complete and unharmed" if last else "there is no earlier one")
            ) from error
        self._prune(name)
        return target

    def clean(self, newest: int | None = None) -> None:
        """Remove what a killed process left half-written, and give later checkpoints than the one that the run
        continues from, which are damaged, another name: what is in them may be whole, such as the adapter.

        Only the process that writes may call it.

        Args:
            newest: step of the checkpoint that the run continues from.
        """
        for leftover in self.folder.glob(".step_*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for name in self.names() if newest is not None else []:
            if _step(name) > newest:
                numbered = (f"{name}.damaged{f'-{n}' if n > 1 else ''}" for n in itertools.count(1))
                aside = next(path for path in map(self.folder.joinpath, numbered) if not path.exists())
                os.rename(self.folder / name, aside)
                self._warn(f"{self.folder / name} is {aside.name} now")

    def names(self) -> list[str]:
        """Folders that look like checkpoints, newest first."""
        if not self.folder.is_dir():
            return []
        found = [p.name for p in self.folder.iterdir() if p.is_dir() and _STEP.fullmatch(p.name)]
        return sorted(found, key=_step, reverse=True)

    def newest_name(self) -> str | None:
        """The newest checkpoint whose files are as they were written; broken ones are passed over with a warning."""
        return self._newest()[0]

    def load_newest(self) -> Checkpoint | None:
        """The newest good checkpoint, None where there is none at all.

        Raises:
            CheckpointError: all are damaged; or see `load`.
        """
        name, problems = self._newest()
        if name is None and problems:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is as it was written:\n"
                + "".join(f"  {name}: {problem}\n" for name, problem in problems.items())
                + "Restore the files, or start anew in another logger.log_dir or checkpointing.checkpoint_dir; "
                "policy.megatron_cfg.peft.adapter_path can be an adapter/ of these, if you trust it"
            )
        return None if name is None else load(self.folder / name)

    def _newest(self) -> tuple[str | None, dict[str, str]]:
        """The newest good checkpoint, and what is wrong with later ones."""
        problems = {}
        for name in self.names():
            problem = verify(self.folder / name)
            if problem is None:
                return name, problems
            problems[name] = problem
            self._warn(f"{self.folder / name} is passed over: {problem}")
        return None, problems

    def _point_latest(self, name: str) -> None:
        temporary = self.folder / f".{LATEST}"
        with temporary.open("w") as file:
            file.write(name + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.folder / LATEST)
        _sync(self.folder)

    def _prune(self, saved: str) -> None:
        """Remove what is superseded. Later steps than the one just saved are of a history that was given up, or the run
        could not have gone on before them; they neither count nor stay."""
        if self._keep is None:
            return
        scores: dict[str, float | None] = {}
        for name in self.names():
            try:
                scores[name] = json.loads((self.folder / name / CHECKPOINT_FILE).read_text())["score"]
            except (OSError, ValueError, KeyError, TypeError):
                self._warn(f"{self.folder / name} is not readable and goes")

        def rank(name: str) -> tuple[bool, float, int]:
            score = scores[name]
            # NaN compares with nothing.
            is_number = score is not None and math.isfinite(score)
            return is_number, score * (1 if self._higher else -1) if is_number else 0.0, _step(name)

        rankable = [name for name in scores if _step(name) <= _step(saved)]
        kept = {saved, *sorted(rankable, key=rank, reverse=True)[: self._keep]}
        for name in self.names():
            if name not in kept:
                # Out of sight first: a crash in between leaves a hidden folder, never half a checkpoint.
                doomed = self.folder / f".{name}.removed"
                os.rename(self.folder / name, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def verify(path: Path) -> str | None:
    """What is wrong with a checkpoint's files; None when they are as they were written."""
    description = path / CHECKPOINT_FILE
    try:
        files = json.loads(description.read_text())["files"]
        for name, expected in files.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["bytes"]:
                return f"{name} has {file.stat().st_size} bytes instead of {expected['bytes']}"
            if _sha256(file) != expected["sha256"]:
                return f"{name} has changed since it was written"
    except FileNotFoundError:
        return f"{CHECKPOINT_FILE} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{CHECKPOINT_FILE} is not readable"
    return None


def load(path: Path) -> Checkpoint:
    """Read a checkpoint that `verify` accepts.

    Raises:
        CheckpointError: it was written by a newer version.
    """
    description = json.loads((path / CHECKPOINT_FILE).read_text())
    if description["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {description['format']}; this version reads format {FORMAT}")
    plain = ("step", "weight_version", "payload_digest", "counters", "flags", "cursor", "identity", "layout", "score")
    # None also in checkpoints that were written before there was any.
    extrapolated = description.get("extrapolation")
    return Checkpoint(
        **{key: description[key] for key in plain},
        adapter=read_peft(path / "adapter"),
        moments=load_file(path / "optimizer.safetensors"),
        random=load_file(path / "random.safetensors"),
        start=read_peft(path / "start") if (path / "start").is_dir() else None,
        extrapolation=(extrapolated, load_file(path / NEXT)) if extrapolated is not None else None,
        svd=load_file(path / "svd.safetensors") if (path / "svd.safetensors").is_file() else {},
        config=(path / "config.yaml").read_text(),
        metrics=(path / "metrics.jsonl").read_bytes(),
        path=path,
    )


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """What keeps a run from continuing, one line per key: saved value, current value."""
    lines = []
    for key in sorted(saved.keys() | current.keys()):
        old, new = saved.get(key), current.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += [f"{key}.{line}" for line in differences(old, new)]
        elif old != new:
            lines.append(f"{key}: the checkpoint has {old!r}, this run {new!r}")
    return lines


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of a model's or an adapter's weights and configuration, by file name."""
    files = [*sorted(folder.glob("*.safetensors")), folder / "config.json", folder / "adapter_config.json"]
    return {file.name: _sha256(file) for file in files if file.is_file()}


def _write(checkpoint: Checkpoint, folder: Path) -> None:
    folder.mkdir()
    write_peft(folder / "adapter", checkpoint.adapter, base_model=checkpoint.adapter.base_model_name_or_path or "")
    if checkpoint.start is not None:
        write_peft(folder / "start", checkpoint.start, base_model=checkpoint.start.base_model_name_or_path or "")
    save_file(checkpoint.moments, folder / "optimizer.safetensors")
    save_file(checkpoint.random, folder / "random.safetensors")
    if checkpoint.extrapolation is not None:
        save_file(checkpoint.extrapolation[1], folder / NEXT)
    if checkpoint.svd:
        save_file(checkpoint.svd, folder / "svd.safetensors")
    (folder / "config.yaml").write_text(checkpoint.config)
    (folder / "metrics.jsonl").write_bytes(checkpoint.metrics)
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    description = {
        "format": FORMAT,
        "step": checkpoint.step,
        "weight_version": checkpoint.weight_version,
        "payload_digest": checkpoint.payload_digest,
        "score": checkpoint.score,
        "layout": checkpoint.layout,
        "identity": checkpoint.identity,
        "cursor": checkpoint.cursor,
        "counters": checkpoint.counters,
        "flags": checkpoint.flags,
        "extrapolation": None if checkpoint.extrapolation is None else checkpoint.extrapolation[0],
        "files": {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files},
    }
    (folder / CHECKPOINT_FILE).write_text(json.dumps(description, indent=2) + "\n")
    folders = [p for p in folder.rglob("*") if p.is_dir()]
    for path in (*files, folder / CHECKPOINT_FILE, *folders, folder):
        _sync(path)


def _sync(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _step(name: str) -> int:
    match = _STEP.fullmatch(name)
    assert match is not None
    return int(match.group(1))
