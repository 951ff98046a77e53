"""Processes and counts that follow from a configuration."""

from __future__ import annotations

import pytest

from lora_rl.config import ConfigError, as_sft, derive_layout, derive_sft_layout, layout, load_config
from tests.unit.config.sample_files import write_model

TP = "policy.megatron_cfg.tensor_model_parallel_size"
PP = "policy.megatron_cfg.pipeline_model_parallel_size"


@pytest.fixture
def wide_model(tmp_path):
    return write_model(tmp_path / "wide", hidden_size=512)


def test_cpu_takes_exactly_tp_times_pp_ranks(config_file):
    got = derive_layout(load_config(config_file, [f"{TP}=2", f"{PP}=2"]), cores=8)
    assert (got.platform, got.tp, got.pp, got.dp, got.world_size) == ("cpu", 2, 2, 1, 4)
    assert (got.num_engines, got.engine_tp) == (1, 1)


def test_batch_counts(config_file):
    overrides = ["cluster.gpus_per_node=4", f"{TP}=2", "policy.train_global_batch_size=64"]
    got = derive_layout(load_config(config_file, overrides), cores=8)
    assert (got.dp, got.sequences_per_step, got.optimizer_steps_per_batch, got.sequences_per_rank) == (2, 256, 4, 32)


@pytest.fixture(autouse=True)
def no_limit_on_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_tiny_models_get_two_threads_and_wider_ones_all_cores(config_file, wide_model):
    tiny = derive_layout(load_config(config_file), cores=8)
    assert (tiny.threads_per_rank, tiny.threads_per_engine) == (2, 2)
    split = derive_layout(load_config(config_file, [f"{TP}=2"]), cores=2)
    assert (split.threads_per_rank, split.threads_per_engine) == (1, 2)
    overrides = [f"policy.model_name={wide_model}", "cluster.gpus_per_node=2"]
    wide = derive_layout(load_config(config_file, overrides), cores=8)
    assert (wide.threads_per_rank, wide.threads_per_engine) == (4, 8)
    few = derive_layout(load_config(config_file, overrides), cores=1)
    assert (few.threads_per_rank, few.threads_per_engine) == (1, 1)
    limited = derive_layout(load_config(config_file, [*overrides, "cluster.num_cpus=4"]))
    assert (limited.threads_per_rank, limited.threads_per_engine) == (2, 4)


def test_cores_are_shared_where_engines_generate_while_the_policy_trains(config_file, wide_model):
    overrides = [
        f"policy.model_name={wide_model}",
        *APART,
        f"{OWN}=1",
        "loss_fn.use_importance_sampling_correction=true",
    ]
    in_turns = derive_layout(load_config(config_file, overrides), cores=8)
    assert (in_turns.threads_per_rank, in_turns.threads_per_engine) == (8, 8)
    at_once = derive_layout(load_config(config_file, [*overrides, "grpo.async_grpo.enabled=true"]), cores=8)
    assert (at_once.threads_per_rank, at_once.threads_per_engine) == (4, 4)


@pytest.mark.parametrize(("asked", "threads"), [("3", (3, 3)), ("64", (4, 8)), ("", (4, 8)), ("nonsense", (4, 8))])
def test_omp_num_threads_is_an_upper_limit(config_file, wide_model, monkeypatch, asked, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    config = load_config(config_file, [f"policy.model_name={wide_model}", "cluster.gpus_per_node=2"])
    got = derive_layout(config, cores=8)
    assert (got.threads_per_rank, got.threads_per_engine) == threads


@pytest.mark.parametrize(
    ("overrides", "platform", "tokens"),
    [
        ([], "cpu", 4096),
        ([], "cuda", None),
        (["policy.generation.vllm_cfg.max_num_batched_tokens=512"], "cpu", 512),
        (["policy.generation.vllm_cfg.max_num_batched_tokens=512"], "cuda", 512),
    ],
)
def test_an_iteration_of_an_engine_on_the_cpu_holds_its_longest_sequence(config_file, overrides, platform, tokens):
    config = load_config(config_file, overrides)
    assert layout.engine_batched_tokens(config, platform) == tokens
    # Past the loader: the model of this test has no room for so many.
    generation = config.policy.generation.vllm_cfg.model_copy(update={"max_model_len": 9000})
    policy = config.policy.model_copy(
        update={"generation": config.policy.generation.model_copy(update={"vllm_cfg": generation})}
    )
    if tokens == 4096:
        assert layout.engine_batched_tokens(config.model_copy(update={"policy": policy}), platform) == 9000


def test_configured_threads_win(config_file):
    overrides = ["policy.megatron_cfg.num_threads=3", "policy.generation.vllm_cfg.num_threads=5"]
    got = derive_layout(load_config(config_file, overrides), cores=2)
    assert (got.threads_per_rank, got.threads_per_engine) == (3, 5)


def test_cuda_has_an_engine_on_every_group_of_gpus(config_file, wide_model):
    overrides = [
        f"policy.model_name={wide_model}",
        "cluster.platform=cuda",
        "cluster.gpus_per_node=8",
        "cluster.num_nodes=2",
        "cluster.address=auto",
        "policy.generation.vllm_cfg.tensor_parallel_size=2",
    ]
    got = derive_layout(load_config(config_file, overrides), cores=128)
    assert (got.world_size, got.dp, got.num_engines, got.engine_tp) == (16, 16, 8, 2)
    assert (got.threads_per_rank, got.threads_per_engine) == (8, 8)


APART = ["policy.generation.colocated.enabled=false"]
OWN = "policy.generation.colocated.resources.gpus_per_node"
ENGINE_TP = "policy.generation.vllm_cfg.tensor_parallel_size"


@pytest.mark.parametrize(
    ("overrides", "world_size", "num_engines", "num_gpus"),
    [
        (["cluster.gpus_per_node=4", f"{OWN}=2"], 2, 2, 4),
        (["cluster.gpus_per_node=8", f"{OWN}=4", f"{ENGINE_TP}=2"], 4, 2, 8),
        # null: one engine.
        (["cluster.gpus_per_node=4", f"{ENGINE_TP}=2"], 2, 1, 4),
        (["cluster.gpus_per_node=4", f"{OWN}=2", "cluster.num_nodes=2", "cluster.address=auto"], 4, 4, 8),
    ],
)
def test_engines_on_gpus_of_their_own(config_file, overrides, world_size, num_engines, num_gpus):
    got = derive_layout(load_config(config_file, ["cluster.platform=cuda", *APART, *overrides]), cores=16)
    assert (got.world_size, got.num_engines, got.num_gpus) == (world_size, num_engines, num_gpus)
    assert not got.colocated
    assert "on resources of their own" in got.describe()


def test_engines_that_take_turns_add_no_gpus(config_file):
    got = derive_layout(load_config(config_file, ["cluster.platform=cuda", "cluster.gpus_per_node=4"]), cores=16)
    assert (got.world_size, got.num_engines, got.num_gpus) == (4, 4, 4)
    assert got.colocated
    assert "taking turns with the ranks" in got.describe()


def test_engines_apart_on_the_cpu(config_file):
    """They take nothing from the ranks, and no GPUs."""
    got = derive_layout(load_config(config_file, [*APART, f"{OWN}=2", f"{TP}=2"]), cores=8)
    assert (got.world_size, got.num_engines, got.num_gpus, got.colocated) == (2, 2, 0, False)
    one = derive_layout(load_config(config_file, [*APART, f"{ENGINE_TP}=2"]), cores=8)
    assert (one.num_engines, one.engine_tp, one.num_gpus) == (1, 2, 0)


OWN_NODES = "policy.generation.colocated.resources.num_nodes"
NODES = ["cluster.address=auto", "grpo.num_prompts_per_step=96"]


@pytest.mark.parametrize(
    ("overrides", "ranks_on", "engines_on"),
    [
        ([], (2,), (1,)),
        (["cluster.num_nodes=2"], (2, 2), (1, 1)),
        ([*APART, "cluster.num_nodes=2"], (2, 2), (1, 1)),
        ([*APART, "cluster.num_nodes=2", f"{OWN}=2"], (2, 2), (2, 2)),
        # A single node is shared, as it must be.
        ([*APART, f"{OWN_NODES}=1"], (2,), (1,)),
        ([*APART, "cluster.num_nodes=2", f"{OWN_NODES}=1"], (2, 0), (0, 1)),
        ([*APART, "cluster.num_nodes=4", f"{OWN_NODES}=1", f"{OWN}=3"], (2, 2, 2, 0), (0, 0, 0, 3)),
        (["cluster.platform=cuda", "cluster.num_nodes=2"], (2, 2), (2, 2)),
        (["cluster.platform=cuda", *APART, "cluster.num_nodes=2"], (1, 1), (1, 1)),
        (["cluster.platform=cuda", *APART, "cluster.num_nodes=2", f"{OWN_NODES}=1"], (2, 0), (0, 2)),
        (["cluster.platform=cuda", *APART, "cluster.num_nodes=3", f"{OWN_NODES}=2", f"{OWN}=1"], (2, 0, 0), (0, 1, 1)),
        (
            ["cluster.platform=cuda", *APART, "cluster.num_nodes=3", f"{OWN_NODES}=2", f"{ENGINE_TP}=2"],
            (2, 0, 0),
            (0, 1, 1),
        ),
    ],
)
def test_what_each_node_has(config_file, overrides, ranks_on, engines_on):
    got = derive_layout(load_config(config_file, ["cluster.gpus_per_node=2", *NODES, *overrides]), cores=8)
    assert (got.ranks_on, got.engines_on) == (ranks_on, engines_on)
    assert (got.world_size, got.num_engines) == (sum(ranks_on), sum(engines_on))
    assert got.dp == got.world_size


def test_nodes_are_described(config_file):
    overrides = [*NODES, *APART, "cluster.num_nodes=3", f"{OWN_NODES}=1", f"{TP}=2", f"{OWN}=2"]
    text = derive_layout(load_config(config_file, overrides), cores=8).describe()
    assert "rank 1: tp 1, pp 0, dp 0, node 0" in text
    assert "rank 2: tp 0, pp 0, dp 1, node 1" in text
    assert "2 nodes (0 to 1): 2 ranks each\n1 node (2): 2 engines\n" in text
    alike = derive_layout(load_config(config_file, [*NODES, "cluster.num_nodes=2"]), cores=8).describe()
    assert "2 nodes (0 to 1): 1 rank and 1 engine each" in alike
    assert "node" not in derive_layout(load_config(config_file), cores=8).describe()


def test_a_pipeline_or_data_parallel_group_may_span_nodes(config_file):
    got = derive_layout(load_config(config_file, [*NODES, "cluster.num_nodes=2", "cluster.gpus_per_node=1", f"{PP}=2"]))
    assert (got.ranks_on, got.pp, got.dp) == ((1, 1), 2, 1)


def test_ranks_are_ordered_tp_then_dp_then_pp(config_file):
    got = derive_layout(load_config(config_file, ["cluster.gpus_per_node=8", f"{TP}=2", f"{PP}=2"]), cores=8)
    coordinates = [got.coordinates(rank) for rank in range(got.world_size)]
    assert len(set(coordinates)) == 8
    assert coordinates[:3] == [(0, 0, 0), (1, 0, 0), (0, 0, 1)]  # (tp, pp, dp)
    assert coordinates[4] == (0, 1, 0)
    text = got.describe()
    assert "rank 5: tp 1, pp 1, dp 0" in text
    assert "8 ranks = tp 2 x pp 2 x dp 2" in text
    assert "256 sequences, 1 optimizer step, 128 sequences per data-parallel rank" in text


def test_long_lists_of_ranks_are_cut(config_file):
    overrides = ["cluster.gpus_per_node=128", "grpo.num_prompts_per_step=128"]
    text = derive_layout(load_config(config_file, overrides), cores=8).describe()
    assert "rank 31:" in text
    assert "rank 32:" not in text
    assert "... and 96 more ranks" in text


def test_another_platform_than_the_checked_one_is_checked_again(config_file, monkeypatch):
    config = load_config(config_file, [f"{TP}=2"])
    monkeypatch.setattr(layout, "count_gpus", lambda: 3)
    with pytest.raises(ConfigError, match="3 x 1 = 3 ranks are not a multiple"):
        derive_layout(config, platform="cuda")
    monkeypatch.setattr(layout, "count_gpus", lambda: 4)
    assert derive_layout(config, platform="cuda").dp == 2


@pytest.mark.parametrize(
    ("devices", "tool", "visible", "expected"),
    [
        (0, None, None, "cpu"),
        (1, None, None, "cuda"),
        (0, "/usr/bin/nvidia-smi", None, "cuda"),
        (1, "/usr/bin/nvidia-smi", "", "cpu"),
        (1, None, "0", "cuda"),
    ],
)
def test_auto_looks_for_a_gpu(config_file, monkeypatch, devices, tool, visible, expected):
    config = load_config(config_file)
    auto = config.model_copy(update={"cluster": config.cluster.model_copy(update={"platform": "auto"})})
    monkeypatch.setattr(layout, "_gpu_devices", lambda: [f"/dev/nvidia{i}" for i in range(devices)])
    monkeypatch.setattr(layout.shutil, "which", lambda name: tool)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert layout.platform_of(auto) == expected


def test_visible_devices_are_counted(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert layout.count_gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert layout.count_gpus() == 0


def test_null_keys_mean_other_keys(config_file):
    config = load_config(config_file)
    assert config.train_global_batch_size == config.sequences_per_step == 256
    assert config.lr_decay_iters == config.num_optimizer_steps == 100
    halves = load_config(config_file, ["policy.train_global_batch_size=128"])
    assert halves.lr_decay_iters == halves.num_optimizer_steps == 200
    assert config.engine_precision == "float32"
    assert config.engine_max_model_len == 32
    assert config.data_seed == config.grpo.seed
    overrides = [
        "policy.train_global_batch_size=128",
        "policy.megatron_cfg.scheduler.lr_decay_iters=50",
        "policy.generation.vllm_cfg.precision=bfloat16",
        "policy.generation.vllm_cfg.max_model_len=48",
        "data.seed=0",
        "policy.tokenizer.name=some/tokenizer",
    ]
    config = load_config(config_file, overrides)
    assert (config.train_global_batch_size, config.lr_decay_iters, config.data_seed) == (128, 50, 0)
    assert (config.engine_precision, config.engine_max_model_len) == ("bfloat16", 48)
    assert config.policy.tokenizer_name == "some/tokenizer"


def test_importance_bounds_are_those_the_type_uses(config_file):
    def bounds(kind: str) -> tuple[float | None, float | None]:
        return load_config(config_file, [f"loss_fn.importance_sampling_type={kind}"]).loss_fn.importance_sampling_bounds

    assert bounds("tis") == (None, 2.0)
    assert bounds("icepop") == bounds("seq_mask") == (0.5, 2.0)
    assert bounds("null") == (None, None)


def test_a_batch_of_examples_that_ranks_cannot_share_is_named_as_the_user_knows_it(config_file):
    ranks = ["cluster.gpus_per_node=3", "grpo.num_prompts_per_step=33", "policy.train_global_batch_size=null"]
    config = as_sft(load_config(config_file, [*ranks, "sft.batch_size=100"]))
    with pytest.raises(ConfigError, match=r"sft\.batch_size = 100\n.*100 sequences do not divide over 3"):
        derive_sft_layout(config)
