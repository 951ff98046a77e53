import pytest

from lora_rl.rewards import RewardReason, RewardResult, exact_match, score_batch

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


def test_batch_keeps_the_order():
    results = score_batch(["1", "2", "3"], ["1", "3", "3"], [False, False, True], end_token=END)
    assert [result.reason for result in results] == ["correct", "wrong", "truncated"]


def test_batch_of_unequal_lengths():
    with pytest.raises(ValueError, match="2 completions, 1 answers and 2 truncation flags"):
        score_batch(["1", "2"], ["1"], [False, False])


@pytest.mark.parametrize("reason", [reason for reason in RewardReason if reason is not RewardReason.CORRECT])
@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_no_reason_but_correct_can_carry_a_positive_value(reason, value):
    with pytest.raises(ValueError, match=reason.value):
        RewardResult(value, reason)
