"""Building the policy model: Hugging Face weights through Megatron-Bridge, LoRA layers, Megatron's DDP around them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lora_rl.config.model_files import find_folder, folder_or_id
from lora_rl.lora.init import initialise_adapters
from lora_rl.lora.svd import install_spectrum
from lora_rl.lora.targets import adapter_modules, global_name, layer_numbers, select_targets
from lora_rl.policy.platform import Platform

if TYPE_CHECKING:
    from lora_rl.config import RunConfig

# In the name of every parameter of an SVD-LoRA adapter that is trained.
THETA = ".adapter.activation.theta"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class PolicyModel:
    """The model of one rank.

    Attributes:
        chunks: Megatron model chunks wrapped in DDP (one; virtual pipelining is not used).
        bridge: converts weights between Megatron's and Hugging Face's names and layouts.
        lora: the adapter recipe, also used to switch adapters off for reference logprobs.
        vocab_size: real vocabulary size; logits beyond it are padding.
    """

    chunks: list[torch.nn.Module]
    bridge: Any
    lora: Any
    vocab_size: int

    @property
    def module(self) -> torch.nn.Module:
        """The bare Megatron model below DDP and precision wrappers."""
        module = self.chunks[0]
        while hasattr(module, "module"):
            module = module.module
        return module


def initialise_parallel(
    platform: Platform,
    *,
    rank: int,
    world_size: int,
    tp: int,
    pp: int,
    seed: int,
    init_method: str,
    ep: int = 1,
    store: dist.Store | None = None,
) -> None:
    """Join the process group and build Megatron's tensor-, pipeline- and data-parallel groups.

    Args:
        init_method: torch.distributed URL all ranks agree on, such as `tcp://127.0.0.1:29500` or `file:///...`.
        ep: data-parallel ranks that share the experts of a mixture of experts.
        store: the store behind that URL, in the process that serves it.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if store is None and init_method.startswith("tcp://"):
        host, _, port = init_method.removeprefix("tcp://").rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False)
    meeting_point: dict[str, Any] = {"init_method": init_method} if store is None else {"store": store}
    dist.init_process_group(platform.backend, rank=rank, world_size=world_size, **meeting_point)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep
    )
    model_parallel_cuda_manual_seed(seed)


def build_policy_model(config: RunConfig, platform: Platform) -> PolicyModel:
    """Load the base model, freeze it, add adapters, wrap in Megatron's DDP.

    Adapters are float32 parameters whatever the precision of the base. With `peft.enabled` false there are none, and
    every weight is trained.

    Raises:
        TargetError: a target module matches nothing, or must not be adapted.
        RuntimeError: something other than the adapters ended up trainable.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "0" if find_folder(config.policy.model_name) is None else "1")
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.bridge.peft.lora import LoRA
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig

    policy, megatron = config.policy, config.policy.megatron_cfg
    dtype = _DTYPES[policy.precision]
    bridge = AutoBridge.from_hf_pretrained(folder_or_id(policy.model_name), dtype=dtype)
    provider = bridge.to_megatron_provider()
    if not platform.transformer_engine:
        provider.transformer_layer_spec = local_layer_spec
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "context_parallel_size": megatron.context_parallel_size,
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "sequence_parallel": megatron.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # Microbatches have different shapes: sequences are not padded to a common length across the batch.
        "variable_seq_lengths": True,
        # The default dispatcher refuses variable lengths, also in models without experts.
        "moe_token_dispatcher_type": "alltoall",
        # The gradient of a balancing loss would reach the adapters through the routers' inputs; routers are frozen.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # Nor may the routers' own way to balance experts, a bias that moves at each step.
        "moe_router_bias_update_rate": 0.0,
        # With Transformer Engine installed the bridge asks for it, but Megatron's plain linears, such as those of
        # adapters, need a kernel of Apex for it.
        "gradient_accumulation_fusion": False,
        "seq_length": policy.max_total_sequence_length,
    }
    if megatron.activation_checkpointing:
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if platform.transformer_engine and provider.gated_linear_unit and provider.activation_func is F.silu:
        # Half of what the backward pass keeps of an MLP; the bridge asks for it for some families only.
        fields["bias_activation_fusion"] = True
    for name, value in {**fields, **platform.provider_overrides}.items():
        setattr(provider, name, value)
    provider.finalize()

    peft = megatron.peft
    lora = LoRA(
        dim=peft.dim,
        alpha=peft.alpha,
        dropout=peft.dropout,
        # Otherwise adapters take the gathered output of the norm from Transformer Engine's LayerNormLinear, which then
        # leaves out its gradient: earlier layers would be trained as if this adapter were not there.
        sequence_parallel_input_regather=megatron.sequence_parallel,
    )
    tied = bool(provider.share_embeddings_and_output_weights)

    def add_adapters(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        names = _module_names_everywhere(chunks)
        selected = select_targets(peft.target_modules, peft.exclude_modules, names, tied_output=tied)
        for chunk in chunks:
            numbers = layer_numbers(chunk)

            # Megatron-Bridge matches names with the layer numbers of a pipeline stage, so that `*.layers.0.*` would
            # adapt the first layer of every stage; match global numbers instead.
            def match(
                module: Any, name: str | None = None, prefix: str | None = None, *, numbers: Any = numbers
            ) -> Any:
                full = f"{prefix}.{name}" if prefix else str(name)
                return (full, full) if global_name(full, numbers) in selected else None

            lora.match = match
            lora.freeze_model(chunk)
            lora._walk_model(chunk, lora.transform)
            chunk.train()
            for adapter in adapter_modules(chunk).values():
                _make_float32(adapter)
            initialise_adapters(
                chunk,
                a_method=peft.lora_A_init_method,
                b_method=peft.lora_B_init_method,
                seed=config.grpo.seed,
                tp_rank=parallel_state.get_tensor_model_parallel_rank(),
                tp_size=megatron.tensor_model_parallel_size,
            )
            if peft.svd.enabled:
                for adapter in adapter_modules(chunk).values():
                    relative = peft.svd.parameterization == "relative"
                    install_spectrum(adapter, peft.svd.mode, relative=relative)
        if megatron.activation_checkpointing:
            from megatron.bridge.peft.recompute import maybe_enable_recompute_inputs_grad

            # Without it the frozen embedding's output needs no gradient and recomputed layers never see a backward.
            maybe_enable_recompute_inputs_grad(chunks)
        return chunks

    if peft.enabled:
        provider.register_pre_wrap_hook(add_adapters)
    ddp = megatron.distributed_data_parallel_config
    chunks = provider.provide_distributed_model(
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=ddp.grad_reduce_in_fp32,
            overlap_grad_reduce=ddp.overlap_grad_reduce,
            use_distributed_optimizer=False,
        ),
        use_cpu_initialization=platform.name == "cpu",
        mixed_precision_wrapper=None,
    )
    model = PolicyModel(chunks=chunks, bridge=bridge, lora=lora, vocab_size=provider.vocab_size)
    trained, what = (".adapter.", "exactly the adapters") if peft.enabled else ("", "all weights")
    if peft.enabled and peft.svd.enabled:
        trained, what = THETA, "exactly the singular values"
    wrong = [n for n, p in model.module.named_parameters() if p.requires_grad != (trained in n)]
    if wrong:
        raise RuntimeError(f"{what} must be trainable, but these parameters are not as they should: {wrong}")
    return model


def _module_names_everywhere(chunks: list[torch.nn.Module]) -> set[str]:
    """Module names of all pipeline stages, with global layer numbers; the same on every rank."""
    from megatron.core import parallel_state

    names = [global_name(n, layer_numbers(chunk)) for chunk in chunks for n, _ in chunk.named_modules()]
    gathered: list[list[str]] = [[] for _ in range(parallel_state.get_pipeline_model_parallel_world_size())]
    dist.all_gather_object(gathered, names, group=parallel_state.get_pipeline_model_parallel_group())
    return {name for stage in gathered for name in stage}


def _make_float32(adapter: torch.nn.Module) -> None:
    """Keep an adapter's parameters in float32 over a bfloat16 base: cast what goes in, and back what comes out."""
    parameters = list(adapter.parameters())
    if all(p.dtype is torch.float32 for p in parameters):
        return
    for parameter in parameters:
        parameter.data = parameter.data.float()
    forward = adapter.forward

    def in_float32(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return forward(x.float(), *args, **kwargs).to(x.dtype)

    adapter.forward = in_float32
