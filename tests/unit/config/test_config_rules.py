"""Every rule between keys: it fires, it names the key, the value and the remedy, and it keeps quiet otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_rl.config import ConfigError, layout, load_config, resolved_yaml, rule_engine
from lora_rl.config.capabilities import CAPABILITIES
from lora_rl.config.errors import show
from lora_rl.config.keys import all_keys
from lora_rl.config.model_rules import MODEL_RULES
from lora_rl.config.rules import PEFT_FILES, RULES
from tests.unit.config.sample_files import write_model

LOSS = "loss_fn"
PEFT = "policy.megatron_cfg.peft"
SVD = f"{PEFT}.svd"
SVD_ON = f"{SVD}.enabled=true"
# In the current folder; the rules read no more of it than its files' names.
ADAPTER = "sft-adapter"
MOE = "policy.model_name=Qwen/Qwen3-30B-A3B-Base"
TARGETS = f"{PEFT}.target_modules"
MEGATRON = "policy.megatron_cfg"
SCHEDULER = "policy.megatron_cfg.scheduler"
VLLM = "policy.generation.vllm_cfg"
SYNC = "policy.generation.weight_sync"
MERGED = f"{SYNC}.mode=merged"
MOE_ATTENTION = (MOE, f"{TARGETS}=[linear_qkv]", f"{SYNC}.mode=adapter_merge")
COLOCATED = "policy.generation.colocated"
OWN_GPUS = f"{COLOCATED}.resources.gpus_per_node"
DATA = Path(__file__).parents[3] / "examples/data/sums.jsonl"
OWN_NODES = f"{COLOCATED}.resources.num_nodes"
THREE_NODES = ["cluster.num_nodes=3", "cluster.address=auto"]
CORRECTION = f"{LOSS}.use_importance_sampling_correction=true"

REINFORCE = f"{LOSS}.disable_ppo_ratio=true"
GSPO = f"{LOSS}.sequence_level_importance_ratios=true"
SEQUENCE_MEAN = f"{LOSS}.token_level_loss=false"
KL = f"{LOSS}.reference_policy_kl_penalty=0.1"
KL_TYPE = f"{LOSS}.reference_policy_kl_type"
PLUS_PLUS = "grpo.adv_estimator.name=reinforce_plus_plus"
SHAPING = "grpo.reward_shaping"
RAMP = (f"{SHAPING}.enabled=true", f"{SHAPING}.overlong_buffer_penalty=1.0")

NEXT = "grpo.next"
JUMPS = f"{NEXT}.enabled=true"

# Not among the cases: several keys are wrong at once.
GDPO = ["grpo.adv_estimator.name=gdpo", *RAMP, f"{SHAPING}.overlong_buffer_length=2", f"{LOSS}.use_kl_in_reward=true"]

# (overrides, key that is reported, part of the message, overrides that mend it)
CASES = [
    (["grpo.num_generations_per_prompt=1"], "grpo.num_generations_per_prompt", "at least 2 completions", 2),
    (["policy.train_global_batch_size=100"], "policy.train_global_batch_size", "32 x 8 = 256; null takes all", 64),
    (
        ["cluster.gpus_per_node=2", "grpo.num_prompts_per_step=5", "grpo.num_generations_per_prompt=3"],
        "policy.train_global_batch_size",
        "15 sequences do not divide over 2 data-parallel ranks; use a multiple of 2",
        None,
    ),
    (
        ["cluster.gpus_per_node=3", "policy.megatron_cfg.tensor_model_parallel_size=2"],
        "cluster.gpus_per_node",
        "3 x 1 = 3 ranks are not a multiple of",
        4,
    ),
    (
        ["cluster.platform=cuda", "cluster.gpus_per_node=2", f"{VLLM}.tensor_parallel_size=4"],
        f"{VLLM}.tensor_parallel_size",
        "the 2 GPUs of a node are not a multiple of it; use a divisor of 2",
        2,
    ),
    (["cluster.num_nodes=2"], "cluster.num_nodes", "set cluster.address", 1),
    (["policy.generation.temperature=0"], "policy.generation.temperature", "greedy rollouts", 0.5),
    ([CORRECTION, "policy.generation.top_p=0.9"], "policy.generation.top_p", "renormalised over the tokens", 1.0),
    ([CORRECTION, "policy.generation.top_k=20"], "policy.generation.top_k", "use null or switch", -1),
    (
        [CORRECTION, f"{LOSS}.truncated_importance_sampling_ratio=null"],
        f"{LOSS}.truncated_importance_sampling_ratio",
        "importance_sampling_type tis needs it",
        2.0,
    ),
    (
        [
            CORRECTION,
            f"{LOSS}.importance_sampling_type=icepop",
            f"{LOSS}.truncated_importance_sampling_ratio_min=null",
        ],
        f"{LOSS}.truncated_importance_sampling_ratio_min",
        "importance_sampling_type icepop needs it",
        0.5,
    ),
    (
        [
            CORRECTION,
            f"{LOSS}.importance_sampling_type=seq_mask",
            f"{LOSS}.truncated_importance_sampling_ratio_min=3",
        ],
        f"{LOSS}.truncated_importance_sampling_ratio_min",
        "must be less than loss_fn.truncated_importance_sampling_ratio = 2.0",
        1.5,
    ),
    (
        ["policy.megatron_cfg.peft.adapter_path=/nowhere"],
        "policy.megatron_cfg.peft.adapter_path",
        "must be a PEFT directory; it has no adapter_config.json and no adapter_model.safetensors",
        None,
    ),
    (["grpo.early_stop_patience=2", "grpo.val_period=0"], "grpo.early_stop_patience", "needs validation while", None),
    (
        ["grpo.async_grpo.enabled=true", CORRECTION],
        f"{COLOCATED}.enabled",
        "engines need their own devices",
        None,
    ),
    (
        ["grpo.async_grpo.enabled=true", f"{COLOCATED}.enabled=false"],
        f"{LOSS}.use_importance_sampling_correction",
        "trains on rollouts of older weights",
        "true",
    ),
    (
        ["grpo.async_grpo.in_flight_weight_updates=true"],
        "grpo.async_grpo.in_flight_weight_updates",
        "has no effect while grpo.async_grpo.enabled is false",
        "false",
    ),
    (
        ["grpo.async_grpo.recompute_kv_cache_after_weight_updates=true"],
        "grpo.async_grpo.recompute_kv_cache_after_weight_updates",
        "has no effect while grpo.async_grpo.in_flight_weight_updates is false",
        "false",
    ),
    (["sft.train_all_weights=true", "policy.precision=bfloat16"], "policy.precision", "needs float32", "float32"),
    (
        ["sft.train_all_weights=true", "policy.precision=float32", "checkpointing.enabled=true"],
        "checkpointing.enabled",
        "checkpoints hold adapters",
        "false",
    ),
    (
        ["sft.target_answer_probability=0.5", "sft.val_period=0"],
        "sft.target_answer_probability",
        "is measured in validations, and sft.val_period is 0",
        "null",
    ),
    (["sft.train_path=/nowhere"], "sft.train_path", "there is no such file; give a .jsonl or .parquet file", None),
    ([f"sft.train_path={DATA}", "sft.val_path=/nowhere.jsonl"], "sft.val_path", "there is no such file", None),
    (["data.task=null", "data.train_path=/no.jsonl"], "data.train_path", "there is no such file", DATA),
    (["data.task=null", "data.train_path=/"], "data.train_path", "the folder has no state.json; give a", DATA),
    (["data.task=null", f"data.train_path={__file__}"], "data.train_path", "a file of an unknown kind; give a", DATA),
    (["data.task=null"], "data.train_path", "needed when data.task is null; give a .jsonl", None),
    ([f"data.train_path={DATA}"], "data.train_path", "has no effect with data.task addition; set data.task to", None),
    ([f"data.val_path={DATA}"], "data.val_path", "has no effect with data.task addition", None),
    ([f"sft.val_path={DATA}"], "sft.val_path", "has no effect without sft.train_path", None),
    (["sft.answer_key=solution"], "sft.answer_key", "has no effect: data.task addition has no columns", None),
    (["sft.prompt_key=text"], "sft.prompt_key", "has no effect: data.task addition has no columns", None),
    (["data.validation_split=0.1"], "data.validation_split", "because of data.task addition, which holds prompts", 0),
    (
        ["data.task=null", f"data.train_path={DATA}", f"data.val_path={DATA}", "data.validation_split=0.1"],
        "data.validation_split",
        "has no effect because of a val_path; set it to 0",
        0,
    ),
    (
        ["data.task=null", f"data.train_path={DATA}", "data.drop_overlap=true"],
        "data.drop_overlap",
        "has no effect without a val_path",
        "false",
    ),
    (["data.prompt_file=/no.txt"], "data.prompt_file", "there is no such file; give a text file, or null", None),
    (
        ["data.prompt_mode=chat", "data.system_prompt_file=/no.txt"],
        "data.system_prompt_file",
        "there is no such file; give a text file, or null",
        DATA,
    ),
    ([f"data.system_prompt_file={DATA}"], "data.system_prompt_file", "raw prompts have no system message", None),
    (["data.task=reasoning_gym"], "data.reasoning_gym.datasets", "name what to draw from, such as [chain_sum]", "[a]"),
    (
        ["checkpointing.enabled=true", "checkpointing.checkpoint_must_save_by=4h"],
        "checkpointing.checkpoint_must_save_by",
        "must be days:hours:minutes:seconds",
        "4:00:00",
    ),
    (
        [f"{COLOCATED}.enabled=false", f"{OWN_NODES}=2"],
        OWN_NODES,
        "engines and ranks share the one node of cluster.num_nodes; set it to 1 or null",
        1,
    ),
    (
        [*THREE_NODES, f"{COLOCATED}.enabled=false", f"{OWN_NODES}=3"],
        OWN_NODES,
        "leaves no node of cluster.num_nodes = 3 for the trainer; use at most 2",
        1,
    ),
    (
        # Six ranks divide into tensor-parallel pairs, but one pair would be on two nodes.
        [
            *("cluster.address=auto", "cluster.num_nodes=2", "cluster.gpus_per_node=3", "grpo.num_prompts_per_step=96"),
            f"{MEGATRON}.tensor_model_parallel_size=2",
        ],
        f"{MEGATRON}.tensor_model_parallel_size",
        "a tensor-parallel group must be on one node, and a node has 3 ranks; use a divisor of 3",
        1,
    ),
    (
        # Eight GPUs in all, but an engine of four would be on two nodes.
        [
            *("cluster.platform=cuda", "cluster.num_nodes=4", "cluster.address=auto", "cluster.gpus_per_node=2"),
            f"{VLLM}.tensor_parallel_size=4",
        ],
        f"{VLLM}.tensor_parallel_size",
        "the 2 GPUs of a node are not a multiple of it",
        2,
    ),
    (
        [
            *("cluster.platform=cuda", *THREE_NODES, "cluster.gpus_per_node=2", f"{COLOCATED}.enabled=false"),
            *(f"{OWN_NODES}=1", f"{VLLM}.tensor_parallel_size=4"),
        ],
        f"{VLLM}.tensor_parallel_size",
        "an engine is on one node, which has 2 GPUs; lower it",
        2,
    ),
    (
        [
            *("cluster.platform=cuda", *THREE_NODES, "cluster.gpus_per_node=2", f"{COLOCATED}.enabled=false"),
            *(f"{OWN_NODES}=1", f"{OWN_GPUS}=4"),
        ],
        OWN_GPUS,
        "an engine is on one node, which has 2 GPUs; lower it",
        2,
    ),
    (["cluster.address=ray://head:10001"], "cluster.address", "Ray Client is not supported", "head:6379"),
    (["cluster.address=local"], "cluster.address", "must be auto or host:port", "'[::1]:6379'"),
    ([f"{LOSS}.ratio_clip_c=1"], f"{LOSS}.ratio_clip_c", "must be > 1 (3.0 is usual), or null", 3),
    (["policy.generation.max_new_tokens=32"], "policy.generation.max_new_tokens", "must be less than", 31),
    ([f"{VLLM}.max_model_len=8"], f"{VLLM}.max_model_len", "must be more than policy.generation.max_new_tokens", 32),
    (
        ["cluster.platform=cuda", "cluster.gpus_per_node=2", f"{VLLM}.load_format=dummy"],
        f"{VLLM}.load_format",
        "does not prove that every weight of the engine was replaced",
        "auto",
    ),
    (
        ["cluster.platform=cuda", "cluster.gpus_per_node=2", f"{SYNC}.mode=adapter", "policy.precision=float32"],
        f"{SYNC}.mode",
        "vLLM's kernels for adapters take no float32 on GPUs",
        "merged",
    ),
    (
        ["cluster.platform=cuda", "cluster.gpus_per_node=2", "policy.share_prompts=true"],
        "policy.share_prompts",
        "fused attention of GPUs takes no mask",
        "null",
    ),
    ([f"{VLLM}.block_size=48"], f"{VLLM}.block_size", "a multiple of 32 tokens", "null"),
    (
        ["policy.share_prompts=true", "policy.train_micro_batch_size=3"],
        "policy.share_prompts",
        "rows are cut by tokens",
        "null",
    ),
    (
        ["policy.dynamic_batching.enabled=false", "policy.train_micro_batch_size=null"],
        "policy.train_micro_batch_size",
        "needed when policy.dynamic_batching.enabled is false; use 1",
        4,
    ),
    (
        ["policy.dynamic_batching.enabled=false", "policy.train_micro_batch_size=3"],
        "policy.train_micro_batch_size",
        "use a divisor of 256",
        8,
    ),
    (
        ["policy.dynamic_batching.train_mb_tokens=31"],
        "policy.dynamic_batching.train_mb_tokens",
        "one sequence of policy.max_total_sequence_length = 32 tokens must fit",
        32,
    ),
    ([f"{VLLM}.max_num_batched_tokens=10"], f"{VLLM}.max_num_batched_tokens", "at least", 256),
    (
        [f"{VLLM}.max_num_seqs=8", f"{VLLM}.max_num_batched_tokens=31"],
        f"{VLLM}.max_num_batched_tokens",
        "on the CPU no prompt is split, so one sequence of 32 tokens must fit",
        32,
    ),
    (
        ["policy.generation.colocated.resources.gpus_per_node=2"],
        "policy.generation.colocated.resources.gpus_per_node",
        "has no effect while",
        None,
    ),
    (
        ["policy.generation.colocated.resources.num_nodes=2"],
        "policy.generation.colocated.resources.num_nodes",
        "has no effect while",
        None,
    ),
    (
        [f"{COLOCATED}.enabled=false", f"{OWN_GPUS}=3", f"{VLLM}.tensor_parallel_size=2"],
        OWN_GPUS,
        "must be a multiple of policy.generation.vllm_cfg.tensor_parallel_size = 2",
        4,
    ),
    (
        ["checkpointing.checkpoint_must_save_by=0:03:45:00"],
        "checkpointing.checkpoint_must_save_by",
        "has no effect while checkpointing.enabled is false",
        "null",
    ),
    (
        ["cluster.platform=cuda", "cluster.gpus_per_node=2", f"{COLOCATED}.enabled=false", f"{OWN_GPUS}=2"],
        OWN_GPUS,
        "leaves no GPU of cluster.gpus_per_node = 2 for the trainer",
        1,
    ),
    (
        [f"{SYNC}.mode=adapter", f"{SYNC}.rounding=stochastic"],
        f"{SYNC}.rounding",
        "has no effect in mode adapter, which never rounds merged weights; leave it at nearest",
        "nearest",
    ),
    (
        [f"{SYNC}.mode=adapter", f"{SYNC}.min_retention=0.5"],
        f"{SYNC}.min_retention",
        "has no effect in mode adapter, which delivers the whole update; leave it null",
        None,
    ),
    (
        [f"{SYNC}.mode=adapter", f"{PEFT}.dim=513"],
        f"{PEFT}.dim",
        "vLLM serves adapters up to rank 512; lower it, or use policy.generation.weight_sync.mode merged",
        512,
    ),
    (
        [f"{SYNC}.mode=adapter_merge", f"{VLLM}.load_format=dummy"],
        f"{VLLM}.load_format",
        "mode adapter_merge leaves untargeted weights as the engine loaded them; use auto",
        "auto",
    ),
    (
        [f"{SYNC}.mode=adapter", f"{VLLM}.load_format=dummy"],
        f"{VLLM}.load_format",
        "mode adapter leaves untargeted weights as the engine loaded them; use auto",
        "auto",
    ),
    (
        [f"{SCHEDULER}.lr_warmup_iters=10", f"{SCHEDULER}.lr_decay_iters=10"],
        f"{SCHEDULER}.lr_decay_iters",
        "must be more than policy.megatron_cfg.scheduler.lr_warmup_iters = 10",
        11,
    ),
    (
        ["policy.megatron_cfg.optimizer.lr=1e-3", "policy.megatron_cfg.optimizer.min_lr=1e-2"],
        "policy.megatron_cfg.optimizer.min_lr",
        "must not be more than policy.megatron_cfg.optimizer.lr = 0.001",
        1e-3,
    ),
    ([f"{SCHEDULER}.lr_warmup_init=1"], f"{SCHEDULER}.lr_warmup_init", "must not be more than", 0),
    (["policy.megatron_cfg.tensor_model_parallel_size=2", f"{PEFT}.dim=7"], f"{PEFT}.dim", "a multiple of", 8),
    (["data.addition.held_out_pairs=8100"], "data.addition.held_out_pairs", "only 8100 pairs of 2-digit", 8099),
    (
        ["data.addition.digits=1", "data.addition.held_out_pairs=100"],
        "data.addition.held_out_pairs",
        "only 100 pairs of 1-digit",
        99,
    ),
    (["policy.tokenizer.chat_template=no.jinja"], "policy.tokenizer.chat_template", "no such file", None),
    # rewards
    (["reward.atol=1"], "reward.atol", "reward.name is exact_match, which has no such option (numeric has)", None),
    (["reward.name=numeric", "reward.match=text"], "reward.match", "(exact_match has); leave it null", None),
    (["reward.name=format"], "reward.pattern", "needed when reward.name is format; such as <think>", "a*"),
    (
        ["reward.name=function"],
        "reward.function",
        "needed when reward.name is function; such as rewards.py:length_penalty",
        "lora_rl.rewards.exact_match:exact_match",
    ),
    (
        ["reward.additional=[{name: format, atol: 1, pattern: a}]"],
        "reward.additional[0].atol",
        "reward.additional[0].name is format, which has no such option",
        None,
    ),
    (["reward.answer_from=regex"], "reward.answer_pattern", "needed when reward.answer_from is regex", "(a)"),
    (["reward.answer_from=marker"], "reward.answer_marker", "needed when reward.answer_from is marker", "a"),
    (["reward.answer_marker=a"], "reward.answer_marker", "no effect unless reward.answer_from is marker", None),
    (["reward.answer_from=regex", "reward.answer_pattern=(a"], "reward.answer_pattern", "missing )", "(a)"),
    (["reward.answer_from=regex", "reward.answer_pattern=a"], "reward.answer_pattern", "but has 0; such as", "(a)"),
    (["reward.name=format", "reward.pattern=["], "reward.pattern", "not a regular expression", "[a]"),
    (
        ["reward.additional=[{name: exact_match}]"],
        "reward.additional[0].label",
        "another verifier is called exact_match already; give this one a label",
        None,
    ),
    (["reward.label=wrong"], "reward.label", "the share of completions with this reason is called so", "right"),
    (
        ["reward.name=function", "reward.function=f"],
        "reward.function",
        "expected module:name or file:name",
        "lora_rl.rewards.exact_match:exact_match",
    ),
    (
        ["reward.name=function", "reward.function=no_such.module:f"],
        "reward.function",
        "there is no module no_such here or in the environment; name one that can be imported, or a file",
        "lora_rl.rewards.exact_match:exact_match",
    ),
    (
        ["reward.name=function", "reward.function=lora_rl.rewards.no_such:f"],
        "reward.function",
        "there is no module no_such in lora_rl.rewards",
        "lora_rl.rewards.exact_match:exact_match",
    ),
    (
        ["reward.name=function", "reward.function=lora_rl.rewards.exact_match:exact_mach"],
        "reward.function",
        "exact_match.py defines no exact_mach; it has [check_integer, check_text, exact_match, match_integer, "
        "match_text]; did you mean exact_match?",
        "lora_rl.rewards.exact_match:exact_match",
    ),
    (
        ["reward.name=function", "reward.function=/nowhere/own.py:f"],
        "reward.function",
        "/nowhere/own.py cannot be read: No such file or directory",
        "lora_rl.rewards.exact_match:exact_match",
    ),
    # methods that exclude each other
    (
        [f"{LOSS}.use_cispo=true", f"{LOSS}.use_sapo=true"],
        f"{LOSS}.use_sapo",
        "than loss_fn.use_cispo; there can",
        "false",
    ),
    ([REINFORCE, SEQUENCE_MEAN, GSPO], f"{LOSS}.sequence_level_importance_ratios", "another policy loss", "false"),
    ([REINFORCE, f"{LOSS}.use_cispo=true"], f"{LOSS}.use_cispo", "than loss_fn.disable_ppo_ratio", "false"),
    ([GSPO, f"{LOSS}.token_level_loss=true"], f"{LOSS}.token_level_loss", "one ratio per sequence; set this", "false"),
    (
        [GSPO, SEQUENCE_MEAN, CORRECTION, f"{LOSS}.importance_sampling_level=token"],
        f"{LOSS}.importance_sampling_level",
        "one ratio per sequence; set this to sequence",
        "sequence",
    ),
    (
        [SEQUENCE_MEAN, f"{LOSS}.constant_length_loss=true"],
        f"{LOSS}.constant_length_loss",
        "a mean over sequences weighs tokens unequally",
        "false",
    ),
    ([f"{LOSS}.use_cispo=true", f"{LOSS}.ratio_clip_c=3"], f"{LOSS}.ratio_clip_c", "has no effect with cispo", None),
    ([f"{LOSS}.use_sapo=true", f"{LOSS}.ratio_clip_c=3"], f"{LOSS}.ratio_clip_c", "has no effect with sapo", None),
    ([REINFORCE, f"{LOSS}.ratio_clip_c=3"], f"{LOSS}.ratio_clip_c", "has no effect with reinforce", None),
    ([f"{LOSS}.sapo_tau_pos=2"], f"{LOSS}.sapo_tau_pos", "has no effect unless loss_fn.use_sapo", 1.0),
    ([f"{LOSS}.sapo_tau_neg=2"], f"{LOSS}.sapo_tau_neg", "leave it at 1.05", 1.05),
    (
        [REINFORCE, "policy.train_global_batch_size=64"],
        "policy.train_global_batch_size",
        "off-policy with nothing to hold it; use null, which takes all 256 completions",
        None,
    ),
    ([KL, f"{KL_TYPE}=k1"], KL_TYPE, "its expected gradient as a loss term is 0; use k2 or k3", "k2"),
    ([KL, f"{LOSS}.use_kl_in_reward=true", f"{KL_TYPE}=k3"], KL_TYPE, "vanishes near the reference policy", "k1"),
    ([KL, f"{LOSS}.use_kl_in_reward=true", f"{KL_TYPE}=k2"], KL_TYPE, "to put k2 in the loss", "k1"),
    ([f"{LOSS}.use_kl_in_reward=true"], f"{LOSS}.use_kl_in_reward", "reference_policy_kl_penalty is 0", "false"),
    (["grpo.adv_estimator.minus_baseline=false"], "grpo.adv_estimator.minus_baseline", "no effect with grpo", "true"),
    ([PLUS_PLUS, "grpo.normalize_rewards=false"], "grpo.normalize_rewards", "always divides by", "true"),
    (
        [PLUS_PLUS, "grpo.use_leave_one_out_baseline=true"],
        "grpo.use_leave_one_out_baseline",
        "has the group's mean as baseline",
        "false",
    ),
    (
        [
            PLUS_PLUS,
            "grpo.adv_estimator.minus_baseline=false",
            "grpo.drop_zero_variance_groups=false",
            "grpo.use_dynamic_sampling=true",
        ],
        "grpo.use_dynamic_sampling",
        "groups of equal rewards teach as much",
        "false",
    ),
    (
        [PLUS_PLUS, "grpo.adv_estimator.minus_baseline=false", "grpo.drop_zero_variance_groups=true"],
        "grpo.drop_zero_variance_groups",
        "groups of equal rewards teach as much",
        "false",
    ),
    ([f"{SHAPING}.enabled=true"], f"{SHAPING}.overlong_buffer_penalty", "needs it; use 1.0", None),
    ([f"{SHAPING}.enabled=true"], f"{SHAPING}.overlong_buffer_length", "a quarter of the longest", None),
    (
        [*RAMP, f"{SHAPING}.overlong_buffer_length=9"],
        f"{SHAPING}.overlong_buffer_length",
        "must be at most 8, the length at which the penalty is full",
        8,
    ),
    (
        [*RAMP, f"{SHAPING}.overlong_buffer_length=2", f"{SHAPING}.max_response_length=10"],
        f"{SHAPING}.max_response_length",
        "would begin after 8 tokens, which no completion exceeds",
        9,
    ),
    (
        ["policy.generation.ignore_eos=true", "grpo.overlong_filtering=true"],
        "grpo.overlong_filtering",
        "every completion is truncated and none is left",
        "false",
    ),
    (
        ["policy.generation.stop_strings=['', x]"],
        "policy.generation.stop_strings",
        "an empty string would end every completion at once",
        "[x]",
    ),
    ([JUMPS, f"{NEXT}.snapshots=6"], f"{NEXT}.snapshots", "auto and its back-test need at least 7 snapshots", 7),
    (
        [JUMPS, f"{NEXT}.predictor.type=linear", f"{NEXT}.snapshots=5"],
        f"{NEXT}.snapshots",
        "need at least 6 snapshots with grpo.next.horizon = 3",
        6,
    ),
    (
        [JUMPS, f"{NEXT}.interval=25"],
        f"{NEXT}.interval",
        "after 25 x 9 = 225 steps, with 8 to come (grpo.next.watch.patience, or 1), and the run ends after 100; use "
        "fewer grpo.next.snapshots or a value up to 10",
        10,
    ),
    (
        [JUMPS, "grpo.max_num_steps=12"],
        f"{NEXT}.interval",
        "use fewer grpo.next.snapshots or more grpo.max_num_steps",
        None,
    ),
    (
        [JUMPS, f"{NEXT}.preset=paper", "grpo.max_num_steps=200", "policy.precision=bfloat16"],
        f"{NEXT}.write_back",
        "which grpo.next.preset paper sets, and policy.precision bfloat16 would round most of a jump away",
        "adapter",
    ),
    ([JUMPS, f"{NEXT}.alphas=[]"], f"{NEXT}.alphas", "must name at least one length", "[1.0]"),
    ([JUMPS, f"{NEXT}.alphas=[1.0, 1.0]"], f"{NEXT}.alphas", "names a length twice", "[1.0]"),
    (
        [JUMPS, f"{NEXT}.gate.enabled=false", f"{NEXT}.alphas=[1.0, 2.0]"],
        f"{NEXT}.alphas",
        "nothing chooses between them",
        "[1.0]",
    ),
    (
        [JUMPS, f"{SYNC}.mode=adapter_merge", f"{NEXT}.write_back=merge"],
        f"{NEXT}.write_back",
        "never reach the engines in policy.generation.weight_sync.mode adapter_merge",
        "adapter",
    ),
    (
        [JUMPS, SVD_ON, f"{PEFT}.adapter_path={ADAPTER}", f"{NEXT}.write_back=merge", f"{SYNC}.mode=adapter_merge"],
        f"{NEXT}.write_back",
        "changes the singular values that policy.megatron_cfg.peft.svd.enabled trains",
        "adapter",
    ),
    # SVD-LoRA
    ([SVD_ON], f"{PEFT}.adapter_path", "trains the singular values of a trained adapter; give its PEFT", None),
    ([f"{SVD}.mode=core"], f"{SVD}.mode", "has no effect while policy.megatron_cfg.peft.svd.enabled", "product"),
    ([f"{SVD}.sigma_lr=1"], f"{SVD}.sigma_lr", "set that to true, or leave this at 0.01", 0.01),
    ([f"{SVD}.sigma_only_sync=false"], f"{SVD}.sigma_only_sync", "leave this at true", "true"),
    ([f"{SVD}.parameterization=relative"], f"{SVD}.parameterization", "has no effect while", "absolute"),
    (
        [SVD_ON, f"{PEFT}.adapter_path={ADAPTER}", f"{SVD}.mode=core", f"{SVD}.parameterization=relative"],
        f"{SVD}.parameterization",
        "a ratio to 0 never moves; use absolute",
        "absolute",
    ),
    (
        [SVD_ON, f"{PEFT}.adapter_path={ADAPTER}", f"{MEGATRON}.optimizer.weight_decay=0.1"],
        f"{MEGATRON}.optimizer.weight_decay",
        "are not decayed; set it to 0",
        0,
    ),
    (
        [SVD_ON, f"{PEFT}.adapter_path={ADAPTER}", f"{SCHEDULER}.lr_warmup_init=0.1"],
        f"{SCHEDULER}.lr_warmup_init",
        "must not be more than policy.megatron_cfg.peft.svd.sigma_lr = 0.01",
        0.01,
    ),
    ([f"{MEGATRON}.sequence_parallel=true"], f"{MEGATRON}.sequence_parallel", "has no effect with", "false"),
    (
        [
            f"{MEGATRON}.sequence_parallel=true",
            f"{MEGATRON}.tensor_model_parallel_size=2",
            "sft.train_all_weights=true",
        ],
        f"{MEGATRON}.sequence_parallel",
        "trains norms, which sequence parallelism leaves out",
        "false",
    ),
    # rules that read the model
    (
        [*MOE_ATTENTION, MERGED],
        f"{SYNC}.mode",
        "cannot load them again",
        "adapter_merge",
    ),
    (
        [*MOE_ATTENTION, f"{TARGETS}=[linear_fc1]"],
        TARGETS,
        "linear_fc1 of this model are in its experts",
        "[linear_qkv]",
    ),
    (
        [*MOE_ATTENTION, f"{MEGATRON}.tensor_model_parallel_size=2"],
        f"{MEGATRON}.sequence_parallel",
        "a mixture of experts over tensor-parallel ranks only with it; set it to true",
        None,
    ),
    (
        ["policy.megatron_cfg.tensor_model_parallel_size=4"],
        "policy.megatron_cfg.tensor_model_parallel_size",
        "must divide the model's num_key_value_heads = 2",
        2,
    ),
    (
        ["policy.megatron_cfg.pipeline_model_parallel_size=3", "grpo.num_prompts_per_step=30"],
        "policy.megatron_cfg.pipeline_model_parallel_size",
        "must divide the model's num_hidden_layers = 4",
        2,
    ),
    (
        [f"{VLLM}.tensor_parallel_size=3"],
        f"{VLLM}.tensor_parallel_size",
        "must divide the model's num_attention_heads = 4",
        4,
    ),
    (
        ["policy.max_total_sequence_length=65"],
        "policy.max_total_sequence_length",
        "the model's max_position_embeddings is 64; use at most that",
        64,
    ),
    ([f"{VLLM}.max_model_len=65"], f"{VLLM}.max_model_len", "max_position_embeddings is 64", 64),
    ([f"{TARGETS}=[]"], TARGETS, "names nothing to adapt", "[linear_qkv]"),
    ([f"{TARGETS}=[lm_head]"], TARGETS, "this model ties the output layer", "[linear_fc1]"),
    ([f"{TARGETS}=[output_layer]"], TARGETS, "this model ties the output layer", "[linear_fc1]"),
    ([f"{TARGETS}=['*.layers.4.*.linear_qkv']"], TARGETS, "layers 0 to 3", "['*.layers.3.*.linear_qkv']"),
    ([f"{TARGETS}=['*.mlp.linear_qkv']"], TARGETS, "matches no module", "['*.self_attention.linear_qkv']"),
    ([f"{PEFT}.exclude_modules=[linear_fc1]"], f"{PEFT}.exclude_modules", "only applies when target_modules", "[]"),
    (
        [f"{TARGETS}=[]", f"{PEFT}.exclude_modules=[linear_qkv, linear_proj, linear_fc1, linear_fc2]"],
        f"{PEFT}.exclude_modules",
        "nothing is left to adapt",
        "[linear_fc1]",
    ),
    (
        [f"{TARGETS}=[]", f"{PEFT}.exclude_modules=[down_proj]"],
        f"{PEFT}.exclude_modules",
        "down_proj is a Hugging Face name",
        "[linear_fc2]",
    ),
]


@pytest.fixture(autouse=True)
def folder_with_an_adapter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ADAPTER).mkdir()
    for name in PEFT_FILES:
        (tmp_path / ADAPTER / name).touch()


@pytest.mark.parametrize(("overrides", "key", "message", "remedy"), CASES, ids=lambda value: str(value)[:60])
def test_rule_fires_and_its_remedy_works(refused, config_file, overrides, key, message, remedy):
    violations = refused(*overrides)
    assert message in str(violations[key])
    if not any(override.startswith(f"{key}=") for override in overrides):
        return
    load_config(config_file, [*overrides, f"{key}={'null' if remedy is None else remedy}"])


@pytest.mark.parametrize(
    ("settings", "rank"),
    [
        ({"r": 16}, 16),
        ({"r": 4, "rank_pattern": {"q_proj": 12}}, 12),
        ({"r": 8}, None),
        ({"r": "eight"}, None),
        ([], None),
    ],
)
def test_an_adapter_of_a_higher_rank_is_refused_before_anything_starts(refused, config_file, settings, rank):
    Path(ADAPTER, "adapter_config.json").write_text(json.dumps(settings))
    overrides = [f"{PEFT}.adapter_path={ADAPTER}", f"{PEFT}.dim=8"]
    if rank is None:
        # What is wrong with the settings is said when the adapter is read.
        load_config(config_file, overrides)
    else:
        assert f"has rank {rank}; use at least that" in refused(*overrides)[f"{PEFT}.dim"].problem


def test_every_rule_fires_in_some_case(refused, monkeypatch):
    fired = set()

    def recorded(rule):
        def run(*arguments):
            for violation in rule(*arguments):
                fired.add(rule.__name__)
                yield violation

        return run

    monkeypatch.setattr(rule_engine, "RULES", [recorded(rule) for rule in RULES])
    monkeypatch.setattr(rule_engine, "MODEL_RULES", [recorded(rule) for rule in MODEL_RULES])
    for overrides, *_ in CASES:
        refused(*overrides)
    refused("policy.model_name=./nowhere")
    refused(*GDPO)
    assert fired == {rule.__name__ for rule in (*RULES, *MODEL_RULES)}


def test_what_belongs_to_no_component_is_refused_with_gdpo(refused):
    violations = refused(*GDPO, KL, f"{KL_TYPE}=k1")
    assert set(violations) == {"grpo.adv_estimator.name", f"{SHAPING}.enabled", f"{LOSS}.use_kl_in_reward"}
    assert "reward.additional is empty; use grpo" in violations["grpo.adv_estimator.name"].problem
    assert "the penalty is part of none" in violations[f"{SHAPING}.enabled"].problem
    assert "put the KL in the loss" in violations[f"{LOSS}.use_kl_in_reward"].problem


def test_methods_that_go_together_are_accepted(config_file):
    for options in (
        [REINFORCE, "policy.train_global_batch_size=256"],
        [GSPO, SEQUENCE_MEAN, f"{LOSS}.ratio_clip_c=3", CORRECTION, f"{LOSS}.importance_sampling_level=sequence"],
        [f"{LOSS}.use_cispo=true", f"{LOSS}.ratio_clip_min=1", f"{LOSS}.constant_length_loss=true"],
        [f"{LOSS}.use_sapo=true", f"{LOSS}.sapo_tau_neg=2", SEQUENCE_MEAN],
        [KL, f"{LOSS}.use_kl_in_reward=true", f"{KL_TYPE}=k1", "grpo.overlong_filtering=true"],
        [f"{KL_TYPE}=k1"],
        ["grpo.adv_estimator.name=gdpo", "reward.additional=[{name: numeric}]"],
        [*RAMP, f"{SHAPING}.overlong_buffer_length=2", PLUS_PLUS],
        [PLUS_PLUS, "grpo.adv_estimator.minus_baseline=false", "grpo.drop_zero_variance_groups=false",
         "grpo.num_generations_per_prompt=1"],
    ):  # fmt: skip
        load_config(config_file, options)


def test_keys_of_one_sync_mode_are_accepted_in_the_others(config_file):
    for mode in ("merged", "adapter_merge"):
        options = [f"{SYNC}.rounding=stochastic", f"{SYNC}.min_retention=0.5", f"{PEFT}.dim=1024"]
        load_config(config_file, [f"{SYNC}.mode={mode}", *options])
    load_config(config_file, [f"{SYNC}.mode=merged", f"{VLLM}.load_format=dummy"])


def test_every_mistake_of_a_sync_mode_is_reported(refused):
    options = [f"{SYNC}.rounding=stochastic", f"{SYNC}.min_retention=0.5", f"{PEFT}.dim=513"]
    violations = refused(f"{SYNC}.mode=adapter", *options, f"{VLLM}.load_format=dummy")
    assert set(violations) == {f"{SYNC}.rounding", f"{SYNC}.min_retention", f"{PEFT}.dim", f"{VLLM}.load_format"}


def test_one_number_of_own_gpus_is_refused_once(refused):
    """Three GPUs are no whole number of engines, and also more than the node has."""
    overrides = ["cluster.platform=cuda", "cluster.gpus_per_node=2", f"{COLOCATED}.enabled=false"]
    violations = refused(*overrides, f"{OWN_GPUS}=3", f"{VLLM}.tensor_parallel_size=2")
    assert "must be a multiple of" in violations[OWN_GPUS].problem


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda capability: capability.key)
def test_unavailable_values_are_refused_with_a_remedy(refused, capability):
    key = all_keys()[capability.key]
    assert key.default in capability.works
    others = {"true | false": str(not key.default).lower(), "int > 0": "2"}
    for value in key.choices if len(key.choices) > 1 else [others[key.valid]]:
        if value in capability.works:
            continue
        violation = refused(f"{capability.key}={value}")[capability.key]
        assert violation.problem.startswith("not available in this version: ")
        assert violation.problem.endswith(f"set it to {' or '.join(map(show, capability.works))}")


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("linear_qkvv", "linear_qkv"),
        ("q_proj", "linear_qkv"),
        ("k_proj", "linear_qkv"),
        ("v_proj", "linear_qkv"),
        ("o_proj", "linear_proj"),
        ("gate_proj", "linear_fc1"),
        ("up_proj", "linear_fc1"),
        ("down_proj", "linear_fc2"),
        ("'*.layers.0.*.q_proj'", "linear_qkv"),
        ("'*.layers.0.*.linear_prj'", "linear_proj"),
    ],
)
def test_target_module_gets_the_megatron_name(refused, target, hint):
    violation = refused(f"{TARGETS}=[{target}]")[TARGETS]
    assert violation.hints == (hint,)
    assert violation.value == target.strip("'")
    assert ("Hugging Face name" in violation.problem) == target.strip("'").endswith("_proj")


def test_all_targets_together_are_accepted(config_file):
    load_config(
        config_file, [f"{TARGETS}=[linear_qkv, linear_proj, linear_fc1, linear_fc2, '*.layers.0.*.linear_qkv']"]
    )
    load_config(config_file, [f"{TARGETS}=[]", f"{PEFT}.exclude_modules=['*.layers.0.*.linear_fc1']"])


def test_output_layer_of_an_untied_model_is_refused_for_another_reason(tmp_path, refused):
    untied = write_model(tmp_path / "untied", tie_word_embeddings=False)
    violation = refused(f"policy.model_name={untied}", f"{TARGETS}=[output_layer]")[TARGETS]
    assert violation.problem == "adapters on the output layer are not available; leave it out"


def test_hub_ids_are_accepted_but_target_names_are_still_checked(config_file, refused):
    for name in ("Qwen/Qwen3-0.6B", "gpt2"):
        assert load_config(config_file, [f"policy.model_name={name}"]).policy.model_name == name
        assert refused(f"policy.model_name={name}", f"{TARGETS}=[q_proj]")[TARGETS].hints == ("linear_qkv",)


@pytest.mark.parametrize("name", ["./modle", "/nowhere/model", "~/nowhere-at-all", "a/b/c", "no name", "-x"])
def test_model_name_that_can_only_be_a_path_must_exist(refused, name):
    violations = refused(f"policy.model_name={name}")
    assert list(violations) == ["policy.model_name"]
    assert "no such folder" in violations["policy.model_name"].problem


def test_misspelt_model_folder_gets_the_near_one(tmp_path, refused, model_dir, monkeypatch):
    violation = refused(f"policy.model_name={tmp_path / 'modle'}")["policy.model_name"]
    assert violation.hints == (str(model_dir),)
    monkeypatch.chdir(tmp_path.parent)
    relative = f"{tmp_path.name}/modell"  # has the form of a hub id, but its first part is a folder here
    assert refused(f"policy.model_name={relative}")["policy.model_name"].hints == (f"{tmp_path.name}/model",)


def test_folder_without_config_json_and_file_instead_of_folder(tmp_path, refused, model_dir):
    violation = refused(f"policy.model_name={tmp_path}")["policy.model_name"]
    assert "the folder has no config.json" in violation.problem
    assert violation.hints == (str(model_dir),)
    violation = refused(f"policy.model_name={model_dir / 'config.json'}")["policy.model_name"]
    assert "this is a file" in violation.problem


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not valid JSON"), ("[]", "holds no JSON object"), ('{"hidden_size": "big"}', "hidden_size = 'big'")],
)
def test_broken_model_config_names_the_file(model_dir, refused, content, message):
    (model_dir / "config.json").write_text(content)
    violation = refused("grpo.seed=1")["policy.model_name"]
    assert str(model_dir / "config.json") in violation.problem
    assert message in violation.problem


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_experts_are_known_by_the_names_of_every_family(model_dir, refused, name):
    path = model_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: 8}))
    assert "in its experts" in refused(f"{TARGETS}=[linear_fc1]")[TARGETS].problem


def test_a_vocabulary_that_ranks_cannot_share_is_refused(model_dir, refused):
    """Nothing is padded."""
    path, tp = model_dir / "config.json", "policy.megatron_cfg.tensor_model_parallel_size"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 265}))
    assert "must divide the model's vocab_size = 265" in refused(f"{tp}=2")[tp].problem


def test_nested_text_config_and_missing_kv_heads_are_understood(tmp_path, refused):
    text = {"num_attention_heads": 6, "num_hidden_layers": 3, "hidden_size": 64}
    folder = tmp_path / "multimodal"
    folder.mkdir()
    (folder / "config.json").write_text('{"text_config": ' + str(text).replace("'", '"') + "}")
    tp = "policy.megatron_cfg.tensor_model_parallel_size"
    violations = refused(f"policy.model_name={folder}", "policy.megatron_cfg.pipeline_model_parallel_size=2")
    assert "num_hidden_layers = 3" in violations["policy.megatron_cfg.pipeline_model_parallel_size"].problem
    with pytest.raises(ConfigError, match="num_key_value_heads = 6"):
        load_config(tmp_path / "run.yaml", [f"policy.model_name={folder}", f"{tp}=4"])


def test_no_gpu_found_is_a_violation(refused, monkeypatch):
    monkeypatch.setattr(layout, "count_gpus", lambda: 0)
    violation = refused("cluster.platform=cuda")["cluster.gpus_per_node"]
    assert "no GPU was found on this machine" in violation.problem


def test_one_gpu_that_the_engine_takes_leaves_none(refused, monkeypatch):
    monkeypatch.setattr(layout, "count_gpus", lambda: 1)
    violations = refused("cluster.platform=cuda", f"{COLOCATED}.enabled=false")
    assert "leaves no GPU of the 1 GPU of this machine for the trainer" in str(
        violations["policy.generation.vllm_cfg.tensor_parallel_size"]
    )


def test_three_mistakes_give_three_messages(refused):
    violations = refused("grpo.max_steps=5", f"{TARGETS}=[linear_qkvv]", CORRECTION, "policy.generation.top_p=0.9")
    assert set(violations) == {"grpo.max_steps", TARGETS, "policy.generation.top_p"}
    error = ConfigError(list(violations.values()), "run.yaml")
    assert str(error).startswith("3 mistakes in run.yaml:\n")
    assert "did you mean grpo.max_num_steps" in str(error)
    assert "did you mean linear_qkv?" in str(error)


def test_schema_and_rule_violations_come_together(refused):
    violations = refused(
        "grpo.seed=x", "grpo.nope=1", "grpo.num_generations_per_prompt=1", "policy.megatron_cfg.enabled=false", "a"
    )
    assert set(violations) == {
        "a",
        "grpo.nope",
        "grpo.seed",
        "grpo.num_generations_per_prompt",
        "policy.megatron_cfg.enabled",
    }


def test_a_rule_is_silent_about_a_value_that_is_already_refused(refused):
    assert list(refused("grpo.max_num_steps=x", f"{SCHEDULER}.lr_warmup_iters=999")) == ["grpo.max_num_steps"]


@pytest.mark.parametrize(
    ("value", "key", "problem", "hints"),
    [
        ("[{name: gcd, wieght: 2}]", "[0].wieght", "unknown key", ("weight",)),
        ("[gcd, {weight: 2}]", "[1].name", "required, but not set. Name of the procedural dataset", ()),
        ("[gcd, {name: lcm, weight: 0}]", "[1].weight", "expected number > 0", ()),
        ("[gcd, {name: lcm, config: 3}]", "[1].config", "expected mapping", ()),
        ("[[gcd]]", "[0]", "expected a mapping with the keys name, weight, config", ()),
        ("gcd", "", "expected list of {name, weight, config}", ()),
    ],
)
def test_wrong_entries_of_a_list_are_named(refused, value, key, problem, hints):
    (violation,) = refused("data.task=reasoning_gym", f"data.reasoning_gym.datasets={value}").values()
    assert violation.key == f"data.reasoning_gym.datasets{key}"
    assert violation.problem.startswith(problem)
    assert violation.hints == hints


def test_settings_of_a_procedural_task_get_their_types_and_survive_the_resolved_file(config_file, tmp_path):
    entry = "{name: chain_sum, weight: 2, config: {max_terms: 3, allow_negation: true, rate: 1e-1, words: [a, '7b']}}"
    config = load_config(config_file, ["data.task=reasoning_gym", f"data.reasoning_gym.datasets=[gcd, {entry}]"])
    gcd, chain_sum = config.data.reasoning_gym.datasets
    assert (gcd.name, gcd.weight, gcd.config) == ("gcd", 1.0, {})
    assert chain_sum.config == {"max_terms": 3, "allow_negation": True, "rate": 0.1, "words": ["a", "7b"]}
    again = tmp_path / "again.yaml"
    again.write_text(resolved_yaml(config))
    assert load_config(again) == config


def test_the_folder_of_several_splits_names_one(refused, tmp_path):
    for split in ("train", "test"):
        (tmp_path / "saved" / split).mkdir(parents=True)
        (tmp_path / "saved" / split / "state.json").write_text("{}")
    violation = refused("data.task=null", f"data.train_path={tmp_path / 'saved'}")["data.train_path"]
    assert "the folder holds several splits; name the folder of one" in violation.problem
    assert violation.hints == tuple(str(tmp_path / "saved" / split) for split in ("test", "train"))
    load_config(tmp_path / "run.yaml", ["data.task=null", f"data.train_path={tmp_path / 'saved/train'}"])


def test_a_misspelt_file_gets_the_near_one(refused):
    violation = refused("data.task=null", f"data.train_path={DATA.with_name('sum.jsonl')}")["data.train_path"]
    assert violation.hints == (str(DATA),)


def test_a_preset_fills_what_is_not_set(config_file, tmp_path):
    plain = load_config(config_file).grpo.next
    assert not plain.enabled
    assert plain == load_config(config_file, [f"{NEXT}.preset=default"]).grpo.next
    paper = [f"{NEXT}.preset=paper", f"{NEXT}.predictor.epochs=7"]
    config = load_config(config_file, paper)
    section = config.grpo.next
    assert (section.interval, section.snapshots, section.horizon, section.alphas) == (10, 15, 5, [1.5])
    assert (section.predictor.type, section.predictor.learning_rate, section.predictor.epochs) == ("nextmlp", 2e-5, 7)
    assert (section.gate.enabled, section.gate.num_prompts, section.watch.patience) == (False, 128, 0)
    assert (section.min_backtest_cos, section.write_back) == (None, "merge")
    again = tmp_path / "again.yaml"
    again.write_text(resolved_yaml(config))
    assert load_config(again) == config


def test_a_wrong_preset_is_one_mistake(refused):
    violations = refused(f"{NEXT}.preset=papper")
    assert list(violations) == [f"{NEXT}.preset"]
    assert violations[f"{NEXT}.preset"].hints == ("paper",)
