"""Sigma-only pushes: what travels, and that they are the full push in another form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lora_rl.config import RunConfig
from lora_rl.lora.merge import AdapterTensors
from lora_rl.lora.svd import decompose, times_core
from lora_rl.sync.errors import SyncError
from lora_rl.sync.manifest import Manifest, check_reports, pair_adapters
from lora_rl.sync.reading import read_push
from lora_rl.sync.sender import WeightSender
from lora_rl.sync.shared_memory import SharedBuffer
from lora_rl.sync.spectral import SigmaSender, SpectralTensors
from tests.support.batches import make_batch, one_microbatch
from tests.support.configs import tiny_config
from tests.support.engine_process import EngineProcess
from tests.support.lab import Recorded, record
from tests.support.pushes import Pusher, score_error, sequences
from tests.support.ranks import run_ranks
from tests.unit.conftest import BATCH_SEED, LAYOUTS
from tests.unit.policy.test_peft import ALL, make_adapter

MODES = ("product", "factors", "core")
RANK = 4
# Rows of the parts of a fused linear, which share V and sigma.
PARTS = {"q": 6, "k": 3}


class Live:
    """An SVD-LoRA adapter on a fused linear."""

    def __init__(self, mode: str) -> None:
        generator = torch.Generator().manual_seed(0)
        a, b = torch.randn(RANK, 10, generator=generator), torch.randn(9, RANK, generator=generator)
        self.parts = decompose(a, b, mode)
        self.a, self.sigma = self.parts.v.T.contiguous(), self.parts.sigma.clone()
        self.mixing = self.parts.mixing if mode == "factors" else None
        self.gathered = 0

    def frames(self) -> dict[str, SpectralTensors]:
        self.gathered += 1
        rows = dict(zip(PARTS, self.parts.u.split(list(PARTS.values())), strict=True))
        return {name: SpectralTensors(self.a, u.contiguous(), self.mixing, 2.0) for name, u in rows.items()}

    def sigmas(self) -> dict[str, torch.Tensor]:
        sigma = self.sigma.clone()
        return dict.fromkeys(PARTS, sigma)

    def adapters(self) -> dict[str, AdapterTensors]:
        return {
            name: AdapterTensors(f.a, times_core(f.b, self.sigma, self.mixing), f.scale)
            for name, f in self.frames().items()
        }


def senders(live: Live, *, is_sender: bool = True) -> tuple[SigmaSender, WeightSender]:
    common = {"mode": "adapter_merge", "base": lambda: (), "adapters": live.adapters, "dtype": torch.float32}
    sigma_only = SigmaSender(**common, is_sender=is_sender, frames=live.frames, sigmas=live.sigmas)
    return sigma_only, WeightSender(**common, is_sender=True)


def received(buffer: SharedBuffer, manifest: Manifest, names: tuple[str, ...]) -> dict[str, AdapterTensors]:
    return pair_adapters(read_push(buffer, manifest, names), manifest.scales)


@pytest.mark.parametrize("mode", MODES)
def test_every_push_is_the_full_push_and_only_sigma_travels(mode: str) -> None:
    live = Live(mode)
    sigma_only, full = senders(live)
    transfer, _ = sigma_only.open(), full.open()
    # An engine on another host has a buffer of its own: all of it at first, then the front.
    far = SharedBuffer.create(transfer.nbytes)
    for sender in (sigma_only, full):
        sender.close_name()
    far.unlink()
    numbers = live.sigma.numel()
    for version in (1, 2, 3):
        live.gathered = 0
        push = sigma_only.send(version, must_differ=version > 1)
        assert live.gathered == 0, "singular vectors are not gathered again"
        assert push.sent_bytes == 4 * numbers if version > 1 else push.sent_bytes == push.manifest.nbytes
        payload = sigma_only.payload(changed=True)
        assert len(payload) == (transfer.nbytes if version == 1 else -(-4 * numbers // 64) * 64)
        far.bytes.numpy()[: len(payload)] = payload
        want = full.send(version, must_differ=version > 1).manifest
        expected = pair_adapters(read_push(full._buffer, want, [e.name for e in want.entries]), want.scales)
        for buffer in (sigma_only._buffer, far):
            got = received(buffer, push.manifest, transfer.names)
            assert got.keys() == expected.keys()
            for name, tensors in got.items():
                assert tensors.scale == expected[name].scale
                assert tensors.a.equal(expected[name].a)
                assert tensors.b.equal(expected[name].b)
        live.sigma[..., 1] += 0.5
    # One that comes only now reads everything.
    late = SharedBuffer.create(transfer.nbytes)
    late.unlink()
    late.bytes.numpy()[:] = sigma_only.payload()
    received(late, push.manifest, transfer.names)


def test_the_manifest_proves_the_singular_vectors_too() -> None:
    live = Live("product")
    sender, _ = senders(live)
    transfer = sender.open()
    sender.close_name()
    push = sender.send(1, must_differ=False)
    entry = next(e for e in push.manifest.entries if e.name == "k.lora_B")
    sender._buffer.bytes[entry.offset] ^= 1
    with pytest.raises(SyncError, match=r"k\.lora_B: checksum"):
        read_push(sender._buffer, push.manifest, transfer.names)
    with pytest.raises(SyncError, match="engine worker 0 holds None"):
        check_reports(push.manifest, [None])


def test_a_sigma_that_did_not_move_is_an_error() -> None:
    live = Live("core")
    sender, _ = senders(live)
    sender.open()
    sender.close_name()
    sender.send(1, must_differ=False)
    with pytest.raises(SyncError, match="version 2 is byte for byte the same as version 1"):
        sender.send(2, must_differ=True)
    live.sigma[0, 1] += 1e-3
    sender.send(3, must_differ=True)


def test_ranks_that_do_not_send_still_take_part_in_the_gathers() -> None:
    live = Live("product")
    sender, _ = senders(live, is_sender=False)
    assert sender.open() is None
    assert sender.send(1, must_differ=True) is None
    assert live.gathered == 1


def test_an_adapter_without_its_vectors_is_incomplete() -> None:
    with pytest.raises(SyncError, match="adapter of q is incomplete"):
        pair_adapters({"q.lora_A": torch.ones(2, 3), "q.lora_sigma": torch.ones(2)}, {"q": 1.0})
    whole = {"q.lora_A": torch.ones(2, 3), "q.lora_B": torch.ones(5, 2), "q.lora_sigma": torch.tensor([2.0, 3.0])}
    np.testing.assert_array_equal(pair_adapters(whole, {"q": 1.0})["q"].b[0], [2.0, 3.0])


# -- a real policy and a real engine ------------------------------------------------------------------------------


def record_svd_pushes(configs: dict[str, RunConfig]) -> dict[str, Any] | None:
    """Two pushes of each configuration's sender, of a policy whose sigma moved in between, and the logprobs then."""
    import torch.distributed as dist

    from lora_rl.lora.targets import adapter_modules
    from lora_rl.policy.senders import make_sender
    from tests.support.lab import started_rank

    rank = started_rank(configs["sigma"])
    made = {name: make_sender(config, rank.model, is_sender=dist.get_rank() == 0) for name, config in configs.items()}
    for sender in made.values():
        sender.open()
        sender.close_name()
    pushes: dict[str, list[Recorded | None]] = {name: [record(sender, 1)] for name, sender in made.items()}
    for name, adapter in adapter_modules(rank.model.module).items():
        noise = torch.randn(adapter.activation.theta.shape, generator=torch.Generator().manual_seed(len(name)))
        adapter.activation.theta.data.copy_(0.3 * noise)
    for name, sender in made.items():
        pushes[name].append(record(sender, 2))
    logprobs = rank.logprobs(make_batch(BATCH_SEED), one_microbatch(make_batch(BATCH_SEED), 1)[1][0], temperature=1.0)
    return {"pushes": pushes, "logprobs": logprobs}


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("mode", "layout"), [("product", "tp2_pp2"), pytest.param("factors", "tp1", marks=pytest.mark.slow)]
)
def test_an_engine_computes_the_same_from_sigma_alone(
    engine: EngineProcess, models: dict[str, Path], tmp_path: Path, mode: str, layout: str
) -> None:
    make_adapter(models["tied"], tmp_path / "sft", r=2, lora_alpha=6, target_modules=ALL)
    tp, pp = LAYOUTS[layout]
    sync = "policy.generation.weight_sync.mode"
    settings = {
        "sigma": [f"{sync}=adapter_merge"],
        "full": [f"{sync}=adapter_merge", "policy.megatron_cfg.peft.svd.sigma_only_sync=false"],
        "merged": [f"{sync}=merged"],
    }
    adapter = f"policy.megatron_cfg.peft.adapter_path={tmp_path / 'sft'}"
    svd = ["policy.megatron_cfg.peft.svd.enabled=true", f"policy.megatron_cfg.peft.svd.mode={mode}"]
    configs = {
        name: tiny_config(models["tied"], adapter, *svd, *options, tp=tp, pp=pp) for name, options in settings.items()
    }
    answers = run_ranks(record_svd_pushes, configs, tp=tp, pp=pp)
    pushes, batch = answers[0]["pushes"], make_batch(BATCH_SEED)
    want = next(a["logprobs"] for a in answers if a["logprobs"] is not None)
    scores = {}
    for name in ("merged", "full", "sigma"):
        pusher = Pusher.for_recorded(engine, pushes[name][0])
        for version, push in enumerate(pushes[name]):
            pusher.replay(push, 3000 + version)
        after = engine.call("score", sequences(batch))
        scores[name] = np.concatenate([np.asarray(line) for line in after])
        assert score_error(after, batch, want) <= 1e-4, name
    np.testing.assert_allclose(scores["sigma"], scores["full"], atol=1e-6, rtol=0)
    np.testing.assert_allclose(scores["sigma"], scores["merged"], atol=2e-5, rtol=0)
