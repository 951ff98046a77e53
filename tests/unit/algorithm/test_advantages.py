import math
import random

import plain_reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_rl.algorithm import group_advantages, zero_variance_samples

MODES = [(normalize, loo) for normalize in (False, True) for loo in (False, True)]


def compute(rewards, ids, normalize=True, leave_one_out=False):
    return group_advantages(
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(ids, dtype=torch.int64),
        normalize=normalize,
        leave_one_out=leave_one_out,
    )


@pytest.mark.parametrize(("normalize", "leave_one_out"), MODES)
def test_matches_the_formula_for_interleaved_groups_of_any_size(normalize, leave_one_out):
    rng = random.Random(0)
    ids = [7] * 2 + [-3] * 5 + [10**12] * 8 + [0] * 3
    rng.shuffle(ids)
    rewards = [round(rng.uniform(-2, 2), 3) for _ in ids]

    result = compute(rewards, ids, normalize, leave_one_out)

    expected = plain_reference.advantages(rewards, ids, normalize, leave_one_out)
    assert result.advantages.dtype == torch.float32
    assert result.advantages.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert (result.num_groups, result.num_zero_variance_groups) == (4, 0)
    if not normalize:
        rebuilt = result.baselines + result.advantages
        assert rebuilt.tolist() == pytest.approx(rewards, rel=1e-5, abs=1e-6)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_order_of_the_batch_does_not_matter_and_each_group_sums_to_zero(data):
    sizes = data.draw(st.lists(st.integers(2, 6), min_size=1, max_size=4))
    ids = [group for group, size in enumerate(sizes) for _ in range(size)]
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, -1.0]), min_size=len(ids), max_size=len(ids)))
    order = data.draw(st.permutations(range(len(ids))))
    normalize, leave_one_out = data.draw(st.sampled_from(MODES))

    straight = compute(rewards, ids, normalize, leave_one_out)
    shuffled = compute([rewards[i] for i in order], [ids[i] for i in order], normalize, leave_one_out)

    assert torch.allclose(straight.advantages[list(order)], shuffled.advantages, atol=1e-6)
    for group in range(len(sizes)):
        members = [i for i, g in enumerate(ids) if g == group]
        assert straight.advantages[members].sum().item() == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("reward", [0.1, 0.3, 1e6 + 0.1, -7.7, 0.0])
@pytest.mark.parametrize(("normalize", "leave_one_out"), MODES)
def test_constant_groups_get_exactly_zero_without_rounding_residue(reward, normalize, leave_one_out):
    result = compute([reward] * 7 + [0.0, 1.0], [1] * 7 + [2] * 2, normalize, leave_one_out)
    assert result.advantages[:7].tolist() == [0.0] * 7
    assert result.zero_variance.tolist() == [True] * 7 + [False] * 2
    assert (result.num_groups, result.num_zero_variance_groups) == (2, 1)
    assert result.advantages[8] > 0.4


@pytest.mark.parametrize("normalize", [False, True])
def test_leave_one_out_keeps_the_only_success_of_a_group(normalize):
    # Its leave-one-out std is 0; filtering or dividing by that would lose it or blow it up.
    result = compute([1, 0, 0, 0], [5] * 4, normalize, leave_one_out=True)
    assert not result.zero_variance.any()
    assert result.advantages.tolist() == pytest.approx(
        [2.0, -2 / 3, -2 / 3, -2 / 3] if normalize else [1.0, -1 / 3, -1 / 3, -1 / 3], rel=1e-5
    )


def test_std_is_bessel_corrected():
    assert compute([0.0, 1.0], [0, 0]).advantages.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], 1e-5)
    assert compute([0.0, 1.0], [0, 0]).stds.tolist() == pytest.approx([math.sqrt(0.5)] * 2)


def test_large_offset_does_not_destroy_a_small_spread():
    # E[x^2] - E[x]^2 in fp32 has an error of about 1e5 here.
    result = compute([1e6, 1e6 + 1, 1e6 + 2, 1e6 + 3], [0] * 4)
    assert result.advantages.tolist() == pytest.approx([-1.161895, -0.387298, 0.387298, 1.161895], rel=1e-4)


def test_statistics_do_not_round_in_fp32():
    # Each is exact in fp32, but their fp32 mean is off by 1.
    rewards = [16777215.0, 16777175.0, 16777195.0, 16777155.0, 16777185.0]
    result = compute(rewards, [0] * 5, normalize=False)
    assert result.advantages.tolist() == [30.0, -10.0, 10.0, -30.0, 0.0]


def test_rewards_equal_up_to_fp32_rounding_are_a_constant_group():
    result = compute([0.3, 0.3 + 3e-8, 0.3], [0] * 3)
    assert len(set(torch.tensor([0.3, 0.3 + 3e-8]).tolist())) == 2
    assert result.zero_variance.all()
    assert result.advantages.tolist() == [0.0] * 3


def test_tiny_spread_is_floored_by_epsilon():
    assert compute([1e-9, 0.0], [0, 0]).advantages.abs().max() < 1e-3


def test_reward_zero_counts_as_a_reward():
    assert compute([0.0, -1.0], [0, 0], normalize=False).advantages.tolist() == [0.5, -0.5]


def test_empty_batch():
    result = compute([], [])
    assert result.advantages.shape == (0,)
    assert (result.num_groups, result.num_zero_variance_groups) == (0, 0)


def test_group_of_one_is_an_error_naming_the_group():
    with pytest.raises(ValueError, match=r"\[42\].*one member"):
        compute([1.0, 0.0, 1.0], [0, 0, 42])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_reward_is_an_error_naming_its_index(bad):
    with pytest.raises(ValueError, match=r"rewards\[2\] = .*group 9"):
        compute([1.0, 0.0, bad, 0.0], [4, 4, 9, 9])


@pytest.mark.parametrize(
    ("rewards", "ids", "message"),
    [
        (torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int64), "rewards must be floating"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), "rewards must be floating"),
        (torch.zeros(2), torch.zeros(3, dtype=torch.int64), "group_ids must be int64"),
        (torch.zeros(2), torch.zeros(2), "group_ids must be int64"),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(rewards, ids, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, ids, normalize=True, leave_one_out=False)


def test_zero_variance_samples_looks_at_the_reward_it_is_given_and_accepts_groups_of_one():
    ids = torch.tensor([0, 1, 0, 1, 2])
    raw = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0])
    shaped = raw - torch.tensor([0.1, 0.0, 0.3, 0.0, 0.0])  # a length penalty
    assert zero_variance_samples(raw, ids).tolist() == [True, False, True, False, True]
    assert zero_variance_samples(shaped, ids).tolist() == [False, False, False, False, True]
