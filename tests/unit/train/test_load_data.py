"""The data of a GRPO job: what is left out is reported, and a job without validation prompts is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_rl.data import Prompt
from lora_rl.train.job import load_data, probes_of
from tests.support.configs import tiny_config

PAPER_FITS = ["grpo.next.interval=2", "grpo.next.write_back=adapter"]


def write(folder: Path, *prompts: str) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts))
    return f"data.train_path={path}"


def test_a_prompt_must_leave_room_for_a_completion(models: dict[str, Path], tmp_path: Path) -> None:
    # One token per byte, 64 - 8 for the prompt.
    rows = write(tmp_path, "a" * 56, "b" * 57, "c" * 60, *(f"d{n}" for n in range(20)))
    config = tiny_config(models["tied"], "data.task=null", rows, "data.validation_split=0.3")
    warnings: list[str] = []
    tokenizer, prompts, held_out, _ = load_data(config, warnings.append)
    lengths = [len(p.token_ids) for p in (*prompts.prompts, *held_out)]
    assert len(lengths) == 21 and max(lengths) == 56
    assert sum(int(w.split()[0]) for w in warnings) == 2
    assert all("policy.max_total_sequence_length 64 - policy.generation.max_new_tokens 8" in w for w in warnings)
    assert tokenizer.decode(prompts.prompts[0].token_ids) == prompts.prompts[0].text
    narrow = tiny_config(models["tied"], "data.task=null", rows, "policy.generation.vllm_cfg.max_model_len=9")
    with pytest.raises(ValueError, match="23 of 23 prompts have more than 1 tokens"):
        load_data(narrow)


def test_validation_needs_prompts(models: dict[str, Path], tmp_path: Path) -> None:
    overrides = ["data.task=null", write(tmp_path, "a", "b", "c", "d", "e")]
    with pytest.raises(ValueError, match=r"no held-out prompts: set data\.val_path or data\.validation_split"):
        load_data(tiny_config(models["tied"], *overrides))
    overrides += ["grpo.val_at_start=false", "grpo.val_period=0"]
    _, prompts, held_out, _ = load_data(tiny_config(models["tied"], *overrides))
    assert (len(prompts), held_out) == (5, [])


def test_fewer_prompts_than_a_step_are_reported_and_used(models: dict[str, Path], tmp_path: Path) -> None:
    off = ["grpo.val_at_start=false", "grpo.val_period=0"]
    warnings: list[str] = []
    config = tiny_config(models["tied"], "data.task=null", write(tmp_path, "a", "b", "c"), *off)
    _, prompts, _, _ = load_data(config, warnings.append)
    assert warnings == [
        "3 training prompts are fewer than grpo.num_prompts_per_step = 4: every step sees some of them more than once"
    ]
    assert [len({p.id for p in prompts.next_batch(4)}) for _ in range(3)] == [3, 3, 3]


def test_the_configured_chat_template_is_used(models: dict[str, Path], tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    chat = [f"policy.tokenizer.chat_template={template}", "data.prompt_mode=chat"]
    _, prompts, _, _ = load_data(tiny_config(models["tied"], *chat))
    assert prompts.prompts[0].text == "<10+10=>"
    with pytest.raises(ValueError, match=r"set policy\.tokenizer\.chat_template to a Jinja file"):
        load_data(tiny_config(models["tied"], "data.prompt_mode=chat"))


def test_prompts_of_the_gate_are_neither_trained_nor_validated_on(models: dict[str, Path], tmp_path: Path) -> None:
    rows = write(tmp_path, *(f"d{n}" for n in range(60)))
    settings = ["data.task=null", rows, "data.validation_split=0.3"]
    plain = load_data(tiny_config(models["tied"], *settings))
    assert plain.gate == []
    jumps = ["grpo.next.enabled=true", "grpo.max_num_steps=100", "grpo.next.gate.num_prompts=16"]
    data = load_data(tiny_config(models["tied"], *settings, *jumps))
    assert len(data.gate) == 16
    assert {p.id for p in data.gate} | {p.id for p in data.prompts.prompts} == {p.id for p in plain.prompts.prompts}
    assert not {p.id for p in data.gate} & {p.id for p in (*data.prompts.prompts, *data.held_out)}
    assert data.held_out == plain.held_out
    assert load_data(tiny_config(models["tied"], *settings, *jumps)).gate == data.gate
    unmeasured = load_data(tiny_config(models["tied"], *settings, *jumps, "grpo.next.preset=paper", *PAPER_FITS))
    assert unmeasured.gate == []
    with pytest.raises(ValueError, match=r"grpo\.next\.gate\.num_prompts: 32 of 4\d training prompts would be set"):
        load_data(tiny_config(models["tied"], *settings, *jumps, "grpo.next.gate.num_prompts=32"))


def test_probes_fit_into_trainer_and_engine(models: dict[str, Path]) -> None:
    """Only prompts are limited in length: an answer may be a whole rationale."""
    for override, longest in (
        ("policy.max_total_sequence_length=40", 39),
        ("policy.generation.vllm_cfg.max_model_len=30", 29),
    ):
        config = tiny_config(models["tied"], override)
        tokenizer = load_data(config).tokenizer
        prompts = [Prompt("p", "ab", tokenizer.encode("ab"), "x" * length) for length in (1, 100)]
        short, long = probes_of(prompts, tokenizer, config)
        assert tokenizer.decode(short) == "abx"
        assert len(long) == longest


def test_a_prompt_of_the_gate_with_another_answer_is_not_trained_on(models: dict[str, Path], tmp_path: Path) -> None:
    rows = [{"prompt": f"d{n}", "answer": answer} for n in range(40) for answer in ("1", "2")]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    jumps = ["grpo.next.enabled=true", "grpo.max_num_steps=100", "grpo.next.gate.num_prompts=16"]
    data = load_data(
        tiny_config(models["tied"], "data.task=null", f"data.train_path={path}", "data.validation_split=0.2", *jumps)
    )
    assert len(data.gate) == 16
    assert not {p.text for p in data.gate} & {p.text for p in data.prompts.prompts}
