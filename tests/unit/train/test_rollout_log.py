"""rollouts.jsonl: what is in a line, and what a continued run keeps."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from lora_rl.rollout.types import Rollout
from lora_rl.train.rollout_log import RolloutLog
from tests.support.rollouts import rollout


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_tells_what_was_trained_on_and_who_sampled_it(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    first, second = rollout(3, 0, 1.0), rollout(3, 1, 0.0)
    mixed = dataclasses.replace(second.completion, version_spans=((4, 1), (5, 1)), weight_version=4)
    second = dataclasses.replace(second, completion=mixed)
    RolloutLog(path).write(7, [first, second], {(3, 0): 0.5})
    one, two = lines(path)
    assert (one["step"], one["group"], one["sample"], one["reward"], one["advantage"]) == (7, 3, 0, 1.0, 0.5)
    assert one["versions"] == [[1, 2]]
    assert two["versions"] == [[4, 1], [5, 1]]
    assert two["advantage"] is None
    assert (two["prompt_id"], two["stop_reason"], two["tokens"], two["reason"]) == ("p3", "stop", 2, "wrong")


def steps_after(path: Path, done: int | None) -> list[int]:
    log = RolloutLog(path, done)
    log.write(99, [rollout(0, 0, 1.0)], {})
    return [line["step"] for line in lines(path)]


def write_steps(path: Path) -> list[Rollout]:
    log, rollouts = RolloutLog(path), [rollout(0, 0, 1.0), rollout(0, 1, 0.0)]
    for step in (1, 2, 3):
        log.write(step, rollouts, {})
    return rollouts


def test_a_continued_run_drops_what_lies_behind_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_steps(path)
    assert steps_after(path, 2) == [1, 1, 2, 2, 99]


def test_a_line_cut_off_by_a_kill_goes_too(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_steps(path)
    path.write_bytes(path.read_bytes()[:-20])
    assert steps_after(path, 3) == [1, 1, 2, 2, 3, 99]


def test_a_new_run_begins_anew_and_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_steps(path)
    assert steps_after(path, None) == [99]
    RolloutLog(None).write(1, [rollout(0, 0, 1.0)], {})
    assert [p.name for p in tmp_path.iterdir()] == ["rollouts.jsonl"]
