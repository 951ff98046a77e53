import gc
import math
import weakref

import pytest
import torch

from lora_rl.algorithm import (
    METRICS,
    LossSettings,
    MetricSum,
    Normaliser,
    as_floats,
    finalise,
    merge,
    policy_loss,
)

EVERYTHING = LossSettings(
    ratio_clip_c=3.0,
    use_importance_sampling_correction=True,
    importance_sampling_type="tis",
    truncated_importance_sampling_ratio=2.0,
)


def run(loss_settings=EVERYTHING, logprobs=None):
    generator = torch.Generator().manual_seed(0)
    values = [-torch.rand(3, 4, generator=generator) for _ in range(5)]
    return policy_loss(
        loss_settings,
        logprobs=values[0] if logprobs is None else logprobs,
        old_logprobs=values[1],
        behaviour_logprobs=values[2],
        reference_logprobs=values[3],
        entropy=values[4].abs(),
        advantages=torch.tensor([1.0, -1.0, 0.5]),
        token_mask=torch.ones(3, 4, dtype=torch.bool),
        sample_mask=torch.ones(3, dtype=torch.bool),
        normaliser=Normaliser(12, 3),
    )


REDUCTIONS = [({}, "tokens"), ({"token_level_loss": False}, "sequences"), ({"constant_length": 6}, "sequences")]


@pytest.mark.parametrize(("reduction", "divided_by"), REDUCTIONS)
def test_every_metric_of_the_table_is_reported_with_the_normaliser_it_declares(reduction, divided_by):
    soft = run(LossSettings(**(vars(EVERYTHING) | {"policy_loss": "sapo", "ratio_clip_c": None} | reduction))).metrics
    metrics = run(LossSettings(**(vars(EVERYTHING) | reduction))).metrics | soft
    assert metrics.keys() == METRICS.keys()
    for name, info in METRICS.items():
        assert metrics[name].normaliser == (info.normaliser or divided_by), name
        assert info.meaning


@pytest.mark.parametrize("reduction", [reduction for reduction, _ in REDUCTIONS])
def test_the_loss_metric_is_the_loss(reduction):
    output = run(LossSettings(**reduction))
    assert finalise(output.metrics, Normaliser(12, 3))["loss"] == pytest.approx(output.loss.item())


def test_metrics_do_not_keep_the_graph_alive():
    class Tracked(torch.Tensor):
        pass

    leaf = torch.full((3, 4), -1.0, requires_grad=True)
    activation = (leaf * 2).as_subclass(Tracked)
    alive = weakref.ref(activation)
    metrics = run(logprobs=activation).metrics
    assert not any(m.value.requires_grad for m in metrics.values())
    del activation
    gc.collect()
    assert alive() is None


def test_engine_that_agrees_with_the_trainer_has_no_mismatch():
    same = torch.full((2, 3), -0.7)
    final = finalise(
        policy_loss(
            LossSettings(reference_policy_kl_penalty=0.0),
            logprobs=same,
            behaviour_logprobs=same.clone(),
            advantages=torch.zeros(2),
            token_mask=torch.ones(2, 3, dtype=torch.bool),
            sample_mask=torch.ones(2, dtype=torch.bool),
            normaliser=Normaliser(6, 2),
        ).metrics,
        Normaliser(6, 2),
    )
    assert final["token_mult_prob_error"] == 1
    assert final["gen_kl_error"] == 0
    assert final["sampling_importance_ratio"] == 1
    assert final["probs_ratio"] == final["probs_ratio_min"] == final["probs_ratio_max"] == 1
    assert final["approx_entropy"] == pytest.approx(0.7)


def test_merge_adds_sums_and_takes_extremes():
    a = {"t": MetricSum(1.0, "tokens"), "hi": MetricSum(2.0, "max"), "lo": MetricSum(torch.tensor(2.0), "min")}
    b = {"t": MetricSum(torch.tensor(3.0), "tokens"), "hi": MetricSum(5.0, "max"), "lo": MetricSum(1.0, "min")}
    for parts in ([a, b], [b, a]):
        assert finalise(merge(parts), Normaliser(8, 1)) == {"t": 0.5, "hi": 5.0, "lo": 1.0}
    assert merge([]) == {}


def test_merge_leaves_its_inputs_alone():
    a, b = {"t": MetricSum(1.0, "tokens")}, {"t": MetricSum(2.0, "tokens")}
    merge([a, b])
    assert a["t"].value == 1.0


@pytest.mark.parametrize("kind", ["max", "min", "sum", "tokens"])
def test_nan_survives_merging_in_any_order(kind):
    parts = [{"x": MetricSum(v, kind)} for v in (math.nan, 1.0, 2.0)]
    for order in (parts, parts[::-1], parts[1:] + parts[:1]):
        assert math.isnan(finalise(merge(order), Normaliser(1, 1))["x"])


def test_merge_refuses_parts_that_disagree():
    a = {"t": MetricSum(1.0, "tokens"), "kl": MetricSum(1.0, "tokens")}
    with pytest.raises(ValueError, match=r"part 1 reports other metrics.*kl"):
        merge([a, {"t": MetricSum(1.0, "tokens")}])
    with pytest.raises(ValueError, match="'t' has normaliser 'tokens' in one part, 'sequences'"):
        merge([{"t": MetricSum(1.0, "tokens")}, {"t": MetricSum(1.0, "sequences")}])


def test_a_mean_over_nothing_is_left_out_rather_than_zero():
    metrics = {
        "t": MetricSum(0.0, "tokens"),
        "s": MetricSum(3.0, "sequences"),
        "hi": MetricSum(-math.inf, "max"),
        "n": MetricSum(0, "sum"),
    }
    assert finalise(metrics, Normaliser(tokens=0, sequences=2)) == {"s": 1.5, "n": 0.0}


def test_parts_counted_twice_are_detected():
    metrics = run().metrics
    with pytest.raises(ValueError, match="cover 24 tokens but the normaliser says 12"):
        finalise(merge([metrics, metrics]), Normaliser(12, 3))
    assert finalise(merge([metrics, metrics]), Normaliser(12, 3) + Normaliser(12, 3))["num_unmasked_tokens"] == 24


def test_as_floats_keeps_values_and_normalisers():
    metrics = run().metrics
    floats = as_floats(metrics)
    assert all(type(m.value) is float for m in floats.values())
    assert finalise(floats, Normaliser(12, 3)) == finalise(metrics, Normaliser(12, 3))
    assert merge([floats, metrics]).keys() == metrics.keys()


@pytest.mark.parametrize("counts", [(-1, 1), (1, math.nan), (math.inf, 1)])
def test_impossible_counts_are_refused(counts):
    with pytest.raises(ValueError, match="must be a finite count"):
        Normaliser(*counts)
