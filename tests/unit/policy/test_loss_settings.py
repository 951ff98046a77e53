"""The loss section of the configuration as the algorithm's settings: what the one accepts, the other accepts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_rl.config import ConfigError
from lora_rl.policy.trainer import loss_settings
from tests.support.configs import tiny_config

VALUES = {
    "disable_ppo_ratio": ["true"],
    "sequence_level_importance_ratios": ["true"],
    "use_cispo": ["true"],
    "use_sapo": ["true"],
    "sapo_tau_neg": ["2.0"],
    "token_level_loss": ["false"],
    "constant_length_loss": ["true"],
    "reference_policy_kl_penalty": ["0.1"],
    "reference_policy_kl_type": ["k1", "k2"],
    "use_kl_in_reward": ["true"],
    "kl_input_clamp_value": ["1.0", "80", "81"],
    "ratio_clip_min": ["0", "1.0", "1.1"],
    "ratio_clip_max": ["0"],
    "ratio_clip_c": ["3.0", "0.5"],
    "use_importance_sampling_correction": ["true"],
    "importance_sampling_level": ["sequence"],
    "importance_sampling_type": ["icepop", "seq_mask", "null"],
    "truncated_importance_sampling_ratio": ["null", "0.4"],
    "truncated_importance_sampling_ratio_min": ["null", "0.3"],
}


@st.composite
def overrides(draw: st.DrawFn) -> list[str]:
    keys = draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=6, unique=True))
    return [f"loss_fn.{key}={draw(st.sampled_from(VALUES[key]))}" for key in keys]


@given(options=overrides())
@settings(max_examples=200, deadline=None)
def test_what_the_configuration_accepts_the_loss_accepts(models: dict[str, Path], options: list[str]) -> None:
    try:
        config = tiny_config(models["tied"], *options)
    except ConfigError:
        return
    loss_settings(config)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"policy_loss": "ppo_clip", "constant_length": None, "reference_policy_kl_penalty": 0.0}),
        (["disable_ppo_ratio=true"], {"policy_loss": "reinforce"}),
        (["sequence_level_importance_ratios=true", "token_level_loss=false"], {"policy_loss": "gspo"}),
        (["use_cispo=true", "ratio_clip_min=1"], {"policy_loss": "cispo", "ratio_clip_min": 1.0}),
        (
            ["use_sapo=true", "sapo_tau_pos=2", "sapo_tau_neg=3"],
            {"policy_loss": "sapo", "sapo_tau_pos": 2.0, "sapo_tau_neg": 3.0},
        ),
        # The longest completion of the tiny configuration.
        (["constant_length_loss=true"], {"constant_length": 8, "divides_by_tokens": False}),
        (["reference_policy_kl_penalty=0.1"], {"reference_policy_kl_penalty": 0.1}),
        # Taken off the reward: taken once.
        (
            ["reference_policy_kl_penalty=0.1", "use_kl_in_reward=true", "reference_policy_kl_type=k1"],
            {"reference_policy_kl_penalty": 0.0},
        ),
    ],
)
def test_the_loss_follows_the_configuration(
    models: dict[str, Path], options: list[str], expected: dict[str, object]
) -> None:
    made = loss_settings(tiny_config(models["tied"], *(f"loss_fn.{option}" for option in options)))
    assert {name: getattr(made, name) for name in expected} == expected
