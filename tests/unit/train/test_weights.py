"""Pushing and comparing, over a policy and engines that keep what they were asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from lora_rl.config.schema import WeightSyncConfig
from lora_rl.lora.merge import Fidelity
from lora_rl.rollout.types import TrainBatch
from lora_rl.sync.errors import SyncError
from lora_rl.sync.manifest import Manifest, SyncReport, TensorEntry
from lora_rl.sync.sender import Push
from lora_rl.train.weights import WeightSync

PROBES = [(3, 4, 5, 6), (7, 8), (9, 10, 11)]
BY_TRAINER = Fidelity(delta_sq=4.0, delivered_dot_delta=3.0, error_sq=1.0, changed=5.0, total=10.0)
BY_ENGINE = Fidelity(delta_sq=4.0, delivered_dot_delta=2.0, error_sq=1.0, changed=1.0, total=10.0)


@dataclass
class RecordingPolicy:
    """Stands where `PolicyGroup` does; its logprob of token t is -t / 10."""

    fidelity: Fidelity | None = BY_TRAINER
    sent: list[tuple[int, bool]] = field(default_factory=list)
    payloads: int = 0
    temperatures: list[float | None] = field(default_factory=list)

    def send(self, version: int, *, must_differ: bool) -> Push:
        self.sent.append((version, must_differ))
        entries = (TensorEntry("q", (2, 2), "float32", 0, 16, 1), TensorEntry("k", (2,), "float32", 64, 8, 2))
        return Push(Manifest(version, entries), self.fidelity, sent_bytes=16)

    def payload(self, *, changed: bool) -> str:
        assert changed, "the engines have the push before"
        self.payloads += 1
        return f"payload {self.payloads}"

    def logprobs(self, batch: TrainBatch, *, temperature: float | None = None) -> np.ndarray:
        self.temperatures.append(temperature)
        time = np.arange(batch.token_ids.shape[1])
        mask = (time >= batch.prompt_lengths[:, None]) & (time < batch.lengths[:, None])
        return np.where(mask, -batch.token_ids / 10, 0).astype(np.float32)


@dataclass
class RecordingEngines:
    """Stands where `EnginePool` does; engine n says the policy's logprobs plus `offsets[n]`."""

    offsets: Sequence[float] = (0.0, 0.0)
    needs_payload: bool = False
    loaded: list[tuple[int, Any]] = field(default_factory=list)

    def pushing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def load(self, manifest: Manifest, payload: Any = None) -> list[SyncReport]:
        self.loaded.append((manifest.version, payload))
        fidelities = [BY_ENGINE, Fidelity.zero()]
        return [SyncReport(manifest.version, manifest.digest, 2, 24, fidelity) for fidelity in fidelities]

    def confirm(self, manifest: Manifest) -> list[SyncReport]:
        return self.load(manifest)

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[str, list[list[float]]]]:
        return [
            (f"engine {n}", [[offset - t / 10 for t in s[1:]] for s in sequences])
            for n, offset in enumerate(self.offsets)
        ]


@dataclass
class Sync:
    weights: WeightSync
    policy: RecordingPolicy
    engines: RecordingEngines
    warnings: list[str]


def new_sync(
    *,
    fidelity: Fidelity | None = BY_TRAINER,
    offsets: Sequence[float] = (0.0, 0.0),
    needs_payload: bool = False,
    **settings: Any,
) -> Sync:
    policy, engines, warnings = RecordingPolicy(fidelity), RecordingEngines(offsets, needs_payload), []
    return Sync(WeightSync(policy, engines, WeightSyncConfig(**settings), warnings.append), policy, engines, warnings)


def test_a_push_counts_the_version_and_reports_what_travelled() -> None:
    sync = new_sync()
    first = sync.weights.push(after_update=False)
    second = sync.weights.push(after_update=True)
    assert sync.policy.sent == [(1, False), (2, True)]
    assert sync.engines.loaded == [(1, None), (2, None)]
    assert sync.weights.version == second["sync/version"] == 2
    # Of the 24 bytes in the manifest, 16 changed.
    assert (first["sync/version"], first["sync/bytes"], first["sync/tensors"]) == (1, 16, 2)
    assert first["sync/seconds"] > 0
    assert sync.warnings == []


def test_who_merged_says_what_the_cast_delivered() -> None:
    by_trainer = new_sync().weights.push(after_update=False)
    assert (by_trainer["sync/retention"], by_trainer["sync/changed_fraction"]) == (0.75, 0.5)
    assert (by_trainer["sync/delta_norm"], by_trainer["sync/relative_error"]) == (2.0, 0.5)
    # The first worker speaks for all.
    by_engine = new_sync(fidelity=None).weights.push(after_update=False)
    assert (by_engine["sync/retention"], by_engine["sync/changed_fraction"]) == (0.5, 0.1)


def test_without_a_merge_nothing_is_said_and_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = new_sync(fidelity=None, min_retention=0.9, on_low_retention="stop")
    report = SyncReport(1, "", 2, 24)
    monkeypatch.setattr(sync.engines, "load", lambda manifest, payload=None: [report])
    metrics = sync.weights.push(after_update=False)
    assert metrics.keys() == {"sync/version", "sync/bytes", "sync/tensors", "sync/seconds"}


@pytest.mark.parametrize("needs_payload", [True, False])
def test_the_payload_is_fetched_only_when_an_engine_needs_it(needs_payload: bool) -> None:
    sync = new_sync(needs_payload=needs_payload)
    for _ in range(2):
        sync.weights.push(after_update=False)
    assert [payload for _, payload in sync.engines.loaded] == (
        ["payload 1", "payload 2"] if needs_payload else [None, None]
    )
    assert sync.policy.payloads == (2 if needs_payload else 0)


def test_low_retention_warns_in_the_same_words_each_time() -> None:
    sync = new_sync(min_retention=0.8)
    for version in (1, 2):
        assert sync.weights.push(after_update=False)["sync/version"] == version
    first, second = sync.warnings
    assert "policy.generation.weight_sync.min_retention 80.0%" in first
    # The console shows a repeated message once.
    assert first == second


def test_low_retention_can_stop_the_run() -> None:
    sync = new_sync(min_retention=0.8, on_low_retention="stop")
    with pytest.raises(SyncError, match=r"weight version 1: retention 75\.00%: .*weight_sync\.min_retention 80\.0%"):
        sync.weights.push(after_update=False)
    assert sync.warnings == []


@pytest.mark.parametrize("least", [None, 0.5, 0.75])
def test_enough_retention_passes(least: float | None) -> None:
    sync = new_sync(min_retention=least, on_low_retention="stop")
    assert sync.weights.push(after_update=False)["sync/retention"] == 0.75
    assert sync.warnings == []


def test_parity_is_the_largest_mean_difference_of_an_engine() -> None:
    assert new_sync().weights.check_parity(PROBES, 1e-6) == pytest.approx(0, abs=1e-6)
    sync = new_sync(offsets=(0.25, 0.0, -0.5, 0.125))
    assert sync.weights.check_parity(PROBES, None) == pytest.approx(0.5, abs=1e-6)
    assert sync.weights.check_parity(PROBES, 0.6) == pytest.approx(0.5, abs=1e-6)
    # Probes are scored at temperature 1 on both sides, whatever the job samples with.
    assert sync.policy.temperatures == [1.0, 1.0]


def test_a_difference_that_is_no_number_does_not_pass_for_agreement() -> None:
    assert math.isnan(new_sync(offsets=(0.5, float("nan"), 0.0)).weights.check_parity(PROBES, None))


@pytest.mark.parametrize("offset", [0.5, float("nan")])
def test_beyond_the_tolerance_the_engine_is_named(offset: float) -> None:
    sync = new_sync(offsets=(0.0, offset))
    sync.weights.push(after_update=False)
    with pytest.raises(SyncError, match=r"engine 1 and the trainer disagree about weight version 1: .*on 3 probe"):
        sync.weights.check_parity(PROBES, 1e-4)


def test_checksums_of_another_kind_are_not_compared_after_resuming() -> None:
    """From device to device they are computed where the data is, by another formula."""
    host, device = new_sync(), new_sync()
    device.weights = WeightSync(
        device.policy, device.engines, WeightSyncConfig(), device.warnings.append, streamed=True
    )
    for sync in (host, device):
        sync.weights.push(after_update=False)
    assert host.weights.payload != device.weights.payload
    for sync, other in ((new_sync(), device), (new_sync(), host)):
        sync.weights.resume(1, other.weights.payload.rpartition(" ")[0] + " 0123abcd")
        if other is device:
            sync.weights.push(after_update=False)
        else:
            with pytest.raises(SyncError, match="the engines would sample from other weights than before"):
                sync.weights.push(after_update=False)
