"""val_samples.jsonl: what is in a line, what a continued run keeps, and that a report can read it."""

from __future__ import annotations

from pathlib import Path

from lora_rl.track.samples import FILE_NAME, compare, first_and_last
from lora_rl.train.validation_log import ValidationLog, open_validation_log
from tests.support.configs import tiny_config
from tests.support.rollouts import rollout
from tests.unit.train.test_rollout_log import lines


def test_first_and_last_validation_are_read_back_and_compared(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    log = ValidationLog(path)
    # Prompts 0 to 3; two completions each.
    for step, rights in ((0, (0, 0, 2, 1)), (5, (0, 0, 0, 0)), (10, (2, 1, 1, 1))):
        log.write(step, [rollout(g, s, float(s < right)) for g, right in enumerate(rights) for s in range(2)])
    assert lines(path)[0] == {
        "step": 0, "prompt_id": "p0", "sample": 0, "prompt": "p0", "expected": "7", "completion": "text", "reward": 0.0,
        "right": False, "reason": "wrong", "stop_reason": "stop", "tokens": 2,
    }  # fmt: skip
    with path.open("a") as file:
        file.write('{"step": 15, "prom')
    first, last = first_and_last(path)
    assert (first.step, last.step) == (0, 10)
    changes = compare(first, last)
    assert [(change.after[0]["prompt_id"], change.gain) for change in changes.improved] == [("p0", 1.0), ("p1", 0.5)]
    assert [(change.after[0]["prompt_id"], change.gain) for change in changes.regressed] == [("p2", -0.5)]
    assert [len(part) for part in (changes.still_right, changes.still_wrong)] == [1, 0]
    assert changes.total == 4


def test_a_continued_run_keeps_the_validations_up_to_its_checkpoint(models: dict[str, Path], tmp_path: Path) -> None:
    path, config = tmp_path / FILE_NAME, tiny_config(models["tied"])
    log = open_validation_log(config, tmp_path, None)
    for step in (0, 5, 10):
        log.write(step, [rollout(0, 0, 1.0)])
    open_validation_log(config, tmp_path, 5).write(10, [rollout(1, 0, 0.0)])
    assert [(line["step"], line["prompt_id"]) for line in lines(path)] == [(0, "p0"), (5, "p0"), (10, "p1")]
    # One validation alone has nothing to be compared with.
    open_validation_log(config, tmp_path, 0)
    assert first_and_last(path) is None
    path.unlink()
    off = tiny_config(models["tied"], "logger.log_val_samples=false")
    open_validation_log(off, tmp_path, None).write(0, [rollout(0, 0, 1.0)])
    assert not path.exists()
