"""Exact match of a whole completion with an integer answer."""

import re
from collections.abc import Sequence

from lora_rl.rewards.types import RewardReason, RewardResult

# The one way to write each integer: ASCII digits, no leading zeros, no plus sign, no minus zero.
_CANONICAL_INTEGER = re.compile(r"0|-?[1-9][0-9]*")


def exact_match(completion: str, answer: str, *, truncated: bool, end_token: str = "") -> RewardResult:
    """1.0 if the completion, less one `end_token` at its very end, is the answer and nothing else; else 0.0.

    Nothing is forgiven: spaces, leading zeros, text around the answer and a second end token all make the
    completion unparseable. A completion cut off by the length limit (`truncated`) never scores, since its
    next token might have changed the answer.

    Raises ValueError when `answer` is not an integer in canonical form: that is a fault of the data.
    """
    if not _CANONICAL_INTEGER.fullmatch(answer):
        raise ValueError(f"exact_match: the answer {answer!r} is not an integer in canonical form, such as '42'")
    if truncated:
        return RewardResult(0.0, RewardReason.TRUNCATED)
    text = completion.removesuffix(end_token)
    if text == answer:
        return RewardResult(1.0, RewardReason.CORRECT)
    if _CANONICAL_INTEGER.fullmatch(text):
        return RewardResult(0.0, RewardReason.WRONG)
    return RewardResult(0.0, RewardReason.UNPARSEABLE)


def score_batch(
    completions: Sequence[str], answers: Sequence[str], truncated: Sequence[bool], *, end_token: str = ""
) -> list[RewardResult]:
    """`exact_match` for each of N completions; three sequences of length N, results in their order.

    Raises ValueError when the lengths differ.
    """
    if not len(completions) == len(answers) == len(truncated):
        raise ValueError(
            f"score_batch: {len(completions)} completions, {len(answers)} answers and {len(truncated)} "
            "truncation flags; there must be one of each per completion"
        )
    return [
        exact_match(completion, answer, truncated=cut, end_token=end_token)
        for completion, answer, cut in zip(completions, answers, truncated, strict=True)
    ]
