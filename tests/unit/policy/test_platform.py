"""The CPU platform: Megatron's CUDA names work here, and nothing else notices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[3]


def ask(question: str, *arguments: str) -> Any:
    """An answer of `tests.support.platform_probe`."""
    command = [sys.executable, "-m", "tests.support.platform_probe", question, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_a_clear_error_and_changes_nothing() -> None:
    answer = ask("cuda_without_a_gpu")
    assert answer["message"] == (
        "cluster.platform=cuda, but torch sees no GPU; use cluster.platform=cpu on this machine"
    )
    assert answer["changed"] == []
    assert not answer["megatron"]


def test_a_gpu_without_transformer_engine_has_adapters_too() -> None:
    found = ask("cuda_without_transformer_engine")
    assert found.pop("overrides") >= 5
    assert found == {"engine": False, "in bridge": False, "fused": [], "lora": "LoRA", "left": False}


def test_an_unknown_platform_names_the_valid_ones() -> None:
    assert ask("unknown") == "cluster.platform='tpu': valid are 'cpu' and 'cuda'"


def test_preparing_after_megatron_was_imported_is_refused() -> None:
    assert "megatron was imported before lora_rl.policy.platform.prepare('cpu')" in ask("too_late")


# -- in a prepared process -------------------------------------------------------------------------------------------


def probe(folder: str) -> dict[str, Any]:
    """Everything a prepared rank process is asked here."""
    import importlib.util

    from transformers import AutoModelForCausalLM

    from lora_rl.policy.platform import prepare

    placed = {
        "zeros": torch.zeros(2, device="cuda"),
        "empty": torch.empty(2, device=torch.device("cuda", 0)),
        "tensor": torch.tensor([1.0], device="cuda:0"),
        "full": torch.full((2,), 3.0, device="cuda"),
        "arange": torch.arange(3, device=torch.cuda.current_device()),
        "zeros_like": torch.zeros_like(torch.ones(2), device="cuda"),
        ".cuda()": torch.ones(1).cuda(),
        ".to": torch.ones(1).to("cuda"),
        ".to device=": torch.ones(1).to(device="cuda", dtype=torch.float64),
        "module": torch.nn.Linear(2, 2).cuda().weight,
    }
    with torch.device("meta"):
        on_meta = [torch.zeros(2), torch.arange(3), torch.tensor([1.0]), torch.nn.Linear(2, 2).weight]
    explicit = torch.zeros(2, device="meta")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 40)[None]).logits.flatten().tolist()
    return {
        "devices": {name: str(tensor.device) for name, tensor in placed.items()},
        "dtype": str(placed[".to device="].dtype),
        "meta": [str(tensor.device) for tensor in [*on_meta, explicit]],
        "logits": logits,
        "inv_freq": model.model.rotary_emb.inv_freq.tolist(),
        "placeholder": [name for name in sys.modules if name.split(".")[0] == "transformer_engine"],
        "has_te": importlib.util.find_spec("transformer_engine") is not None,
        "same": prepare("cpu") is prepare("cpu"),
        "rng": _rng_forks(),
        "clip": {norm: _clip(norm) for norm in (0.5, 1e6)},
    }


def _rng_forks() -> dict[str, list[float]]:
    """Draws inside and outside forks of Megatron's tracker, interleaved and repeated."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    def draws() -> dict[str, list[float]]:
        model_parallel_cuda_manual_seed(11)
        torch.manual_seed(5)
        out: dict[str, list[float]] = {"outside": [], "inside": []}
        for _ in range(3):
            out["outside"].append(torch.rand(()).item())
            with get_cuda_rng_tracker().fork():
                out["inside"].append(torch.rand(()).item())
        return out

    first, second = draws(), draws()
    torch.manual_seed(5)
    alone = [torch.rand(()).item() for _ in range(3)]
    return {**first, "again inside": second["inside"], "again outside": second["outside"], "alone": alone}


def _clip(max_norm: float) -> dict[str, Any]:
    """The patched clipping of Megatron against PyTorch's on the same gradients."""
    from megatron.core.optimizer import clip_grads, optimizer

    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(4, 3, generator=generator), torch.randn(7, generator=generator)]
    theirs = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    ours = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for mine, other, gradient in zip(ours, theirs, gradients, strict=True):
        mine.grad, other.grad = gradient.clone(), gradient.clone()
    # A parameter without a gradient is passed over.
    ours.append(torch.nn.Parameter(torch.zeros(1)))
    norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    optimizer.clip_grad_by_total_norm_fp32(ours, max_norm, norm.item())
    return {
        "ours": [p.grad.flatten().tolist() for p in ours[:2]],
        "theirs": [p.grad.flatten().tolist() for p in theirs],
        "both names": optimizer.clip_grad_by_total_norm_fp32 is clip_grads.clip_grad_by_total_norm_fp32,
    }


@pytest.fixture(scope="module")
def prepared(models: dict[str, Path]) -> dict[str, Any]:
    return run_ranks(probe, str(models["tied"]))[0]


@pytest.mark.multiprocess
def test_cuda_devices_mean_the_cpu(prepared: dict[str, Any]) -> None:
    assert set(prepared["devices"].values()) == {"cpu"}, prepared["devices"]
    assert prepared["dtype"] == "torch.float64"
    assert prepared["same"]


@pytest.mark.multiprocess
def test_meta_device_contexts_still_work(prepared: dict[str, Any]) -> None:
    assert set(prepared["meta"]) == {"meta"}


@pytest.mark.multiprocess
def test_hugging_face_loads_the_same_model_in_a_prepared_process(
    prepared: dict[str, Any], models: dict[str, Path]
) -> None:
    np.testing.assert_allclose(prepared["logits"], ask("logits", str(models["tied"])), atol=1e-6, rtol=0)
    # Computed, not loaded: these were once left uninitialised, because the model is first built on the meta device.
    np.testing.assert_allclose(prepared["inv_freq"], 10000.0 ** -(np.arange(0, 32, 2) / 32), rtol=1e-6)


@pytest.mark.multiprocess
def test_the_placeholder_is_gone(prepared: dict[str, Any]) -> None:
    assert prepared["placeholder"] == [] or prepared["has_te"]


@pytest.mark.multiprocess
def test_random_forks_are_reproducible_and_leave_the_default_stream_alone(prepared: dict[str, Any]) -> None:
    rng = prepared["rng"]
    assert rng["inside"] == rng["again inside"]
    assert rng["outside"] == rng["again outside"] == rng["alone"]
    assert len({*rng["inside"], *rng["outside"]}) == 6


@pytest.mark.multiprocess
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_equals_pytorch(prepared: dict[str, Any], max_norm: float) -> None:
    clip = prepared["clip"][max_norm]
    assert clip["both names"]
    for mine, other in zip(clip["ours"], clip["theirs"], strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6)
