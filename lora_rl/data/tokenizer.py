"""A light tokenizer: reads a Hugging Face model directory without importing transformers (which costs seconds)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as _RustTokenizer


class Tokenizer:
    """Text <-> token ids, plus the few special tokens a training loop needs. Built by `load_tokenizer`.

    `eos_token_id` ends a completion; `eos_token` is its text. `pad_token_id` falls back to the end token
    for models that define no padding token, as padded positions are masked out everywhere.
    """

    def __init__(self, rust: _RustTokenizer, *, eos_token: str, pad_token: str, chat_template: str | None):
        self._rust = rust
        self.eos_token = eos_token
        self.eos_token_id: int = rust.token_to_id(eos_token)
        self.pad_token_id: int = rust.token_to_id(pad_token)
        self.chat_template = chat_template

    @property
    def vocab_size(self) -> int:
        """Tokens the tokenizer knows. A model's embedding may be padded to more rows."""
        return self._rust.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of `text`. Pass add_special_tokens=False for rendered chats, which bring their own."""
        return tuple(self._rust.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `token_ids`. Special tokens stay visible by default: a verifier must see them."""
        return self._rust.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """`messages` (dicts with `role` and `content`) as one text, through the model's own chat template.

        Raises ValueError when the model has no chat template or the template rejects the messages.
        """
        if self.chat_template is None:
            raise ValueError(
                "this model has no chat template (neither chat_template.jinja nor chat_template "
                "in tokenizer_config.json): use raw prompts"
            )
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_template_error
        try:
            return environment.from_string(self.chat_template).render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, eos_token=self.eos_token
            )
        except TemplateError as error:
            raise ValueError(f"the chat template rejected the messages: {error}") from error


def load_tokenizer(model_dir: str | Path) -> Tokenizer:
    """Read tokenizer.json, tokenizer_config.json and, if there is one, the chat template of a model directory.

    Raises FileNotFoundError for a missing file and ValueError for an end or padding token that is undefined
    or not in the vocabulary.
    """
    model_dir = Path(model_dir)
    tokenizer_file, config_file = model_dir / "tokenizer.json", model_dir / "tokenizer_config.json"
    for path in (tokenizer_file, config_file):
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: not a Hugging Face model directory with a tokenizer")
    rust = _RustTokenizer.from_file(str(tokenizer_file))
    config = json.loads(config_file.read_text())

    eos_token = _token_text(config.get("eos_token"))
    pad_token = _token_text(config.get("pad_token")) or eos_token
    for key, token in (("eos_token", eos_token), ("pad_token", pad_token)):
        if token is None or rust.token_to_id(token) is None:
            raise ValueError(f"{config_file}: {key} is {token!r}; it must be a token of {tokenizer_file.name}")

    template_file = model_dir / "chat_template.jinja"
    chat_template = template_file.read_text() if template_file.is_file() else config.get("chat_template")
    return Tokenizer(rust, eos_token=eos_token, pad_token=pad_token, chat_template=chat_template)


def _token_text(entry: str | dict[str, Any] | None) -> str | None:
    # Older tokenizer_config.json files store a token as {"content": ..., "lstrip": ...}.
    return entry["content"] if isinstance(entry, dict) else entry


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)
