"""The policy terms: their gradients against derivatives written out by hand, and what sets them apart."""

import dataclasses
import math

import plain_reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_losses import CORRECTION, SETTINGS, each_setting, evaluate, full_mask, make_batch

from lora_rl.algorithm import POLICY_LOSSES, LossSettings, Normaliser, finalise, policy_loss

NO_KL = {"reference_policy_kl_penalty": 0.0}
SEQUENCE = {"token_level_loss": False}
KINDS = {
    kind: LossSettings(policy_loss=kind, **NO_KL, **(SEQUENCE if kind == "gspo" else {})) for kind in POLICY_LOSSES
}
each_kind = pytest.mark.parametrize("kind_settings", KINDS.values(), ids=KINDS.keys())


def expected_gradient(s, batch):
    """[B][T] by the chain rule on Python floats."""
    names = ("logprobs", "old_logprobs", "behaviour_logprobs", "advantages", "token_mask", "sample_mask")
    logprobs, old, behaviour, advantages, token_mask, sample_mask = (batch[n].tolist() for n in names)
    mask = [[m and keep for m in row] for row, keep in zip(token_mask, sample_mask, strict=True)]
    tokens, sequences = sum(map(sum, mask)), sum(sample_mask)
    bounds = (s.truncated_importance_sampling_ratio, s.truncated_importance_sampling_ratio_min)
    level, kind = s.importance_sampling_level, s.importance_sampling_type
    w = plain_reference.weights(old, behaviour, mask, level, kind, *bounds)
    result = []
    for i, row in enumerate(mask):
        if s.constant_length is not None:
            share = 1 / (sequences * s.constant_length)
        else:
            share = 1 / tokens if s.token_level_loss else 1 / (sequences * max(sum(row), 1))
        whole = plain_reference.sequence_ratio(logprobs[i], old[i], row)
        result.append([0.0] * len(row))
        for t, m in enumerate(row):
            if m:
                rho = math.exp(logprobs[i][t] - old[i][t])
                slope = plain_reference.policy_slope(s, advantages[i], logprobs[i][t], rho, whole)
                weight = w[i][t] if s.use_importance_sampling_correction else 1.0
                result[i][t] = weight * slope * share
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("seed", [20, 21, 22])
@each_setting
def test_gradient_is_the_derivative_written_out(loss_settings, seed):
    without_kl = dataclasses.replace(loss_settings, **NO_KL)
    batch = make_batch(seed)
    torch.testing.assert_close(evaluate(without_kl, batch)[1], expected_gradient(without_kl, batch))


@each_kind
def test_on_policy_every_term_has_the_gradient_of_reinforce(kind_settings):
    batch = make_batch(seed=23) | {"old_logprobs": None}
    reduction = {"token_level_loss": kind_settings.token_level_loss}
    plain = LossSettings(policy_loss="reinforce", **NO_KL, **reduction)
    torch.testing.assert_close(evaluate(kind_settings, batch)[1], evaluate(plain, batch)[1])


def one_sequence(log_ratios, advantage):
    log_ratios = torch.tensor([log_ratios], dtype=torch.float64)
    return {
        "logprobs": -2.0 + log_ratios,
        "old_logprobs": torch.full_like(log_ratios, -2.0),
        "advantages": torch.tensor([advantage], dtype=torch.float64),
        "token_mask": full_mask(*log_ratios.shape),
        "sample_mask": full_mask(1),
    }


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gspo_clips_sequences_whole_and_not_their_single_tokens(advantage):
    gspo = KINDS["gspo"]
    # Token ratios far outside cancel in the sequence: all tokens train, and all alike.
    _, grad, metrics = evaluate(gspo, one_sequence([1.0, -1.0, 0.0], advantage))
    torch.testing.assert_close(grad, torch.full_like(grad, -advantage / 3))
    assert metrics["clip_fraction_high"].value == metrics["clip_fraction_low"].value == 0
    # A sequence beyond its bound stops as a whole, tokens that have not moved included.
    _, grad, metrics = evaluate(gspo, one_sequence([advantage, 0.0, 0.0], advantage))
    assert (grad == 0).all()
    assert metrics["clip_fraction_high" if advantage > 0 else "clip_fraction_low"].value == 3


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_cispo_bounds_the_weight_and_keeps_the_gradient(advantage):
    cispo = dataclasses.replace(KINDS["cispo"], ratio_clip_min=0.2, ratio_clip_max=0.5)
    _, grad, metrics = evaluate(cispo, one_sequence([2.0, -2.0, 0.0], advantage))
    torch.testing.assert_close(grad[0] * 3, -advantage * torch.tensor([1.5, 0.8, 1.0], dtype=torch.float64))
    assert metrics["clip_fraction_high"].value == metrics["clip_fraction_low"].value == 1


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_sapo_fades_tokens_out_one_by_one_and_faster_for_negative_advantages(advantage):
    sapo = dataclasses.replace(KINDS["sapo"], sapo_tau_neg=3.0)
    tau = 1.0 if advantage > 0 else 3.0
    _, grad, metrics = evaluate(sapo, one_sequence([0.0, 1.0, 2.0], advantage))
    slopes = (grad[0] * 3 / -advantage).tolist()
    assert slopes[0] == pytest.approx(1.0)
    for log_ratio, slope in zip((0.0, 1.0, 2.0), slopes, strict=True):
        half = tau * (math.exp(log_ratio) - 1) / 2
        assert slope == pytest.approx(math.exp(log_ratio) / math.cosh(half) ** 2)  # 4 s (1 - s) = sech^2(x / 2)
    assert metrics["soft_gate"].value == pytest.approx(sum(s / math.exp(x) for x, s in enumerate(slopes)))


@each_kind
def test_a_second_update_sees_the_same_old_policy_and_a_constant_importance_weight(kind_settings):
    # The gradient with the correction divided by that without it is the weight, whatever the term.
    level = {"importance_sampling_level": "sequence"} if kind_settings.policy_loss == "gspo" else {}
    corrected = dataclasses.replace(kind_settings, **CORRECTION, **level)
    batch = make_batch(seed=24)
    weights = []
    for move in (0.0, 0.05):
        moved = batch | {"logprobs": batch["old_logprobs"] + move}
        plain, weighted = evaluate(kind_settings, moved)[1], evaluate(corrected, moved)[1]
        trained = plain != 0
        assert trained.sum() > 10
        weights.append(torch.where(trained, weighted / plain, 0.0))
    torch.testing.assert_close(weights[0], weights[1])
    assert (weights[0][weights[0] != 0] - 1).abs().max() > 0.1


@pytest.mark.parametrize("kind_settings", [s for k, s in KINDS.items() if k != "reinforce"])
def test_gradient_steps_move_off_the_old_policy_until_the_term_holds_them(kind_settings):
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    old, optimizer, gradients = logprobs.detach().clone(), torch.optim.SGD([logprobs], lr=1.0), []
    for _ in range(6):
        output = policy_loss(
            kind_settings,
            logprobs=logprobs,
            old_logprobs=old,
            advantages=torch.tensor([1.0, -1.0]),
            token_mask=full_mask(2, 3),
            sample_mask=full_mask(2),
            normaliser=Normaliser(6, 2),
        )
        optimizer.zero_grad()
        output.loss.backward()
        gradients.append(logprobs.grad.abs().mean(dim=1))
        optimizer.step()
    ratio = finalise(output.metrics, Normaliser(6, 2))
    assert ratio["probs_ratio_max"] > 1.2 and ratio["probs_ratio_min"] < 0.8
    first, last = gradients[0], gradients[-1]
    if kind_settings.policy_loss in ("ppo_clip", "gspo"):
        assert (last == 0).all()
    elif kind_settings.policy_loss == "cispo":
        # The weight stays at its bound: 1.2 and 0.8 times the first gradient.
        torch.testing.assert_close(last, first * torch.tensor([1.2, 0.8]))
    else:
        assert 0 < last[1] < first[1]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_reductions_weigh_tokens_as_they_say(data):
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    kept = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    constant = data.draw(st.integers(1, 9))
    width = max(lengths) + data.draw(st.integers(0, 2))
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    batch = {
        "logprobs": torch.full((len(lengths), width), -1.0, dtype=torch.float64),
        "advantages": torch.ones(len(lengths), dtype=torch.float64),
        "token_mask": mask,
        "sample_mask": torch.tensor(kept),
    }
    tokens = sum(n for n, keep in zip(lengths, kept, strict=True) if keep)
    filled = sum(n > 0 for n, keep in zip(lengths, kept, strict=True) if keep)

    def gradient_sum(**reduction):
        return -evaluate(LossSettings(policy_loss="reinforce", **NO_KL, **reduction), batch)[1].sum().item()

    # Of a loss of -1 per token the gradients add up to the share of the weight that was handed out.
    assert gradient_sum() == pytest.approx(1.0 if tokens else 0.0)
    assert gradient_sum(**SEQUENCE) == pytest.approx(filled / max(sum(kept), 1))
    assert gradient_sum(constant_length=constant) == pytest.approx(tokens / (max(sum(kept), 1) * constant))


def test_the_settings_exercise_every_term_and_every_reduction():
    assert {s.policy_loss for s in SETTINGS.values()} == set(POLICY_LOSSES)
    assert {(s.token_level_loss, s.constant_length is None) for s in SETTINGS.values()} == {
        (True, True), (True, False), (False, True),
    }  # fmt: skip
