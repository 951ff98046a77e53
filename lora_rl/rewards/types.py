"""What is scored, and what scoring returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class RewardError(ValueError):
    """Rewards cannot be computed at all: a fault of the data, of a function, or of the machine, never of an answer."""


class RewardReason(StrEnum):
    """Why a completion got its reward. Only CORRECT and PARTIAL ever come with a positive value."""

    CORRECT = "correct"
    PARTIAL = "partial"  # a value between 0 and 1, from a verifier that was asked to give such
    WRONG = "wrong"  # a well-formed answer, but another one
    UNPARSEABLE = "unparseable"  # not a well-formed answer
    TRUNCATED = "truncated"  # cut off by the length limit; what it says so far does not count
    TIMED_OUT = "timed_out"  # scoring it took longer than `reward.timeout_s`
    WORKER_DIED = "worker_died"  # the process that scored it died, twice
    ERROR = "error"  # the verifier raised an exception
    INVALID_VALUE = "invalid_value"  # a function returned None, NaN, infinity or something that is no reward


_POSITIVE = (RewardReason.CORRECT, RewardReason.PARTIAL)


@dataclass(frozen=True)
class ScoreRequest:
    """One completion and what a verifier may want to know.

    Attributes:
        completion: its text, without the end token.
        answer: the right answer, as the data have it.
        truncated: whether it was cut off, by the length limit or by the engine.
        prompt: the text it continues.
        metadata: the prompt's; what crosses a process border must be picklable.
    """

    completion: str
    answer: str
    truncated: bool = False
    prompt: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardResult:
    """One verifier's reward of one completion.

    Attributes:
        value: the reward; 0.0 is a reward like any other.
        reason: why.
        components: parts of the value that a function reports besides, by name; not added to it.
        message: what went wrong, for reasons that are faults.

    A reason may be given as its text. Raises ValueError for another text, and for a positive value whose reason is
    neither CORRECT nor PARTIAL: rewards fail closed.
    """

    value: float
    reason: RewardReason
    components: Mapping[str, float] = field(default_factory=dict)
    message: str = ""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "reason", RewardReason(self.reason))
        except ValueError:
            valid = ", ".join(RewardReason)
            raise ValueError(f"a reward cannot have the reason {self.reason!r}; valid are {valid}") from None
        # `not <=` rather than `>`, so that NaN is refused as well.
        if self.reason not in _POSITIVE and not self.value <= 0.0:
            raise ValueError(f"a reward with reason {self.reason.value!r} cannot have the value {self.value}")


@dataclass(frozen=True)
class Score:
    """The reward of one completion over all verifiers.

    Attributes:
        value: sum of weight x value.
        reason: that of the first verifier, which accuracy is measured by.
        components: value of each verifier, before its weight, and of the parts it reports as `<label>/<part>`.
    """

    value: float
    reason: RewardReason
    components: dict[str, float] = field(default_factory=dict)


class Verifier(Protocol):
    """Scores completions. Never raises for a bad completion; `check` raises ValueError for bad data."""

    def check(self, request: ScoreRequest) -> None:
        """Raise ValueError if the right answer, or the metadata, cannot be used. The completion is not looked at."""
        ...

    def score(self, request: ScoreRequest) -> RewardResult:
        """The reward. Undefined if `check` raises."""
        ...


def verdict(right: bool) -> RewardResult:
    """1 and CORRECT, or 0 and WRONG."""
    return RewardResult(1.0, RewardReason.CORRECT) if right else RewardResult(0.0, RewardReason.WRONG)


def failed(reason: RewardReason, message: str = "") -> RewardResult:
    """0 for a reason that is not an answer."""
    return RewardResult(0.0, reason, message=message)
