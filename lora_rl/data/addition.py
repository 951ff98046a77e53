"""Addition of two numbers: a task that is procedural, exactly verifiable and learnable by a tiny model."""

import random

from lora_rl.data.examples import Example
from lora_rl.data.prompt_format import PromptFormat
from lora_rl.data.source import Prompt
from lora_rl.data.tokenizer import Tokenizer


def addition_pairs(
    digits: int = 2, held_out_pairs: int = 810, split_seed: int = 0
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All ordered pairs of `digits`-digit numbers, split into (train, held out).

    One shuffle by `split_seed` is cut in two: the parts are disjoint and complete by construction. Pairs are
    ordered, so 12+34 may be held out while 34+12 is trained on. Each part is returned in ascending order.

    Raises ValueError for digits outside 1..3 (all pairs are held in memory) and for held_out_pairs that leave
    either part empty.
    """
    if not 1 <= digits <= 3:
        raise ValueError(f"addition: digits is {digits}; valid are 1, 2 and 3")
    numbers = range(0 if digits == 1 else 10 ** (digits - 1), 10**digits)
    pairs = [(a, b) for a in numbers for b in numbers]
    if not 0 < held_out_pairs < len(pairs):
        raise ValueError(f"addition: held_out_pairs is {held_out_pairs}; valid are 1..{len(pairs) - 1}")
    random.Random(split_seed).shuffle(pairs)
    return sorted(pairs[held_out_pairs:]), sorted(pairs[:held_out_pairs])


def addition_examples(
    digits: int = 2, held_out_pairs: int = 810, split_seed: int = 0
) -> tuple[list[Example], list[Example]]:
    """The questions `a+b=` with their sums as answers: (train, held out). Arguments as in `addition_pairs`."""
    train, held_out = addition_pairs(digits, held_out_pairs, split_seed)
    return [_example(a, b) for a, b in train], [_example(a, b) for a, b in held_out]


def addition_prompts(
    tokenizer: Tokenizer, digits: int = 2, held_out_pairs: int = 810, split_seed: int = 0
) -> tuple[list[Prompt], list[Prompt]]:
    """The same as raw prompts: (train, held out)."""
    train, held_out = addition_examples(digits, held_out_pairs, split_seed)
    raw = PromptFormat(tokenizer)
    return raw.prompts(train), raw.prompts(held_out)


def _example(a: int, b: int) -> Example:
    name = f"addition/{a}+{b}"
    return Example(name, f"{a}+{b}=", str(a + b), where=name, metadata={"a": a, "b": b})
