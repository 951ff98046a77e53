"""Walk-forward back-test: what a predictor, given only the past, would have proposed, against what training then did.

How well a curve fits the points it was fitted to says nothing: the path of a random walk is fitted nearly as well. Here
every proposal is compared with the whole change that followed it, not only with that change's leading triplet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lora_rl.next.factors import RankOne
from lora_rl.next.predictors import Predictor
from lora_rl.next.recorder import Projection
from lora_rl.next.trajectory import Trajectory

# Fewest snapshots after the origin that a curve is fitted to.
LEAST_KNOWN = 3


@dataclass(frozen=True)
class BackTest:
    """The verdict on one predictor, over all matrices and folds together. P is what was proposed, T what came.

    Attributes:
        cosine: <P, T> / (|P| |T|).
        damping: <P, T> / <P, P>, the factor by which proposals should have been longer, within 0 and 1.
        by_fold: the cosine of each fold.
    """

    cosine: float
    damping: float
    by_fold: tuple[float, ...]


def folds(count: int, horizon: int, *, most: int, learnt: bool) -> list[int]:
    """Snapshots at which proposals can be made whose outcome is known, the newest `most` of them.

    Args:
        count: index of the last snapshot.
        learnt: whether the predictor needs examples whose future was known then.
    """
    first = horizon + 1 if learnt else min(LEAST_KNOWN, count - horizon)
    return list(range(max(first, 1), count - horizon + 1))[-most:]


def walk_forward(predictor: Predictor, known: Mapping[str, Trajectory], at: Sequence[int]) -> dict[str, list[RankOne]]:
    """What the predictor proposes for every matrix at each of the snapshots `at`, from what was known then."""
    rounds = [predictor.predict({name: t.until(i) for name, t in known.items()}) for i in at]
    return {name: [proposals[name] for proposals in rounds] for name in known}


def judge(proposals: Mapping[str, Sequence[RankOne]], projections: Mapping[str, Sequence[Projection]]) -> BackTest:
    """Compare proposals with what came.

    Args:
        projections: `Recorder.project` of the proposals, of all matrices of the model.
    """
    count = len(next(iter(proposals.values())))
    by_fold = [_sums(proposals, projections, [fold]) for fold in range(count)]
    inner, proposed, came = _sums(proposals, projections, range(count))
    return BackTest(
        cosine=_ratio(inner, math.sqrt(proposed * came)),
        damping=min(max(_ratio(inner, proposed), 0.0), 1.0),
        by_fold=tuple(_ratio(i, math.sqrt(p * c)) for i, p, c in by_fold),
    )


def best(tests: Mapping[str, BackTest], least_cosine: float | None) -> str | None:
    """The predictor with the largest cosine, None where that is below `least_cosine` (None: any will do)."""
    name = max(tests, key=lambda n: tests[n].cosine)
    return name if least_cosine is None or tests[name].cosine >= least_cosine else None


def _sums(
    proposals: Mapping[str, Sequence[RankOne]], projections: Mapping[str, Sequence[Projection]], at: Sequence[int]
) -> tuple[float, float, float]:
    inner = sum(projections[name][fold][0] for name in proposals for fold in at)
    proposed = sum(proposals[name][fold].sigma ** 2 for name in proposals for fold in at)
    came = sum(projections[name][fold][1] for name in proposals for fold in at)
    return inner, proposed, came


def _ratio(one: float, other: float) -> float:
    return one / other if other > 0 else 0.0
