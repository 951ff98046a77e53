"""From a question to the tokens that the model gets: template, system message, chat template or raw text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Literal

from lora_rl.data.examples import Example, Message, shorten
from lora_rl.data.source import Prompt
from lora_rl.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptFormat:
    """How prompts look to the model.

    Attributes:
        tokenizer: of the model.
        mode: `raw` for the text itself, `chat` for what the model's chat template makes of it.
        template: text with one `{}`, where the question goes (in a chat, into the last message); None: the question
            alone. Braces that are meant are doubled, as in `str.format`.
        system: text of a system message before each chat; None: none.

    Raises ValueError for mode `chat` with a tokenizer that has no chat template, and for a system message in mode
    `raw`.
    """

    tokenizer: Tokenizer
    mode: Literal["raw", "chat"] = "raw"
    template: str | None = None
    system: str | None = None

    def __post_init__(self) -> None:
        if self.mode == "chat" and self.tokenizer.chat_template is None:
            raise ValueError(
                "data.prompt_mode is chat, but the tokenizer has no chat template: set policy.tokenizer.chat_template "
                "to a Jinja file, or data.prompt_mode to raw"
            )
        if self.mode == "raw" and self.system is not None:
            raise ValueError("a system message needs data.prompt_mode=chat")

    def prompt(self, example: Example) -> Prompt:
        """The prompt of an example.

        Raises ValueError, naming where the example stands, if mode and example do not go together.
        """
        try:
            text = self._text(example.content)
        except ValueError as error:
            raise ValueError(f"{example.where}: {error}") from error
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if self.mode == "raw" and ids[: len(self.tokenizer.prefix_ids)] != self.tokenizer.prefix_ids:
            # A chat template brings its own special tokens, and so does a text that begins with them.
            ids = self.tokenizer.prefix_ids + ids
        if not ids:
            raise ValueError(f"{example.where}: no token is left of the prompt {shorten(text)}")
        return Prompt(id=example.id, text=text, token_ids=ids, answer=example.answer, metadata=example.metadata)

    def prompts(self, examples: Sequence[Example]) -> list[Prompt]:
        """The prompts of examples, in their order."""
        return [self.prompt(example) for example in examples]

    def _text(self, content: str | tuple[Message, ...]) -> str:
        if self.mode == "raw":
            if not isinstance(content, str):
                raise ValueError("the prompt is a list of messages, which needs data.prompt_mode=chat")
            return self._fill(content)
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        messages[-1] = messages[-1] | {"content": self._fill(messages[-1]["content"])}
        if self.system is not None:
            if messages[0]["role"] == "system":
                raise ValueError("the messages begin with a system message; data.system_prompt_file would be a second")
            messages.insert(0, {"role": "system", "content": self.system})
        return self.tokenizer.render_chat(messages)

    def _fill(self, question: str) -> str:
        return question if self.template is None else self.template.format(question)


def read_template(path: Path) -> str:
    """A prompt template, less one line break at its end, which editors add.

    Raises ValueError, naming the file, unless it has exactly one `{}`.
    """
    text = read_text(path)
    advice = "write {} once, where the prompt goes, and double every other brace: {{ and }}"
    try:
        fields = [field for field in Formatter().parse(text) if field[1] is not None]
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {advice}") from error
    if [field[1:] for field in fields] != [("", "", None)]:
        found = ", ".join(f"{{{name}}}" for _, name, _, _ in fields) or "no {}"
        raise ValueError(f"{path}: it has {found}; {advice}")
    return text


def read_text(path: Path) -> str:
    """A text file, less one line break at its end.

    Raises ValueError, naming the file, for an empty one and for one that is not UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}") from error
    if not text.strip():
        raise ValueError(f"{path}: the file is empty")
    return text.removesuffix("\n").removesuffix("\r")
