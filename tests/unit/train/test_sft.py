"""Supervised fine-tuning: what is trained on, and that its loss is the cross-entropy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lora_rl.config import ConfigError, RunConfig, as_sft, derive_layout
from lora_rl.data import Prompt, load_tokenizer
from lora_rl.track import Console, PhaseTimer, RunRecorder
from lora_rl.train import sft
from lora_rl.train.resume import Stop
from lora_rl.train.sft import example_batch, load_examples, run_sft
from tests.support.batches import make_batch, one_microbatch
from tests.support.configs import tiny_config
from tests.support.hf import hf_logprobs, load_hf
from tests.support.lab import new_rank
from tests.support.ranks import run_ranks
from tests.unit.conftest import BATCH_SEED, LAYOUTS


def test_the_batch_holds_prompt_answer_and_end(models: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(models["tied"])
    examples = [Prompt(t, t, tokenizer.encode(t), answer) for t, answer in (("1+1=", "2"), ("20+21=", "41"))]
    batch = example_batch(examples, tokenizer)
    for row, text in enumerate(("1+1=2", "20+21=41")):
        ids = batch.token_ids[row, : batch.lengths[row]].tolist()
        assert tokenizer.decode(ids) == text + tokenizer.eos_token
        assert tokenizer.decode(ids[: batch.prompt_lengths[row]]) == examples[row].text
    assert batch.global_tokens == 2 + 3
    assert batch.global_sequences == 2


def supervised(config: RunConfig, batch_seed: int, steps: int) -> list[tuple[float | None, float]]:
    rank = new_rank(config)
    history = []
    for _ in range(steps):
        batch = make_batch(batch_seed)
        shards, cuts = one_microbatch(batch, rank.dp_size)
        result = rank.train_step(shards[rank.dp_rank], cuts[rank.dp_rank], supervised=True)
        nll = result.metrics["nll"].value / batch.global_tokens if result.metrics else None
        history.append((nll, result.grad_norm))
    return history


@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", [*LAYOUTS, "dp2"])
def test_the_loss_is_hugging_faces_cross_entropy_and_falls(models: dict[str, Path], layout: str) -> None:
    tp, pp, dp = (1, 1, 2) if layout == "dp2" else (*LAYOUTS[layout], 1)
    config = as_sft(tiny_config(models["tied"], "policy.generation.temperature=0.6", tp=tp, pp=pp, dp=dp))
    answers = run_ranks(supervised, config, BATCH_SEED, 4, tp=tp, pp=pp, dp=dp)
    losses = np.sum([[nll for nll, _ in a] for a in answers if a[0][0] is not None], axis=0)
    batch, model = make_batch(BATCH_SEED), load_hf(models["tied"])
    total = 0.0
    for row in range(len(batch)):
        ids = torch.from_numpy(batch.token_ids[row, : batch.lengths[row]])[None]
        labels = ids.clone()
        labels[0, : batch.prompt_lengths[row]] = -100
        with torch.no_grad():
            count = int(batch.lengths[row] - batch.prompt_lengths[row])
            total += float(model(input_ids=ids, labels=labels).loss) * count
    assert losses[0] == pytest.approx(total / batch.global_tokens, abs=1e-5)
    assert losses[-1] < losses[0] - 0.05


def train_all_weights(config: RunConfig, steps: int, out: Path, source: Path) -> list[float]:
    from lora_rl.policy.export import save_model

    rank = new_rank(config)
    assert all(p.requires_grad for p in rank.model.module.parameters())
    norms = []
    for step in range(steps):
        batch = make_batch(BATCH_SEED + step)
        shards, cuts = one_microbatch(batch, rank.dp_size)
        norms.append(rank.train_step(shards[rank.dp_rank], cuts[rank.dp_rank], supervised=True).grad_norm)
    save_model(rank.model, out, source)
    return norms


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "dp2"])
def test_training_all_weights_is_what_plain_pytorch_does(
    models: dict[str, Path], tmp_path: Path, layout: str, kind: str
) -> None:
    steps, lr, clip = 3, 1e-2, 0.5
    tp, pp, dp = (1, 1, 2) if layout == "dp2" else (*LAYOUTS[layout], 1)
    # With its usual epsilon Adam would blow the rounding of small gradients up to whole steps.
    overrides = ["sft.train_all_weights=true", "policy.megatron_cfg.optimizer.adam_eps=1e-2"]
    overrides += [f"policy.max_grad_norm={clip}", f"policy.megatron_cfg.optimizer.lr={lr}"]
    config = as_sft(tiny_config(models[kind], *overrides, tp=tp, pp=pp, dp=dp))
    saved = tmp_path / "model"
    norms = run_ranks(train_all_weights, config, steps, saved, models[kind], tp=tp, pp=pp, dp=dp)[0]

    reference = load_hf(models[kind])
    start = {name: p.detach().clone() for name, p in reference.named_parameters()}
    optimizer = torch.optim.AdamW(reference.parameters(), lr=lr, eps=1e-2, weight_decay=0.0)
    for step in range(steps):
        batch = make_batch(BATCH_SEED + step)
        optimizer.zero_grad()
        (-hf_logprobs(reference, batch).sum() / batch.global_tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
        assert norms[step] == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
    trained = dict(load_hf(saved).named_parameters())
    assert trained.keys() == start.keys()
    for name, expected in reference.named_parameters():
        torch.testing.assert_close(trained[name], expected, atol=1e-5, rtol=0, msg=name)
        assert not torch.equal(expected, start[name]), name
    assert load_tokenizer(saved).eos_token_id == load_tokenizer(models[kind]).eos_token_id


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "examples.jsonl"
    path.write_text(text)
    return path


def test_files_with_other_keys(models: dict[str, Path], tmp_path: Path) -> None:
    path = write(tmp_path, '{"q": "é?", "a": "ja"}\n{"q": "b", "a": "c", "more": 1}\n')
    keys = [f"sft.train_path={path}", "sft.prompt_key=q", "sft.answer_key=a"]
    tokenizer, prompts, held_out, _ = load_examples(as_sft(tiny_config(models["tied"], *keys)))
    assert [(p.text, p.answer) for p in prompts.prompts] == [("é?", "ja"), ("b", "c")]
    assert held_out == []
    assert tokenizer.decode(prompts.prompts[0].token_ids) == "é?"
    with pytest.raises(ValueError, match="2 of 2 training prompts are also in the validation data"):
        load_examples(as_sft(tiny_config(models["tied"], *keys, f"sft.val_path={path}")))
    keys += ["policy.max_total_sequence_length=5", "policy.generation.max_new_tokens=1"]
    short, warnings = as_sft(tiny_config(models["tied"], *keys)), []
    _, prompts, _, _ = load_examples(short, warnings.append)
    assert [p.text for p in prompts.prompts] == ["b"]
    (warning,) = warnings
    assert "1 of 2 prompts have more than 5 tokens" in warning and "the longest has 6" in warning


def test_examples_come_from_the_source_of_data_too(models: dict[str, Path], tmp_path: Path) -> None:
    path = write(tmp_path, "".join(f'{{"prompt": "{n}", "answer": "{n}"}}\n' for n in range(40)))
    config = as_sft(tiny_config(models["tied"], "data.task=null", f"data.train_path={path}"))
    _, prompts, held_out, _ = load_examples(config)
    assert (len(prompts), held_out) == (40, [])
    path.write_text('{"prompt": "1", "answer": "2", "q": "3", "solution": "4"}\n')
    keys = ["data.task=null", f"data.train_path={path}", "sft.answer_key=solution"]
    for overrides, expected in ((keys, ("1", "4")), ([*keys, "sft.prompt_key=q"], ("3", "4"))):
        _, prompts, _, _ = load_examples(as_sft(tiny_config(models["tied"], *overrides)))
        assert [(p.text, p.answer) for p in prompts.prompts] == [expected]


def test_examples_are_split_as_prompts_are(models: dict[str, Path], tmp_path: Path) -> None:
    path = write(tmp_path, "".join(f'{{"prompt": "{n}", "answer": "{n}"}}\n' for n in range(40)))
    split = as_sft(tiny_config(models["tied"], f"sft.train_path={path}", "data.validation_split=0.3"))
    _, prompts, held_out, _ = load_examples(split)
    assert len(prompts) + len(held_out) == 40 and held_out


def test_examples_without_an_answer_are_refused(models: dict[str, Path]) -> None:
    overrides = ["data.task=reasoning_gym", "data.reasoning_gym.datasets=[propositional_logic]"]
    overrides += ["data.reasoning_gym.size=2", "data.reasoning_gym.val_size=1", "policy.max_total_sequence_length=512"]
    with pytest.raises(ValueError, match=r"reasoning_gym/propositional_logic/\w+ has no answer to train on"):
        load_examples(as_sft(tiny_config(models["tied"], *overrides)))


def test_missing_files_are_refused_before_anything_starts(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"sft\.train_path = /nowhere"):
        tiny_config(models["tied"], "sft.train_path=/nowhere")


def test_the_section_replaces_what_grpo_has(models: dict[str, Path]) -> None:
    overrides = ["sft.batch_size=32", "sft.max_num_steps=7", "policy.train_global_batch_size=4"]
    overrides += ["policy.generation.temperature=0.5", "loss_fn.reference_policy_kl_penalty=0.1"]
    config: Any = as_sft(tiny_config(models["tied"], *overrides))
    assert config.train_global_batch_size == config.sequences_per_step == 32
    assert config.num_optimizer_steps == config.lr_decay_iters == 7
    assert config.policy.generation.temperature == 1.0
    assert config.loss_fn.reference_policy_kl_penalty == 0.0
    assert config.policy.megatron_cfg.peft.enabled
    config = as_sft(tiny_config(models["tied"], "sft.train_all_weights=true"))
    assert not config.policy.megatron_cfg.peft.enabled


class LearningPolicy:
    """Stands where `PolicyGroup` does: each step makes every answer more likely."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def train_supervised(self, batch: Any) -> dict[str, float]:
        self.steps += 1
        return {"nll": 1.0 / self.steps, "grad_norm": 1.0}

    def logprobs(self, batch: Any) -> np.ndarray:
        return np.full((len(batch), 1), -1.0 / max(self.steps, 0.1), dtype=np.float32)


def test_what_reached_its_target_is_saved_and_not_trained_again(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = as_sft(
        tiny_config(
            models["tied"], "sft.target_answer_probability=0.7", "sft.val_period=1", "sft.max_num_steps=20",
            "checkpointing.enabled=true", "checkpointing.save_period=20",
        )
    )  # fmt: skip
    data, policy, saved = load_examples(config), LearningPolicy(0), []

    @contextmanager
    def start(
        config: RunConfig, layout: Any, console: Any, run_dir: Any, data: Any, resume: Any, same: Any
    ) -> Iterator[Any]:
        tokenizer, prompts, held_out, _ = data
        yield sft.SftJob(policy, tokenizer, prompts, held_out, same, None, {"model/parameters": 1})

    monkeypatch.setattr(sft, "_start", start)
    monkeypatch.setattr(sft, "take", lambda job, config, layout, step, *rest, **more: step)
    monkeypatch.setattr(sft, "keep_result", lambda *_: None)
    store = SimpleNamespace(save=lambda step: saved.append(step) or f"step_{step}")

    def run(resume: Any) -> None:
        stop = Stop(saves=True, limit_s=None, notify=print)
        with (
            Console("quiet", 20) as console,
            RunRecorder(tmp_path, resume_step=resume and resume.step) as recorder,
        ):
            layout = derive_layout(config)
            run_sft(
                config, layout, console, recorder, PhaseTimer(), tmp_path, data, stop=stop, store=store, resume=resume
            )

    run(None)
    # exp(-1 / 3) = 0.72
    assert (policy.steps, saved) == (3, [3])
    run(SimpleNamespace(step=3))
    assert (policy.steps, saved) == (3, [3])


def test_a_dry_run_describes_what_is_trained() -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "examples/run_sft.py", "--config", "examples/configs/sft_tiny_cpu.yaml", "--dry-run"]
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "each step: 128 sequences, 1 optimizer step," in said
    assert "vLLM" not in said.partition("\n\n")[2]
