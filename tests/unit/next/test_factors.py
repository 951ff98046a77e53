"""Low-rank changes in factor space: the same as dense ones, on one rank and on two."""

from __future__ import annotations

import pytest
import torch

from lora_rl.next.factors import Factors, RankOne, difference, leading, product, squared_norm
from lora_rl.next.writeback import into_adapter, into_weight
from tests.unit.next.trajectories import COLUMNS, RANK, ROWS, on_two_ranks, random_factors, shards, whole


def dense(change: RankOne) -> torch.Tensor:
    return change.sigma * torch.outer(change.u.double(), change.v.double())


def direction(seed: int, sigma: float) -> RankOne:
    generator = torch.Generator().manual_seed(seed)
    u, v = torch.randn(ROWS, generator=generator), torch.randn(COLUMNS, generator=generator)
    return RankOne(sigma, (u / u.norm()).double(), (v / v.norm()).double())


def test_leading_triplet_of_a_change_equals_the_dense_decomposition():
    later, earlier = random_factors(0), random_factors(1)
    change = difference(later, earlier)
    expected = whole(later) - whole(earlier)
    left, sigma, right = torch.linalg.svd(expected)
    found = leading(change)
    torch.testing.assert_close(found.sigma, float(sigma[0]), rtol=1e-10, atol=0)
    torch.testing.assert_close(dense(found), sigma[0] * torch.outer(left[:, 0], right[0]), rtol=0, atol=1e-8)
    torch.testing.assert_close(squared_norm(change), float(expected.square().sum()), rtol=1e-12, atol=0)
    given = direction(2, 0.7)
    torch.testing.assert_close(product(change, given), float((expected * dense(given)).sum()), rtol=1e-12, atol=1e-12)


def test_a_small_change_of_large_factors_keeps_its_digits():
    earlier = random_factors(0)
    nudge = random_factors(1)
    later = Factors(earlier.a + 1e-7 * nudge.a, earlier.b + 1e-7 * nudge.b)
    sigma = torch.linalg.svdvals(whole(later) - whole(earlier))
    torch.testing.assert_close(leading(difference(later, earlier)).sigma, float(sigma[0]), rtol=1e-8, atol=0)


@pytest.mark.parametrize("a_split", [True, False])
def test_two_ranks_find_what_one_finds(a_split):
    later, earlier, given = random_factors(0), random_factors(1), direction(2, 0.7)
    parts = [
        difference(x, y) for x, y in zip(shards(later, a_split=a_split), shards(earlier, a_split=a_split), strict=True)
    ]
    alone = leading(difference(later, earlier))
    halves = on_two_ranks(lambda rank, all_reduce: leading(parts[rank], all_reduce))
    u = torch.cat([h.u for h in halves])
    v = torch.cat([h.v for h in halves]) if a_split else halves[0].v
    assert [h.sigma for h in halves] == [pytest.approx(alone.sigma, rel=1e-12)] * 2
    torch.testing.assert_close(halves[0].sigma * torch.outer(u, v), dense(alone), rtol=0, atol=1e-9)

    def own(rank: int) -> RankOne:
        return RankOne(given.sigma, given.u.chunk(2)[rank], given.v.chunk(2)[rank] if a_split else given.v)

    expected = product(difference(later, earlier), given), squared_norm(difference(later, earlier))
    for pair in on_two_ranks(lambda n, add: (product(parts[n], own(n), add), squared_norm(parts[n], add))):
        assert pair == pytest.approx(expected, rel=1e-12)


def test_nothing_has_no_direction():
    same = random_factors(0)
    nothing = leading(difference(same, same))
    assert nothing.sigma == 0.0
    assert not nothing.u.any()


@pytest.mark.parametrize("sigma", [0.3, 40.0, -5.0])
def test_writing_back_gives_up_exactly_the_smallest_singular_value(sigma):
    factors, change = random_factors(3), direction(4, sigma)
    wanted = whole(factors) + dense(change)
    values = torch.linalg.svdvals(wanted)
    new, dropped = into_adapter(factors, change)
    assert new.a.shape == factors.a.shape
    assert new.b.shape == factors.b.shape
    error = torch.linalg.norm(whole(new) - wanted)
    torch.testing.assert_close(float(error), float(values[RANK]), rtol=1e-7, atol=0)
    assert dropped == pytest.approx(float(values[RANK] ** 2 / values.square().sum()), rel=1e-7)
    # A is as large as it was, and as near to it as its new row space allows.
    torch.testing.assert_close(new.a.norm(), factors.a.double().norm())
    assert torch.linalg.norm(new.a - factors.a) < torch.linalg.norm(factors.a)


@pytest.mark.parametrize("a_split", [True, False])
def test_two_ranks_write_back_what_one_writes(a_split):
    factors, change = random_factors(3), direction(4, 5.0)
    alone, dropped = into_adapter(factors, change)
    parts = shards(factors, a_split=a_split)

    def half(rank: int, all_reduce) -> tuple[Factors, float]:
        v = change.v.chunk(2)[rank] if a_split else change.v
        return into_adapter(parts[rank], RankOne(change.sigma, change.u.chunk(2)[rank], v), all_reduce)

    halves = on_two_ranks(half)
    a = torch.cat([h.a for h, _ in halves], dim=1) if a_split else halves[0][0].a
    torch.testing.assert_close(a, alone.a, rtol=0, atol=1e-8)
    torch.testing.assert_close(torch.cat([h.b for h, _ in halves]), alone.b, rtol=0, atol=1e-8)
    assert [d for _, d in halves] == [pytest.approx(dropped)] * 2


def test_a_change_within_the_row_space_is_exact_and_no_row_of_a_dies():
    """As after a short training: two of the four ranks are in use, and the change is along rows that A has."""
    factors = random_factors(5)
    factors.b[:, 2:] = 0
    v = factors.a[0].double() / factors.a[0].double().norm()
    change = RankOne(3.0, direction(6, 1.0).u, v)
    new, dropped = into_adapter(factors, change)
    torch.testing.assert_close(whole(new), whole(factors) + dense(change), rtol=0, atol=1e-8)
    assert dropped < 1e-12
    assert torch.linalg.matrix_rank(new.a) == RANK


def test_a_change_of_nothing_is_no_change():
    factors = random_factors(3)
    new, dropped = into_adapter(factors, direction(4, 1.0).times(0.0))
    assert new is factors
    assert dropped == 0.0
    weight = torch.randn(ROWS, COLUMNS)
    assert into_weight(weight, direction(4, 1.0).times(0.0)).equal(weight)


def test_merging_is_exact_and_leaves_the_original():
    weight, change = torch.randn(ROWS, COLUMNS), direction(4, 2.0)
    before = weight.clone()
    merged = into_weight(weight, change)
    torch.testing.assert_close(merged.double(), weight.double() + dense(change), rtol=0, atol=1e-6)
    assert weight.equal(before)
    low = into_weight(weight.bfloat16(), change)
    assert low.equal((weight.bfloat16().float() + dense(change).float()).bfloat16())
