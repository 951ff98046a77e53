"""Rules between keys. Each yields what is wrong, why, and what to set instead; none needs the model's files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from lora_rl.config.algorithm_rules import ALGORITHM_RULES
from lora_rl.config.data_rules import DATA_RULES
from lora_rl.config.errors import Violation
from lora_rl.config.layout import BLOCK_ON_CPU, layout_violations, platform_of
from lora_rl.config.next_rules import NEXT_RULES
from lora_rl.config.reward_rules import REWARD_RULES
from lora_rl.config.schema import RunConfig
from lora_rl.config.svd_rules import SVD_RULES

PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
# The largest of vLLM's `MaxLoRARanks`.
MAX_ENGINE_RANK = 512

Rule = Callable[[RunConfig], Iterator[Violation]]


def group_needs_two(config: RunConfig) -> Iterator[Violation]:
    """Every advantage is measured against the group's mean, which is the completion itself in a group of one."""
    size, estimator = config.grpo.num_generations_per_prompt, config.grpo.adv_estimator
    if size < 2 and (estimator.name != "reinforce_plus_plus" or estimator.minus_baseline):
        problem = "a group baseline needs at least 2 completions per prompt, or every advantage is 0; use 8, say"
        yield Violation("grpo.num_generations_per_prompt", problem, size)


def batch_divides_step(config: RunConfig) -> Iterator[Violation]:
    """A step's sequences are split into whole optimizer steps."""
    batch, total = config.policy.train_global_batch_size, config.sequences_per_step
    if batch is not None and total % batch:
        yield Violation(
            "policy.train_global_batch_size",
            "must divide grpo.num_prompts_per_step x grpo.num_generations_per_prompt = "
            f"{config.grpo.num_prompts_per_step} x {config.grpo.num_generations_per_prompt} = {total}; "
            "null takes all of them in one optimizer step",
            batch,
        )


def layout_fits(config: RunConfig) -> Iterator[Violation]:
    """Ranks divide into tp x pp, batches divide over dp."""
    yield from layout_violations(config, platform_of(config))


def several_nodes_need_a_cluster(config: RunConfig) -> Iterator[Violation]:
    """A Ray that the run starts itself has this machine only."""
    if config.cluster.num_nodes > 1 and config.cluster.address is None:
        problem = "several nodes need a running Ray cluster; set cluster.address, for example to auto"
        yield Violation("cluster.num_nodes", problem, config.cluster.num_nodes)


def address_can_be_attached_to(config: RunConfig) -> Iterator[Violation]:
    """A driver that is no part of the cluster has no objects to share, and a Ray of its own needs no address."""
    address = config.cluster.address
    if address is not None and "://" in address:
        problem = "Ray Client is not supported; run on a node of the cluster with address auto, or host:port"
        yield Violation("cluster.address", problem, address)
    elif address is not None and address != "auto" and not re.fullmatch(r"\[?[\w.:-]+?\]?:\d+", address):
        problem = "must be auto or host:port of a running Ray cluster; null starts a Ray on this machine"
        yield Violation("cluster.address", problem, address)


def sampling_is_random(config: RunConfig) -> Iterator[Violation]:
    """Logits are divided by the temperature, and greedy completions of one prompt are all the same."""
    if config.policy.generation.temperature == 0:
        problem = (
            "greedy rollouts of one prompt are all equal, so there is no advantage and no probability to correct "
            "by; use a temperature > 0 (grpo.val_temperature may be 0)"
        )
        yield Violation("policy.generation.temperature", problem, 0)


def correction_needs_full_distribution(config: RunConfig) -> Iterator[Violation]:
    """top-p and top-k make the engine renormalise over the kept tokens; the trainer's probabilities are over all."""
    if not config.loss_fn.use_importance_sampling_correction:
        return
    problem = (
        "with loss_fn.use_importance_sampling_correction the engine's probabilities, renormalised over the tokens "
        "it kept, are not comparable with the trainer's; "
    )
    generation = config.policy.generation
    if generation.top_p < 1:
        yield Violation("policy.generation.top_p", problem + "use 1.0 or switch the correction off", generation.top_p)
    if (generation.top_k or 0) > 0:
        yield Violation("policy.generation.top_k", problem + "use null or switch the correction off", generation.top_k)


def correction_bounds(config: RunConfig) -> Iterator[Violation]:
    """The chosen truncation has the bounds it uses, in order."""
    loss = config.loss_fn
    kind = loss.importance_sampling_type
    if not loss.use_importance_sampling_correction or kind is None:
        return
    upper_key, lower_key = "truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min"
    upper, lower = getattr(loss, upper_key), getattr(loss, lower_key)
    if upper is None:
        yield Violation(f"loss_fn.{upper_key}", f"importance_sampling_type {kind} needs it; use 2.0, say", None)
    if kind == "tis":
        return
    if lower is None:
        yield Violation(f"loss_fn.{lower_key}", f"importance_sampling_type {kind} needs it; use 0.5, say", None)
    elif upper is not None and lower >= upper:
        yield Violation(f"loss_fn.{lower_key}", f"must be less than loss_fn.{upper_key} = {upper}", lower)


def dual_clip_above_one(config: RunConfig) -> Iterator[Violation]:
    """The dual clip bounds the ratio of negative advantages from above (Ye et al. 2020: c > 1)."""
    bound = config.loss_fn.ratio_clip_c
    if bound is not None and bound <= 1:
        yield Violation("loss_fn.ratio_clip_c", "must be > 1 (3.0 is usual), or null to switch dual clip off", bound)


def completion_leaves_room_for_prompt(config: RunConfig) -> Iterator[Violation]:
    """A sequence holds a prompt and a completion, in the trainer and in the engine."""
    new, total = config.policy.generation.max_new_tokens, config.policy.max_total_sequence_length
    if new >= total:
        problem = f"must be less than policy.max_total_sequence_length = {total}, to leave room for the prompt"
        yield Violation("policy.generation.max_new_tokens", problem, new)
    engine_length = config.policy.generation.vllm_cfg.max_model_len
    if engine_length is not None and engine_length <= new:
        problem = f"must be more than policy.generation.max_new_tokens = {new}; null takes {total}"
        yield Violation("policy.generation.vllm_cfg.max_model_len", problem, engine_length)


def microbatch_size_is_known(config: RunConfig) -> Iterator[Violation]:
    """Microbatches are cut by tokens or by sequences."""
    batching, micro = config.policy.dynamic_batching, config.policy.train_micro_batch_size
    longest = config.policy.max_total_sequence_length
    if not batching.enabled and micro is None:
        problem = "needed when policy.dynamic_batching.enabled is false; use 1, or switch dynamic batching on"
        yield Violation("policy.train_micro_batch_size", problem, None)
    if batching.enabled and batching.train_mb_tokens < longest:
        problem = f"one sequence of policy.max_total_sequence_length = {longest} tokens must fit; raise it to that"
        yield Violation("policy.dynamic_batching.train_mb_tokens", problem, batching.train_mb_tokens)


def shared_prompts_are_possible(config: RunConfig) -> Iterator[Violation]:
    """Rows of several sequences are cut by tokens, and need an attention that takes their mask."""
    policy = config.policy
    if policy.share_prompts and platform_of(config) == "cuda":
        problem = "the fused attention of GPUs takes no mask of this kind; use null or false"
        yield Violation("policy.share_prompts", problem, True)
    if policy.share_prompts and not (policy.dynamic_batching.enabled and policy.train_micro_batch_size is None):
        problem = (
            "rows are cut by tokens: set policy.dynamic_batching.enabled to true and policy.train_micro_batch_size to "
            "null, or this to null"
        )
        yield Violation("policy.share_prompts", problem, True)


def engine_iteration_holds_sequences(config: RunConfig) -> Iterator[Violation]:
    """vLLM decodes one token of each running sequence per iteration, and on the CPU takes prompts whole."""
    vllm = config.policy.generation.vllm_cfg
    tokens, longest = vllm.max_num_batched_tokens, config.engine_max_model_len
    if tokens is not None and tokens < vllm.max_num_seqs:
        problem = f"must be at least policy.generation.vllm_cfg.max_num_seqs = {vllm.max_num_seqs}, or null"
        yield Violation("policy.generation.vllm_cfg.max_num_batched_tokens", problem, tokens)
    elif tokens is not None and tokens < longest and platform_of(config) == "cpu":
        problem = (
            f"on the CPU no prompt is split, so one sequence of {longest} tokens must fit; raise it to that, or null"
        )
        yield Violation("policy.generation.vllm_cfg.max_num_batched_tokens", problem, tokens)


def block_fits_attention(config: RunConfig) -> Iterator[Violation]:
    """vLLM's attention for the CPU computes blocks of a fixed size."""
    size = config.policy.generation.vllm_cfg.block_size
    if size is not None and size % BLOCK_ON_CPU and platform_of(config) == "cpu":
        problem = f"on the CPU a block has a multiple of {BLOCK_ON_CPU} tokens; use {BLOCK_ON_CPU}, or null"
        yield Violation("policy.generation.vllm_cfg.block_size", problem, size)


def colocated_engines_have_no_own_gpus(config: RunConfig) -> Iterator[Violation]:
    """A key that would be ignored is refused."""
    colocated = config.policy.generation.colocated
    for name in ("gpus_per_node", "num_nodes"):
        value = getattr(colocated.resources, name)
        if colocated.enabled and value is not None:
            problem = "has no effect while policy.generation.colocated.enabled is true; leave it null"
            yield Violation(f"policy.generation.colocated.resources.{name}", problem, value)


def engine_nodes_leave_nodes_for_ranks(config: RunConfig) -> Iterator[Violation]:
    """With several nodes, those of the engines are part of `cluster.num_nodes`."""
    own, nodes = config.policy.generation.colocated.resources.num_nodes, config.cluster.num_nodes
    if config.policy.generation.colocated.enabled or own is None:
        return
    if nodes == 1 and own > 1:
        problem = "engines and ranks share the one node of cluster.num_nodes; set it to 1 or null, or raise num_nodes"
        yield Violation("policy.generation.colocated.resources.num_nodes", problem, own)
    elif nodes > 1 and own >= nodes:
        problem = f"leaves no node of cluster.num_nodes = {nodes} for the trainer; use at most {nodes - 1}"
        yield Violation("policy.generation.colocated.resources.num_nodes", problem, own)


def async_runs_beside_the_trainer(config: RunConfig) -> Iterator[Violation]:
    """Generating while training needs devices of its own, and a correction for weights that are behind."""
    if not config.grpo.async_grpo.enabled:
        return
    if config.policy.generation.colocated.enabled:
        problem = (
            "grpo.async_grpo.enabled generates while the trainer works, so engines need their own devices; set false"
        )
        yield Violation("policy.generation.colocated.enabled", problem, True)
    if not config.loss_fn.use_importance_sampling_correction:
        problem = "grpo.async_grpo.enabled trains on rollouts of older weights, which must be corrected for; set true"
        yield Violation("loss_fn.use_importance_sampling_correction", problem, False)


def async_keys_have_an_effect(config: RunConfig) -> Iterator[Violation]:
    """A key that would be ignored is refused."""
    prefix, settings = "grpo.async_grpo", config.grpo.async_grpo
    mode = config.policy.generation.weight_sync.mode
    if settings.in_flight_weight_updates and not settings.enabled:
        problem = f"has no effect while {prefix}.enabled is false; set that to true or this to false"
        yield Violation(f"{prefix}.in_flight_weight_updates", problem, True)
    if settings.recompute_kv_cache_after_weight_updates:
        key = f"{prefix}.recompute_kv_cache_after_weight_updates"
        if not settings.in_flight_weight_updates:
            problem = (
                f"has no effect while {prefix}.in_flight_weight_updates is false; set that to true or this to false"
            )
            yield Violation(key, problem, True)
        elif mode == "adapter":
            problem = "in weight-sync mode adapter a request keeps its adapter to its end; set it to false"
            yield Violation(key, problem, True)


def sync_mode_fits(config: RunConfig) -> Iterator[Violation]:
    """What a weight-sync mode cannot do, and keys that would be ignored in it."""
    prefix, sync = "policy.generation.weight_sync", config.policy.generation.weight_sync
    if sync.mode == "adapter":
        if sync.rounding == "stochastic":
            problem = "has no effect in mode adapter, which never rounds merged weights; leave it at nearest"
            yield Violation(f"{prefix}.rounding", problem, sync.rounding)
        if sync.min_retention is not None:
            problem = "has no effect in mode adapter, which delivers the whole update; leave it null"
            yield Violation(f"{prefix}.min_retention", problem, sync.min_retention)
        if platform_of(config) == "cuda" and config.engine_precision == "float32":
            problem = (
                "vLLM's kernels for adapters take no float32 on GPUs; use policy.precision bfloat16, or mode merged or "
                "adapter_merge"
            )
            yield Violation(f"{prefix}.mode", problem, sync.mode)
        rank = config.policy.megatron_cfg.peft.dim
        if rank > MAX_ENGINE_RANK:
            problem = f"vLLM serves adapters up to rank {MAX_ENGINE_RANK}; lower it, or use {prefix}.mode merged"
            yield Violation("policy.megatron_cfg.peft.dim", problem, rank)
    dummy = config.policy.generation.vllm_cfg.load_format == "dummy"
    if dummy and sync.mode == "merged" and sync.transport == "auto" and platform_of(config) == "cuda":
        problem = (
            f"a push from device to device does not prove that every weight of the engine was replaced; use auto, or "
            f"{prefix}.transport shared_memory"
        )
        yield Violation("policy.generation.vllm_cfg.load_format", problem, "dummy")
    if dummy and sync.mode != "merged":
        problem = f"mode {sync.mode} leaves untargeted weights as the engine loaded them; use auto"
        yield Violation("policy.generation.vllm_cfg.load_format", problem, "dummy")


def learning_rate_schedule(config: RunConfig) -> Iterator[Violation]:
    """The learning rate warms up, then decays."""
    scheduler, optimizer = config.policy.megatron_cfg.scheduler, config.policy.megatron_cfg.optimizer
    # A run shorter than the warm-up is a short run, not a mistake: it just never leaves the warm-up.
    warmup = scheduler.lr_warmup_iters
    prefix = "policy.megatron_cfg.scheduler"
    decay = scheduler.lr_decay_iters
    if decay is not None and decay <= warmup:
        problem = f"must be more than {prefix}.lr_warmup_iters = {warmup}; null takes the whole run"
        yield Violation(f"{prefix}.lr_decay_iters", problem, decay)
    svd = config.policy.megatron_cfg.peft.svd
    peak_key = "policy.megatron_cfg.peft.svd.sigma_lr" if svd.enabled else "policy.megatron_cfg.optimizer.lr"
    peak = svd.sigma_lr if svd.enabled else optimizer.lr
    for key in (f"{prefix}.lr_warmup_init", "policy.megatron_cfg.optimizer.min_lr"):
        section = scheduler if key.endswith("init") else optimizer
        value = getattr(section, key.rpartition(".")[2])
        if value > peak:
            yield Violation(key, f"must not be more than {peak_key} = {peak}", value)


def start_adapter_is_there(config: RunConfig) -> Iterator[Violation]:
    """A PEFT directory to start from, and no starting values that it would overwrite."""
    peft, prefix = config.policy.megatron_cfg.peft, "policy.megatron_cfg.peft"
    if peft.adapter_path is None:
        return
    missing = [n for n in PEFT_FILES if not (Path(peft.adapter_path) / n).is_file()]
    if missing:
        problem = f"must be a PEFT directory; it has no {' and no '.join(missing)}"
        yield Violation(f"{prefix}.adapter_path", problem, peft.adapter_path)
    elif (rank := _largest_rank(Path(peft.adapter_path) / PEFT_FILES[0])) > peft.dim:
        problem = f"the adapter in {prefix}.adapter_path has rank {rank}; use at least that"
        yield Violation(f"{prefix}.dim", problem, peft.dim)
    if peft.lora_B_init_method != "zero":
        problem = "has no effect with adapter_path, which sets every B; leave it at zero"
        yield Violation(f"{prefix}.lora_B_init_method", problem, peft.lora_B_init_method)


def _largest_rank(file: Path) -> int:
    """Of a PEFT adapter's modules; 0 where its settings do not say, which is an error when it is read."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        ranks = [settings["r"], *(settings.get("rank_pattern") or {}).values()]
        return max(rank if isinstance(rank, int) else 0 for rank in ranks)
    except (ValueError, TypeError, KeyError, AttributeError):
        return 0


def stop_strings_are_not_empty(config: RunConfig) -> Iterator[Violation]:
    """Every text has the empty one in it."""
    stops = config.policy.generation.stop_strings
    if "" in (stops or []):
        problem = "an empty string would end every completion at once; leave it out"
        yield Violation("policy.generation.stop_strings", problem, stops)


def early_stop_needs_validation(config: RunConfig) -> Iterator[Violation]:
    """Nothing is compared when nothing is measured."""
    if config.grpo.early_stop_patience is not None and config.grpo.val_period == 0:
        problem = "needs validation while training; set grpo.val_period, or this to null"
        yield Violation("grpo.early_stop_patience", problem, config.grpo.early_stop_patience)


def all_weights_are_trained_plainly(config: RunConfig) -> Iterator[Violation]:
    """Without adapters there is no float32 copy of the weights, and nothing that a checkpoint could hold."""
    if not config.sft.train_all_weights:
        return
    if config.policy.precision != "float32":
        problem = "sft.train_all_weights needs float32: small updates would round away"
        yield Violation("policy.precision", problem, config.policy.precision)
    if config.checkpointing.enabled:
        problem = "checkpoints hold adapters, and with sft.train_all_weights there are none; set it to false"
        yield Violation("checkpointing.enabled", problem, True)
    if config.policy.megatron_cfg.peft.adapter_path is not None:
        problem = "sft.train_all_weights trains no adapter; leave it null"
        yield Violation("policy.megatron_cfg.peft.adapter_path", problem, config.policy.megatron_cfg.peft.adapter_path)


def target_needs_validation(config: RunConfig) -> Iterator[Violation]:
    """The probability is measured in validations."""
    target = config.sft.target_answer_probability
    if target is not None and config.sft.val_period == 0:
        problem = "is measured in validations, and sft.val_period is 0; set that to 10, say, or this to null"
        yield Violation("sft.target_answer_probability", problem, target)


def save_by_is_a_duration(config: RunConfig) -> Iterator[Violation]:
    """days:hours:minutes:seconds, from which the front may be left out; who says by when to save means to save."""
    text, problem = config.checkpointing.checkpoint_must_save_by, ""
    if text is None:
        return
    if not re.fullmatch(r"\d+(:\d+){0,3}", text):
        problem = "must be days:hours:minutes:seconds, such as 0:03:45:00"
    elif not config.checkpointing.enabled:
        problem = "has no effect while checkpointing.enabled is false; set that to true or this to null"
    if problem:
        yield Violation("checkpointing.checkpoint_must_save_by", problem, text)


def sequence_parallel_fits(config: RunConfig) -> Iterator[Violation]:
    """Sequences are split over tensor-parallel ranks, and norms on parts of them are frozen."""
    megatron, key = config.policy.megatron_cfg, "policy.megatron_cfg.sequence_parallel"
    if megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1:
        problem = "has no effect with policy.megatron_cfg.tensor_model_parallel_size = 1; set it to false"
        yield Violation(key, problem, True)
    if megatron.sequence_parallel and config.sft.train_all_weights:
        problem = "sft.train_all_weights trains norms, which sequence parallelism leaves out; set it to false"
        yield Violation(key, problem, True)


def adapter_rank_divides(config: RunConfig) -> Iterator[Violation]:
    """Tensor parallelism shards the rank dimension of column-parallel adapters."""
    dim, tp = config.policy.megatron_cfg.peft.dim, config.policy.megatron_cfg.tensor_model_parallel_size
    if dim % tp:
        problem = f"must be a multiple of policy.megatron_cfg.tensor_model_parallel_size = {tp}"
        yield Violation("policy.megatron_cfg.peft.dim", problem, dim)


def chat_template_exists(config: RunConfig) -> Iterator[Violation]:
    """The template is a file."""
    template = config.policy.tokenizer.chat_template
    if template is not None and not Path(template).is_file():
        problem = "no such file; name a Jinja file, or null for the tokenizer's own template"
        yield Violation("policy.tokenizer.chat_template", problem, template)


RULES: tuple[Rule, ...] = (
    group_needs_two,
    batch_divides_step,
    layout_fits,
    several_nodes_need_a_cluster,
    address_can_be_attached_to,
    sampling_is_random,
    correction_needs_full_distribution,
    correction_bounds,
    dual_clip_above_one,
    completion_leaves_room_for_prompt,
    microbatch_size_is_known,
    shared_prompts_are_possible,
    engine_iteration_holds_sequences,
    block_fits_attention,
    colocated_engines_have_no_own_gpus,
    async_runs_beside_the_trainer,
    async_keys_have_an_effect,
    engine_nodes_leave_nodes_for_ranks,
    sync_mode_fits,
    learning_rate_schedule,
    start_adapter_is_there,
    save_by_is_a_duration,
    all_weights_are_trained_plainly,
    target_needs_validation,
    early_stop_needs_validation,
    stop_strings_are_not_empty,
    adapter_rank_divides,
    sequence_parallel_fits,
    chat_template_exists,
    *DATA_RULES,
    *REWARD_RULES,
    *ALGORITHM_RULES,
    *NEXT_RULES,
    *SVD_RULES,
)
