"""`reward`: how completions are scored, by one verifier or a weighted sum of several."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from lora_rl.config.schema.base import Section

VerifierName = Literal["exact_match", "numeric", "math_verify", "reasoning_gym", "format", "function"]
AnswerFrom = Literal["whole", "regex", "boxed", "marker"]

_EXTRACTION = ("answer_from", "answer_pattern", "answer_marker")
# The options each verifier has; any other must stay null.
OPTIONS: dict[str, tuple[str, ...]] = {
    "exact_match": ("match", *_EXTRACTION),
    "numeric": ("number", "atol", "rtol", *_EXTRACTION),
    "math_verify": _EXTRACTION,
    "reasoning_gym": ("partial_credit", *_EXTRACTION),
    "format": ("pattern", "score_truncated"),
    "function": ("function", "score_truncated"),
}


class VerifierConfig(Section):
    """One verifier with its options. Null options stand at the verifier's default, which the description names."""

    name: VerifierName = Field("exact_match", description="Verifier, see docs/rewards.md.")
    weight: PositiveFloat = Field(1.0, description="Factor of this verifier's score in the reward.")
    label: str | None = Field(None, description="Its name in the metrics, reward/<label>; null: the verifier's name.")
    match: Literal["integer", "text"] | None = Field(
        None, description="exact_match: what answers are; integer: canonical integers, which is null too."
    )
    number: Literal["whole", "first", "last"] | None = Field(
        None, description="numeric: the number is the whole answer (null too), or the first or last one in it."
    )
    atol: NonNegativeFloat | None = Field(None, description="numeric: absolute error that is accepted; null: 0.")
    rtol: NonNegativeFloat | None = Field(
        None, description="numeric: accepted error relative to the right answer; null: 0. The larger bound counts."
    )
    partial_credit: bool | None = Field(
        None, description="reasoning_gym: keep scores below 1, which some wrong answers get; null: false."
    )
    pattern: str | None = Field(
        None, description="format: regular expression that the whole completion must match; `.` matches line breaks."
    )
    function: str | None = Field(
        None, description="function: your own, as package.module:name or path/to/file.py:name."
    )
    score_truncated: bool | None = Field(
        None, description="format, function: also score completions that were cut off; null: false, they get 0."
    )
    answer_from: AnswerFrom | None = Field(
        None,
        description="The answer is the whole completion (null too), the last match of answer_pattern, the content of "
        "the last \\boxed{}, or what follows the last answer_marker.",
    )
    answer_pattern: str | None = Field(
        None, description="For answer_from regex: regular expression with one group, which is the answer."
    )
    answer_marker: str | None = Field(None, description="For answer_from marker: the text before the answer.")

    @property
    def metric(self) -> str:
        """Its name in the metrics."""
        return self.label or self.name


class RewardConfig(VerifierConfig):
    """`reward`: how completions are scored."""

    additional: list[VerifierConfig] = Field(
        [],
        description="Further verifiers, each a mapping of the keys above this one; the reward is the weighted sum of "
        "all. Accuracy and reasons are those of the first.",
    )
    num_workers: PositiveInt | None = Field(
        None, description="Processes that run math_verify, reasoning_gym and functions; null: one per core, at most 8."
    )
    timeout_s: PositiveFloat = Field(
        10.0, description="Seconds for one answer; a worker that needs longer is killed and the answer scores 0."
    )
    worker_memory_gib: PositiveFloat | None = Field(
        None, description="Memory, GiB of address space, that a worker may take beyond what it starts with; null: any."
    )
    max_answer_chars: PositiveInt = Field(
        20_000, description="Longest answer, in characters, that is parsed; longer ones are unparseable."
    )
