"""SVD-LoRA in a real Megatron model: starts at the adapter's function, trains sigma alone, at every layout alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lora_rl.config import RunConfig
from lora_rl.lora.peft_io import read_peft, write_peft
from tests.support.batches import make_batch, one_microbatch
from tests.support.configs import tiny_config
from tests.support.lab import new_rank, started_rank
from tests.support.ranks import RankFailed, run_ranks
from tests.unit.conftest import BATCH_SEED, LAYOUTS
from tests.unit.policy.test_peft import ALL, make_adapter, reference_of

pytestmark = pytest.mark.multiprocess
MODES = ("product", "factors", "core")
SVD = "policy.megatron_cfg.peft.svd"
# 4 layers of 4 linears at rank 8, less what the adapter has no direction for: it has rank 2 on each part of a fused
# linear, with As of its own, so 6 on qkv, 4 on fc1, 2 on the others.
LINEARS, RANK, DIRECTIONS = 16, 8, (6, 2, 4, 2)
COUNTS = {
    "product": (LINEARS * RANK, 4 * sum(DIRECTIONS)),
    "factors": (LINEARS * 2 * RANK, 4 * (sum(DIRECTIONS) + LINEARS // 4 * RANK)),
    "core": (LINEARS * RANK**2, 4 * sum(k * k for k in DIRECTIONS)),
}


@pytest.fixture(scope="module")
def sft(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """An adapter with large B made by `peft`, alpha / r = 3, and its logprobs on the test batch."""
    folder = tmp_path_factory.mktemp("sft") / "adapter"
    return folder, make_adapter(models["tied"], folder, r=2, lora_alpha=6, target_modules=ALL)


def config_of(models: dict[str, Path], sft: tuple[Path, Any], mode: str, *overrides: str, **layout: int) -> RunConfig:
    return tiny_config(
        models["tied"],
        f"policy.megatron_cfg.peft.adapter_path={sft[0]}",
        f"{SVD}.enabled=true",
        f"{SVD}.mode={mode}",
        "loss_fn.reference_policy_kl_penalty=0.1",
        *overrides,
        **layout,
    )


def facts(config: RunConfig, steps: int, saved: Any = None) -> dict[str, Any]:
    """What a policy is before and after some training steps, as told by each rank."""
    from lora_rl.policy.export import export_peft
    from lora_rl.policy.offload import FrozenWeights
    from lora_rl.policy.state import gather_state, load_state

    rank = started_rank(config)
    if saved is not None:
        load_state(rank, saved["state"], with_random=saved["same_layout"])
    batch = make_batch(BATCH_SEED)
    (shard,), (cut,) = one_microbatch(batch, 1)
    at_start = rank.logprobs(shard, cut, temperature=1.0)
    adapter, state = export_peft(rank.model), gather_state(rank)
    before = {name: p.detach().clone() for name, p in rank.model.module.named_parameters()}
    history, metrics = [], {}
    for _ in range(steps):
        reference = rank.logprobs(shard, cut, reference=True)
        result = rank.train_step(shard, cut, reference_logprobs=reference)
        metrics = metrics or {name: m.value for name, m in result.metrics.items()}
        loss = result.metrics["loss"].value if result.metrics else None
        history.append((loss, result.grad_norm, result.learning_rate))
    group = [{k: v for k, v in g.items() if k != "params"} for g in rank.optimizer.param_groups]
    last = {
        "reference": rank.logprobs(shard, cut, reference=True, temperature=1.0),
        "at_end": rank.logprobs(shard, cut, temperature=1.0),
        "describe": rank.describe(),
        "changed": {n for n, p in rank.model.module.named_parameters() if not p.equal(before[n])},
        "dtypes": {p.dtype for n, p in rank.model.module.named_parameters() if ".adapter." in n},
    }
    # As while the engines have the devices: only the base model is away.
    FrozenWeights(rank.model.chunks).offload()
    return {
        **last,
        "at_start": at_start,
        "history": history,
        "metrics": metrics,
        "group": group,
        "adapter": adapter,
        "state": state,
        "last_adapter": export_peft(rank.model),
        "last_state": gather_state(rank),
    }


def facts_of_all(configs: dict[str, RunConfig], steps: int) -> dict[str, dict[str, Any]]:
    return {name: facts(config, steps) for name, config in configs.items()}


@pytest.fixture(scope="module")
def on_one(models: dict[str, Path], sft: tuple[Path, Any]) -> dict[str, dict[str, Any]]:
    # First, because Megatron-Bridge remembers which models it prepared for recomputation by their address.
    configs = {"recomputed": config_of(models, sft, "product", "policy.megatron_cfg.activation_checkpointing=true")}
    configs |= {mode: config_of(models, sft, mode) for mode in MODES}
    configs["bfloat16"] = config_of(models, sft, "product", "policy.precision=bfloat16")
    configs["relative"] = config_of(models, sft, "product", f"{SVD}.parameterization=relative", f"{SVD}.sigma_lr=0.1")
    return run_ranks(facts_of_all, configs, 3)[0]


@pytest.mark.parametrize("name", [*MODES, "relative"])
def test_a_run_starts_at_the_adapter_and_trains_sigma_alone(
    on_one: dict[str, dict[str, Any]], models: dict[str, Path], sft: tuple[Path, np.ndarray], tmp_path: Path, name: str
) -> None:
    fact, mode = on_one[name], "product" if name == "relative" else name
    np.testing.assert_allclose(fact["at_start"], sft[1], atol=2e-5, rtol=0)
    assert (fact["describe"]["trainable"], fact["describe"]["directions"]) == COUNTS[mode]
    assert len(fact["changed"]) == LINEARS
    assert all(changed.endswith(".adapter.activation.theta") for changed in fact["changed"])
    assert [(g["wd_mult"], g["lr"]) for g in fact["group"]] == [(0.0, 0.1 if name == "relative" else 1e-2)]
    # The reference policy is the start, exactly, before and after.
    assert fact["metrics"]["kl"] == 0
    np.testing.assert_array_equal(fact["reference"], fact["at_start"])
    assert np.abs(fact["at_end"] - fact["at_start"]).max() > 1e-2
    # What leaves as a plain adapter is what the policy computes, by `peft` itself; alpha is not r.
    write_peft(tmp_path / "out", fact["last_adapter"], base_model=str(models["tied"]))
    np.testing.assert_allclose(reference_of(models["tied"], tmp_path / "out"), fact["at_end"], atol=1e-4, rtol=0)
    assert {t.scale for t in fact["last_adapter"].tensors.values()} == {4.0}


def test_recomputation_changes_nothing_and_sigma_is_float32_over_a_bfloat16_base(
    on_one: dict[str, dict[str, Any]],
) -> None:
    plain, recomputed, rough = on_one["product"], on_one["recomputed"], on_one["bfloat16"]
    np.testing.assert_allclose(recomputed["history"], plain["history"], rtol=1e-4)
    assert recomputed["changed"] == rough["changed"] == plain["changed"]
    assert rough["dtypes"] == plain["dtypes"] == {torch.float32}
    assert rough["metrics"]["kl"] == 0
    assert rough["history"][0][1] == pytest.approx(plain["history"][0][1], rel=0.1)


@pytest.mark.parametrize("mode", MODES)
def test_frames_are_orthonormal_and_the_change_of_every_weight_is_the_adapters(
    on_one: dict[str, dict[str, Any]], sft: tuple[Path, np.ndarray], mode: str
) -> None:
    tensors, theirs = on_one[mode]["state"].svd, read_peft(sft[0]).tensors
    for name in {key.rpartition(".")[0] for key in tensors}:
        for frame in (tensors[f"{name}.linear_in"], tensors[f"{name}.linear_out"].T):
            frame = frame[frame.norm(dim=1) > 0].double()
            torch.testing.assert_close(frame @ frame.T, torch.eye(len(frame)).double(), atol=1e-6, rtol=0)
    for module, ours in on_one[mode]["adapter"].tensors.items():
        want = theirs[module].scale * theirs[module].b.double() @ theirs[module].a.double()
        got = ours.scale * ours.b.double() @ ours.a.double()
        assert (got - want).norm() <= 1e-6 * want.norm(), module


def gradients(configs: dict[str, RunConfig], sigmas: dict[str, Any], eps: float) -> dict[str, dict[str, Any]]:
    """Gradients of theta; of B where the same function is plain LoRA; and a difference quotient along the former."""
    from lora_rl.lora.targets import adapter_modules
    from lora_rl.policy.export import export_peft, import_peft

    batch = make_batch(BATCH_SEED)
    (shard,), (cut,) = one_microbatch(batch, 1)

    def backward(rank: Any) -> float:
        for chunk in rank.model.chunks:
            chunk.zero_grad_buffer()
        rank.optimizer.zero_grad()
        [result] = rank.forward_backward(shard, cut, reference_logprobs=np.zeros_like(shard.behaviour_logprobs))
        return float(result["metrics"]["loss"].value) / batch.global_tokens

    answer = {}
    plain = new_rank(configs["plain"])
    for mode in MODES:
        rank = started_rank(configs[mode])
        adapters = {name: a.activation for name, a in adapter_modules(rank.model.module).items()}
        for name, spectrum in adapters.items():
            # Away from the start, where the core would be diagonal.
            noise = torch.randn(spectrum.theta.shape, generator=torch.Generator().manual_seed(len(name)))
            spectrum.theta.data.copy_(0.1 * noise)
        backward(rank)
        theta = {name: s.theta.main_grad.clone() for name, s in adapters.items()}
        import_peft(plain.model, export_peft(rank.model))
        backward(plain)
        b = {name: a.linear_out.weight.main_grad.clone() for name, a in adapter_modules(plain.model.module).items()}
        losses = []
        for sign in (1, -1):
            for name, spectrum in adapters.items():
                spectrum.theta.data.add_(theta[name], alpha=sign * eps * (1 if sign == 1 else 2))
            losses.append(backward(rank))
        answer[mode] = {
            "theta": theta,
            "b": b,
            "u": {n: a.linear_out.weight.clone() for n, a in adapter_modules(rank.model.module).items()},
            "mixing": {n: s.mixing.clone() for n, s in adapters.items()},
            "sigma": {n: (s.sigma.detach() + eps * theta[n]) for n, s in adapters.items()},
            "slope": (losses[0] - losses[1]) / (2 * eps),
        }
    return answer


def test_the_gradient_of_sigma_is_the_projection_of_the_weights_gradient(
    models: dict[str, Path], sft: tuple[Path, np.ndarray]
) -> None:
    """dL/dC = s U^T G V, where plain LoRA gets s G V for B if A = V^T; and a difference quotient of the loss."""
    configs = {mode: config_of(models, sft, mode) for mode in MODES}
    configs["plain"] = tiny_config(models["tied"], "loss_fn.reference_policy_kl_penalty=0.1")
    [answer] = run_ranks(gradients, configs, {}, 1e-3)
    for mode, got in answer.items():
        squared = 0.0
        for name, theta in got["theta"].items():
            core, sigma = got["u"][name].T @ got["b"][name], got["sigma"][name]
            if mode == "product":
                want = core.diagonal()
            elif mode == "factors":
                weighted = core * got["mixing"][name]
                want = torch.stack([weighted @ sigma[1], weighted.T @ sigma[0]])
            else:
                want = core
            torch.testing.assert_close(theta, want, atol=2e-5 * float(want.abs().max()), rtol=1e-3)
            squared += float((theta.double() ** 2).sum())
        assert squared > 1e-4, mode
        assert got["slope"] == pytest.approx(squared, rel=0.02), mode


@pytest.mark.parametrize(
    ("mode", "layout", "overrides"),
    [
        ("factors", "tp2_pp2", ()),
        pytest.param("product", "tp2", (), marks=pytest.mark.slow),
        pytest.param("product", "tp2", ("policy.megatron_cfg.sequence_parallel=true",), marks=pytest.mark.slow),
        pytest.param("core", "pp2", (), marks=pytest.mark.slow),
    ],
)
def test_the_layout_changes_nothing(
    on_one: dict[str, dict[str, Any]],
    models: dict[str, Path],
    sft: tuple[Path, np.ndarray],
    mode: str,
    layout: str,
    overrides: tuple[str, ...],
) -> None:
    one, (tp, pp) = on_one[mode], LAYOUTS[layout]
    ranks = run_ranks(facts, config_of(models, sft, mode, *overrides, tp=tp, pp=pp), 3, tp=tp, pp=pp)
    state, reporting = ranks[0]["last_state"].svd, next(r for r in ranks if r["at_start"] is not None)
    np.testing.assert_allclose(reporting["at_start"], one["at_start"], atol=2e-5, rtol=0)
    assert reporting["metrics"]["kl"] == 0
    told = next(r["history"] for r in ranks if r["history"][0][0] is not None)
    np.testing.assert_allclose([h[0] for h in told], [h[0] for h in one["history"]], atol=1e-3, rtol=1e-4)
    for rank in ranks:
        np.testing.assert_allclose([h[1] for h in rank["history"]], [h[1] for h in one["history"]], rtol=1e-4)
    for key, want in one["last_state"].svd.items():
        if key.endswith(("sigma_ref", "theta")):
            np.testing.assert_allclose(state[key], want, atol=1e-4, rtol=1e-4, err_msg=key)
    assert sum(r["describe"]["trainable"] for r in ranks) == COUNTS[mode][0]
    assert sum(r["describe"]["directions"] for r in ranks) == COUNTS[mode][1]


def test_a_saved_run_continues_bit_for_bit_and_keeps_its_frames(
    models: dict[str, Path], sft: tuple[Path, np.ndarray], on_one: dict[str, dict[str, Any]]
) -> None:
    config = config_of(models, sft, "product")
    half = run_ranks(facts, config, 1)[0]
    rest = run_ranks(facts, config, 2, {"state": half["last_state"], "same_layout": True})[0]
    assert rest["history"] == on_one["product"]["history"][1:]
    for kind in ("svd", "moments"):
        want, got = (getattr(run["last_state"], kind) for run in (on_one["product"], rest))
        assert got.keys() == want.keys()
        assert all(got[key].equal(tensor) for key, tensor in want.items())
    np.testing.assert_array_equal(rest["reference"], on_one["product"]["at_start"])
    # Frames that were turned meanwhile (here: swapped) are those of the checkpoint, not of a new decomposition.
    turned = half["last_state"]
    for key, tensor in turned.svd.items():
        turned.svd[key] = tensor.flip(-1) if key.rpartition(".")[2] in ("linear_out", "theta", "sigma_ref") else tensor
        if key.endswith("linear_in"):
            turned.svd[key] = tensor.flip(0)
    elsewhere = run_ranks(
        facts, config_of(models, sft, "product", tp=2), 0, {"state": turned, "same_layout": False}, tp=2
    )
    np.testing.assert_allclose(elsewhere[0]["at_start"], half["at_end"], atol=2e-5, rtol=0)
    assert all(elsewhere[0]["last_state"].svd[key].equal(tensor) for key, tensor in turned.svd.items())


def test_linears_without_a_trained_adapter_are_refused_by_name(models: dict[str, Path], tmp_path: Path) -> None:
    make_adapter(models["tied"], tmp_path / "sft", r=2, lora_alpha=6, target_modules=["q_proj", "o_proj"])
    config = config_of(models, (tmp_path / "sft", None), "product", pp=2)
    with pytest.raises(RankFailed, match=r"0 on 8 linears \(decoder\.layers\.0\.mlp\.linear_fc1"):
        run_ranks(facts, config, 0, pp=2)
