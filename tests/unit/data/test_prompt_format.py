"""What the model gets: chat template or raw text, template files, special tokens exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_rl.data import Tokenizer, load_tokenizer
from lora_rl.data.examples import Example
from lora_rl.data.prompt_format import PromptFormat, read_template, read_text
from tests.support.made_tokenizers import BOS, CHAT_WITH_BOS, CHATML, EOS, write_tokenizer

MESSAGES = ({"role": "system", "content": "S"}, {"role": "user", "content": "Q"})
BOS_ID, EOS_ID = 1, 2


def example(content: str | tuple = "Q") -> Example:
    return Example("id", content, "A", "data.jsonl, line 7", {"level": 1})


def decoded(tokenizer: Tokenizer, form: PromptFormat, content: str | tuple = "Q") -> str:
    prompt = form.prompt(example(content))
    text = tokenizer.decode(prompt.token_ids)
    assert text.removeprefix(BOS) == prompt.text.removeprefix(BOS)
    assert (prompt.id, prompt.answer, prompt.metadata) == ("id", "A", {"level": 1})
    return text


@pytest.mark.parametrize(
    ("adds_bos", "adds_eos", "content", "expected"),
    [
        (False, False, "Q", "Q"),
        (True, False, "Q", f"{BOS}Q"),
        (True, False, f"{BOS}Q", f"{BOS}Q"),  # not twice
        (False, False, f"{BOS}Q", f"{BOS}Q"),
        (True, True, "Q", f"{BOS}Q"),  # an end token after the prompt would end the completion before it begins
        (False, True, "Q", "Q"),
        (False, True, f"Q{EOS}", f"Q{EOS}"),  # the user's own
    ],
)
def test_raw_prompts_begin_once_and_do_not_end(tmp_path, adds_bos, adds_eos, content, expected) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, adds_bos=adds_bos, adds_eos=adds_eos))
    assert decoded(tokenizer, PromptFormat(tokenizer), content) == expected


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_chat_template_brings_its_own_beginning(tmp_path: Path, adds_bos: bool) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, adds_bos=adds_bos, template=CHAT_WITH_BOS))
    prompt = PromptFormat(tokenizer, "chat").prompt(example())
    assert prompt.text == f"{BOS}<|user|>Q{EOS}<|assistant|>"
    assert prompt.token_ids.count(BOS_ID) == 1 and prompt.token_ids[0] == BOS_ID
    assert prompt.token_ids.count(EOS_ID) == 1


def test_a_chat_template_without_a_beginning_gets_none(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, adds_bos=True, template=CHATML))
    assert decoded(tokenizer, PromptFormat(tokenizer, "chat")) == f"<|user|>Q{EOS}<|assistant|>"


def test_chats_with_system_message_and_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template=CHATML))
    form = PromptFormat(tokenizer, "chat", template="Solve {}!", system="Be brief.")
    expected = f"<|system|>Be brief.{EOS}<|user|>Solve Q!{EOS}<|assistant|>"
    assert decoded(tokenizer, form) == expected
    assert decoded(tokenizer, form, ({"role": "user", "content": "Q"},)) == expected
    with pytest.raises(ValueError, match=r"data\.jsonl, line 7: the messages begin with a system message"):
        form.prompt(example(MESSAGES))
    own = PromptFormat(tokenizer, "chat", template="Solve {}!")
    assert decoded(tokenizer, own, MESSAGES) == f"<|system|>S{EOS}<|user|>Solve Q!{EOS}<|assistant|>"
    assert MESSAGES[1]["content"] == "Q"  # rows are not changed


def test_mode_and_tokenizer_must_fit(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    message = r"data\.prompt_mode is chat.*set policy\.tokenizer\.chat_template to a Jinja file, or .* to raw"
    with pytest.raises(ValueError, match=message):
        PromptFormat(tokenizer, "chat")
    with pytest.raises(
        ValueError, match=r"line 7: the prompt is a list of messages, which needs data\.prompt_mode=chat"
    ):
        PromptFormat(tokenizer).prompt(example(MESSAGES))
    with pytest.raises(ValueError, match="a system message needs"):
        PromptFormat(tokenizer, system="S")


def test_a_chosen_template_replaces_the_models(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", template=CHATML)
    chosen = tmp_path / "chosen.jinja"
    chosen.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    tokenizer = load_tokenizer(folder, chosen)
    assert decoded(tokenizer, PromptFormat(tokenizer, "chat")) == "[Q]"


def test_a_template_that_rejects_a_row_names_it(tmp_path: Path) -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template=refusing))
    with pytest.raises(ValueError, match=r"data\.jsonl, line 7: the chat template rejected .*: no system role"):
        PromptFormat(tokenizer, "chat").prompt(example(MESSAGES))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "the chat template rejected the messages: "),
        ("{{ messages[0].content + 1 }}", "the chat template rejected the messages: can only concatenate str"),
        ("{{ strftime_now('%d') }}{{ messages[0].content }}", "'strftime_now' is undefined"),
        ("", "no token is left of the prompt ''"),
    ],
)
def test_templates_that_do_not_work(tmp_path: Path, template: str, message: str) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template=template))
    with pytest.raises(ValueError, match=rf"data\.jsonl, line 7: .*{message}"):
        PromptFormat(tokenizer, "chat").prompt(example())


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("{}=\n", "Q="),
        ("{}", "Q"),
        ("1+1=2\n\n{}=\n\n", "1+1=2\n\nQ=\n"),  # one line break at the end goes
        ("Put it into \\boxed{{}}: {}", "Put it into \\boxed{}: Q"),
        ("\ufeff{}", "Q"),
    ],
)
def test_template_files(tmp_path: Path, text: str, filled: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(text, encoding="utf-8")
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    assert PromptFormat(tokenizer, template=read_template(path)).prompt(example()).text == filled
    braces = PromptFormat(tokenizer, template=read_template(path)).prompt(example("{x} {}")).text
    assert braces == filled.replace("Q", "{x} {}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no field", r"prompt\.txt: it has no {}; write {} once"),
        ("{} and {}", r"it has {}, {}; write {} once"),
        ("{question}", r"it has {question}; write {} once"),
        ("{:>5}", r"write {} once"),
        ("{!r}", r"write {} once"),
        ("{} \\boxed{", r"prompt\.txt: .*; write {} once"),
        ("{} }", r"prompt\.txt: .*; write {} once"),
        (" \n", r"prompt\.txt: the file is empty"),
    ],
)
def test_wrong_template_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_template(path)


def test_a_template_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "system.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"system\.txt: not UTF-8"):
        read_text(path)
