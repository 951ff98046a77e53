"""Tokens drawn by inversion: right shares, no impossible token, one random number per token."""

from __future__ import annotations

import pytest
import torch

from lora_rl.rollout import sampling
from lora_rl.rollout.sampling import sample_by_inversion


def test_shares_are_the_probabilities() -> None:
    weights = torch.tensor([0.0, 3.0, 1.0, 0.0, 6.0, 0.0])
    torch.manual_seed(0)
    drawn = sample_by_inversion(weights.expand(20_000, -1), {})
    shares = torch.bincount(drawn, minlength=6) / 20_000
    # Four standard deviations of a share.
    assert (shares - weights / 10).abs().max() < 4 * (0.25 / 20_000) ** 0.5
    assert not shares[weights == 0].any()


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
def test_the_ends_of_the_interval_draw_possible_tokens(monkeypatch: pytest.MonkeyPatch, number: float) -> None:
    monkeypatch.setattr(torch, "rand", lambda *size, **_: torch.full(size, number, dtype=torch.float64))
    probabilities = torch.tensor([[0.0, 0.0, 0.2, 0.0, 0.0], [1e-30, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]])
    assert sample_by_inversion(probabilities, {}).tolist() == [2, 0, 4]


def test_a_rare_token_among_many_is_drawn_as_often_as_it_should() -> None:
    """Of 50,000 tokens the last 1,000 have 1 % together: a sum in float32 would lose much of it."""
    probabilities = torch.cat([torch.full((49_000,), 0.99 / 49_000), torch.full((1_000,), 0.01 / 1_000)])
    torch.manual_seed(1)
    share = (sample_by_inversion(probabilities.expand(4_000, -1), {}) >= 49_000).float().mean()
    assert float(share) == pytest.approx(0.01, abs=4 * (0.01 / 4_000) ** 0.5)


def test_a_row_with_a_generator_draws_the_same_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    probabilities = torch.rand(7, 300)

    def draw(rows: list[int]) -> list[int]:
        own = {place: torch.Generator().manual_seed(row) for place, row in enumerate(rows)}
        return sample_by_inversion(probabilities[rows], own).tolist()

    together = draw(list(range(7)))
    assert len(set(together)) > 3
    assert draw([4, 2]) == [together[4], together[2]]
    monkeypatch.setattr(sampling, "_CHUNK_ELEMENTS", 700)
    assert draw(list(range(7))) == together
