import json
import shutil
from pathlib import Path

import pytest

from lora_rl.data import load_tokenizer

MODEL_DIR = Path(__file__).parents[3] / "examples" / "models" / "tiny-adder"


@pytest.fixture
def model_dir(tmp_path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL_DIR / name, tmp_path)
    return tmp_path


def edit_config(model_dir: Path, **changes) -> None:
    path = model_dir / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_round_trip_of_any_text():
    tokenizer = load_tokenizer(MODEL_DIR)
    text = "12+34= \n\t é 水"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())  # one token per byte
    assert tokenizer.decode(ids) == text


def test_special_tokens():
    tokenizer = load_tokenizer(MODEL_DIR)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (0, 1, 258)
    ids = (*tokenizer.encode("46"), tokenizer.eos_token_id)
    assert tokenizer.decode(ids) == "46<|end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "46"
    assert tokenizer.encode("46<|end|>") == ids


def test_a_single_user_message_equals_the_raw_prompt():
    tokenizer = load_tokenizer(MODEL_DIR)
    assert tokenizer.render_chat([{"role": "user", "content": "12+34="}]) == "12+34="


def test_chat_template_inside_the_config(model_dir):
    (model_dir / "chat_template.jinja").unlink()
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    edit_config(model_dir, chat_template=template + "{% if add_generation_prompt %}[assistant]{% endif %}")
    tokenizer = load_tokenizer(model_dir)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "[user]hi<|end|>[assistant]"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "[user]hi<|end|>"


def test_no_chat_template(model_dir):
    (model_dir / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(model_dir).render_chat([{"role": "user", "content": "hi"}])


def test_template_that_rejects_its_messages(model_dir):
    (model_dir / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="roles must alternate"):
        load_tokenizer(model_dir).render_chat([{"role": "user", "content": "hi"}])


def test_padding_falls_back_to_the_end_token(model_dir):
    edit_config(model_dir, pad_token=None, eos_token={"content": "<|end|>", "lstrip": False})
    tokenizer = load_tokenizer(model_dir)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1


@pytest.mark.parametrize("token", [None, "<|nope|>"])
def test_an_undefined_end_token_is_an_error(model_dir, token):
    edit_config(model_dir, eos_token=token)
    with pytest.raises(ValueError, match="eos_token is"):
        load_tokenizer(model_dir)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "tokenizer.json",
            "version https://git-lfs.github.com/spec/v1",
            "tokenizer.json: not a file of the tokenizers",
        ),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not JSON: "),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: must be a JSON object, not list"),
        ("generation_config.json", "}", "generation_config.json: not JSON: "),
    ],
)
def test_a_damaged_file_is_named(model_dir, file, content, message):
    (model_dir / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(model_dir)
