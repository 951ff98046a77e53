"""When a run saves and stops, and what it refuses to continue from."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_rl.config import RunConfig
from lora_rl.data import PromptSource
from lora_rl.train.checkpoint import CheckpointError
from lora_rl.train.resume import Stop, check_fits, checkpoint_folder, identity, is_save_step, seconds
from tests.support.configs import tiny_config, with_peft
from tests.support.rollouts import prompt
from tests.unit.train.test_checkpoint import make


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_with_checkpoints_the_first_signal_waits_for_the_step_and_the_second_does_not(number: int) -> None:
    told: list[str] = []
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), Stop(saves=True, notify=told.append) as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested and stop.signalled
        assert len(told) == 1
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_without_checkpoints_the_first_signal_stops_at_once(number: int) -> None:
    with pytest.raises(KeyboardInterrupt), Stop(saves=False):
        os.kill(os.getpid(), number)


def test_the_time_limit_counts_from_the_start() -> None:
    now = [100.0]
    stop = Stop(saves=True, limit_s=60, clock=lambda: now[0])
    now[0] = 159.9
    assert not stop.requested
    now[0] = 160.0
    assert stop.requested and stop.time_is_up and not stop.signalled
    assert not Stop(saves=True, clock=lambda: now[0]).requested


def test_durations() -> None:
    assert [seconds(text) for text in ("90", "2:30", "01:00:00", "1:02:03:04")] == [90, 150, 3600, 93784]
    for text in ("", "1:2:3:4:5", "1h", "-3", "1::2"):
        with pytest.raises(ValueError, match="is not days:hours:minutes:seconds"):
            seconds(text)


def test_save_steps(models: dict[str, Path]) -> None:
    config = tiny_config(models["tied"], "checkpointing.enabled=true", "checkpointing.save_period=4")
    assert [step for step in range(1, 11) if is_save_step(step, 10, config)] == [4, 8, 10]
    assert checkpoint_folder(config, Path("run")) == Path("run/checkpoints")
    elsewhere = tiny_config(models["tied"], "checkpointing.checkpoint_dir=there")
    assert checkpoint_folder(elsewhere, Path("run")) == Path("there")


def svd_lora(config: RunConfig, **changes: object) -> RunConfig:
    """Past the checks of the loader: there is no adapter to start from."""
    svd = config.policy.megatron_cfg.peft.svd.model_copy(update={"enabled": True, **changes})
    return with_peft(config, svd=svd)


def test_svd_lora_continues_with_the_same_parameters_only(models: dict[str, Path]) -> None:
    config, prompts = tiny_config(models["tied"]), PromptSource([prompt("1")], seed=1)
    # Checkpoints of plain LoRA say nothing of it, and fit as before.
    assert "svd" not in identity(config, prompts)["adapter"]
    checkpoint = make(10)
    checkpoint.identity = identity(svd_lora(config), prompts)
    check_fits(checkpoint, identity(svd_lora(config, sigma_lr=1.0, sigma_only_sync=False), prompts))
    for key, value in (("mode", "core"), ("parameterization", "relative")):
        with pytest.raises(CheckpointError, match=f"adapter.svd.{key}: the checkpoint has .*, this run '{value}'"):
            check_fits(checkpoint, identity(svd_lora(config, **{key: value}), prompts))


def test_identity_follows_content_not_names(models: dict[str, Path], tmp_path: Path) -> None:
    config, prompts = tiny_config(models["tied"]), PromptSource([prompt(str(n)) for n in range(5)], seed=1)
    same = identity(config, prompts)
    moved = shutil.copytree(models["tied"], tmp_path / "moved")
    assert identity(tiny_config(moved), prompts) == same
    prompts.next_batch(3)
    assert identity(config, prompts) == same, "the cursor moves on"
    checkpoint = make(10)
    checkpoint.identity, checkpoint.path = same, Path("checkpoints/step_10")
    check_fits(checkpoint, same)

    (moved / "config.json").write_text((moved / "config.json").read_text() + " ")
    with pytest.raises(CheckpointError, match="job: the checkpoint has 'grpo', this run 'sft'"):
        check_fits(checkpoint, identity(config, prompts, "sft"))
    changes = {
        "adapter.dim: the checkpoint has 8, this run 4": identity(with_peft(config, dim=4), prompts),
        "adapter.svd: the checkpoint has None, this run {'enabled': True": identity(svd_lora(config), prompts),
        "adapter.target_modules": identity(with_peft(config, target_modules=["linear_qkv"]), prompts),
        "base_model.config.json": identity(tiny_config(moved), prompts),
        "base_model.model.safetensors": identity(tiny_config(models["untied"]), prompts),
        "data.prompts": identity(config, PromptSource([prompt("other")], seed=1)),
        "data.seed: the checkpoint has 1, this run 2": identity(config, PromptSource(prompts.prompts, seed=2)),
    }
    for line, other in changes.items():
        with pytest.raises(CheckpointError) as error:
            check_fits(checkpoint, other)
        assert line in str(error.value)
        assert "cannot continue from checkpoints/step_10" in str(error.value)


def test_what_a_hash_of_prompts_may_come_from_is_said() -> None:
    same = {"data": {"prompts": "ab", "seed": 1}}
    checkpoint: Any = SimpleNamespace(identity=same, path=Path("checkpoints/step_5"))
    with pytest.raises(CheckpointError, match=r"data\.prompts: .*'ab'.*'cd' .*grpo\.next\.gate sets some"):
        check_fits(checkpoint, {"data": {"prompts": "cd", "seed": 1}})
