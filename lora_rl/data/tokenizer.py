"""A light tokenizer: reads a Hugging Face model directory without importing transformers (which costs seconds)."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as _RustTokenizer


class Tokenizer:
    """Text <-> token ids, plus the few special tokens a training loop needs. Built by `load_tokenizer`.

    `eos_token_id` ends a completion; `eos_token` is its text. `pad_token_id` falls back to the end token
    for models that define no padding token: masks go by length, never by id. `special_tokens` are the texts that
    a chat template may refer to, such as `bos_token`. `end_token_ids` are all that end a completion: chat models often
    have a second one in generation_config.json, at which vLLM stops, too.
    """

    def __init__(
        self,
        rust: _RustTokenizer,
        *,
        eos_token: str,
        pad_token: str,
        chat_template: str | None,
        special_tokens: Mapping[str, str] | None = None,
        end_token_ids: Iterable[int] = (),
    ):
        self._rust = rust
        self.eos_token = eos_token
        self.eos_token_id: int = rust.token_to_id(eos_token)
        self.pad_token_id: int = rust.token_to_id(pad_token)
        self.end_token_ids = frozenset({self.eos_token_id, *end_token_ids})
        self.chat_template = chat_template
        self.special_tokens = {**(special_tokens or {}), "eos_token": eos_token, "pad_token": pad_token}

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """What the tokenizer puts before a text by itself: the beginning-of-text token, or nothing."""
        alone, whole = (self.encode("a", add_special_tokens=special) for special in (False, True))
        starts = [i for i in range(len(whole)) if whole[i : i + len(alone)] == alone]
        return whole[: starts[0]] if alone and starts else ()

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
                "this model has no chat template (neither chat_template.jinja nor chat_template in "
                "tokenizer_config.json): set policy.tokenizer.chat_template to a Jinja file, or data.prompt_mode to raw"
            )
        try:
            return self._compiled_template.render(
                **self.special_tokens, messages=list(messages), add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template rejected the messages: {error}") from error

    @cached_property
    def _compiled_template(self) -> Template:
        # `strftime_now` is left undefined on purpose: prompts must not depend on the day.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_template_error
        environment.filters["tojson"] = _to_json
        return environment.from_string(self.chat_template or "")


def load_tokenizer(
    model_dir: str | Path, chat_template: str | Path | None = None, *, model: str | Path | None = None
) -> Tokenizer:
    """Read tokenizer.json, tokenizer_config.json and, if there is one, the chat template of a model directory.

    Special tokens that tokenizer_config.json leaves to the tokenizer's class, as those of GPT-2 do, are looked up in
    special_tokens_map.json, and the end token in generation_config.json and config.json.

    Args:
        chat_template: Jinja file to use instead of the model's own template.
        model: directory of the model whose generation_config.json names further end tokens; None: model_dir.

    Raises FileNotFoundError for a missing file, ValueError for one that is damaged, and for an end or padding token
    that is undefined or not in the vocabulary.
    """
    model_dir = Path(model_dir)
    tokenizer_file, config_file = model_dir / "tokenizer.json", model_dir / "tokenizer_config.json"
    for path in (tokenizer_file, config_file):
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: not a Hugging Face model directory with a tokenizer")
    try:
        rust = _RustTokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"{tokenizer_file}: not a file of the tokenizers library: {error}") from error
    config = _read_json(config_file)
    tokens = _special_tokens(_read_json(model_dir / "special_tokens_map.json")) | _special_tokens(config)

    eos_token = tokens.get("eos_token") or _end_token_of_model(rust, model_dir)
    pad_token = tokens.get("pad_token") or eos_token
    for key, token in (("eos_token", eos_token), ("pad_token", pad_token)):
        if token is None or rust.token_to_id(token) is None:
            raise ValueError(f"{config_file}: {key} is {token!r}; it must be a token of {tokenizer_file.name}")
    assert eos_token is not None and pad_token is not None
    return Tokenizer(
        rust,
        eos_token=eos_token,
        pad_token=pad_token,
        chat_template=_chat_template(model_dir, config, chat_template),
        special_tokens=tokens,
        end_token_ids=_end_ids(Path(model or model_dir) / "generation_config.json"),
    )


def _end_ids(file: Path) -> list[int]:
    ids = _read_json(file).get("eos_token_id")
    return [i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be a JSON object, not {type(content).__name__}")
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of `bos_token`, `eos_token` and their like."""
    texts = {key: _token_text(entry) for key, entry in config.items() if key.endswith("_token")}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _end_token_of_model(rust: _RustTokenizer, model_dir: Path) -> str | None:
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(model_dir / name).get("eos_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(first, int):
            return rust.id_to_token(first)
    return None


def _chat_template(model_dir: Path, config: Mapping[str, Any], chosen: str | Path | None) -> str | None:
    file = Path(chosen) if chosen is not None else model_dir / "chat_template.jinja"
    if chosen is not None or file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _token_text(entry: str | dict[str, Any] | None) -> str | None:
    # Older tokenizer_config.json files store a token as {"content": ..., "lstrip": ...}.
    return entry["content"] if isinstance(entry, dict) else entry


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)
