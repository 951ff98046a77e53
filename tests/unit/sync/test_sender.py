"""The sending side alone: what it writes, and that it notices an update which did not arrive."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lora_rl.lora.merge import AdapterTensors
from lora_rl.sync.errors import SyncError
from lora_rl.sync.manifest import Manifest
from lora_rl.sync.sender import WeightSender


class Live:
    """A model of two matrices and a vector; `q` and `k` have adapters that share their A, as a fused linear's do."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.tensors = {"q.weight": random(6, 5), "k.weight": random(4, 5).bfloat16(), "norm": random(7)}
        self.a, self.b = random(2, 5), {"q": random(6, 2), "k": random(4, 2)}
        self.scale = 3.0
        self.handed_out = 0

    def base(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Lazily, as an exporter does."""
        for name, tensor in self.tensors.items():
            self.handed_out += 1
            yield name, tensor

    def adapters(self) -> dict[str, AdapterTensors]:
        a = self.a.clone()
        return {name: AdapterTensors(a, b.clone(), self.scale) for name, b in self.b.items()}


def new_sender(live: Live, mode: str = "merged", *, is_sender: bool = True, **options) -> WeightSender:
    options = {"dtype": torch.float32, **options}
    return WeightSender(mode=mode, base=live.base, adapters=live.adapters, is_sender=is_sender, **options)


def opened(live: Live, mode: str = "merged", **options) -> WeightSender:
    sender = new_sender(live, mode, **options)
    sender.open()
    sender.close_name()
    return sender


def stored(sender: WeightSender, manifest: Manifest) -> dict[str, torch.Tensor]:
    return {e.name: sender._buffer.view(e.offset, e.shape, getattr(torch, e.dtype)).clone() for e in manifest.entries}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_tensors_are_cast_once(dtype: torch.dtype) -> None:
    live = Live()
    sender = opened(live, dtype=dtype)
    push = sender.send(7, must_differ=True)
    assert push.manifest.version == 7
    assert push.manifest.mode == "merged"
    assert [e.name for e in push.manifest.entries] == list(live.tensors)
    assert all(e.offset % 64 == 0 for e in push.manifest.entries)
    for name, tensor in stored(sender, push.manifest).items():
        want = live.tensors[name].float()
        if name != "norm":
            want = want + 3.0 * live.b[name[0]] @ live.a
        torch.testing.assert_close(tensor, want.to(dtype), atol=1e-6, rtol=0 if dtype is torch.float32 else 1e-2)
        assert tensor.dtype is dtype
    # Measured while merging: only the two adapted matrices count.
    assert push.fidelity.total == 6 * 5 + 4 * 5
    assert push.fidelity.metrics()["sync/retention"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("mode", ["adapter_merge", "adapter"])
def test_only_adapters_travel_and_a_shared_a_travels_once(mode: str) -> None:
    live = Live()
    sender = opened(live, mode)
    live.handed_out = 0
    push = sender.send(1, must_differ=True)
    assert live.handed_out == 0
    assert push.manifest.scales == {"q": 3.0, "k": 3.0}
    tensors = stored(sender, push.manifest)
    assert tensors.keys() == {"q.lora_A", "q.lora_B", "k.lora_A", "k.lora_B"}
    for module, b in live.b.items():
        assert tensors[f"{module}.lora_A"].equal(live.a)
        assert tensors[f"{module}.lora_B"].equal(b)
    assert push.manifest.nbytes == push.sent_bytes == 4 * (2 * 5 + 6 * 2 + 4 * 2)
    assert push.fidelity is None


def test_what_did_not_change_does_not_count_as_sent() -> None:
    live = Live()
    sender = opened(live, "adapter_merge")
    sender.send(1, must_differ=True)
    live.b["q"] += 1
    push = sender.send(2, must_differ=True)
    assert push.sent_bytes == 4 * 6 * 2
    assert push.manifest.nbytes == 4 * (2 * 5 + 6 * 2 + 4 * 2)


@pytest.mark.parametrize("mode", ["merged", "adapter_merge"])
def test_everything_is_read_within_the_call(mode: str) -> None:
    """A lazy export that is consumed after the next optimizer step would mix two versions."""
    live = Live()
    sender = opened(live, mode)
    live.handed_out = 0
    push = sender.send(1, must_differ=False)
    assert live.handed_out == (3 if mode == "merged" else 0)
    sent = stored(sender, push.manifest)
    for tensor in (*live.tensors.values(), live.a, *live.b.values()):
        tensor.add_(1.0)
    after = stored(sender, push.manifest)
    assert all(after[name].equal(tensor) for name, tensor in sent.items())


def test_ranks_that_do_not_send_still_take_part_in_the_gathers() -> None:
    live = Live()
    sender = new_sender(live, is_sender=False)
    assert sender.open() is None
    assert sender.send(1, must_differ=True) is None
    sender.close_name()
    assert live.handed_out == 6


@pytest.mark.parametrize("mode", ["merged", "adapter_merge", "adapter"])
def test_an_update_that_does_not_reach_the_payload_is_an_error(mode: str) -> None:
    live = Live()
    sender = opened(live, mode)
    first = sender.send(1, must_differ=False).manifest
    assert sender.send(2, must_differ=False).manifest.digest == first.digest
    with pytest.raises(SyncError, match="weight version 3 is byte for byte the same as version 2"):
        sender.send(3, must_differ=True)
    live.b["q"][0, 0] += 1e-3
    assert sender.send(4, must_differ=True).manifest.digest != first.digest
    # Also a change of nothing but the scale is one.
    live.scale = 2.0
    sender.send(5, must_differ=True)


def test_an_update_that_rounds_away_is_an_error_and_stochastic_rounding_keeps_it() -> None:
    live = Live()
    for name in live.b:
        live.b[name] *= 1e-7
    sender = opened(live, dtype=torch.bfloat16)
    sender.send(1, must_differ=False)
    live.b["k"] *= 1.5
    with pytest.raises(SyncError, match="in low precision a small update can round to nothing"):
        sender.send(2, must_differ=True)
    stochastic = opened(live, dtype=torch.bfloat16, rounding="stochastic")
    digests = {stochastic.send(version, must_differ=True).manifest.digest for version in range(20)}
    # Each version has a seed of its own.
    assert len(digests) > 1


def test_rounding_is_reproducible_by_seed_and_version() -> None:
    live = Live()

    def digest(seed: int, version: int) -> str:
        sender = opened(live, dtype=torch.bfloat16, rounding="stochastic", seed=seed)
        return sender.send(version, must_differ=False).manifest.digest

    assert digest(1, 5) == digest(1, 5)
    assert len({digest(1, 5), digest(2, 5), digest(1, 6)}) == 3


def test_an_adapter_without_a_base_tensor_is_an_error() -> None:
    live = Live()
    sender = opened(live)
    live.b["v"] = torch.ones(4, 2)
    with pytest.raises(SyncError, match="modules the base model does not have: v"):
        sender.send(1, must_differ=False)


def test_opening_names_the_tensors_and_the_size() -> None:
    sender, other = new_sender(Live()), new_sender(Live(), "adapter")
    transfer, adapters = sender.open(), other.open()
    for opened_sender in (sender, other):
        opened_sender.close_name()
    assert transfer.names == ("q.weight", "k.weight", "norm")
    assert transfer.nbytes == 2 * 128 + 28
    assert adapters.names == ("k.lora_A", "k.lora_B", "q.lora_A", "q.lora_B")


def test_sending_before_opening() -> None:
    with pytest.raises(RuntimeError, match="send before open"):
        new_sender(Live()).send(1, must_differ=False)
    with pytest.raises(RuntimeError, match="no payload before open"):
        new_sender(Live()).payload()


def test_a_model_that_grew_does_not_fit() -> None:
    live = Live()
    sender = opened(live)
    live.tensors["more"] = torch.zeros(1000)
    with pytest.raises(ValueError, match="outside the block"):
        sender.send(1, must_differ=False)


def test_the_payload_is_the_buffer() -> None:
    live = Live()
    sender = opened(live)
    push = sender.send(1, must_differ=False)
    entry = push.manifest.entries[2]
    norm = sender.payload()[entry.offset : entry.offset + entry.nbytes].view(np.float32)
    np.testing.assert_array_equal(norm, live.tensors["norm"])
