"""What a verifier returns."""

from dataclasses import dataclass
from enum import StrEnum


class RewardReason(StrEnum):
    """Why a completion got its reward. Only CORRECT ever comes with a positive value."""

    CORRECT = "correct"
    WRONG = "wrong"  # a well-formed answer, but another one
    UNPARSEABLE = "unparseable"  # not a well-formed answer
    TRUNCATED = "truncated"  # cut off by the length limit; what it says so far does not count


@dataclass(frozen=True)
class RewardResult:
    """The reward of one completion.

    Raises ValueError for a positive value whose reason is not CORRECT: rewards fail closed.
    """

    value: float
    reason: RewardReason

    def __post_init__(self) -> None:
        # `not <=` rather than `>`, so that NaN is refused as well.
        if self.reason is not RewardReason.CORRECT and not self.value <= 0.0:
            raise ValueError(f"a reward with reason {self.reason.value!r} cannot have the value {self.value}")
