"""Verifiers as the configuration describes them: extraction and truncation around the comparison."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lora_rl.rewards.extract import AnswerExtractor, PatternTimeout, matches_whole
from lora_rl.rewards.types import RewardReason, RewardResult, ScoreRequest, Verifier, failed, verdict

if TYPE_CHECKING:
    from lora_rl.config.schema import VerifierConfig

# Those that may not end, need seconds to import or are not ours. The others take microseconds and run in the driver.
POOLED = frozenset({"math_verify", "reasoning_gym", "function"})
# Imported once, before workers are forked.
PRELOADED = {"math_verify": "lora_rl.rewards.math_expression", "reasoning_gym": "lora_rl.rewards.reasoning"}


@dataclass(frozen=True)
class AnswerVerifier:
    """Extracts the answer and compares it; a truncated completion never scores.

    Attributes:
        extractor: finds the answer.
        compare: (answer found, request) -> result.
        check_answer: raises ValueError for a right answer that cannot be used.
        max_chars: longer answers are unparseable.
    """

    extractor: AnswerExtractor
    compare: Callable[[str, ScoreRequest], RewardResult]
    check_answer: Callable[[ScoreRequest], None]
    max_chars: int

    def check(self, request: ScoreRequest) -> None:
        self.check_answer(request)

    def score(self, request: ScoreRequest) -> RewardResult:
        if request.truncated:
            return failed(RewardReason.TRUNCATED)
        try:
            found = self.extractor(request.completion)
        except PatternTimeout:
            return failed(RewardReason.TIMED_OUT, "answer_pattern backtracks without end; make it simpler")
        if found is None or len(found) > self.max_chars:
            return failed(RewardReason.UNPARSEABLE)
        return self.compare(found, request)


@dataclass(frozen=True)
class FormatVerifier:
    """1.0 if the whole completion matches the pattern, else 0.0.

    Attributes:
        pattern: regular expression (package `regex`); `.` matches line breaks.
        score_truncated: whether completions that were cut off are looked at.
    """

    pattern: str
    score_truncated: bool

    def check(self, request: ScoreRequest) -> None:
        """Every example will do."""

    def score(self, request: ScoreRequest) -> RewardResult:
        if request.truncated and not self.score_truncated:
            return failed(RewardReason.TRUNCATED)
        try:
            return verdict(matches_whole(self.pattern, request.completion))
        except PatternTimeout:
            return failed(RewardReason.TIMED_OUT, "pattern backtracks without end; make it simpler")


@dataclass(frozen=True)
class CompleteOnly:
    """Another verifier, for completions that were not cut off."""

    verifier: Verifier

    def check(self, request: ScoreRequest) -> None:
        self.verifier.check(request)

    def score(self, request: ScoreRequest) -> RewardResult:
        return failed(RewardReason.TRUNCATED) if request.truncated else self.verifier.score(request)


def build_verifier(config: VerifierConfig, max_chars: int) -> Verifier:
    """The verifier of a section whose options fit.

    Args:
        max_chars: longest answer that is parsed.

    Raises:
        RewardError: a function that cannot be loaded.
    """
    if config.name == "format":
        assert config.pattern is not None
        return FormatVerifier(config.pattern, bool(config.score_truncated))
    if config.name == "function":
        from lora_rl.rewards.function import FunctionVerifier

        assert config.function is not None
        function = FunctionVerifier(config.function)
        return function if config.score_truncated else CompleteOnly(function)
    extractor = AnswerExtractor(config.answer_from or "whole", config.answer_pattern or "", config.answer_marker or "")
    return AnswerVerifier(extractor, *_comparison(config), max_chars)


def warm_up(name: str) -> None:
    """Import what a verifier needs, and let it build what it caches."""
    if name in PRELOADED:
        importlib.import_module(PRELOADED[name]).warm_up()


_Compare = Callable[[str, ScoreRequest], RewardResult]


def _comparison(config: VerifierConfig) -> tuple[_Compare, Callable[[ScoreRequest], None]]:
    if config.name == "reasoning_gym":
        from lora_rl.rewards.reasoning import check_task, match_task

        return partial(match_task, partial_credit=bool(config.partial_credit)), check_task
    if config.name == "math_verify":
        from lora_rl.rewards.math_expression import check_expression, match_expression

        cut_out = (config.answer_from or "whole") != "whole"
        return _texts(partial(match_expression, bare=cut_out), check_expression)
    if config.name == "numeric":
        from lora_rl.rewards.numeric import check_number, match_number

        options = {"which": config.number or "whole", "atol": config.atol or 0.0, "rtol": config.rtol or 0.0}
        return _texts(partial(match_number, **options), check_number)
    from lora_rl.rewards.exact_match import check_integer, check_text, match_integer, match_text

    return _texts(match_text, check_text) if config.match == "text" else _texts(match_integer, check_integer)


def _texts(compare: Callable[[str, str], RewardResult], check: Callable[[str], None]) -> tuple[_Compare, Callable]:
    """A comparison of two texts as one of a text and a request."""
    return lambda text, request: compare(text, request.answer), lambda request: check(request.answer)
