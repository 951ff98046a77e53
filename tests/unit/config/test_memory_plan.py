"""The memory plan against published parameter counts and against sums done by hand; what does not fit; what is missing.

What real ranks and engines hold is compared in tests/unit/policy/test_memory_plan.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rl.algorithm import share_prompts
from lora_rl.config import ConfigError, check_machine, derive_layout, hardware, layout, load_config, memory_parts
from lora_rl.config.memory_plan import memory_plan, trainer_of
from lora_rl.config.memory_table import GIB
from lora_rl.config.model_files import read_model_facts
from lora_rl.config.parameters import Shape, shape_of

TINY = Path(__file__).parents[3] / "examples/models/tiny-adder"

# Parameters as the files of these models on the hub have them.
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B-Base": 596_049_920,
    "Qwen/Qwen3-8B-Base": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-30B-A3B-Base": 30_532_122_624,
}
CUDA = ("cluster.platform=cuda", "cluster.gpus_per_node=8", "policy.precision=bfloat16")
MEGATRON = "policy.megatron_cfg"
ATTENTION = (
    f"{MEGATRON}.peft.target_modules=[linear_qkv]",
    "policy.generation.weight_sync.mode=adapter_merge",
)
SPLIT = (f"{MEGATRON}.tensor_model_parallel_size=4", f"{MEGATRON}.sequence_parallel=true")


def plan_of(config_file: Path, *overrides: str):
    config = load_config(config_file, overrides)
    return memory_plan(config, derive_layout(config, cores=16))


def items(holder) -> dict[str, tuple[float, float, float]]:
    return {i.name: (i.generation / GIB, i.training / GIB, i.push / GIB) for i in holder.items}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameters_are_those_that_are_published(name: str, count: int) -> None:
    shape = shape_of(read_model_facts(name))
    assert isinstance(shape, Shape)
    assert shape.total == count


def test_the_cache_of_the_hub_comes_before_a_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--Qwen--Qwen3-8B-Base"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("abc")
    (repository / "snapshots/abc").mkdir(parents=True)
    (repository / "snapshots/abc/config.json").write_text(json.dumps({"num_hidden_layers": 7}))
    assert read_model_facts("Qwen/Qwen3-8B-Base").source == "description"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    facts = read_model_facts("Qwen/Qwen3-8B-Base")
    assert (facts.source, facts.num_layers) == ("cache", 7)


def test_an_8b_model_on_eight_gpus(config_file: Path) -> None:
    """By hand: 8,190,735,360 parameters; r 16 on all four linears; 36 layers, 8 key-value heads of 128."""
    overrides = (
        *CUDA,
        "cluster.gpu_memory_gib=79",
        "policy.model_name=Qwen/Qwen3-8B-Base",
        f"{MEGATRON}.tensor_model_parallel_size=4",
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.gpus_per_node=4",
        "policy.generation.vllm_cfg.tensor_parallel_size=4",
        "policy.generation.vllm_cfg.gpu_memory_utilization=0.9",
    )
    plan = plan_of(config_file, *overrides)
    # (4096 + 6144) + (4096 + 4096) + (4096 + 2 * 12288) + (12288 + 4096), each times r and layers.
    trained = 16 * 36 * (10_240 + 8_192 + 28_672 + 16_384)
    assert (plan.parameters, plan.trained) == (8_190_735_360, trained)
    trainer, engines = plan.holders
    held = items(trainer)
    # Norms (4096 x 2 + 128 x 2 per layer, 4096 at the end) are not split.
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    base = ((8_190_735_360 - norms) / 4 + norms) * 2 / GIB
    assert held["base weights"] == pytest.approx((base,) * 3)
    assert held["adapters, gradients, optimizer"] == pytest.approx((trained / 4 * 16 / GIB,) * 3)
    assert held["activations"][0] == held["activations"][2] == 0 < held["activations"][1]
    served = items(engines)
    assert engines.limit == int(0.9 * 79 * GIB)
    assert sum(served[name][0] for name in served) == pytest.approx(0.9 * 79)
    per_token = 2 * 36 * 2 * 128 * 2
    assert f"{per_token // 1024}.0 KiB per token, {int(served['KV cache'][0] * GIB // per_token):,} tokens" in (
        plan.describe()
    )
    assert "  fits\n" in plan.describe()
    assert "those of a description in this package" in plan.describe()


def test_taking_turns_moves_weights_to_the_host(config_file: Path) -> None:
    turns = (*CUDA, "cluster.gpu_memory_gib=79", "policy.model_name=Qwen/Qwen3-8B-Base")
    plan = plan_of(config_file, *turns, f"{MEGATRON}.tensor_model_parallel_size=4", "grpo.num_prompts_per_step=8")
    [gpu] = plan.holders
    held = items(gpu)
    assert held["base weights"][0] == held["engine weights"][1] == held["KV cache"][1] == 0
    assert held["base weights"][1] > 3
    # At the first push everything is there.
    assert gpu.peak == gpu.totals[2]
    # 8 ranks with a quarter of the model, 8 engines with the whole of it, 2 bytes each.
    [host] = re.findall(r"host memory: ([\d.]+) GiB", plan.describe())
    assert float(host) == pytest.approx(8 * 1.25 * 8_190_735_360 * 2 / GIB, rel=1e-3)


def test_recomputation_and_pipeline_stages_change_activations(config_file: Path, model_dir: Path) -> None:
    add = {"vocab_size": 264, "head_dim": 32}
    (model_dir / "config.json").write_text(json.dumps({**json.loads((model_dir / "config.json").read_text()), **add}))
    batch = ("policy.dynamic_batching.train_mb_tokens=1024",)

    def kept(*overrides: str) -> float:
        return items(plan_of(config_file, *batch, *overrides).holders[0])["activations"][1]

    whole = kept()
    # One input of 128 values for each of four layers, and one layer in full.
    recomputed = 4 * 1024 * 128 * 4 / GIB + whole / 4
    assert kept(f"{MEGATRON}.activation_checkpointing=true") == pytest.approx(recomputed)
    # The first stage holds half of the layers for two microbatches.
    assert kept(f"{MEGATRON}.pipeline_model_parallel_size=2") == pytest.approx(whole)


def test_experts_are_counted_once_per_layer_and_their_activations_per_token(config_file: Path) -> None:
    name = "policy.model_name=Qwen/Qwen3-30B-A3B-Base"
    attention = f"{MEGATRON}.peft.target_modules=[linear_qkv, linear_proj]"
    plan = plan_of(config_file, *CUDA, name, attention, *SPLIT)
    assert plan.trained == 16 * 48 * ((2048 + 4096 + 2 * 512) + (4096 + 2048))
    assert plan.holders[0].limit is None
    assert "set cluster.gpu_memory_gib" in plan.describe()


def test_weights_that_cannot_fit_are_refused_and_an_estimate_only_warned_about(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "count_gpus", lambda: 8)
    monkeypatch.setattr(hardware, "is_installed", lambda name: False)
    apart = ("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=4")
    model = ("policy.model_name=Qwen/Qwen3-14B", "policy.generation.vllm_cfg.tensor_parallel_size=4")
    overrides = [*CUDA, *apart, *model, "cluster.gpu_memory_gib=24"]
    config = load_config(config_file, overrides)
    with pytest.raises(ConfigError) as caught:
        check_machine(config, derive_layout(config))
    assert "weights alone take 27.51 of 24.00 GiB on each GPU of the trainer; use more GPUs" in str(caught.value)
    assert "does not fit: weights alone" in memory_plan(config, derive_layout(config)).describe()

    long = "policy.dynamic_batching.train_mb_tokens=131072"
    split = f"{MEGATRON}.tensor_model_parallel_size=4"
    lengths = ("policy.max_total_sequence_length=8192", "policy.generation.max_new_tokens=4096")
    config = load_config(config_file, [*overrides, long, split, *lengths])
    check_machine(config, derive_layout(config))
    [warning] = memory_plan(config, derive_layout(config)).warnings()
    assert warning.endswith("on each GPU of the trainer; lower policy.dynamic_batching.train_mb_tokens")


def test_a_dry_run_says_what_is_missing_and_a_run_is_refused(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "count_gpus", lambda: 2)
    monkeypatch.setattr(layout, "count_gpus", lambda: 2)
    config = load_config(config_file, CUDA)
    lacks = hardware.missing(config, derive_layout(config))
    assert lacks[0] == "GPUs: 8 are used per node, this machine has 2"
    with pytest.raises(ConfigError, match="8 are used per node, this machine has 2") as caught:
        check_machine(config, derive_layout(config))
    assert caught.value.violations[0].key == "cluster.platform"
    # The CPU build is what this environment has.
    assert "its CPU build is installed (`uv sync --no-group cpu --group cuda`)" in lacks[1]
    assert hardware.missing(load_config(config_file), derive_layout(load_config(config_file))) == []


def test_a_tracker_that_is_not_installed_is_missing_on_this_machine(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hardware.is_installed("pydantic") and not hardware.is_installed("lora-rl-no-such-package")
    trackers = ("logger.wandb_enabled=true", "logger.mlflow_enabled=true")
    config = load_config(config_file, trackers)
    for there, lacks in (
        ((), ["Weights & Biases is not installed", "MLflow is not installed"]),
        (("wandb",), ["MLflow is not installed"]),
        # Any package with its client will do.
        (("wandb", "mlflow"), []),
        (("mlflow-skinny",), ["Weights & Biases is not installed"]),
    ):
        monkeypatch.setattr(hardware, "is_installed", there.__contains__)
        expected = [f"packages: {text} (`uv sync --extra trackers`)" for text in lacks]
        assert hardware.missing(config, derive_layout(config)) == expected
    monkeypatch.setattr(hardware, "is_installed", lambda name: False)
    monkeypatch.setattr(hardware, "count_gpus", lambda: 2)
    config = load_config(config_file, [*CUDA, *trackers])
    with pytest.raises(ConfigError) as caught:
        check_machine(config, derive_layout(config))
    platform, wandb, mlflow = caught.value.violations
    assert (platform.key, wandb.key, mlflow.key) == (
        "cluster.platform",
        "logger.wandb_enabled",
        "logger.mlflow_enabled",
    )
    assert "install it with uv sync --no-group cpu --group cuda --extra trackers, or set this to false" in str(wandb)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "mamba"}, "models of type mamba are not counted, only llama"),
        ({}, "does not state vocab_size"),
        ({"num_experts": 8, "vocab_size": 264}, "does not state moe_intermediate_size and num_experts_per_tok"),
    ],
)
def test_no_plan_without_sizes(config_file: Path, model_dir: Path, change: dict, reason: str) -> None:
    content = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**content, **change}))
    assert reason in plan_of(config_file, *ATTENTION).describe()
    assert not plan_of(config_file, "policy.model_name=some/model").holders


@given(
    prompt=st.integers(1, 4000),
    completion=st.integers(1, 2000),
    group=st.integers(1, 32),
    tokens=st.integers(64, 10**5),
)
def test_the_plan_shares_prompts_as_training_does(prompt: int, completion: int, group: int, tokens: int) -> None:
    shape: Any = SimpleNamespace(linears={"up": (512, 2048, 1), "down": (2048, 512, 1)}, q=256, active_experts=1)
    sequences = memory_parts.sharing_sequences(shape, prompt=prompt, completion=completion, group=group, tokens=tokens)
    rows = share_prompts(
        [0] * group,
        [prompt] * group,
        [prompt + completion] * group,
        attention_tokens=2 * 512 * 2048 / (4 * 256),
        max_tokens=tokens,
    )
    assert sequences == max(map(len, rows))


def test_a_limit_in_sequences_counts_beside_one_in_tokens(config_file: Path) -> None:
    base = [f"policy.model_name={TINY}", "policy.dynamic_batching.train_mb_tokens=4096"]

    def tokens(*overrides: str) -> int:
        config = load_config(config_file, [*base, *overrides])
        facts = read_model_facts(config.policy.model_name)
        return trainer_of(config, derive_layout(config), shape_of(facts), facts).tokens

    one = tokens("policy.train_micro_batch_size=1")
    assert one == load_config(config_file, base).policy.max_total_sequence_length
    assert tokens("policy.train_micro_batch_size=2") == 2 * one
    assert tokens() > 2 * one
