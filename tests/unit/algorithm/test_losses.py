import dataclasses
import math

import plain_reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_rl.algorithm import (
    LossSettings,
    Normaliser,
    finalise,
    group_advantages,
    merge,
    policy_loss,
)

CORRECTION = {"use_importance_sampling_correction": True}
ICEPOP = CORRECTION | {
    "importance_sampling_type": "icepop",
    "truncated_importance_sampling_ratio": 1.4,
    "truncated_importance_sampling_ratio_min": 0.7,
}
SETTINGS = {
    "defaults": LossSettings(),
    "no_kl": LossSettings(reference_policy_kl_penalty=0.0),
    "sequence_mean": LossSettings(token_level_loss=False, reference_policy_kl_penalty=0.3),
    "asymmetric": LossSettings(ratio_clip_min=0.1, ratio_clip_max=0.5),
    "dual_clip": LossSettings(ratio_clip_c=1.2, ratio_clip_max=0.05),
    "k1_as_metric": LossSettings(reference_policy_kl_type="k1", reference_policy_kl_penalty=0.0),
    "k2_clamped": LossSettings(
        reference_policy_kl_type="k2", reference_policy_kl_penalty=0.5, kl_input_clamp_value=0.3
    ),
    "raw_weights": LossSettings(**CORRECTION),
    "tis_sequence": LossSettings(
        **CORRECTION,
        importance_sampling_level="sequence",
        importance_sampling_type="tis",
        truncated_importance_sampling_ratio=1.2,
        token_level_loss=False,
    ),
    "icepop": LossSettings(**ICEPOP),
    "seq_mask": LossSettings(
        **CORRECTION,
        importance_sampling_type="seq_mask",
        truncated_importance_sampling_ratio=1.1,
        truncated_importance_sampling_ratio_min=0.9,
    ),
    "dr_grpo": LossSettings(constant_length=9, reference_policy_kl_penalty=0.3),
    "gspo": LossSettings(policy_loss="gspo", token_level_loss=False, ratio_clip_min=0.05, ratio_clip_max=0.07),
    "gspo_dual_corrected": LossSettings(
        **CORRECTION,
        policy_loss="gspo",
        token_level_loss=False,
        importance_sampling_level="sequence",
        importance_sampling_type="tis",
        truncated_importance_sampling_ratio=1.2,
        ratio_clip_max=0.02,
        ratio_clip_c=1.05,
    ),
    "cispo": LossSettings(policy_loss="cispo", ratio_clip_min=1.0, ratio_clip_max=0.2),
    "cispo_icepop": LossSettings(**ICEPOP, policy_loss="cispo", ratio_clip_min=0.1, constant_length=6),
    "sapo": LossSettings(policy_loss="sapo", token_level_loss=False),
    "sapo_sharp": LossSettings(**CORRECTION, policy_loss="sapo", sapo_tau_pos=4.0, sapo_tau_neg=7.5),
    "reinforce": LossSettings(policy_loss="reinforce", reference_policy_kl_type="k2"),
    "reinforce_icepop": LossSettings(**ICEPOP, policy_loss="reinforce", token_level_loss=False),
}
REPORTED = {
    "ppo_clip": {"clip_fraction_low", "clip_fraction_high"},
    "gspo": {"clip_fraction_low", "clip_fraction_high"},
    "cispo": {"clip_fraction_low", "clip_fraction_high"},
    "sapo": {"soft_gate"},
    "reinforce": set(),
}
each_setting = pytest.mark.parametrize("loss_settings", SETTINGS.values(), ids=SETTINGS.keys())


def make_batch(seed=0, rows=7, width=5, dtype=torch.float64):
    """Keyword arguments of policy_loss, without the normaliser; row 0 is empty, row 1 has one token, row 2 is
    dropped as a sample."""
    generator = torch.Generator().manual_seed(seed)

    def near(x, scale=0.3):
        return x + scale * torch.randn(rows, width, generator=generator, dtype=dtype)

    old = -torch.rand(rows, width, generator=generator, dtype=dtype) * 4
    token_mask = torch.rand(rows, width, generator=generator) < 0.75
    token_mask[0] = False
    token_mask[1] = torch.arange(width) == 1
    sample_mask = torch.ones(rows, dtype=torch.bool)
    sample_mask[2] = False
    return {
        "logprobs": near(old),
        "old_logprobs": old,
        "behaviour_logprobs": near(old),
        "reference_logprobs": near(old),
        "entropy": torch.rand(rows, width, generator=generator, dtype=dtype),
        "advantages": torch.randn(rows, generator=generator, dtype=dtype),
        "token_mask": token_mask,
        "sample_mask": sample_mask,
    }


def evaluate(loss_settings, batch, normaliser=None):
    """(loss, gradient on logprobs, metrics)."""
    normaliser = normaliser or Normaliser.count(batch["token_mask"], batch["sample_mask"])
    logprobs = batch["logprobs"].detach().clone().requires_grad_()
    output = policy_loss(loss_settings, **(batch | {"logprobs": logprobs}), normaliser=normaliser)
    output.loss.backward()
    return output.loss.detach(), logprobs.grad, output.metrics


def full_mask(*shape):
    return torch.ones(shape, dtype=torch.bool)


# --- formulas -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_policy", [False, True])
@each_setting
def test_loss_and_metrics_match_the_formulas(loss_settings, on_policy):
    batch = make_batch()
    if on_policy:
        batch["old_logprobs"] = None
    loss, _, metrics = evaluate(loss_settings, batch)

    names = ("logprobs", "old_logprobs", "behaviour_logprobs", "reference_logprobs")
    lists = [None if batch[n] is None else batch[n].tolist() for n in names]
    masks = [batch[n].tolist() for n in ("advantages", "token_mask", "sample_mask")]
    expected, expected_metrics = plain_reference.loss(loss_settings, *lists, *masks)

    assert loss.item() == pytest.approx(expected, rel=1e-9)
    final = finalise(metrics, Normaliser.count(batch["token_mask"], batch["sample_mask"]))
    conditional = {"clip_fraction_low", "clip_fraction_high", "clip_fraction_dual", "soft_gate"}
    reported = REPORTED[loss_settings.policy_loss] | ({"clip_fraction_dual"} if loss_settings.ratio_clip_c else set())
    assert conditional & final.keys() == reported
    for name in conditional - reported:
        del expected_metrics[name]
    for name, value in expected_metrics.items():
        assert final[name] == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize(
    # CISPO's weight moves with pi but is not differentiated: its gradient is tested in test_policy_terms.py.
    "loss_settings",
    [s for s in SETTINGS.values() if s.policy_loss != "cispo"],
    ids=[n for n, s in SETTINGS.items() if s.policy_loss != "cispo"],
)
def test_gradient_is_that_of_the_loss(loss_settings):
    batch = make_batch(seed=1)
    normaliser = Normaliser.count(batch["token_mask"], batch["sample_mask"])

    def loss(logprobs):
        return policy_loss(loss_settings, **(batch | {"logprobs": logprobs}), normaliser=normaliser).loss

    assert torch.autograd.gradcheck(loss, batch["logprobs"].clone().requires_grad_())
    _, grad, _ = evaluate(loss_settings, batch)
    trained = batch["token_mask"] & batch["sample_mask"][:, None]
    assert (grad[~trained] == 0).all()
    assert grad[trained].abs().max() > 1e-3


@each_setting
def test_only_the_current_logprobs_receive_a_gradient(loss_settings):
    batch = {n: x.requires_grad_() if x.is_floating_point() else x for n, x in make_batch().items()}
    policy_loss(loss_settings, **batch, normaliser=Normaliser(10, 5)).loss.backward()
    received = {n for n, x in batch.items() if x.grad is not None}
    assert received == {"logprobs"}


@pytest.mark.parametrize("token_level", [True, False])
def test_on_policy_gradient_is_reinforce_with_baseline(token_level):
    # A tabular softmax policy; the REINFORCE gradient is written out by hand: A (onehot - pi) for each token.
    generator = torch.Generator().manual_seed(2)
    rows, width, vocab = 4, 3, 5
    logits = torch.randn(rows, width, vocab, generator=generator, requires_grad=True)
    tokens = torch.randint(vocab, (rows, width), generator=generator)
    token_mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0])
    advantages = group_advantages(
        rewards, torch.zeros(4, dtype=torch.int64), normalize=False, leave_one_out=False
    ).advantages

    logprobs = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    policy_loss(
        LossSettings(reference_policy_kl_penalty=0.0, token_level_loss=token_level),
        logprobs=logprobs,
        advantages=advantages,
        token_mask=token_mask,
        sample_mask=full_mask(4),
        normaliser=Normaliser(tokens=9, sequences=4),
    ).loss.backward()

    pi = logits.detach().softmax(-1)
    for i in range(rows):
        for t in range(width):
            share = 1 / 9 if token_level else 1 / (4 * int(token_mask[i].sum()))
            score = -pi[i, t]
            score[tokens[i, t]] += 1
            weight = (rewards[i] - rewards.mean()) * share if token_mask[i, t] else 0.0
            torch.testing.assert_close(logits.grad[i, t], -weight * score, atol=1e-6, rtol=1e-5)


def test_on_policy_shortcut_equals_passing_the_current_logprobs_as_old():
    batch = make_batch(seed=3)
    explicit = evaluate(SETTINGS["icepop"], batch | {"old_logprobs": batch["logprobs"].clone()})
    shortcut = evaluate(SETTINGS["icepop"], batch | {"old_logprobs": None})
    assert torch.equal(explicit[0], shortcut[0])
    assert torch.equal(explicit[1], shortcut[1])


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "gradient_flows"),
    [(1, 0.5, False), (1, -0.5, True), (-1, 0.5, True), (-1, -0.5, False), (-1, 2.0, False), (-1, 1.0, True)],
)
def test_clipping_stops_the_gradient_on_the_right_side_only(advantage, log_ratio, gradient_flows):
    clip = LossSettings(reference_policy_kl_penalty=0, ratio_clip_c=3.0)
    batch = {
        "logprobs": torch.full((1, 1), log_ratio),
        "old_logprobs": torch.zeros(1, 1),
        "advantages": torch.tensor([float(advantage)]),
        "token_mask": full_mask(1, 1),
        "sample_mask": full_mask(1),
    }
    _, grad, metrics = evaluate(clip, batch)
    assert (grad.item() != 0) == gradient_flows
    clipped = sum(metrics[f"clip_fraction_{side}"].value.item() for side in ("low", "high", "dual"))
    assert clipped == (not gradient_flows)


# --- additivity -----------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_microbatches_ranks_and_padding_do_not_change_loss_gradient_or_metrics(data):
    loss_settings = data.draw(st.sampled_from(list(SETTINGS.values())))
    batch = make_batch(seed=data.draw(st.integers(0, 1000)))
    rows, width = batch["logprobs"].shape
    normaliser = Normaliser.count(batch["token_mask"], batch["sample_mask"])
    whole_loss, whole_grad, whole_metrics = evaluate(loss_settings, batch, normaliser)

    owner = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)))
    total, grad, parts, counted = 0.0, torch.zeros_like(whole_grad), [], Normaliser(0, 0)
    for part in range(4):  # some parts are empty
        index = torch.nonzero(owner == part).flatten()
        extra = data.draw(st.integers(0, 3))
        micro = {name: pad(x[index], extra) for name, x in batch.items()}
        loss, micro_grad, metrics = evaluate(loss_settings, micro, normaliser)
        counted = counted + Normaliser.count(micro["token_mask"], micro["sample_mask"])
        total += loss
        grad[index] = micro_grad[:, :width]
        assert (micro_grad[:, width:] == 0).all()
        parts.append(metrics)

    assert counted == normaliser
    torch.testing.assert_close(total, whole_loss)
    torch.testing.assert_close(grad, whole_grad)
    merged = finalise(merge(data.draw(st.permutations(parts))), normaliser)
    assert merged == pytest.approx(finalise(whole_metrics, normaliser), rel=1e-9)


def pad(x, extra):
    """Widen a [B, T] tensor with positions that must not matter."""
    if x.ndim == 1:
        return x
    filler = False if x.dtype == torch.bool else math.nan
    return torch.cat([x, torch.full((len(x), extra), filler, dtype=x.dtype)], dim=1)


def test_a_sequence_cut_in_two_adds_up_with_token_level_loss():
    batch = make_batch(seed=4)
    normaliser = Normaliser.count(batch["token_mask"], batch["sample_mask"])
    loss, grad, _ = evaluate(SETTINGS["icepop"], batch, normaliser)
    halves = [
        evaluate(SETTINGS["icepop"], {n: x[:, s] if x.ndim == 2 else x for n, x in batch.items()}, normaliser)
        for s in (slice(None, 2), slice(2, None))
    ]
    torch.testing.assert_close(halves[0][0] + halves[1][0], loss)
    torch.testing.assert_close(torch.cat([halves[0][1], halves[1][1]], dim=1), grad)


# --- masks, extremes, nothing at all ----------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@each_setting
def test_values_at_masked_positions_never_leak(loss_settings, poison):
    clean = make_batch(seed=5)
    trained = clean["token_mask"] & clean["sample_mask"][:, None]
    dirty = {
        name: torch.where(trained, x, poison) if x.ndim == 2 and x.dtype != torch.bool else x
        for name, x in clean.items()
    }
    dirty["advantages"] = torch.where(clean["sample_mask"], clean["advantages"], poison)

    loss, grad, metrics = evaluate(loss_settings, clean)
    dirty_loss, dirty_grad, dirty_metrics = evaluate(loss_settings, dirty)

    assert torch.equal(loss, dirty_loss)
    assert torch.equal(grad, dirty_grad)
    assert {n: m.value.item() for n, m in metrics.items()} == {n: m.value.item() for n, m in dirty_metrics.items()}


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "behaviour_logprobs", "reference_logprobs"])
def test_nan_at_a_trained_position_makes_the_loss_nan(name):
    batch = make_batch(seed=6)
    batch["token_mask"][3, 3] = True
    batch[name][3, 3] = math.nan
    assert evaluate(SETTINGS["icepop"], batch)[0].isnan()


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "behaviour_logprobs", "reference_logprobs"])
@pytest.mark.parametrize("difference", [100.0, -100.0])
@each_setting
def test_huge_log_ratio_keeps_loss_gradient_and_metrics_finite(loss_settings, difference, name):
    batch = make_batch(seed=7, dtype=torch.float32)
    batch[name] = batch[name] + difference
    loss, grad, metrics = evaluate(loss_settings, batch)
    assert torch.isfinite(loss)
    assert torch.isfinite(grad).all()
    assert all(math.isfinite(m.value.item()) for m in metrics.values())


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("width", [0, 4])
@pytest.mark.parametrize("normaliser", [Normaliser(100, 10), Normaliser(0, 0)])
@each_setting
def test_a_microbatch_without_tokens_has_loss_zero_and_a_zero_gradient(loss_settings, normaliser, rows, width):
    batch = make_batch(rows=7)
    batch = {n: x[:rows, :width] if x.ndim == 2 else x[:rows] for n, x in batch.items()}
    batch["token_mask"] = torch.zeros_like(batch["token_mask"])
    parameter = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    batch["logprobs"] = batch["logprobs"] * parameter
    output = policy_loss(loss_settings, **batch, normaliser=normaliser)
    output.loss.backward()

    assert output.loss.item() == 0
    assert parameter.grad.item() == 0
    final = finalise(merge([output.metrics]), Normaliser(0, 0))
    assert final == {"num_unmasked_tokens": 0, "num_valid_samples": float(batch["sample_mask"].sum())}


def test_dropping_every_sample_equals_masking_every_token():
    batch = make_batch()
    batch["sample_mask"] = torch.zeros_like(batch["sample_mask"])
    loss, grad, _ = evaluate(LossSettings(), batch)
    assert loss == 0
    assert (grad == 0).all()


def test_constant_rewards_teach_nothing():
    batch = make_batch(seed=8)
    batch["advantages"] = group_advantages(
        torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64), normalize=True, leave_one_out=False
    ).advantages.double()
    loss, grad, _ = evaluate(SETTINGS["no_kl"], batch)
    assert loss == 0
    assert (grad == 0).all()


def test_bf16_logprobs_are_computed_with_in_fp32():
    batch = make_batch(seed=9, dtype=torch.bfloat16)
    batch["advantages"] = batch["advantages"].float()
    loss, grad, metrics = evaluate(LossSettings(), batch)
    upcast = {n: x.float() if x.is_floating_point() else x for n, x in batch.items()}
    assert loss.dtype == torch.float32
    assert torch.equal(loss, evaluate(LossSettings(), upcast)[0])
    assert metrics["probs_ratio"].value.dtype == torch.float32
    assert grad.dtype == torch.bfloat16


# --- several updates on one batch -------------------------------------------------------------------------------


def test_second_update_has_a_ratio_and_a_constant_importance_weight():
    # Clip bounds so wide that nothing is clipped: the loss of a token is then -A rho w, which reveals w.
    wide = LossSettings(**CORRECTION, reference_policy_kl_penalty=0.0, ratio_clip_min=1.0, ratio_clip_max=1e6)
    old = torch.tensor([[-1.0]])
    batch = {
        "old_logprobs": old,
        "behaviour_logprobs": torch.tensor([[-1.3]]),
        "advantages": torch.tensor([2.0]),
        "token_mask": full_mask(1, 1),
        "sample_mask": full_mask(1),
    }
    weights, ratios = [], []
    for move in (0.0, 0.4):
        loss, _, metrics = evaluate(wide, batch | {"logprobs": old + move})
        ratios.append(metrics["probs_ratio"].value.item())
        weights.append(loss.item() / (-2.0 * ratios[-1]))
        assert metrics["sampling_importance_ratio"].value.item() == pytest.approx(math.exp(0.3))
        assert metrics["token_mult_prob_error"].value.item() == pytest.approx(math.exp(0.3))
    assert ratios == pytest.approx([1.0, math.exp(0.4)])
    assert weights == pytest.approx([math.exp(0.3)] * 2)


def test_gradient_steps_move_the_ratio_until_clipping_acts():
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    optimizer = torch.optim.SGD([logprobs], lr=1.0)
    old, clip_shares = logprobs.detach().clone(), []
    for _ in range(4):
        output = policy_loss(
            SETTINGS["no_kl"],
            logprobs=logprobs,
            old_logprobs=old,
            advantages=torch.tensor([1.0, -1.0]),
            token_mask=full_mask(2, 3),
            sample_mask=full_mask(2),
            normaliser=Normaliser(6, 2),
        )
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        final = finalise(output.metrics, Normaliser(6, 2))
        clip_shares.append((final["clip_fraction_low"], final["clip_fraction_high"]))
    assert clip_shares[0] == (0.0, 0.0)
    assert clip_shares[-1] == (0.5, 0.5)


# --- KL term ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_kl_term_reaches_the_gradient(kind):
    batch = make_batch(seed=10)
    with_kl = LossSettings(reference_policy_kl_type=kind, reference_policy_kl_penalty=0.5)
    without = dataclasses.replace(with_kl, reference_policy_kl_penalty=0.0)
    difference = evaluate(with_kl, batch)[1] - evaluate(without, batch)[1]
    trained = batch["token_mask"] & batch["sample_mask"][:, None]
    assert (difference[trained] != 0).all()
    assert (difference[~trained] == 0).all()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_is_exactly_zero_against_itself(kind):
    batch = make_batch(seed=11, dtype=torch.float32)
    batch["reference_logprobs"] = batch["logprobs"].clone()
    penalty = 0.0 if kind == "k1" else 0.01
    kl_settings = LossSettings(reference_policy_kl_type=kind, reference_policy_kl_penalty=penalty)
    _, _, metrics = evaluate(kl_settings, batch)
    assert metrics["kl"].value.item() == 0
    assert metrics["loss"].value.item() == metrics["policy_loss"].value.item()


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reference_policy_kl_penalty": -1.0}, "reference_policy_kl_penalty = -1.0"),
        ({"reference_policy_kl_penalty": math.nan}, "reference_policy_kl_penalty = nan"),
        ({"reference_policy_kl_type": "k3+"}, "reference_policy_kl_type = 'k3\\+': valid are k1, k2, k3"),
        ({"kl_input_clamp_value": 100.0}, "kl_input_clamp_value = 100.0"),
        ({"ratio_clip_min": 1.5}, "ratio_clip_min = 1.5"),
        ({"ratio_clip_max": -0.1}, "ratio_clip_max = -0.1"),
        ({"ratio_clip_c": 1.0}, "ratio_clip_c = 1.0"),
        ({"importance_sampling_type": "tis"}, "importance_sampling_type = 'tis' has no effect"),
        ({"truncated_importance_sampling_ratio": 2.0}, "truncated_importance_sampling_ratio = 2.0 has no effect"),
        (CORRECTION | {"importance_sampling_type": "icepop"}, "truncated_importance_sampling_ratio is null"),
        ({"ratio_clip_c": 0.5, "ratio_clip_min": -1.0}, "ratio_clip_min.*ratio_clip_c"),
        ({"policy_loss": "ppo"}, "policy_loss = 'ppo': valid are ppo_clip, gspo, cispo, sapo, reinforce"),
        ({"sapo_tau_pos": 0.0}, "sapo_tau_pos = 0.0: must be a positive number"),
        ({"sapo_tau_neg": math.inf}, "sapo_tau_neg = inf"),
        ({"constant_length": 0}, "constant_length = 0: must be at least 1 token"),
        ({"constant_length": 8, "token_level_loss": False}, "constant_length = 8 gives every token the same weight"),
        ({"policy_loss": "gspo"}, "token_level_loss = True: gspo has one ratio per sequence"),
        (
            CORRECTION | {"policy_loss": "gspo", "token_level_loss": False},
            "importance_sampling_level = 'token': gspo's ratio is one per sequence",
        ),
        ({"policy_loss": "cispo", "ratio_clip_c": 3.0}, "ratio_clip_c = 3.0 has no effect with cispo"),
        ({"policy_loss": "sapo", "ratio_clip_c": 3.0}, "ratio_clip_c = 3.0 has no effect with sapo"),
        ({"policy_loss": "reinforce", "ratio_clip_c": 3.0}, "ratio_clip_c = 3.0 has no effect with reinforce"),
        ({"reference_policy_kl_type": "k1"}, "reference_policy_kl_type = 'k1': its expected gradient"),
    ],
)
def test_invalid_settings_are_all_named(fields, message):
    with pytest.raises(ValueError, match=message):
        LossSettings(**fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": torch.zeros(7)}, r"logprobs must have shape \[B, T\], got \[7\]"),
        ({"old_logprobs": torch.zeros(7, 1)}, r"old_logprobs must have shape \[7, 5\].*\[7, 1\]"),
        ({"advantages": torch.zeros(1)}, r"advantages must have shape \[7\].*\[1\]"),
        ({"token_mask": torch.ones(7, 5)}, "token_mask must be bool, got torch.float32"),
        ({"reference_logprobs": None}, "reference_logprobs is None but .*kl_penalty is 0.01"),
        ({"behaviour_logprobs": None}, "behaviour_logprobs is None but .*correction is true"),
    ],
)
def test_unusable_inputs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(SETTINGS["icepop"], **(make_batch() | change), normaliser=Normaliser(1, 1))


@pytest.mark.parametrize("reduction", [{}, {"token_level_loss": False}, {"constant_length": 8}])
def test_a_normaliser_of_zero_with_tokens_present_is_refused(reduction):
    with pytest.raises(ValueError, match="must count the whole global batch"):
        policy_loss(LossSettings(**reduction), **make_batch(), normaliser=Normaliser(0, 0))
