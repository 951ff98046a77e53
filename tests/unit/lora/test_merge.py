"""Merging: exact in float32, unbiased with stochastic rounding, and honest about what is lost."""

from __future__ import annotations

import math

import pytest
import torch

from lora_rl.lora.merge import AdapterTensors, Fidelity, merge, seed_for, stochastic_round

BF16, F32 = torch.bfloat16, torch.float32
LARGEST = torch.finfo(BF16).max


def random(*shape: int, std: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def make_adapter(rows: int, columns: int, *, rank: int = 4, std: float = 1.0, scale: float = 1.5) -> AdapterTensors:
    """An adapter whose delta has about the given standard deviation."""
    b = random(rows, rank, std=std / (scale * math.sqrt(rank)), seed=2)
    return AdapterTensors(a=random(rank, columns, seed=1), b=b, scale=scale)


def exact_delta(adapter: AdapterTensors) -> torch.Tensor:
    return adapter.scale * (adapter.b.double() @ adapter.a.double())


@pytest.mark.parametrize("base_dtype", [F32, BF16, torch.float16])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_float32_result_is_the_dense_sum(base_dtype: torch.dtype, rounding: str) -> None:
    base, adapter = random(37, 20, seed=3).to(base_dtype), make_adapter(37, 20)
    merged, fidelity = merge(base, adapter, dtype=F32, rounding=rounding, seed=1)
    assert merged.equal(base.float() + adapter.delta())
    want = base.double() + exact_delta(adapter)
    torch.testing.assert_close(merged.double(), want, atol=2e-6, rtol=1e-6)
    assert fidelity.metrics()["sync/retention"] == pytest.approx(1.0, abs=1e-7)
    assert fidelity.metrics()["sync/relative_error"] < 1e-6


def test_bfloat16_result_is_cast_once() -> None:
    base, adapter = random(64, 48, seed=3).to(BF16), make_adapter(64, 48)
    merged, _ = merge(base, adapter, dtype=BF16, rounding="nearest", seed=1)
    assert merged.equal((base.float() + adapter.delta()).to(BF16))
    # Rounding the delta first and adding in bfloat16 is another result.
    assert not merged.equal(base + adapter.delta().to(BF16))


@pytest.mark.parametrize("chunk_elements", [1, 100, 1 << 20])
def test_fidelity_is_that_of_the_whole_matrix_whatever_the_chunks(chunk_elements: int) -> None:
    base, adapter = random(50, 31, seed=3).to(BF16), make_adapter(50, 31, std=3e-3)
    for rounding in ("nearest", "stochastic"):
        merged, fidelity = merge(base, adapter, dtype=BF16, rounding=rounding, seed=5, chunk_elements=chunk_elements)
        delta, delivered = exact_delta(adapter), merged.double() - base.double()
        want = {
            "sync/delta_norm": delta.norm().item(),
            "sync/retention": ((delivered * delta).sum() / delta.square().sum()).item(),
            "sync/relative_error": ((delivered - delta).norm() / delta.norm()).item(),
            "sync/changed_fraction": (merged != base).double().mean().item(),
        }
        assert fidelity.metrics() == pytest.approx(want, rel=1e-5)


def test_fidelity_adds_over_tensors() -> None:
    base, adapter = random(40, 16, seed=3).to(BF16), make_adapter(40, 16, std=1e-3)
    halves = Fidelity.zero()
    for rows in (slice(0, 25), slice(25, 40)):
        part = AdapterTensors(adapter.a, adapter.b[rows], adapter.scale)
        halves += merge(base[rows], part, dtype=BF16, rounding="nearest", seed=0)[1]
    whole = merge(base, adapter, dtype=BF16, rounding="nearest", seed=0)[1]
    assert halves.metrics() == pytest.approx(whole.metrics(), rel=1e-6)
    assert halves.total == 640


def test_small_deltas_near_one_vanish_to_nearest_and_arrive_stochastically() -> None:
    base = (1.0 + random(512, 512, std=0.1, seed=3)).to(BF16)
    adapter = make_adapter(512, 512, std=1e-4)
    nearest = merge(base, adapter, dtype=BF16, rounding="nearest", seed=0)[1].metrics()
    assert nearest["sync/retention"] < 0.01
    assert nearest["sync/changed_fraction"] < 0.001
    retentions = []
    for version in range(20):
        seed = seed_for(version, "w", 0)
        merged, fidelity = merge(base, adapter, dtype=BF16, rounding="stochastic", seed=seed)
        retentions.append(fidelity.metrics()["sync/retention"])
        assert (merged != base).float().mean() > 0.01
    # One rounding's standard error: each element errs by sqrt(|delta| * spacing) at most.
    delta = exact_delta(adapter)
    spread = (delta.abs().pow(3) * 2**-7).sum().sqrt().item() / delta.square().sum().item()
    assert abs(sum(retentions) / 20 - 1) < 4 * spread / math.sqrt(20) < 0.03


def test_without_delta_nothing_is_lost() -> None:
    base = random(8, 6, seed=3).to(BF16)
    adapter = AdapterTensors(random(2, 6), torch.zeros(8, 2), 4.0)
    for rounding in ("nearest", "stochastic"):
        merged, fidelity = merge(base, adapter, dtype=BF16, rounding=rounding, seed=1)
        assert merged.equal(base)
        assert fidelity.metrics() == {
            "sync/delta_norm": 0.0,
            "sync/retention": 1.0,
            "sync/relative_error": 0.0,
            "sync/changed_fraction": 0.0,
        }


def test_without_adapter_the_base_is_cast_to_nearest_into_a_new_tensor() -> None:
    for base, dtype in ((random(8, 6), BF16), (random(5), F32)):
        merged, fidelity = merge(base, None, dtype=dtype, rounding="stochastic", seed=1)
        assert merged.equal(base.to(dtype))
        assert merged.data_ptr() != base.data_ptr()
        assert fidelity == Fidelity.zero()


def test_a_thousand_merges_leave_the_base_bit_identical() -> None:
    base, adapter = random(32, 32, seed=3).to(BF16), make_adapter(32, 32)
    before = base.clone()
    for seed in range(1000):
        merge(base, adapter, dtype=BF16, rounding="stochastic", seed=seed)
    assert base.view(torch.int16).equal(before.view(torch.int16))


def test_wrong_shapes_and_words_are_refused() -> None:
    base, adapter = random(8, 6), make_adapter(8, 6)
    with pytest.raises(ValueError, match=r"A \[4, 6\] and B \[8, 4\] .* \[6, 8\]"):
        merge(base.T, adapter, dtype=F32, rounding="nearest", seed=0)
    with pytest.raises(ValueError, match=r"'up'.*nearest"):
        merge(base, adapter, dtype=F32, rounding="up", seed=0)
    with pytest.raises(ValueError, match=r"float16.*bfloat16"):
        merge(base, adapter, dtype=torch.float16, rounding="stochastic", seed=0)


# -- stochastic rounding ---------------------------------------------------------------------------------------


def neighbours(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bfloat16 values next to x towards and away from zero, as float64."""
    bits = x.view(torch.int32) & -0x10000
    return bits.view(F32).double(), (bits + 0x10000).view(F32).double()


@pytest.mark.parametrize("size", [1.0, 3.7e-3, 1e-38, 5e-41, 3e38])
def test_mean_is_the_value_and_results_are_its_neighbours(size: float) -> None:
    x = (random(1, 64, seed=4).sign() * torch.linspace(0.5, 1.0, 64) * size).repeat(4096, 1)
    rounded = stochastic_round(x, BF16, seed=11).double()
    low, high = neighbours(x)
    assert ((rounded == low) | (rounded == high)).all()
    share_high = (x.double() - low) / (high - low)
    assert (share_high > 0.02).sum() > 1000
    sigma = (share_high * (1 - share_high) * (high - low).square()).mean(0).div(4096).sqrt()
    # 64 columns at four standard errors each, and the mean over all of them.
    error = rounded.mean(0) - x[0].double()
    assert (error.abs() <= 4 * sigma).all()
    assert abs(error.sum()) <= 4 * sigma.square().sum().sqrt()


def test_neighbouring_elements_round_independently() -> None:
    x = torch.full((1024, 1024), 1 + 2**-8)
    up = (stochastic_round(x, BF16, seed=3).double() > 1).double() - 0.5
    limit = 4 * 0.25 / 1024
    for shifted in (up.roll(1, 0), up.roll(1, 1), up.roll((1, 1), (0, 1)), up.roll(512, 1)):
        assert abs((up * shifted).mean()) < limit
    other = (stochastic_round(x, BF16, seed=4).double() > 1).double() - 0.5
    assert abs((up * other).mean()) < limit
    # Neither rows nor columns have a preference of their own.
    for dim in (0, 1):
        assert up.mean(dim).std() == pytest.approx(0.5 / 32, rel=0.15)


def test_every_slice_rounds_as_in_the_whole_matrix() -> None:
    x = random(70, 50, seed=5)
    whole = stochastic_round(x, BF16, seed=2**63 + 5)
    for rows, columns in ((slice(13, 70), slice(0, 50)), (slice(0, 70), slice(9, 31)), (slice(69, 70), slice(49, 50))):
        part = stochastic_round(x[rows, columns], BF16, 2**63 + 5, row_offset=rows.start, col_offset=columns.start)
        assert part.equal(whole[rows, columns])
    assert not stochastic_round(x[13:], BF16, 2**63 + 5).equal(whole[13:])


def test_the_same_seed_repeats_and_others_differ() -> None:
    x = random(64, 64, seed=5)
    seeds = [seed_for(version, name, run) for version in (1, 2) for name in ("q", "k") for run in (7, 8)]
    assert len(set(seeds)) == 8
    results = [stochastic_round(x, BF16, seed) for seed in seeds]
    assert results[0].equal(stochastic_round(x, BF16, seed_for(1, "q", 7)))
    assert not any(one.equal(other) for i, one in enumerate(results) for other in results[:i])
    # All 64 bits of a seed count.
    assert not stochastic_round(x, BF16, 1).equal(stochastic_round(x, BF16, 1 + 2**40))


def test_noise_is_the_published_hash() -> None:
    """Element (0, 0) of seed 0 has the key 0; from there on the bits follow in exact integer arithmetic."""

    def finalise(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & 0xFFFFFFFF
        x ^= x >> 15
        x = x * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    seed, offset = 0xFEDCBA9876543210, (3_000_000, 151_000)
    x = (torch.arange(35).reshape(5, 7) * 1873 + 0x3F800000).to(torch.int32).view(F32)
    rounded = stochastic_round(x, BF16, seed, row_offset=offset[0], col_offset=offset[1]).float().view(torch.int32)
    for row in range(5):
        for column in range(7):
            key = finalise(finalise(row + offset[0] ^ seed & 0xFFFFFFFF) ^ seed >> 32)
            noise = finalise(key ^ column + offset[1]) & 0xFFFF
            assert rounded[row, column] == (x.view(torch.int32)[row, column].item() + noise) & ~0xFFFF


def test_representable_and_special_values_stay() -> None:
    tiny = 2.0**-133
    kept = torch.tensor([0.0, -0.0, 1.0, -2.5, tiny, -tiny, LARGEST, -LARGEST, math.inf, -math.inf])
    for seed in range(50):
        rounded = stochastic_round(kept.repeat(20, 1), BF16, seed)
        assert rounded.view(torch.int16).equal(kept.to(BF16).view(torch.int16).expand(20, -1))
    nan = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(F32).repeat(20, 1)
    assert stochastic_round(nan, BF16, 1).isnan().all()


def test_finite_values_never_become_infinite() -> None:
    beyond = torch.tensor([torch.finfo(F32).max, -torch.finfo(F32).max]).repeat(2000, 1)
    assert beyond.to(BF16).isinf().all()
    assert stochastic_round(beyond, BF16, 1).equal(torch.tensor([LARGEST, -LARGEST], dtype=BF16).expand(2000, 2))


def test_float32_is_left_alone() -> None:
    x = random(5, 5)
    rounded = stochastic_round(x, F32, 1)
    assert rounded.equal(x)
    assert rounded.data_ptr() != x.data_ptr()
