"""Rules of `policy.megatron_cfg.peft.svd`."""

from __future__ import annotations

from collections.abc import Iterator

from lora_rl.config.errors import Violation
from lora_rl.config.schema import RunConfig, SvdConfig

PEFT = "policy.megatron_cfg.peft"
SVD = f"{PEFT}.svd"


def svd_starts_from_an_adapter(config: RunConfig) -> Iterator[Violation]:
    """There is nothing to decompose in an adapter whose B is 0."""
    if config.policy.megatron_cfg.peft.svd.enabled and config.policy.megatron_cfg.peft.adapter_path is None:
        problem = (
            f"{SVD}.enabled trains the singular values of a trained adapter; give its PEFT directory "
            "(run_sft.py leaves one in adapter/ of its run folder)"
        )
        yield Violation(f"{PEFT}.adapter_path", problem, None)


def svd_keys_have_an_effect(config: RunConfig) -> Iterator[Violation]:
    """A key that would be ignored is refused."""
    peft = config.policy.megatron_cfg.peft
    for key in ("mode", "parameterization", "sigma_lr", "sigma_only_sync"):
        value, default = getattr(peft.svd, key), SvdConfig.model_fields[key].default
        if not peft.svd.enabled and value != default:
            shown = str(default).lower() if isinstance(default, bool) else default
            problem = f"has no effect while {SVD}.enabled is false; set that to true, or leave this at {shown}"
            yield Violation(f"{SVD}.{key}", problem, value)


def core_is_absolute(config: RunConfig) -> Iterator[Violation]:
    """Off the diagonal the core starts at 0, of which there is no ratio."""
    svd = config.policy.megatron_cfg.peft.svd
    if svd.enabled and svd.mode == "core" and svd.parameterization == "relative":
        problem = f"{SVD}.mode core starts at 0 off the diagonal, and a ratio to 0 never moves; use absolute"
        yield Violation(f"{SVD}.parameterization", problem, svd.parameterization)


def singular_values_do_not_decay(config: RunConfig) -> Iterator[Violation]:
    """Their parameter group has no weight decay."""
    megatron = config.policy.megatron_cfg
    if megatron.peft.svd.enabled and megatron.optimizer.weight_decay > 0:
        problem = f"singular values ({SVD}.enabled) are not decayed; set it to 0"
        yield Violation("policy.megatron_cfg.optimizer.weight_decay", problem, megatron.optimizer.weight_decay)


SVD_RULES = (svd_starts_from_an_adapter, svd_keys_have_an_effect, core_is_absolute, singular_values_do_not_decay)
