"""The decomposition of an adapter: against the dense SVD, over shards, and for adapters that lack directions."""

from __future__ import annotations

import threading

import pytest
import torch

from lora_rl.lora.svd import ALONE, Decomposition, Shards, Spectrum, decompose, times_core

MODES = ("product", "factors", "core")
OUT, IN, RANK = 48, 40, 8


def adapter(seed: int = 0, *, rank: int = RANK) -> tuple[torch.Tensor, torch.Tensor]:
    """A [RANK, in] and B [out, RANK] with singular values over four orders of magnitude; B A has rank `rank`."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(*shape, generator=generator) for shape in ((RANK, IN), (OUT, RANK)))
    b = b * torch.logspace(0, -4, RANK)
    b[:, rank:] = 0
    return a, b


def product(parts: Decomposition, mode: str) -> torch.Tensor:
    """U C V^T, from float32 parts in float64."""
    u, v, sigma, mixing = (t.double() for t in (parts.u, parts.v, parts.sigma, parts.mixing))
    return times_core(u, sigma, mixing if mode == "factors" else None) @ v.T


def over_ranks(a: torch.Tensor, b: torch.Tensor, mode: str, ranks: int, *, spread_a: bool) -> list[Decomposition]:
    """`decompose` on threads that hold a slice each and exchange through a list."""
    barrier, box, found = threading.Barrier(ranks, timeout=20), [None] * ranks, [None] * ranks

    def run(rank: int) -> None:
        def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
            box[rank] = tensor
            barrier.wait()
            everyone = list(box)
            barrier.wait()
            return everyone

        shards = Shards(rank, gather)
        own_a = a.chunk(ranks, dim=1)[rank] if spread_a else a
        a_shards = shards if spread_a else ALONE
        found[rank] = decompose(own_a, b.chunk(ranks)[rank], mode, a_shards=a_shards, b_shards=shards)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("mode", MODES)
def test_the_parts_are_orthonormal_and_multiply_to_the_adapter(mode: str) -> None:
    a, b = adapter()
    parts = decompose(a, b, mode)
    want = b.double() @ a.double()
    assert (product(parts, mode) - want).norm() <= 3e-7 * want.norm()
    for frame in (parts.u.double(), parts.v.double()):
        torch.testing.assert_close(frame.T @ frame, torch.eye(RANK).double(), atol=5e-7, rtol=0)


def test_singular_values_are_those_of_the_dense_matrices() -> None:
    a, b = adapter()
    dense = torch.linalg.svdvals(b.double() @ a.double())[:RANK]
    sigma = decompose(a, b, "product").sigma
    torch.testing.assert_close(sigma.double(), dense, atol=0, rtol=1e-7)
    assert dense[0] > 1e3 * dense[-1]
    torch.testing.assert_close(decompose(a, b, "core").sigma, sigma.diag())
    of_b, of_a = decompose(a, b, "factors").sigma
    torch.testing.assert_close(of_b.double(), torch.linalg.svdvals(b.double()), atol=0, rtol=1e-7)
    torch.testing.assert_close(of_a.double(), torch.linalg.svdvals(a.double()), atol=0, rtol=1e-7)


@pytest.mark.parametrize("spread_a", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_shards_give_the_parts_of_the_whole(mode: str, spread_a: bool) -> None:
    """Eight ranks hold 6 rows of B each, fewer than its 8 columns."""
    a, b = adapter()
    alone = decompose(a, b, mode)
    ranks = over_ranks(a, b, mode, 8, spread_a=spread_a)
    for parts in ranks:
        assert parts.sigma.equal(ranks[0].sigma)
        torch.testing.assert_close(parts.sigma, alone.sigma, atol=1e-7 * float(alone.sigma.max()), rtol=1e-6)
        torch.testing.assert_close(parts.mixing, alone.mixing, atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.cat([p.u for p in ranks]), alone.u, atol=1e-6, rtol=0)
    whole_v = torch.cat([p.v for p in ranks]) if spread_a else ranks[3].v
    torch.testing.assert_close(whole_v, alone.v, atol=1e-6, rtol=0)


@pytest.mark.parametrize("mode", ["product", "core"])
def test_signs_are_canonical(mode: str) -> None:
    """Negating columns of B with rows of A is the same adapter, and gives the same parts."""
    a, b = adapter()
    flips = torch.tensor([1, -1, -1, 1, -1, 1, 1, -1.0])
    one, other = decompose(a, b, mode), decompose(a * flips[:, None], b * flips, mode)
    torch.testing.assert_close(other.u, one.u, atol=1e-6, rtol=0)
    torch.testing.assert_close(other.v, one.v, atol=1e-6, rtol=0)
    assert (one.u.gather(0, one.u.abs().argmax(dim=0, keepdim=True)) > 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_directions_that_the_adapter_lacks_are_left_out(mode: str) -> None:
    a, b = adapter(rank=3)
    parts = decompose(a, b, mode)
    want = b.double() @ a.double()
    assert (product(parts, mode) - want).norm() <= 3e-7 * want.norm()
    assert (parts.u.norm(dim=0) > 0).tolist() == [True] * 3 + [False] * 5
    spectrum = Spectrum(RANK, mode)
    spectrum.start_from(parts)
    assert spectrum.directions == {"product": 3, "factors": 3 + RANK, "core": 9}[mode]
    # Nothing flows through them: they can never start to move.
    x = torch.randn(16, IN, generator=torch.Generator().manual_seed(1))
    (spectrum(x @ parts.v) @ parts.u.T).square().sum().backward()
    gradient = spectrum.theta.grad
    assert gradient.count_nonzero() == spectrum.directions if mode != "factors" else gradient[0, 3:].eq(0).all()


def test_a_matrix_with_fewer_rows_than_the_rank_has_fewer_directions() -> None:
    a, b = adapter()
    for narrow in (decompose(a, b[:5], "product"), decompose(a[:, :5], b, "product")):
        assert narrow.sigma.count_nonzero() == 5
        assert narrow.sigma.shape == (RANK,)
    parts = decompose(a[:, :5], b, "factors")
    torch.testing.assert_close(product(parts, "factors").float(), b @ a[:, :5], atol=1e-5, rtol=1e-5)


def test_an_adapter_of_zeros_has_nothing_to_decompose() -> None:
    a, b = adapter()
    for mode in MODES:
        assert decompose(a, torch.zeros_like(b), mode) is None


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_module_multiplies_by_the_core_that_it_exports(mode: str, relative: bool) -> None:
    a, b = adapter()
    parts = decompose(a, b, mode)
    spectrum = Spectrum(RANK, mode, relative=relative)
    spectrum.start_from(parts)
    assert spectrum.sigma.equal(parts.sigma), "the start is exact"
    torch.manual_seed(0)
    spectrum.theta.data.normal_(0, 0.1)
    want = parts.sigma * (1 + spectrum.theta) if relative else parts.sigma + spectrum.theta
    torch.testing.assert_close(spectrum.sigma, want)
    x = torch.randn(5, RANK)
    exported = times_core(parts.u, spectrum.sigma, spectrum.mixing if mode == "factors" else None)
    torch.testing.assert_close(spectrum(x) @ parts.u.T, x @ exported.T, atol=1e-4, rtol=1e-5)
