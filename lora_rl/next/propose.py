"""From a trajectory to a proposal: the predictor that the back-test supports, and how far it may be followed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lora_rl.next.backtest import BackTest, best, folds, judge, walk_forward
from lora_rl.next.factors import RankOne
from lora_rl.next.nextmlp import NextMLP
from lora_rl.next.predictors import Linear, Predictor, Random, Saturating, Scale
from lora_rl.next.recorder import Projection
from lora_rl.next.trajectory import Trajectory, aligned

if TYPE_CHECKING:
    from lora_rl.config.schema import NextConfig

type Project = Callable[[Mapping[str, Sequence[RankOne]], Sequence[int]], Mapping[str, Sequence[Projection]]]


@dataclass(frozen=True)
class Proposal:
    """What to add to the weights for alpha = 1.

    Attributes:
        predictor: who proposes; None: nobody was good enough.
        changes: by module.
        tests: the back-tests, by predictor.
    """

    predictor: str | None
    changes: dict[str, RankOne] = field(default_factory=dict)
    tests: dict[str, BackTest] = field(default_factory=dict)


def predictors(settings: NextConfig, seed: int) -> dict[str, Predictor]:
    """Those that `grpo.next.predictor.type` names."""
    section = settings.predictor
    every: dict[str, Predictor] = {
        "saturating": Saturating(),
        "linear": Linear(),
        "scale": Scale(),
        "nextmlp": NextMLP(section.hidden, section.learning_rate, section.epochs, seed),
        "random": Random(seed),
    }
    names = [name for name in every if name != "random"] if section.type == "auto" else [section.type]
    return {name: every[name] for name in names}


def propose(
    raw: Mapping[str, Trajectory], among: Mapping[str, Predictor], settings: NextConfig, project: Project
) -> Proposal:
    """The change that the best predictor expects over the next snapshots.

    Args:
        raw: `Recorder.trajectories` of all modules, with whole vectors.
        among: predictors to choose from.
        project: compares earlier proposals with what came; see `Recorder.project`.
    """
    known = {name: aligned(trajectory) for name, trajectory in raw.items()}
    tests: dict[str, BackTest] = {}
    if settings.is_backtested:
        count = next(iter(known.values())).count
        # The same for all: cosines of different snapshots could not be compared.
        learnt = any(isinstance(predictor, NextMLP) for predictor in among.values())
        at = folds(count, settings.horizon, most=settings.backtest_folds, learnt=learnt)
        for name, predictor in among.items():
            proposals = walk_forward(predictor, known, at)
            tests[name] = judge(proposals, project(proposals, at))
        chosen = best(tests, settings.min_backtest_cos)
    else:
        (chosen,) = among
    if chosen is None:
        return Proposal(None, tests=tests)
    damping = tests[chosen].damping if settings.damping else 1.0
    changes = {name: change.times(damping) for name, change in among[chosen].predict(known).items()}
    if not any(change.sigma for change in changes.values()):
        return Proposal(None, tests=tests)
    return Proposal(chosen, changes, tests)
