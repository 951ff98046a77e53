"""Section `policy`: the trained model, how it is split over ranks, its adapters and its optimizer."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from lora_rl.config.schema.base import BelowOne, Precision, Section
from lora_rl.config.schema.generation import GenerationConfig


class TokenizerConfig(Section):
    """`policy.tokenizer`."""

    name: str | None = Field(None, description="Directory or hub id of the tokenizer; null: policy.model_name.")
    chat_template: str | None = Field(None, description="Jinja file of the chat template; null: the tokenizer's own.")


class DynamicBatchingConfig(Section):
    """`policy.dynamic_batching`: microbatches of equal work instead of equal count."""

    enabled: bool = Field(True, description="Fill microbatches up to train_mb_tokens.")
    train_mb_tokens: PositiveInt = Field(8192, description="Tokens per microbatch and rank, padding included.")


class SequencePackingConfig(Section):
    """`policy.sequence_packing`: several sequences in one row, without padding."""

    enabled: bool = Field(False, description="Pack sequences.")


class SvdConfig(Section):
    """`policy.megatron_cfg.peft.svd`: train only the singular values of the adapter in peft.adapter_path."""

    enabled: bool = Field(False, description="Freeze the adapter's singular vectors, train its singular values.")
    mode: Literal["product", "factors", "core"] = Field(
        "product",
        description="What is trained per linear: product, the dim singular values of B A; factors, those of B and "
        "of A; core, a dim x dim matrix between the singular vectors of B A.",
    )
    parameterization: Literal["absolute", "relative"] = Field(
        "absolute",
        description="absolute: a step adds to a singular value; relative: to its ratio to the starting value.",
    )
    sigma_lr: PositiveFloat = Field(
        1e-2, description="Peak learning rate of the singular values, in place of policy.megatron_cfg.optimizer.lr."
    )
    sigma_only_sync: bool = Field(
        True,
        description="In weight-sync modes adapter_merge and adapter, send the singular vectors once and then only the "
        "trained numbers.",
    )


class PeftConfig(Section):
    """`policy.megatron_cfg.peft`: the LoRA adapters."""

    enabled: bool = Field(True, description="Train LoRA adapters on a frozen base model.")
    dim: PositiveInt = Field(16, description="Rank r of the adapters.")
    alpha: PositiveFloat = Field(32.0, description="Adapters are scaled by alpha / dim.")
    dropout: BelowOne = Field(0.0, description="Dropout probability on the adapters' input while training.")
    target_modules: list[str] = Field(
        ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
        description="Megatron linears that get an adapter: names, or wildcards such as *.layers.0.*.linear_qkv.",
    )
    exclude_modules: list[str] = Field(
        [], description="With an empty target_modules: adapt all four linears of every layer except these."
    )
    lora_A_init_method: Literal["xavier", "uniform", "normal", "kaiming"] = Field(
        "xavier", description="Starting values of A (r x in)."
    )
    lora_B_init_method: Literal["zero", "normal", "xavier", "kaiming", "uniform"] = Field(
        "zero", description="Starting values of B (out x r); zero: the run starts at the base model."
    )
    adapter_path: str | None = Field(
        None, description="PEFT directory of an adapter to start from; null: start from the methods above."
    )
    lora_dtype: Literal["float32"] = Field(
        "float32", description="Type of A and B; small updates would round away in bfloat16."
    )
    svd: SvdConfig = Field(default_factory=SvdConfig)


class OptimizerConfig(Section):
    """`policy.megatron_cfg.optimizer`."""

    optimizer: Literal["adam"] = Field("adam", description="Optimizer (AdamW: decoupled weight decay).")
    lr: PositiveFloat = Field(1e-4, description="Peak learning rate.")
    min_lr: NonNegativeFloat = Field(0.0, description="Learning rate at the end of the decay.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Decoupled weight decay.")
    adam_beta1: BelowOne = Field(0.9, description="Decay of the first moment.")
    adam_beta2: BelowOne = Field(0.999, description="Decay of the second moment.")
    adam_eps: PositiveFloat = Field(1e-8, description="Added to the root of the second moment.")


class SchedulerConfig(Section):
    """`policy.megatron_cfg.scheduler`: the learning rate over time, counted in optimizer steps."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Course of the learning rate after the warm-up."
    )
    lr_warmup_iters: NonNegativeInt = Field(0, description="Optimizer steps of linear warm-up.")
    lr_decay_iters: PositiveInt | None = Field(
        None, description="Optimizer step at which min_lr is reached; null: the last of grpo.max_num_steps steps."
    )
    lr_warmup_init: NonNegativeFloat = Field(0.0, description="Learning rate at the start of the warm-up.")


class DDPConfig(Section):
    """`policy.megatron_cfg.distributed_data_parallel_config`."""

    grad_reduce_in_fp32: bool = Field(True, description="Sum gradients over ranks in float32.")
    overlap_grad_reduce: bool = Field(False, description="Reduce gradients while the backward pass still runs.")


class MegatronConfig(Section):
    """`policy.megatron_cfg`: parallel layout, memory and the parts of the Megatron trainer."""

    enabled: bool = Field(True, description="Train with Megatron-Core: the only trainer there is.")
    tensor_model_parallel_size: PositiveInt = Field(1, description="Ranks that share each layer (tp).")
    pipeline_model_parallel_size: PositiveInt = Field(1, description="Consecutive groups of layers (pp).")
    context_parallel_size: PositiveInt = Field(1, description="Ranks that share each sequence (cp).")
    expert_model_parallel_size: PositiveInt = Field(
        1, description="Data-parallel ranks that share the experts of a mixture of experts (ep)."
    )
    sequence_parallel: bool = Field(False, description="Split layer norms along the sequence over tp ranks.")
    activation_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, about a third more time."
    )
    num_threads: PositiveInt | None = Field(
        None, description="OpenMP threads per rank; null: derived from the cores and processes."
    )
    peft: PeftConfig = Field(default_factory=PeftConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    distributed_data_parallel_config: DDPConfig = Field(default_factory=DDPConfig)


class PolicyConfig(Section):
    """`policy`."""

    model_name: str = Field(
        description="Hugging Face model: a directory (relative to the current one or to the configuration "
        "file's project) or a hub id."
    )
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    precision: Precision = Field("bfloat16", description="Type of the frozen base weights and the activations.")
    train_global_batch_size: PositiveInt | None = Field(
        None, description="Sequences per optimizer step; null: all of a step (prompts x generations)."
    )
    train_micro_batch_size: PositiveInt | None = Field(
        None, description="Sequences per microbatch and rank; needed when dynamic_batching is off."
    )
    logprob_batch_size: PositiveInt | None = Field(
        None, description="Sequences per rank in a logprob-only pass; null: as in training."
    )
    max_total_sequence_length: PositiveInt = Field(2048, description="Longest prompt + completion, in tokens.")
    max_grad_norm: PositiveFloat | None = Field(1.0, description="Gradients are clipped to this norm; null: off.")
    dynamic_batching: DynamicBatchingConfig = Field(default_factory=DynamicBatchingConfig)
    sequence_packing: SequencePackingConfig = Field(default_factory=SequencePackingConfig)
    share_prompts: bool | None = Field(
        None,
        description="Train on the completions of a prompt behind one copy of it, where that is less work; null: on the "
        "CPU, whose attention takes the mask this needs. Not in passes that train_micro_batch_size or "
        "logprob_batch_size cut by sequences.",
    )
    megatron_cfg: MegatronConfig = Field(default_factory=MegatronConfig)
    generation: GenerationConfig = Field(default_factory=GenerationConfig)

    @property
    def tokenizer_name(self) -> str:
        """Directory or hub id to load the tokenizer from."""
        return self.tokenizer.name or self.model_name
