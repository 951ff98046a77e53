"""From configuration to prompts: the split cannot leak, prompts that do not fit are reported, answers are masked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rl.config.schema import DataConfig
from lora_rl.data import Prompt, PromptSource, drop_too_long, load_prompts, load_tokenizer
from lora_rl.data.examples import Example, keep_apart, split_examples
from lora_rl.rollout.types import batch_of_sequences
from tests.support.made_tokenizers import CHATML, EOS, PAD, write_tokenizer

TEXT = st.text(min_size=1).filter(lambda text: text.strip())
MESSAGES = TEXT.map(lambda text: ({"role": "user", "content": text},))
CHATS = st.lists(TEXT, min_size=2, max_size=3).map(lambda ts: tuple({"role": "user", "content": t} for t in ts))


def examples_of(contents: list) -> list[Example]:
    return [Example(str(n), content, str(n), f"line {n}") for n, content in enumerate(contents)]


def silent(message: str) -> None:
    raise AssertionError(f"unexpected warning: {message}")


@given(
    st.lists(st.one_of(TEXT, MESSAGES, CHATS), min_size=1, max_size=30).flatmap(
        lambda texts: st.lists(st.sampled_from(texts), min_size=1, max_size=60)
    ),
    st.floats(0.01, 0.99),
)
def test_no_prompt_is_on_both_sides(contents: list, fraction: float) -> None:
    examples = examples_of(contents)
    try:
        train, held_out = split_examples(examples, fraction)
    except ValueError as error:
        assert "leaves none to" in str(error)
        return
    assert {e.id for e in train} | {e.id for e in held_out} == {e.id for e in examples}
    assert len(train) + len(held_out) == len(examples)
    assert not {e.key for e in train} & {e.key for e in held_out}


@given(TEXT, st.sampled_from(["", " ", "\n"]))
def test_a_prompt_is_the_same_as_a_message_and_with_blanks(text: str, blank: str) -> None:
    plain, padded, message = examples_of([text, blank + text + blank, ({"role": "user", "content": text + blank},)])
    assert plain.key == padded.key == message.key


def test_the_split_has_about_its_share_and_stays_when_the_file_grows() -> None:
    examples = examples_of([f"question {n}" for n in range(4000)])
    _, held_out = split_examples(examples, 0.1)
    assert 330 < len(held_out) < 470
    _, more = split_examples(examples_of([f"question {n}" for n in range(3000, 8000)]), 0.1)
    shared = {f"question {n}" for n in range(3000, 4000)}
    assert {e.key for e in held_out} & shared == {e.key for e in more} & shared
    _, wider = split_examples(examples, 0.2)
    assert {e.id for e in held_out} < {e.id for e in wider}
    assert split_examples(examples, 0.0) == (examples, [])


@pytest.mark.parametrize(("fraction", "side"), [(1e-9, "validate on"), (1 - 1e-9, "train on")])
def test_a_split_that_leaves_a_side_empty(fraction: float, side: str) -> None:
    with pytest.raises(ValueError, match=rf"of 3 examples leaves none to {side}"):
        split_examples(examples_of(["a", "b", "c"]), fraction)


def test_overlap_is_refused_or_dropped() -> None:
    train, held_out = examples_of(["a", "b ", "c", "b"]), examples_of(["b", "d"])
    with pytest.raises(ValueError, match=r"2 of 4 training prompts .* line 1 \('b'\), which is line 0: remove them"):
        keep_apart(train, held_out, drop_overlap=False, warn=silent)
    warnings: list[str] = []
    assert [e.key for e in keep_apart(train, held_out, drop_overlap=True, warn=warnings.append)] == ["a", "c"]
    assert len(warnings) == 1 and warnings[0].startswith("2 of 4 training prompts") and "left out" in warnings[0]
    with pytest.raises(ValueError, match="none would be left to train on"):
        keep_apart(held_out, held_out, drop_overlap=True, warn=silent)
    assert keep_apart(train, examples_of(["x"]), drop_overlap=False, warn=silent) == train


def prompts_of(*lengths: int) -> list[Prompt]:
    return [Prompt(f"p{n}", "x" * n, (3,) * n, "1") for n in lengths]


def test_prompts_that_do_not_fit_are_reported_and_left_out() -> None:
    warnings: list[str] = []
    kept = drop_too_long(prompts_of(3, 9, 5, 6), 5, "limit 10 - 5", warnings.append)
    assert [p.id for p in kept] == ["p3", "p5"]
    (warning,) = warnings
    assert warning.startswith(
        "2 of 4 prompts have more than 5 tokens (limit 10 - 5); the longest has 9: p9 ('xxxxxxxxx')"
    )
    assert drop_too_long(prompts_of(5, 4), 5, "", silent) == prompts_of(5, 4)
    assert drop_too_long([], 5, "", silent) == []
    with pytest.raises(ValueError, match=r"2 of 2 prompts have more than 1 tokens .* None is left: raise the limit"):
        drop_too_long(prompts_of(2, 3), 1, "", silent)
    with pytest.raises(ValueError, match="the longest has 10"):
        drop_too_long(prompts_of(4), 5, "", silent, length=lambda p: len(p.token_ids) + 6)


def write_rows(path: Path, *prompts: str) -> str:
    path.write_text("".join(json.dumps({"q": p, "a": p.upper(), "n": len(p)}) + "\n" for p in prompts))
    return str(path)


def test_files_become_prompts(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template=CHATML))
    (tmp_path / "prompt.txt").write_text("Say {}\n")
    (tmp_path / "system.txt").write_text("Loudly.\n")
    data = DataConfig(
        task=None,
        train_path=write_rows(tmp_path / "train.jsonl", "one", "two", "three"),
        val_path=write_rows(tmp_path / "val.jsonl", "four"),
        input_key="q",
        output_key="a",
        prompt_mode="chat",
        prompt_file=str(tmp_path / "prompt.txt"),
        system_prompt_file=str(tmp_path / "system.txt"),
    )
    train, held_out = load_prompts(data, tokenizer, silent)
    assert [(p.answer, p.metadata) for p in train] == [("ONE", {"n": 3}), ("TWO", {"n": 3}), ("THREE", {"n": 5})]
    assert [p.text for p in held_out] == [f"<|system|>Loudly.{EOS}<|user|>Say four{EOS}<|assistant|>"]
    assert tokenizer.decode(train[0].token_ids) == train[0].text
    with pytest.raises(ValueError, match=r"1 of 3 training prompts .*train\.jsonl, line 2 \('two'\)"):
        load_prompts(data.model_copy(update={"val_path": write_rows(tmp_path / "val.jsonl", "two")}), tokenizer, silent)
    split = data.model_copy(update={"val_path": None, "validation_split": 0.5})
    split = split.model_copy(update={"train_path": write_rows(tmp_path / "many.jsonl", *map(str, range(50)))})
    train, held_out = load_prompts(split, tokenizer, silent)
    assert len(train) + len(held_out) == 50 and min(len(train), len(held_out)) > 10


def test_addition_as_chat(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template=CHATML))
    train, held_out = load_prompts(DataConfig(prompt_mode="chat"), tokenizer, silent)
    assert (len(train), len(held_out)) == (7290, 810)
    assert train[0].text == f"<|user|>10+10={EOS}<|assistant|>"


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": (4,)},
        {"answer": "x"},
        {"id": "other"},
        {"metadata": {"tests": ["assert f(1) == 2"]}},
    ],
)
def test_a_resume_with_other_data_is_refused(change: dict) -> None:
    prompts = [Prompt(str(n), "text", (n,), "a", {"level": n}) for n in range(3)]
    state = PromptSource(prompts).state_dict()
    PromptSource([Prompt(p.id, p.text, p.token_ids, p.answer, dict(p.metadata)) for p in prompts]).load_state_dict(
        state
    )
    changed = Prompt(**{**vars(prompts[1]), **change})
    for others in ([prompts[0], changed, prompts[2]], [prompts[1], prompts[0], prompts[2]], prompts[:2]):
        with pytest.raises(ValueError, match="belongs to other prompts"):
            PromptSource(others).load_state_dict(state)


def test_fewer_prompts_than_a_batch_resume_in_mid_epoch() -> None:
    def source() -> PromptSource:
        return PromptSource(prompts_of(1, 2, 3), seed=4)

    whole, first = source(), source()
    batches = [[p.id for p in whole.next_batch(8)] for _ in range(5)]
    assert all(set(batch) == {"p1", "p2", "p3"} for batch in batches)
    for _ in range(2):
        first.next_batch(8)
    state = json.loads(json.dumps(first.state_dict()))
    assert (state["epoch"], state["position"]) == (5, 1)
    second = source()
    second.load_state_dict(state)
    assert [[p.id for p in second.next_batch(8)] for _ in range(3)] == batches[2:]


@pytest.mark.parametrize("pad", [None, EOS], ids=["no pad token", "pad is the end token"])
def test_the_end_token_is_trained_on_although_it_pads(tmp_path: Path, pad: str | None) -> None:
    config = {"eos_token": EOS} | ({} if pad is None else {"pad_token": pad})
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, config=config))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    sequences = [(*tokenizer.encode(text), tokenizer.eos_token_id) for text in ("1+1=2", "20+21=41")]
    batch = batch_of_sequences(sequences, [4, 6])
    assert batch.lengths.tolist() == [6, 9]
    assert batch.global_tokens == (1 + 1) + (2 + 1)  # each answer with its end token, and no padding
    assert batch.token_ids[0, 5] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"eos_token": EOS, "pad_token": PAD}, {}),
        ({"model_max_length": 1024}, {"special_tokens_map.json": {"eos_token": {"content": EOS}, "pad_token": PAD}}),
        ({"pad_token": PAD}, {"generation_config.json": {"eos_token_id": [2, 0]}, "config.json": {"eos_token_id": 1}}),
        ({"pad_token": PAD, "eos_token": None}, {"config.json": {"eos_token_id": 2}}),
    ],
)
def test_where_special_tokens_are_declared(tmp_path: Path, config: dict, files: dict) -> None:
    write_tokenizer(tmp_path, config=config)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == (EOS, 2, 0)


def test_of_several_templates_the_default_is_taken_and_json_is_not_escaped(tmp_path: Path) -> None:
    templates = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}"},
    ]
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, config={"eos_token": EOS, "chat_template": templates}))
    messages = [{"role": "user", "content": "<é> & 'x'"}, {"role": "user", "content": "not shown"}]
    assert tokenizer.render_chat(messages) == '{"role": "user", "content": "<é> & \'x\'"}'
