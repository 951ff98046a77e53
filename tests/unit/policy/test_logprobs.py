"""Vocabulary-parallel logprobs and entropy against float64 log_softmax, and against themselves on two ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lora_rl.policy.logprobs import _VocabParallelLogprobs, vocab_parallel_logprobs
from tests.support.ranks import run_ranks

VOCAB, PADDED = 90, 96


def random_logits(rows: int = 40, *, scale: float = 3.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [rows, PADDED] whose padding is *not* small, and targets that include the first and last real token."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, PADDED, generator=generator) * scale
    logits[:, VOCAB:] = 50.0
    targets = torch.randint(0, VOCAB, (rows,), generator=generator)
    targets[:2] = torch.tensor([0, VOCAB - 1])
    return logits, targets


def exact(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 logprobs and entropy over the real vocabulary."""
    table = torch.log_softmax(logits.double()[:, :VOCAB] / temperature, dim=-1)
    return table.gather(-1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_values_and_gradients_equal_float64(temperature: float) -> None:
    logits, targets = random_logits()
    logits.requires_grad_()
    weights = torch.linspace(-1, 2, len(targets))
    logprobs, entropy = vocab_parallel_logprobs(logits, targets, temperature=temperature, vocab_size=VOCAB)
    (logprobs * weights).sum().backward()

    wide = logits.detach().double().requires_grad_()
    want, want_entropy = exact(wide, targets, temperature)
    (want * weights).sum().backward()
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert not entropy.requires_grad
    torch.testing.assert_close(logprobs.double(), want, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(logits.grad.double(), wide.grad, atol=1e-6, rtol=1e-5)
    assert not logits.grad[:, VOCAB:].any()


def test_gradcheck() -> None:
    logits, targets = random_logits(6)
    logits = logits[:, :VOCAB].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: _VocabParallelLogprobs.apply(x, targets, None, 0)[0], (logits,))


def test_extreme_logits_stay_finite() -> None:
    logits, targets = random_logits(4)
    logits[0, :VOCAB] = 1e4  # uniform, far from 0
    logits[1, :VOCAB] = -1e4
    logits[1, VOCAB - 1] = 1e4  # the target has all the mass
    logits[2, 0] = 3e38
    logits[3, :VOCAB] = torch.linspace(-1e30, 1e30, VOCAB)
    logits.requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(logits, targets, temperature=1.0, vocab_size=VOCAB)
    logprobs.sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert torch.isfinite(entropy).all()
    torch.testing.assert_close(logprobs[:2], torch.tensor([-np.log(VOCAB), 0.0], dtype=torch.float32))
    torch.testing.assert_close(entropy, torch.tensor([np.log(VOCAB), 0.0, 0.0, 0.0], dtype=torch.float32))


def test_bfloat16_logits_are_computed_in_float32() -> None:
    logits, targets = random_logits()
    narrow = logits.bfloat16().requires_grad_()
    logprobs, _ = vocab_parallel_logprobs(narrow, targets, temperature=0.7, vocab_size=VOCAB)
    torch.testing.assert_close(logprobs.double(), exact(narrow.detach(), targets, 0.7)[0], atol=2e-6, rtol=1e-6)
    logprobs.sum().backward()
    assert narrow.grad.dtype is torch.bfloat16


def test_no_rows() -> None:
    logprobs, entropy = vocab_parallel_logprobs(
        torch.zeros(0, PADDED, requires_grad=True), torch.zeros(0, dtype=torch.int64), temperature=1.0, vocab_size=VOCAB
    )
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_without_a_distribution_is_refused(temperature: float) -> None:
    logits, targets = random_logits(2)
    with pytest.raises(ValueError, match="temperature="):
        vocab_parallel_logprobs(logits, targets, temperature=temperature, vocab_size=VOCAB)


def on_two_ranks(temperature: float) -> tuple[np.ndarray, ...]:
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    logits, targets = random_logits()
    # The second slice of 48 ends in padding; with a vocabulary of 40 it is nothing but padding.
    part = logits.chunk(2, dim=-1)[parallel_state.get_tensor_model_parallel_rank()].clone().requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(part, targets, temperature=temperature, vocab_size=VOCAB, group=group)
    logprobs.square().sum().backward()
    padding_only, _ = vocab_parallel_logprobs(part.detach(), targets % 40, temperature=1.0, vocab_size=40, group=group)
    return tuple(x.detach().numpy() for x in (logprobs, entropy, part.grad, padding_only))


@pytest.mark.multiprocess
def test_two_ranks_equal_one() -> None:
    answers = run_ranks(on_two_ranks, 0.7, tp=2)
    logits, targets = random_logits()
    logits.requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(logits, targets, temperature=0.7, vocab_size=VOCAB)
    logprobs.square().sum().backward()
    narrow, _ = vocab_parallel_logprobs(logits.detach()[:, :48], targets % 40, temperature=1.0, vocab_size=40)
    for answer in answers:
        np.testing.assert_allclose(answer[0], logprobs.detach(), atol=1e-6)
        np.testing.assert_allclose(answer[1], entropy, atol=1e-6)
        np.testing.assert_allclose(answer[3], narrow, atol=1e-6)
    np.testing.assert_allclose(np.concatenate([a[2] for a in answers], axis=1), logits.grad, atol=1e-6, rtol=1e-6)
