"""The sending side alone: what it writes, and that it notices an update which did not arrive."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lora_rl.sync.errors import SyncError
from lora_rl.sync.sender import MergedSender


class Live:
    """Weights that change between pushes, handed out lazily as an exporter does."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            "a": torch.randn(3, 5, generator=generator),
            "b": torch.randn(7, generator=generator).bfloat16(),
        }
        self.handed_out = 0

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            self.handed_out += 1
            yield name, tensor


def opened(live: Live, dtype: torch.dtype = torch.float32) -> MergedSender:
    sender = MergedSender(live, is_sender=True, dtype=dtype)
    sender.open()
    sender.close_name()
    return sender


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_buffer_holds_the_weights_cast_once(dtype: torch.dtype) -> None:
    live = Live()
    sender = opened(live, dtype)
    manifest = sender.send(7, must_differ=True)
    assert manifest.version == 7
    assert [e.name for e in manifest.entries] == ["a", "b"]
    for entry in manifest.entries:
        assert entry.offset % 64 == 0
        assert entry.dtype == str(dtype).removeprefix("torch.")
        stored = sender._buffer.view(entry.offset, entry.shape, dtype)
        assert torch.equal(stored, live.tensors[entry.name].to(dtype))


def test_everything_is_read_within_the_call() -> None:
    """A lazy export that is consumed after the next optimizer step would mix two versions."""
    live = Live()
    sender = opened(live)
    live.handed_out = 0
    manifest = sender.send(1, must_differ=False)
    assert live.handed_out == 2
    sent = sender._buffer.view(manifest.entries[0].offset, (3, 5), torch.float32).clone()
    live.tensors["a"].add_(1.0)
    assert torch.equal(sender._buffer.view(manifest.entries[0].offset, (3, 5), torch.float32), sent)


def test_ranks_that_do_not_send_still_take_part_in_the_gathers() -> None:
    live = Live()
    sender = MergedSender(live, is_sender=False, dtype=torch.float32)
    assert sender.open() is None
    assert sender.send(1, must_differ=True) is None
    sender.close_name()
    assert live.handed_out == 4


def test_an_update_that_does_not_reach_the_payload_is_an_error() -> None:
    live = Live()
    sender = opened(live)
    first = sender.send(1, must_differ=False)
    assert sender.send(2, must_differ=False).digest == first.digest
    with pytest.raises(SyncError, match="weight version 3 is byte for byte the same as version 2"):
        sender.send(3, must_differ=True)
    live.tensors["a"][0, 0] += 1e-3
    assert sender.send(4, must_differ=True).digest != first.digest


def test_an_update_that_rounds_away_is_an_error() -> None:
    live = Live()
    sender = opened(live, torch.bfloat16)
    sender.send(1, must_differ=False)
    live.tensors["a"] *= 1 + 1e-6
    with pytest.raises(SyncError, match="in low precision a small update can round to nothing"):
        sender.send(2, must_differ=True)


def test_sending_before_opening() -> None:
    with pytest.raises(RuntimeError, match="send before open"):
        MergedSender(Live(), is_sender=True, dtype=torch.float32).send(1, must_differ=False)


def test_a_model_that_grew_does_not_fit() -> None:
    live = Live()
    sender = opened(live)
    live.tensors["c"] = torch.zeros(1000)
    with pytest.raises(ValueError, match="outside the block"):
        sender.send(1, must_differ=False)
