import pytest

from lora_rl.rewards import RewardReason, RewardResult, exact_match
from lora_rl.rewards.exact_match import check_text, match_text

END = "<|end|>"


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("46<|end|>", "correct"),
        ("46", "correct"),  # engines may drop the end token
        ("47<|end|>", "wrong"),
        ("4<|end|>", "wrong"),
        ("-46<|end|>", "wrong"),
        ("046<|end|>", "unparseable"),
        ("46 <|end|>", "unparseable"),
        (" 46<|end|>", "unparseable"),
        ("46\n<|end|>", "unparseable"),
        ("46.0<|end|>", "unparseable"),
        ("+46<|end|>", "unparseable"),
        ("46!<|end|>", "unparseable"),
        ("=46<|end|>", "unparseable"),
        ("46<|end|><|end|>", "unparseable"),
        ("<|end|>46", "unparseable"),
        ("46<|end|>46", "unparseable"),
        ("\u0664\u0666<|end|>", "unparseable"),  # Arabic-Indic digits, which int() would accept
        ("4\u00b2<|end|>", "unparseable"),
        ("-0<|end|>", "unparseable"),
        ("<|end|>", "unparseable"),
        ("", "unparseable"),
        ("\ufffd", "unparseable"),  # what a decoder makes of half a character
    ],
)
def test_only_the_bare_answer_scores(completion, reason):
    result = exact_match(completion, "46", truncated=False, end_token=END)
    assert result == RewardResult(1.0 if reason == "correct" else 0.0, RewardReason(reason))


def test_without_an_end_token_nothing_is_stripped():
    assert exact_match("46<|end|>", "46", truncated=False).reason is RewardReason.UNPARSEABLE


@pytest.mark.parametrize("completion", ["46", "46<|end|>", "nonsense"])
def test_a_truncated_completion_never_scores(completion):
    result = exact_match(completion, "46", truncated=True, end_token=END)
    assert result == RewardResult(0.0, RewardReason.TRUNCATED)


@pytest.mark.parametrize("answer", ["046", "46 ", "", "x", "4.6"])
def test_a_malformed_reference_answer_is_an_error(answer):
    with pytest.raises(ValueError, match="canonical form"):
        exact_match(answer, answer, truncated=False)


@pytest.mark.parametrize("answer", ["0", "-7", "198"])
def test_every_canonical_integer_is_a_valid_answer(answer):
    assert exact_match(answer, answer, truncated=False).value == 1.0


@pytest.mark.parametrize(
    ("text", "reason"), [("Paris", "correct"), ("paris", "wrong"), ("Paris ", "wrong"), ("", "unparseable")]
)
def test_texts(text, reason):
    assert match_text(text, "Paris").reason == reason


def test_an_empty_text_is_no_answer():
    with pytest.raises(ValueError, match="empty"):
        check_text("")


POSITIVE = (RewardReason.CORRECT, RewardReason.PARTIAL)


@pytest.mark.parametrize("reason", [reason for reason in RewardReason if reason not in POSITIVE])
@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_only_correct_and_partial_can_carry_a_positive_value(reason, value):
    with pytest.raises(ValueError, match=reason.value):
        RewardResult(value, reason)
