import math
import random

import plain_reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_rl.algorithm import gdpo_advantages, reinforce_plus_plus_advantages

REWARD = st.sampled_from([0.0, 0.1, 0.5, 1.0, -1.0])


def plus_plus(rewards, ids, tokens, minus_baseline=True):
    return reinforce_plus_plus_advantages(
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(tokens, dtype=torch.int64),
        minus_baseline=minus_baseline,
    )


def gdpo(components, ids, trained=None, normalize=True, leave_one_out=False):
    return gdpo_advantages(
        {name: torch.tensor(values, dtype=torch.float32) for name, values in components.items()},
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor([True] * len(ids) if trained is None else trained),
        normalize=normalize,
        leave_one_out=leave_one_out,
    )


@pytest.mark.parametrize("minus_baseline", [True, False])
def test_reinforce_plus_plus_matches_the_formula(minus_baseline):
    rng = random.Random(0)
    ids = [7] * 3 + [-3] * 5 + [10**12] * 4
    rng.shuffle(ids)
    rewards = [round(rng.uniform(-2, 2), 3) for _ in ids]
    tokens = [rng.randrange(0, 9) for _ in ids]
    tokens[4] = 0
    expected = plain_reference.reinforce_plus_plus(rewards, ids, tokens, minus_baseline)
    result = plus_plus(rewards, ids, tokens, minus_baseline)
    assert result.dtype == torch.float32
    assert result.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert result[4] == 0


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_whitening_gives_tokens_mean_0_and_std_1_in_any_order(data):
    sizes = data.draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    ids = [group for group, size in enumerate(sizes) for _ in range(size)]
    n = len(ids)
    rewards = data.draw(st.lists(REWARD, min_size=n, max_size=n))
    tokens = data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    minus_baseline = data.draw(st.booleans())
    order = list(data.draw(st.permutations(range(n))))

    result = plus_plus(rewards, ids, tokens, minus_baseline)
    shuffled = plus_plus(
        [rewards[i] for i in order], [ids[i] for i in order], [tokens[i] for i in order], minus_baseline
    )
    assert torch.allclose(result[order], shuffled, atol=1e-5)

    per_token = torch.repeat_interleave(result.double(), torch.tensor(tokens))
    if (result != 0).any():
        assert per_token.mean().item() == pytest.approx(0, abs=1e-4)
        assert per_token.std(correction=0).item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("minus_baseline", [True, False])
@pytest.mark.parametrize("reward", [0.1, 1e6 + 0.1, -7.7, 0.0])
def test_a_batch_of_equal_rewards_gets_exactly_zero(reward, minus_baseline):
    assert plus_plus([reward] * 6, [0, 0, 0, 1, 1, 1], [3, 1, 2, 5, 1, 1], minus_baseline).tolist() == [0.0] * 6


def test_constant_groups_teach_without_the_baseline_only():
    rewards, ids, tokens = [1, 1, 0, 0, 1, 0], [0, 0, 1, 1, 2, 2], [2] * 6
    assert plus_plus(rewards, ids, tokens, minus_baseline=False).tolist() == pytest.approx([1, 1, -1, -1, 1, -1], 1e-4)
    root = math.sqrt(3)
    assert plus_plus(rewards, ids, tokens).tolist() == pytest.approx([0, 0, 0, 0, root, -root], rel=1e-4)


def test_groups_of_one_need_no_baseline():
    assert plus_plus([1, 0], [0, 1], [1, 1], minus_baseline=False).tolist() == pytest.approx([1, -1], rel=1e-4)
    with pytest.raises(ValueError, match="one member"):
        plus_plus([1, 0], [0, 1], [1, 1])


def test_untrained_sequences_count_in_their_group_but_not_in_the_batch():
    # The third has no token: it lowers the group's mean to 1/3, and mean and std are those of the other two.
    values, tokens = [2 / 3, -1 / 3], [1, 3]
    mean = (2 / 3 - 1) / 4
    std = math.sqrt(sum(n * (v - mean) ** 2 for v, n in zip(values, tokens, strict=True)) / 4)
    result = plus_plus([1, 0, 0], [0, 0, 0], [1, 3, 0])
    assert result.tolist() == pytest.approx([*((v - mean) / std for v in values), 0.0], rel=1e-4)


def test_nothing_trained_and_nothing_at_all():
    assert plus_plus([1, 0], [0, 0], [0, 0]).tolist() == [0.0, 0.0]
    assert plus_plus([], [], []).shape == (0,)
    assert gdpo({"a": [], "b": []}, []).shape == (0,)


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_gdpo_matches_the_formula(normalize, leave_one_out):
    rng = random.Random(1)
    ids = [0] * 4 + [1] * 3 + [2] * 5
    components = {name: [rng.choice([0.0, 0.5, 1.0]) for _ in ids] for name in ("correct", "format", "length")}
    components["format"][:4] = [1.0] * 4  # constant in one group
    trained = [rng.random() < 0.8 for _ in ids]
    expected = plain_reference.gdpo(list(components.values()), ids, trained, normalize, leave_one_out)
    result = gdpo(components, ids, trained, normalize, leave_one_out)
    assert 0 < sum(trained) < len(ids)
    assert result.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_gdpo_tells_apart_what_the_sum_of_rewards_does_not():
    # The first and the last two earn 1 in all, but of different rarity.
    correct, form = [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]
    advantages = gdpo({"correct": correct, "format": form}, [0] * 4)
    assert advantages[0] > advantages[1] + 0.1
    assert advantages[1] == advantages[2]


def test_gdpo_needs_two_components_and_names_the_bad_one():
    with pytest.raises(ValueError, match=r"at least 2 reward components, got 1 \(correct\).*name to grpo"):
        gdpo({"correct": [1.0, 0.0]}, [0, 0])
    with pytest.raises(ValueError, match=r"reward component 'format': rewards\[1\] = nan"):
        gdpo({"correct": [1.0, 0.0], "format": [1.0, math.nan]}, [0, 0])


@pytest.mark.parametrize("minus_baseline", [True, False])
def test_non_finite_rewards_and_wrong_weights_are_refused(minus_baseline):
    with pytest.raises(ValueError, match=r"rewards\[1\] = nan"):
        plus_plus([1.0, math.nan], [0, 0], [1, 1], minus_baseline)
    with pytest.raises(ValueError, match="weights must be >= 0"):
        plus_plus([1.0, 0.0], [0, 0], [1, -1], minus_baseline)
    with pytest.raises(ValueError, match="weights must be >= 0 and of shape"):
        plus_plus([1.0, 0.0], [0, 0], [1], minus_baseline)
