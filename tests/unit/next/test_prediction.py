"""Predictors on trajectories whose future is known, and the back-test that has to tell them from chance."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lora_rl.config.schema.next import NextConfig
from lora_rl.next.backtest import BackTest, best, folds, judge, walk_forward
from lora_rl.next.factors import Factors, RankOne
from lora_rl.next.nextmlp import NextMLP
from lora_rl.next.predictors import Linear, Predictor, Random, Saturating, Scale, combined
from lora_rl.next.propose import Proposal, predictors, propose
from lora_rl.next.recorder import Recorder
from lora_rl.next.trajectory import Trajectory, Triplets, aligned
from tests.unit.next.trajectories import on_two_ranks, random_walk, rotating, shards, whole

HORIZON = 3
MLP = NextMLP(hidden=64, lr=1e-3, epochs=150, seed=0)


def recorded(snapshots: list) -> Recorder:
    recorder = Recorder(len(snapshots))
    for snapshot in snapshots:
        recorder.record(snapshot)
    return recorder


def known(recorder: Recorder) -> dict[str, Trajectory]:
    return {name: aligned(t) for name, t in recorder.trajectories(HORIZON).items()}


def dense(change: RankOne) -> torch.Tensor:
    return change.sigma * torch.outer(change.u, change.v)


def backtest(predictor: Predictor, snapshots: list, most: int = 3) -> BackTest:
    recorder = recorded(snapshots)
    at = folds(len(snapshots) - 1, HORIZON, most=most, learnt=isinstance(predictor, NextMLP))
    proposals = walk_forward(predictor, known(recorder), at)
    return judge(proposals, recorder.project(proposals, at, HORIZON))


def flipped(t: Triplets, generator: torch.Generator) -> Triplets:
    signs = torch.where(torch.rand(len(t), generator=generator) < 0.5, -1.0, 1.0).double()[:, None]
    return Triplets(t.sigma, t.u * signs, t.v * signs)


def error(predictor: Predictor, snapshots: list) -> float:
    """Norm of what a prediction from all but the last `HORIZON` snapshots leaves of the change that came."""
    past, came = snapshots[:-HORIZON], snapshots[-1]
    proposals = predictor.predict(known(recorded(past)))
    gaps = [whole(came[n]) - whole(past[-1][n]) - dense(p) for n, p in proposals.items()]
    return float(torch.stack([g.square().sum() for g in gaps]).sum().sqrt())


def test_saturating_beats_linear_by_30_percent_where_growth_slows_down():
    snapshots = rotating(12)
    came = {n: whole(snapshots[-1][n]) - whole(snapshots[-1 - HORIZON][n]) for n in snapshots[0]}
    nothing = float(torch.stack([c.square().sum() for c in came.values()]).sum().sqrt())
    assert error(Saturating(), snapshots) < 0.7 * error(Linear(), snapshots)
    assert error(Saturating(), snapshots) < nothing


def test_the_line_is_exact_on_a_line():
    first = rotating(1, noise=0)[1]
    snapshots = [{n: type(f)(f.a, t * f.b) for n, f in first.items()} for t in range(7)]
    for predictor in (Linear(), Scale()):
        proposals = predictor.predict(known(recorded(snapshots)))
        for name, f in first.items():
            expected = torch.linalg.svd(whole(f))
            best_rank_one = expected.S[0] * torch.outer(expected.U[:, 0], expected.Vh[0])
            torch.testing.assert_close(dense(proposals[name]), HORIZON * best_rank_one, rtol=0, atol=1e-6)


def test_trails_of_vectors_are_matrices_of_one_column():
    """Of fewer entries than there are snapshots; one of them never moves."""
    generator = torch.Generator().manual_seed(0)
    limits, start = torch.randn(6, generator=generator), torch.randn(6, generator=generator)
    path = [start + limits * (1 - torch.exp(torch.tensor(-t / 5.0))) for t in range(13)]
    one = torch.ones(1, 1)
    snapshots = [{"moves": Factors(one, x[:, None]), "rests": Factors(one, start[:, None])} for x in path]
    came, past = (path[-1] - path[-1 - HORIZON]).double(), torch.stack(path[:-HORIZON]).double()
    trajectories = known(recorded(snapshots[:-HORIZON]))
    for predictor in (Saturating(), Linear(), Scale(), Random(0), MLP):
        rests = predictor.predict(trajectories)["rests"]
        assert rests.sigma == pytest.approx(0, abs=1e-12)
    slopes = torch.from_numpy(np.polyfit(np.arange(len(past)), past.numpy(), 1)[0])
    moves = {type(p): dense(p.predict(trajectories)["moves"])[:, 0] for p in (Saturating(), Linear())}
    torch.testing.assert_close(moves[Linear], HORIZON * slopes, rtol=1e-9, atol=0)
    # As close as a grid of time constants comes; a line is off by more than all that came.
    assert (moves[Saturating] - came).norm() < 0.05 * came.norm() < 0.05 * (moves[Linear] - came).norm()
    for predictor in (Saturating(), MLP):
        assert backtest(predictor, snapshots).cosine > 0.95


def test_a_combination_is_the_leading_part_of_the_weighted_sum():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    triplets, weights = Triplets(draw(5), draw(5, 20), draw(5, 9)), draw(5)
    total = sum(float(weights[i]) * dense(triplets.at(i)) for i in range(5))
    left, sigma, right = torch.linalg.svd(total)
    torch.testing.assert_close(dense(combined(triplets, weights)), sigma[0] * torch.outer(left[:, 0], right[0]))


@pytest.mark.parametrize("predictor", [Saturating(), Linear(), Scale(), MLP], ids=lambda p: type(p).__name__)
def test_signs_of_a_decomposition_change_no_prediction(predictor):
    generator = torch.Generator().manual_seed(3)
    raw = recorded(rotating(9)).trajectories(HORIZON)
    turned = {
        n: Trajectory(*(flipped(x, generator) for x in (t.total, t.last, t.future)), HORIZON) for n, t in raw.items()
    }
    assert any(not turned[n].total.u.equal(raw[n].total.u) for n in raw)
    one, other = (predictor.predict({n: aligned(t) for n, t in x.items()}) for x in (raw, turned))
    for name in raw:
        torch.testing.assert_close(dense(one[name]), dense(other[name]), rtol=0, atol=1e-9)


def test_alignment_changes_no_matrix_and_lets_no_vector_jump():
    raw = recorded(rotating(9)).trajectories(HORIZON)["first"]
    straight = aligned(raw)
    for before, after in ((raw.total, straight.total), (raw.last, straight.last), (raw.future, straight.future)):
        for i in range(len(before)):
            torch.testing.assert_close(dense(after.at(i)), dense(before.at(i)), rtol=0, atol=1e-12)
    assert ((straight.total.u[1:] * straight.total.u[:-1]).sum(1) > 0).all()
    assert ((straight.last.u * straight.total.u).sum(1) >= 0).all()
    assert ((straight.last.v * straight.total.v).sum(1) >= 0).all()


def test_the_past_does_not_know_the_future():
    recorder, shorter = recorded(rotating(9)), recorded(rotating(9)[:6])
    cut, own = known(recorder)["first"].until(5), known(shorter)["first"]
    assert (len(cut.total), len(cut.last), len(cut.future)) == (len(own.total), len(own.last), len(own.future))
    for name in ("total", "last", "future"):
        torch.testing.assert_close(getattr(cut, name).u, getattr(own, name).u)


def test_the_back_test_sees_what_can_be_predicted():
    verdict = backtest(Saturating(), rotating(12))
    assert verdict.cosine > 0.6
    assert 0.3 < verdict.damping <= 1
    assert len(verdict.by_fold) == 3
    assert backtest(MLP, rotating(12)).cosine > 0.3


@pytest.mark.parametrize("predictor", [Saturating(), Linear(), Scale(), MLP], ids=lambda p: type(p).__name__)
def test_the_back_test_rejects_a_random_walk(predictor):
    """Although its path looks as if it had a direction: the leading share of its total change is large."""
    snapshots = random_walk(12)
    triplets = known(recorded(snapshots))["module0"]
    assert triplets.total.sigma[-1] > 2 * triplets.last.sigma[-1]
    verdict = backtest(predictor, snapshots)
    assert abs(verdict.cosine) < 0.2
    assert best({"x": verdict}, 0.3) is None


def test_the_back_test_rejects_what_goes_backwards_and_anywhere():
    class Backwards:
        def predict(self, t):
            return {n: p.times(-1) for n, p in Saturating().predict(t).items()}

    assert backtest(Backwards(), rotating(12)).cosine < -0.6
    assert backtest(Backwards(), rotating(12)).damping == 0
    assert abs(backtest(Random(0), rotating(12)).cosine) < 0.2


def test_damping_is_the_length_that_would_have_been_right():
    class Twice:
        def predict(self, t):
            return {n: p.times(2) for n, p in Saturating().predict(t).items()}

    once, twice = backtest(Saturating(), rotating(12)), backtest(Twice(), rotating(12))
    assert twice.cosine == pytest.approx(once.cosine)
    assert twice.damping == pytest.approx(once.damping / 2, rel=0.05) or once.damping == 1


def test_the_best_is_taken_only_if_it_is_good_enough():
    tests = {"a": BackTest(0.4, 1, ()), "b": BackTest(0.6, 1, ())}
    assert best(tests, 0.5) == "b"
    assert best(tests, 0.7) is None
    assert best(tests, None) == "b"


def test_folds_are_the_newest_with_a_known_outcome():
    assert folds(12, 3, most=3, learnt=False) == [7, 8, 9]
    assert folds(12, 3, most=99, learnt=False) == list(range(3, 10))
    assert folds(12, 3, most=99, learnt=True) == list(range(4, 10))


def test_projections_are_the_same_on_two_ranks():
    snapshots = rotating(6)
    alone = recorded(snapshots)
    at = [2, 3]
    proposals = walk_forward(Saturating(), known(alone), at)
    halves = [Recorder(7), Recorder(7)]
    for snapshot in snapshots:
        for rank, recorder in enumerate(halves):
            recorder.record({n: shards(f)[rank] for n, f in snapshot.items()})

    def own(rank: int) -> dict[str, list[RankOne]]:
        return {
            n: [RankOne(p.sigma, p.u.chunk(2)[rank], p.v.chunk(2)[rank]) for p in ps] for n, ps in proposals.items()
        }

    expected = alone.project(proposals, at, HORIZON)
    for found in on_two_ranks(lambda rank, add: halves[rank].project(own(rank), at, HORIZON, add)):
        assert found.keys() == expected.keys()
        for name in found:
            assert sum(found[name], ()) == pytest.approx(sum(expected[name], ()))


def proposed(snapshots: list, settings: NextConfig, among: dict[str, Predictor]) -> tuple[Proposal, dict]:
    """What is proposed, and at which snapshots each predictor was tested."""
    recorder, at_of = recorded(snapshots), {}

    def project(proposals, at):
        at_of[len(at_of)] = list(at)
        return recorder.project(proposals, at, settings.horizon)

    return propose(recorder.trajectories(settings.horizon), among, settings, project), at_of


def test_predictors_are_compared_at_the_same_snapshots():
    """One that learns can be tested at fewer; a cosine of an easier snapshot proves nothing."""
    settings = NextConfig(snapshots=7, horizon=HORIZON, predictor={"epochs": 2})
    _, at_of = proposed(rotating(7), settings, predictors(settings, seed=0))
    assert list(at_of.values()) == [[4]] * 4


def test_a_proposal_is_as_long_as_the_past_would_have_had_it():
    class TooLong:
        def predict(self, known):
            return {n: change.times(4.0) for n, change in Saturating().predict(known).items()}

    snapshots, settings = rotating(9), NextConfig(horizon=HORIZON)
    fitting, _ = proposed(snapshots, settings, {"fitting": Saturating()})
    damped, _ = proposed(snapshots, settings, {"long": TooLong()})
    assert damped.tests["long"].damping == pytest.approx(fitting.tests["fitting"].damping / 4, rel=0.3)
    for name, change in damped.changes.items():
        undamped = TooLong().predict(known(recorded(snapshots)))[name]
        assert change.sigma == pytest.approx(damped.tests["long"].damping * undamped.sigma)
    whole_length, _ = proposed(snapshots, NextConfig(horizon=HORIZON, damping=False), {"long": TooLong()})
    assert whole_length.changes["first"].sigma > 2 * damped.changes["first"].sigma


@pytest.mark.parametrize("seed", range(5))
def test_auto_proposes_nothing_on_a_random_walk(seed):
    """Best of four is not better than chance."""
    settings = NextConfig(horizon=HORIZON, predictor={"epochs": 50})
    proposal, _ = proposed(random_walk(9, seed=seed), settings, predictors(settings, seed))
    assert proposal.predictor is None and proposal.changes == {}
    assert len(proposal.tests) == 4


def test_a_proposal_of_length_nothing_is_none():
    class Nothing:
        def predict(self, known):
            return {n: change.times(0.0) for n, change in Scale().predict(known).items()}

    settings = NextConfig(horizon=HORIZON, min_backtest_cos=None, damping=False, predictor={"type": "scale"})
    proposal, _ = proposed(rotating(9), settings, {"nothing": Nothing()})
    assert proposal.predictor is None


def test_the_recorder_keeps_the_newest_and_copies():
    snapshots = rotating(6)
    recorder = Recorder(3)
    for snapshot in snapshots:
        recorder.record(snapshot)
    snapshots[-1]["first"].b.zero_()
    assert len(recorder.snapshots) == 3
    assert recorder.snapshots[0]["first"].b.equal(snapshots[4]["first"].b)
    assert recorder.snapshots[-1]["first"].b.any()
    recorder.clear()
    with pytest.raises(ValueError, match="at least 2 snapshots, there are 0"):
        recorder.trajectories(1)


def test_learning_needs_an_example():
    with pytest.raises(ValueError, match="horizon \\+ 2 snapshots"):
        MLP.predict(known(recorded(rotating(3))))
