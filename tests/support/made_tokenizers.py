"""Small but real tokenizers with what models differ in: special tokens, where they are declared, chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT_WITH_BOS = "{{ bos_token }}" + CHATML


def write_tokenizer(
    folder: Path,
    *,
    adds_bos: bool = False,
    adds_eos: bool = False,
    config: dict[str, Any] | None = None,
    template: str | None = None,
) -> Path:
    """A byte-level tokenizer with ids 0-2 for padding, start and end.

    Args:
        adds_bos, adds_eos: whether the tokenizer puts them around every text by itself.
        config: tokenizer_config.json; None: start, end and padding token declared.
        template: chat_template.jinja; None: no such file.
    """
    special = [PAD, BOS, EOS]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(special + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    if adds_bos or adds_eos:
        around = f"{BOS} $A" if adds_bos else "$A"
        single = f"{around} {EOS}" if adds_eos else around
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[(BOS, 1), (EOS, 2)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    declared = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD} if config is None else config
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
