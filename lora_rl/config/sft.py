"""The configuration as supervised fine-tuning reads it."""

from __future__ import annotations

from dataclasses import replace

from lora_rl.config.errors import ConfigError
from lora_rl.config.layout import Layout, derive_layout
from lora_rl.config.schema import RunConfig


def as_sft(config: RunConfig) -> RunConfig:
    """The configuration with the section `sft` in place of what GRPO has for the same.

    One optimizer step of `sft.batch_size` examples per step, and the logits as they are: no temperature, no KL. With
    `sft.train_all_weights` there are no adapters.
    """
    sft, policy = config.sft, config.policy
    grpo = config.grpo.model_copy(
        update={
            "num_prompts_per_step": sft.batch_size,
            "num_generations_per_prompt": 1,
            "max_num_steps": sft.max_num_steps,
            "max_num_epochs": sft.max_num_epochs,
            "val_period": sft.val_period,
        }
    )
    peft = policy.megatron_cfg.peft.model_copy(update={"enabled": not sft.train_all_weights})
    policy = policy.model_copy(
        update={
            "megatron_cfg": policy.megatron_cfg.model_copy(update={"peft": peft}),
            "train_global_batch_size": None,
            "generation": policy.generation.model_copy(update={"temperature": 1.0}),
        }
    )
    loss = config.loss_fn.model_copy(update={"reference_policy_kl_penalty": 0.0})
    return config.model_copy(update={"grpo": grpo, "policy": policy, "loss_fn": loss})


def derive_sft_layout(config: RunConfig) -> Layout:
    """`derive_layout` of a configuration from `as_sft`, with errors that name the key of `sft` where that is the cause.

    Raises:
        ConfigError: see `derive_layout`.
    """
    try:
        return derive_layout(config)
    except ConfigError as error:
        raise ConfigError(
            [
                replace(v, key="sft.batch_size", value=config.sft.batch_size)
                if v.key == "policy.train_global_batch_size"
                else v
                for v in error.violations
            ]
        ) from None
