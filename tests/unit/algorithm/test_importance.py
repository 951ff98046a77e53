import math

import plain_reference
import pytest
import torch

from lora_rl.algorithm import importance_weights

KINDS = [
    (None, None, None),
    ("tis", 1.3, None),
    ("icepop", 1.3, 0.8),
    ("seq_mask", 1.1, 0.9),
]


def batch(seed=0, rows=12, width=6):
    generator = torch.Generator().manual_seed(seed)
    train = -torch.rand(rows, width, generator=generator) * 3
    behaviour = train + 0.3 * torch.randn(rows, width, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[0], mask[1] = False, torch.arange(width) == 2  # an empty and a single-token sequence
    return train, behaviour, mask


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("kind", "upper", "lower"), KINDS)
def test_matches_the_formula(level, kind, upper, lower):
    train, behaviour, mask = batch()
    result = importance_weights(train, behaviour, mask, level=level, kind=kind, upper=upper, lower=lower)

    args = (train.tolist(), behaviour.tolist(), mask.tolist(), level)
    expected = torch.tensor(plain_reference.weights(*args, kind, upper, lower))
    untruncated = torch.tensor(plain_reference.weights(*args, None, None, None))
    torch.testing.assert_close(result.weights, expected)
    assert torch.equal(result.out_of_bounds, expected.ne(untruncated))
    # The case must exercise the type: some positions altered, some not.
    assert result.out_of_bounds.any() == (kind is not None)
    assert (mask & ~result.out_of_bounds).any()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("kind", "upper", "lower"), KINDS)
def test_masked_positions_are_exactly_zero_whatever_they_hold(level, kind, upper, lower):
    train, behaviour, mask = batch()
    clean = importance_weights(train, behaviour, mask, level=level, kind=kind, upper=upper, lower=lower)
    dirty = importance_weights(
        torch.where(mask, train, math.nan),
        torch.where(mask, behaviour, -math.inf),
        mask,
        level=level,
        kind=kind,
        upper=upper,
        lower=lower,
    )
    assert torch.equal(clean.weights, dirty.weights)
    assert (dirty.weights[~mask] == 0).all()
    assert not dirty.out_of_bounds[~mask].any()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("kind", "upper", "lower"), KINDS)
@pytest.mark.parametrize("difference", [100.0, -100.0])
def test_huge_log_ratio_stays_finite(level, kind, upper, lower, difference):
    behaviour = torch.full((2, 3), -1.0)
    mask = torch.ones(2, 3, dtype=torch.bool)
    weights = importance_weights(
        behaviour + difference, behaviour, mask, level=level, kind=kind, upper=upper, lower=lower
    ).weights
    assert torch.isfinite(weights).all()
    if kind in ("icepop", "seq_mask"):
        assert (weights == 0).all()


@pytest.mark.parametrize(("kind", "upper", "lower"), KINDS)
def test_nan_at_an_unmasked_position_is_not_hidden(kind, upper, lower):
    train, behaviour, _ = batch()
    mask = torch.ones_like(train, dtype=torch.bool)
    behaviour[3, 2] = math.nan
    assert importance_weights(train, behaviour, mask, kind=kind, upper=upper, lower=lower).weights[3, 2].isnan()


def test_weights_carry_no_gradient():
    train, behaviour, mask = batch()
    weights = importance_weights(train.requires_grad_(), behaviour.requires_grad_(), mask).weights
    assert not weights.requires_grad


def test_equal_policies_have_weight_exactly_one():
    train, _, mask = batch()
    for level in ("token", "sequence"):
        weights = importance_weights(train, train.clone(), mask, level=level).weights
        assert torch.equal(weights, mask.float())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "word"}, "importance_sampling_level = 'word'.*token, sequence"),
        ({"kind": "ice"}, "importance_sampling_type = 'ice'.*tis, icepop, seq_mask"),
        ({"kind": "tis"}, "truncated_importance_sampling_ratio is null"),
        ({"kind": "icepop", "upper": 2.0}, "truncated_importance_sampling_ratio_min is null"),
        ({"kind": "tis", "upper": 2.0, "lower": 0.5}, "ratio_min = 0.5.*does not use it"),
        ({"upper": 2.0}, "truncated_importance_sampling_ratio = 2.0.*does not use it"),
        ({"kind": "seq_mask", "upper": 0.5, "lower": 2.0}, "nothing would be kept"),
        ({"kind": "tis", "upper": -1.0}, "must be a positive number"),
    ],
)
def test_invalid_combinations_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        importance_weights(*batch(), **options)
