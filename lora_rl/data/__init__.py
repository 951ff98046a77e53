"""Prompt sources, tokenisation and the resumable data cursor. Imports neither torch nor transformers."""

from lora_rl.data.addition import addition_pairs, addition_prompts
from lora_rl.data.hub import fetch_model, model_folder
from lora_rl.data.load import drop_too_long, load_prompts
from lora_rl.data.source import Prompt, PromptSource
from lora_rl.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Prompt",
    "PromptSource",
    "Tokenizer",
    "addition_pairs",
    "addition_prompts",
    "drop_too_long",
    "fetch_model",
    "load_prompts",
    "load_tokenizer",
    "model_folder",
]
