"""What a push is proved by."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from lora_rl.sync.errors import SyncError
from lora_rl.sync.manifest import Manifest, SyncReport, TensorEntry, check_names, check_reports, checksum

ENTRIES = (
    TensorEntry("a", (2, 3), "float32", 0, 24, 0x1234),
    TensorEntry("b", (4,), "bfloat16", 64, 8, 0xFF),
)
MANIFEST = Manifest(3, ENTRIES)
GOOD = SyncReport(3, MANIFEST.digest, 2, 32)


def test_round_trip_through_plain_types() -> None:
    assert Manifest.from_dict(json.loads(json.dumps(MANIFEST.to_dict()))) == MANIFEST
    assert MANIFEST.nbytes == 32


def test_digest_ignores_order_offsets_and_version() -> None:
    moved = dataclasses.replace(ENTRIES[0], offset=128)
    assert Manifest(9, (ENTRIES[1], moved)).digest == MANIFEST.digest


@pytest.mark.parametrize(
    "change",
    [{"name": "c"}, {"shape": (3, 2)}, {"dtype": "float16"}, {"checksum": 0x1235}],
    ids=lambda c: next(iter(c)),
)
def test_digest_sees_every_other_change(change: dict) -> None:
    assert Manifest(3, (dataclasses.replace(ENTRIES[0], **change), ENTRIES[1])).digest != MANIFEST.digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_checksum_sees_every_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    before = checksum(tensor)
    assert before == checksum(tensor.clone())
    tensor.view(-1).view(torch.uint8)[-1] ^= 1
    assert checksum(tensor) != before


def test_checksum_of_scalars_and_of_nothing() -> None:
    assert checksum(torch.tensor(1.5)) != checksum(torch.tensor(2.5))
    assert checksum(torch.zeros(0)) == 0


@pytest.mark.parametrize(
    ("received", "message"),
    [
        (["a"], "missing 1 (b)"),
        ([], "missing 2 (a, b)"),
        (["a", "b", "c"], "unexpected 1 (c)"),
        (["a", "b", "a"], "repeated 1 (a)"),
        (["a", "x"], "missing 1 (b); unexpected 1 (x)"),
        (["a", "b", *"stuvw"], "unexpected 5 (s, t, u, v, ...)"),
    ],
)
def test_names_must_be_exactly_those_of_the_checkpoint(received: list[str], message: str) -> None:
    with pytest.raises(SyncError) as error:
        check_names(received, ["a", "b"])
    assert message in str(error.value)


def test_a_tied_head_may_be_on_either_side_but_not_twice() -> None:
    for received, expected in ((["a", "h"], ["a"]), (["a"], ["a", "h"]), (["a", "h"], ["h", "a"])):
        check_names(received, expected, optional=["h"])
    with pytest.raises(SyncError, match=r"repeated 1 \(h\)"):
        check_names(["a", "h", "h"], ["a"], optional=["h"])


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"digest": "00000000"}, {"tensors": 1}, {"nbytes": 24}], ids=lambda c: next(iter(c))
)
def test_one_worker_with_anything_else_is_named(change: dict) -> None:
    check_reports(MANIFEST, [GOOD, GOOD])
    with pytest.raises(SyncError, match=r"engine worker 1 holds .*but the trainer sent"):
        check_reports(MANIFEST, [GOOD, dataclasses.replace(GOOD, **change)])


@pytest.mark.parametrize("reports", [[], [None]])
def test_silence_is_no_proof(reports: list) -> None:
    with pytest.raises(SyncError, match=r"no engine worker reported|engine worker 0 holds None"):
        check_reports(MANIFEST, reports)
