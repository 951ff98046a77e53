"""Answers that models come up with and verifiers choke on; none of them is worth any of `GOLDS`."""

from __future__ import annotations

import random

# Far from what a few random digits make. None has a digit, or a form, that the fragments below could yield by chance.
GOLDS = ("7310462", r"\frac{7310462}{13}", "7310462.5", r"\sqrt{7310462}", r"\{7310462, 13\}", "7310462x + 13")

_LATEX = (
    r"\frac{", r"\sqrt[", r"\boxed{", "{", "}", "^", "_", "$", "$$", r"\left(", r"\right)", r"\begin{pmatrix}",
    r"\end{pmatrix}", "&", r"\\", r"\text{", r"\infty", r"\pi", r"\sum_", r"\int", r"\lim_{x \to", r"\cdot", "=",
    r"\ne", r"\in", r"\{", r"\}", ",", "x", "y", "1", "2", "0", "-", "+", "/", "%", r"\%", "!", "answer is", "I hope",
    "(", ")", "[", "]", "|", "<", ">", ".", "e", "i", "nan", "inf",
)  # fmt: skip
_UNICODE = "\u0664\u00b2\u221e\u2212\u00d7\u200b\u202e\ufffd\U0001d7ce\u2044\u00bd\u0000\u000b\ud7ff\U0010ffff\u0301"


def malformed_answers(rng: random.Random, count: int) -> list[str]:
    """So many answers, of every kind in turn; the same for the same state of the generator."""
    kinds = (_bytes, _unicode, _braces, _digits, _latex, _latex, _numbers, _text)
    return [kinds[n % len(kinds)](rng) for n in range(count)]


def _bytes(rng: random.Random) -> str:
    return rng.randbytes(rng.randint(0, 200)).decode("utf-8", "replace")


def _unicode(rng: random.Random) -> str:
    return "".join(rng.choice(_UNICODE + "7310462 $\\{}") for _ in range(rng.randint(1, 6)))


def _braces(rng: random.Random) -> str:
    depth = rng.randint(1, 200)
    inner = rng.choice(("", "1", "x", "\\frac", "^"))
    return rng.choice(("", "$", "\\boxed")) + "{" * depth + inner + "}" * (depth + rng.randint(-1, 1))


def _digits(rng: random.Random) -> str:
    # More digits than any right answer has.
    return "".join(rng.choice("0123456789") for _ in range(rng.choice((20, 100, 500, 1000)))) + rng.choice(
        ("", ".", "!")
    )


def _latex(rng: random.Random) -> str:
    body = "".join(rng.choice(_LATEX) for _ in range(rng.randint(1, 25)))
    return rng.choice(("", "$", "\\boxed{")) + body + rng.choice(("", "$", "}"))


def _numbers(rng: random.Random) -> str:
    return rng.choice(
        (
            "1e400",
            "-1e-400",
            "nan",
            "NaN",
            "-inf",
            "0x6f8c3e",
            "1_000",
            "1,00",
            "++1",
            "1e",
            ".",
            "-",
            "1/0",
            "0/0",
            "0^0",
        )
    )


def _text(rng: random.Random) -> str:
    words = ("the", "answer", "is", "not", "known", "None", "True", "[]", "{}", "maybe", "seven", "million", "\n", "\t")
    return " ".join(rng.choice(words) for _ in range(rng.randint(0, 30)))
