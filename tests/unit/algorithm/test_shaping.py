import math

import plain_reference
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_rl.algorithm import kl_per_token, overlong_penalty, sequence_kl


@given(
    lengths=st.lists(st.integers(0, 60), max_size=12),
    limit=st.integers(1, 50),
    share=st.floats(0, 1),
    penalty=st.floats(0, 3),
)
def test_overlong_penalty_matches_the_formula(lengths, limit, share, penalty):
    buffer = max(1, round(share * limit))
    result = overlong_penalty(
        torch.tensor(lengths, dtype=torch.int64), max_response_length=limit, buffer_length=buffer, penalty=penalty
    )
    expected = [plain_reference.overlong(n, limit, buffer, penalty) for n in lengths]
    assert result.tolist() == pytest.approx(expected, abs=1e-6)
    assert (result <= 0).all()


def test_overlong_penalty_is_a_ramp_between_free_and_full():
    result = overlong_penalty(torch.tensor([0, 6, 7, 8, 10, 99]), max_response_length=10, buffer_length=4, penalty=2.0)
    assert result.tolist() == [0.0, 0.0, -0.5, -1.0, -2.0, -2.0]
    assert not torch.signbit(result[:2]).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"buffer_length": 0}, "buffer_length = 0: must be in 1..max_response_length = 10"),
        ({"buffer_length": 11}, "buffer_length = 11"),
        ({"penalty": -1.0}, "penalty = -1.0: must be >= 0"),
        ({"penalty": math.nan}, "penalty = nan"),
    ],
)
def test_unusable_penalties_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        overlong_penalty(
            torch.tensor([3]), **({"max_response_length": 10, "buffer_length": 4, "penalty": 1.0} | arguments)
        )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_sequence_kl_is_the_sum_over_the_response(kind):
    generator = torch.Generator().manual_seed(0)
    policy = -torch.rand(5, 6, generator=generator, dtype=torch.float64) * 4
    reference = -torch.rand(5, 6, generator=generator, dtype=torch.float64) * 4
    mask = torch.rand(5, 6, generator=generator) < 0.7
    mask[0], mask[1] = False, torch.arange(6) == 2
    expected = [
        sum(plain_reference.kl(p, r, kind, 1.5) for p, r, m in zip(*rows, strict=True) if m)
        for rows in zip(policy.tolist(), reference.tolist(), mask.tolist(), strict=True)
    ]
    dirty = torch.where(mask, policy, math.nan).requires_grad_()
    result = sequence_kl(dirty, reference, mask, kind=kind, clamp=1.5)
    assert result.tolist() == pytest.approx(expected)
    assert result[0] == 0
    assert not result.requires_grad
    assert (sequence_kl(policy, policy.clone(), mask, kind=kind) == 0).all()


def expected_reward_gradient(kind, log_pi, log_ref, logits):
    """E[k grad log pi], exactly, over a vocabulary: the gradient of a penalty in the reward."""
    penalty = kl_per_token(log_pi, log_ref, kind).detach()
    (gradient,) = torch.autograd.grad((log_pi.exp().detach() * penalty * log_pi).sum(), logits, retain_graph=True)
    return gradient


def policies(distance):
    generator = torch.Generator().manual_seed(4)
    reference = torch.randn(6, generator=generator, dtype=torch.float64)
    logits = (reference + distance * torch.randn(6, generator=generator, dtype=torch.float64)).requires_grad_()
    return logits, logits.log_softmax(0), reference.log_softmax(0)


@pytest.mark.parametrize("distance", [0.01, 1.0])
def test_k1_in_the_reward_has_the_exact_gradient_of_the_kl(distance):
    logits, log_pi, log_ref = policies(distance)
    reverse = (log_pi.exp() * (log_pi - log_ref)).sum()
    (truth,) = torch.autograd.grad(reverse, logits, retain_graph=True)
    torch.testing.assert_close(expected_reward_gradient("k1", log_pi, log_ref, logits), truth)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_k2_and_k3_in_the_reward_vanish_near_the_reference(kind):
    logits, log_pi, log_ref = policies(0.01)
    wanted = expected_reward_gradient("k1", log_pi, log_ref, logits).norm()
    assert wanted > 1e-4
    assert expected_reward_gradient(kind, log_pi, log_ref, logits).norm() < 0.02 * wanted


def test_k3_in_the_reward_is_the_difference_of_the_two_kls():
    logits, log_pi, log_ref = policies(1.0)
    reverse = (log_pi.exp() * (log_pi - log_ref)).sum()
    forward = (log_ref.exp() * (log_ref - log_pi)).sum()
    (truth,) = torch.autograd.grad(reverse - forward, logits, retain_graph=True)
    torch.testing.assert_close(expected_reward_gradient("k3", log_pi, log_ref, logits), truth)
