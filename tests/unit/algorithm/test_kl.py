import plain_reference
import pytest
import torch

from lora_rl.algorithm import kl_per_token

KINDS = ["k1", "k2", "k3"]


def random_logprobs(seed, *shape):
    return -torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 5


@pytest.mark.parametrize("clamp", [20.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_matches_the_formula(kind, clamp):
    lp, ref = random_logprobs(0, 3, 4), random_logprobs(1, 3, 4)
    expected = [
        [plain_reference.kl(a, b, kind, clamp) for a, b in zip(*rows, strict=True)]
        for rows in zip(lp.tolist(), ref.tolist(), strict=True)
    ]
    torch.testing.assert_close(kl_per_token(lp, ref, kind, clamp), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_that_of_the_value_and_not_zero(kind):
    lp, ref = random_logprobs(2, 5).requires_grad_(), random_logprobs(3, 5)
    assert torch.autograd.gradcheck(lambda x: kl_per_token(x, ref, kind), lp)
    (grad,) = torch.autograd.grad(kl_per_token(lp, ref, kind).sum(), lp)
    assert (grad != 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_expected_gradient_over_a_small_vocabulary_is_what_the_table_says(kind):
    # The expectation over sampled tokens is exact: enumerate the vocabulary.
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    log_ref = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    log_pi = logits.log_softmax(0)
    pi = log_pi.exp().detach()

    (expected_gradient,) = torch.autograd.grad(
        (pi * kl_per_token(log_pi, log_ref, kind)).sum(), logits, retain_graph=True
    )
    reverse = (log_pi.exp() * (log_pi - log_ref)).sum()
    forward = (log_ref.exp() * (log_ref - log_pi)).sum()
    truth = {"k1": torch.zeros(()), "k2": reverse, "k3": forward}[kind]
    if kind == "k1":
        torch.testing.assert_close(expected_gradient, torch.zeros_like(logits), atol=1e-12, rtol=0)
    else:
        torch.testing.assert_close(expected_gradient, *torch.autograd.grad(truth, logits, retain_graph=True))
        assert expected_gradient.norm() > 0.1


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_estimates_of_the_value(kind):
    log_pi, log_ref = random_logprobs(5, 8).log_softmax(0), random_logprobs(6, 8).log_softmax(0)
    estimate = (log_pi.exp() * kl_per_token(log_pi, log_ref, kind)).sum()
    torch.testing.assert_close(estimate, (log_pi.exp() * (log_pi - log_ref)).sum())


@pytest.mark.parametrize("kind", KINDS)
def test_equal_policies_have_kl_exactly_zero(kind):
    lp = random_logprobs(7, 9).float()
    assert (kl_per_token(lp, lp.clone(), kind) == 0).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_huge_log_ratio_stays_finite(kind, sign):
    lp = torch.tensor([-101.0 if sign > 0 else -1.0], requires_grad=True)
    ref = torch.tensor([-1.0 if sign > 0 else -101.0])
    value = kl_per_token(lp, ref, kind)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(lp.grad).all()


def test_unknown_kind_names_the_valid_ones():
    with pytest.raises(ValueError, match="'k3\\+' is unknown; valid: k1, k2, k3"):
        kl_per_token(torch.zeros(1), torch.zeros(1), "k3+")
