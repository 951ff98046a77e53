"""Pushes from device to device: both ends of the proof, without the device.

The transfer itself is vLLM's and needs GPUs. Here a stand-in carries the tensors, in a process of its own because
importing vLLM takes ten seconds.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from lora_rl.lora.merge import AdapterTensors
from lora_rl.sync.manifest import weighted_sum
from lora_rl.sync.vllm_plugin import backend_for


def probe() -> dict[str, Any]:
    """Send a base of two matrices with one adapter through a carrier, well and badly."""
    from lora_rl.sync.device import DeviceSender, MergedSource
    from lora_rl.sync.errors import SyncError
    from lora_rl.sync.manifest import SyncReport, check_reports
    from lora_rl.sync.receiver import _Proved

    class Model:
        def load_weights(self, weights: Any) -> None:
            self.loaded = dict(weights)

    class Carrier:
        """The part of vLLM's engine that the proof wraps."""

        def __init__(self) -> None:
            self.model = Model()

        def start_weight_update(self) -> None:
            pass

        def finish_weight_update(self) -> None:
            pass

        def receive_weights(self, update_info: Any) -> None:
            self.model.load_weights(update_info)

    class Receiver(_Proved, Carrier):
        pass

    class Trainer:
        """The part of vLLM's trainer-side engine that drives, in two batches."""

        def __init__(self, source: MergedSource, receiver: Receiver, spoil: Any) -> None:
            self.source, self.receiver, self.spoil = source, receiver, spoil

        def send_weights(self) -> None:
            assert [m.name for m in self.source.metadata()] == ["q.weight", "norm"]
            tensors = [self.spoil(name, tensor) for name, tensor in self.source]
            self.receiver.start_weight_update()
            for part in (tensors[:1], tensors[1:]):
                self.receiver.receive_weights(iter([t for t in part if t]))
            self.receiver.finish_weight_update()

    base = {"q.weight": torch.arange(12.0).reshape(3, 4), "norm": torch.ones(5)}
    adapters = {"q": AdapterTensors(torch.ones(2, 4), torch.ones(3, 2), 0.5)}
    spoils = {
        "nothing": lambda name, t: (name, t),
        "a value": lambda name, t: (name, t + 1 if name == "norm" else t),
        "the order": lambda name, t: (name, t.flip(0) if name == "q.weight" else t),
        "a name": lambda name, t: (name.replace("norm", "other"), t),
        "all of one": lambda name, t: None if name == "norm" else (name, t),
    }
    answers: dict[str, Any] = {}
    for what, spoil in spoils.items():
        receiver = Receiver()
        source = MergedSource(lambda: base.items(), lambda: adapters, dtype=torch.float32, rounding="nearest", seed=0)
        sender = DeviceSender(source, is_sender=True)
        sender.engine = Trainer(source, receiver, spoil)  # type: ignore[assignment]
        push = sender.send(3, must_differ=True)
        report = receiver.report
        report = SyncReport(3, report.digest, report.tensors, report.nbytes)
        try:
            check_reports(push.manifest, [report])
            answers[what] = "accepted"
        except SyncError as error:
            answers[what] = str(error)
        if what == "nothing":
            answers["merged"] = receiver.model.loaded.get("q.weight")
            answers["nbytes"], answers["retention"] = push.manifest.nbytes, push.fidelity.metrics()["sync/retention"]
            try:
                sender.send(4, must_differ=True)
            except SyncError as error:
                answers["again"] = str(error)
    return answers


def _answer(pipe: Any) -> None:
    pipe.send(probe())


@pytest.mark.e2e
def test_the_proof_notices_what_the_carrier_spoils() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(120)
    answers = ours.recv()
    process.join(10)
    assert answers.pop("nothing") == "accepted"
    assert "byte for byte the same" in answers.pop("again")
    assert answers.pop("nbytes") == 4 * 17
    assert answers.pop("retention") == pytest.approx(1.0)
    # The receiver gets its tensors in batches; the last one replaced the stand-in's first.
    answers.pop("merged")
    assert answers.keys() == {"a value", "the order", "a name", "all of one"}
    assert all("but the trainer sent" in message for message in answers.values())


def test_weighted_sum_is_what_it_says() -> None:
    tensor = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    words = tensor.view(torch.int16).tolist()
    total = sum(word * (place * 2654435761 | 1) for place, word in enumerate(words)) % 2**64
    assert weighted_sum(tensor) == (total >> 32) ^ (total & 0xFFFFFFFF)
    assert weighted_sum(tensor.bfloat16()) != weighted_sum(tensor.flip(0).bfloat16())
    changed = tensor.clone()
    changed[500] += 1e-6
    assert weighted_sum(changed) != weighted_sum(tensor)


@pytest.mark.parametrize(
    ("platform", "mode", "transport", "colocated", "backend"),
    [
        ("cpu", "merged", "auto", True, "shared_memory"),
        ("cpu", "merged", "auto", False, "shared_memory"),
        ("cuda", "merged", "auto", True, "ipc"),
        ("cuda", "merged", "auto", False, "nccl"),
        ("cuda", "merged", "object_store", False, "shared_memory"),
        ("cuda", "adapter_merge", "auto", True, "shared_memory"),
        ("cuda", "adapter", "auto", False, "shared_memory"),
    ],
)
def test_backend_is_chosen_by_platform_mode_and_placement(
    platform: str, mode: str, transport: str, colocated: bool, backend: str
) -> None:
    assert backend_for(platform=platform, mode=mode, transport=transport, colocated=colocated) == backend
