"""Checkpoints on disk: whole or not there, verified, pruned only behind a good one."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from lora_rl.lora.merge import AdapterTensors
from lora_rl.lora.peft_io import PeftAdapter
from lora_rl.train import checkpoint as module
from lora_rl.train.checkpoint import Checkpoint, CheckpointError, CheckpointStore, differences, load, verify

QUERY = "model.layers.0.self_attn.q_proj"
FILES = [
    "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors",
    "config.yaml",
    "metrics.jsonl",
    "optimizer.safetensors",
    "random.safetensors",
    "svd.safetensors",
]


def make(step: int, score: float | None = None) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return Checkpoint(
        step=step,
        weight_version=step + 1,
        payload_digest="merged nearest float32 0123abcd",
        adapter=PeftAdapter(
            {"model.layers.0.self_attn.q_proj": AdapterTensors(random(2, 4), random(4, 2), 2.0)}, "base"
        ),
        moments={"decoder.layers.0.self_attention.linear_qkv.linear_in.exp_avg": random(2, 4)},
        counters={"step": float(step), "scheduler": float(step)},
        flags={"gradients_checked": True},
        random={"rank_0.torch": torch.arange(5, dtype=torch.uint8)},
        cursor={"epoch": 0, "position": step, "seed": 1, "shuffle": True, "prompts": "abc"},
        identity={"base_model": {"model.safetensors": "00"}, "adapter": {"dim": 2}},
        layout={"tp": 1, "pp": 1, "dp": 1},
        config="grpo: {}\n",
        metrics=b'{"step": 0}\n',
        extrapolation=({"origin": step, "taken": None}, {"snapshot.0.x.a": random(2, 4)}) if step % 2 else None,
        score=score,
        svd={"decoder.layers.0.self_attention.linear_qkv.theta": random(2)},
    )


class Warnings(list):
    def __call__(self, text: str) -> None:
        self.append(text)


def make_store(folder: Path, *, keep: int | None = None, higher: bool = True) -> tuple[CheckpointStore, Warnings]:
    warnings = Warnings()
    return CheckpointStore(folder / "checkpoints", keep=keep, higher_is_better=higher, warn=warnings), warnings


def test_round_trip(tmp_path: Path) -> None:
    store, warnings = make_store(tmp_path)
    assert store.load_newest() is None
    given = make(20, 0.5)
    path = store.save(given)
    assert path == store.folder / "step_20"
    assert sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()) == sorted(
        [*FILES, "checkpoint.json"]
    )
    back = store.load_newest()
    assert back is not None and back.path == path
    same = {f.name for f in dataclasses.fields(Checkpoint)} - {"adapter", "moments", "random", "svd", "path"}
    assert {name: getattr(back, name) for name in same} == {name: getattr(given, name) for name in same}
    assert back.moments.keys() == given.moments.keys()
    assert all(back.moments[key].equal(t) for key, t in given.moments.items())
    assert back.svd.keys() == given.svd.keys()
    assert all(back.svd[key].equal(t) for key, t in given.svd.items())
    assert back.random["rank_0.torch"].equal(given.random["rank_0.torch"])
    [(module_name, tensors)] = back.adapter.tensors.items()
    assert tensors.a.equal(given.adapter.tensors[module_name].a)
    assert tensors.b.equal(given.adapter.tensors[module_name].b)
    assert (store.folder / "latest").read_text() == "step_20\n"
    assert not warnings


@pytest.mark.parametrize("file", [*FILES, "checkpoint.json"])
@pytest.mark.parametrize("how", ["removed", "cut", "changed"])
def test_a_damaged_newest_is_passed_over(tmp_path: Path, file: str, how: str) -> None:
    store, warnings = make_store(tmp_path)
    store.save(make(10))
    victim = store.save(make(20)) / file
    data = victim.read_bytes()
    if how == "removed":
        victim.unlink()
    elif how == "cut":
        victim.write_bytes(data[:-3])
    elif file == "checkpoint.json":
        victim.write_bytes(b"{" + data)
    else:
        victim.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    loaded = store.load_newest()
    assert loaded is not None and loaded.step == 10
    assert len(warnings) == 1
    assert "step_20 is passed over: " in warnings[0] and Path(file).name in warnings[0]


def test_an_unfinished_folder_is_never_seen_and_goes(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    store.save(make(10))
    (store.folder / ".step_20.abc" / "step_20").mkdir(parents=True)
    assert store.names() == ["step_10"]
    store.clean()
    assert sorted(os.listdir(store.folder)) == ["latest", "step_10"]


@pytest.mark.parametrize(
    ("keep", "higher", "scores", "left"),
    [
        (None, True, {1: 0.1, 2: 0.2, 3: 0.3}, [3, 2, 1]),
        (1, True, {1: 0.9, 2: 0.2, 3: 0.3}, [3, 1]),
        (1, False, {1: 0.9, 2: 0.2, 3: 0.3}, [3, 2]),
        (2, True, {1: 0.9, 2: 0.2, 3: 0.8, 4: 0.1}, [4, 3, 1]),
        (2, True, {1: None, 2: None, 3: None, 4: None}, [4, 3]),
        (2, True, {1: 0.5, 2: None, 3: None, 4: 0.5}, [4, 1]),
        (1, True, {1: 0.5, 2: 0.9}, [2]),
        (1, True, {1: 0.9, 2: math.nan, 3: 0.5}, [3, 1]),
        (1, False, {1: 0.1, 2: math.nan, 3: -math.inf, 4: 0.5}, [4, 1]),
    ],
)
def test_the_best_and_the_newest_are_kept(
    tmp_path: Path, keep: int | None, higher: bool, scores: dict[int, float | None], left: list[int]
) -> None:
    store, _ = make_store(tmp_path, keep=keep, higher=higher)
    for step, score in scores.items():
        store.save(make(step, score))
    assert store.names() == [f"step_{step}" for step in left]
    assert all(verify(store.folder / name) is None for name in store.names())


@pytest.mark.parametrize("broken", ["payload", "description"])
def test_a_damaged_later_one_neither_costs_the_good_one_nor_the_run(tmp_path: Path, broken: str) -> None:
    """The run went on from before it; what it saves now must stay."""
    store, warnings = make_store(tmp_path, keep=1)
    store.save(make(10, 0.1))
    later = make_store(tmp_path)[0].save(make(60, 0.9))
    (later / ("metrics.jsonl" if broken == "payload" else "checkpoint.json")).write_text("{")
    assert store.load_newest().step == 10
    store.clean(10)
    store.save(make(20, 0.2))
    assert store.names() == ["step_20"]
    assert store.load_newest().step == 20
    # What is left of it is the user's.
    assert (store.folder / "step_60.damaged" / "adapter").is_dir()
    assert "step_60 is step_60.damaged now" in warnings[-1]


def test_damaged_checkpoints_that_are_all_there_is_are_no_reason_to_begin_anew(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    for step in (1, 2):
        (store.save(make(step)) / "config.yaml").write_text("changed: by a search and replace")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*:\n  step_2: config.yaml has .*\n  step_1: config"):
        store.load_newest()
    assert store.names() == ["step_2", "step_1"]


def test_a_failed_write_leaves_the_old_one_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = make_store(tmp_path, keep=1)
    store.save(make(10))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def full_disk_as_safetensors_says_it(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    for broken, raises in (("save_file", full), ("save_file", full_disk_as_safetensors_says_it), ("_sync", full)):
        with monkeypatch.context() as patch:
            patch.setattr(module, broken, raises)
            with pytest.raises(
                CheckpointError, match=r"step_20 could not be written: .*No space .*step_10 is complete"
            ):
                store.save(make(20))
        assert sorted(os.listdir(store.folder)) == ["latest", "step_10"]
        assert (store.folder / "latest").read_text() == "step_10\n"
    fresh, _ = make_store(tmp_path / "other")
    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", full)
        with pytest.raises(CheckpointError, match="there is no earlier one"):
            fresh.save(make(1))


def test_a_step_that_is_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    store.save(make(10, 0.1))
    store.save(make(10, 0.7))
    assert store.load_newest().score == 0.7


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    path = store.save(make(10))
    description = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps({**description, "format": 99}))
    with pytest.raises(CheckpointError, match="has format 99; this version reads format 2"):
        load(path)


def test_differences_are_listed_by_key() -> None:
    saved = {"adapter": {"dim": 8, "alpha": 16}, "base_model": {"model.safetensors": "00"}, "gone": 1}
    current = {"adapter": {"dim": 16, "alpha": 16}, "base_model": {"model.safetensors": "11"}}
    assert differences(saved, current) == [
        "adapter.dim: the checkpoint has 8, this run 16",
        "base_model.model.safetensors: the checkpoint has '00', this run '11'",
        "gone: the checkpoint has 1, this run None",
    ]
    assert differences(saved, saved) == []
