"""Exact match with an integer or a text."""

import re

from lora_rl.rewards.types import RewardReason, RewardResult, failed, verdict

# The one way to write each integer: ASCII digits, no leading zeros, no plus sign, no minus zero.
_CANONICAL_INTEGER = re.compile(r"0|-?[1-9][0-9]*")


def check_integer(answer: str) -> None:
    """Raise ValueError when `answer` is not an integer in canonical form."""
    if not _CANONICAL_INTEGER.fullmatch(answer):
        raise ValueError(
            f"exact_match: the answer {answer!r} is not an integer in canonical form, such as '42'; for other texts "
            "set match: text"
        )


def exact_match(completion: str, answer: str, *, truncated: bool, end_token: str = "") -> RewardResult:
    """1.0 if the completion, less one `end_token` at its very end, is the answer and nothing else; else 0.0.

    Nothing is forgiven: spaces, leading zeros, text around the answer and a second end token all make the
    completion unparseable. A completion cut off by the length limit (`truncated`) never scores, since its
    next token might have changed the answer.

    Raises ValueError when `answer` is not an integer in canonical form: that is a fault of the data.
    """
    check_integer(answer)
    if truncated:
        return failed(RewardReason.TRUNCATED)
    text = completion.removesuffix(end_token)
    if text == answer:
        return verdict(True)
    return verdict(False) if _CANONICAL_INTEGER.fullmatch(text) else failed(RewardReason.UNPARSEABLE)


def match_integer(text: str, answer: str) -> RewardResult:
    """`exact_match` of an answer that was already extracted."""
    return exact_match(text, answer, truncated=False)


def check_text(answer: str) -> None:
    """Raise ValueError for an empty answer, which an empty completion would match."""
    if not answer:
        raise ValueError("exact_match: the answer is empty")


def match_text(text: str, answer: str) -> RewardResult:
    """1.0 if the text is the answer, character by character; an empty text is unparseable."""
    return verdict(text == answer) if text else failed(RewardReason.UNPARSEABLE)
