"""How well the changes of a recorded trail of adapters can be predicted, by horizon; and those of a random walk."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lora_rl.lora.peft_io import read_peft
from lora_rl.next.backtest import folds, judge, walk_forward
from lora_rl.next.factors import Factors
from lora_rl.next.nextmlp import NextMLP
from lora_rl.next.predictors import Linear, Predictor, Saturating, Scale
from lora_rl.next.recorder import Recorder, Snapshot
from lora_rl.next.trajectory import aligned

# Snapshots of a trail that a back-test sees, as many as a run keeps.
WINDOW = 12


@dataclass(frozen=True)
class Cosines:
    """Of a back-test over a trail.

    Attributes:
        trained: by predictor, one value per horizon.
        walk: the same of a random walk with steps as long as those of the trail.
    """

    trained: dict[str, list[float]]
    walk: dict[str, list[float]]


def predictors() -> dict[str, Predictor]:
    """Those that a jump may come from."""
    mlp = NextMLP(hidden=256, lr=1e-3, epochs=300, seed=0)
    return {"saturating": Saturating(), "linear": Linear(), "scale": Scale(), "nextmlp": mlp}


def read_trail(checkpoints: Path) -> list[Snapshot]:
    """The adapters of all checkpoints of a run, in order."""
    names = sorted(checkpoints.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    trail = []
    for path in names:
        pairs = read_peft(path / "adapter").tensors
        trail.append({name: Factors(t.a, t.b * t.scale) for name, t in pairs.items()})
    return trail


def random_walk(trail: Sequence[Snapshot], seed: int) -> list[Snapshot]:
    """From the trail's start, A and B take steps in random directions, each as long as the trail's own step."""
    generator = torch.Generator().manual_seed(seed)

    def moved(now: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        step = torch.randn(now.shape, generator=generator)
        return now + step * ((after - before).norm() / step.norm())

    walk = [dict(trail[0])]
    for before, after in itertools.pairwise(trail):
        now = walk[-1]
        walk.append({
            n: Factors(moved(now[n].a, before[n].a, f.a), moved(now[n].b, before[n].b, f.b)) for n, f in after.items()
        })  # fmt: skip
    return walk


def cosines(trail: Sequence[Snapshot], horizons: Sequence[int], seed: int = 0, *, learnt: bool = True) -> Cosines:
    """Back-test every predictor over the trail, and over a random walk, for every horizon.

    Args:
        learnt: also the one that is trained anew at every point of every back-test, which takes minutes.
    """
    names = [name for name, predictor in predictors().items() if learnt or not isinstance(predictor, NextMLP)]

    def by_horizon(snapshots: Sequence[Snapshot], name: str) -> list[float]:
        return [_cosine(snapshots, predictors()[name], horizon) for horizon in horizons]

    walk = random_walk(trail, seed)
    return Cosines({n: by_horizon(trail, n) for n in names}, {n: by_horizon(walk, n) for n in names})


def kept_cosines(run: Path, horizons: Sequence[int], seed: int, *, learnt: bool) -> Cosines:
    """`cosines` of the checkpoints in a run's folder, or what an earlier call kept of them there."""
    kept = run / "cosines.json"
    if kept.exists():
        return Cosines(**json.loads(kept.read_text()))
    found = cosines(read_trail(run / "checkpoints"), horizons, seed, learnt=learnt)
    kept.write_text(json.dumps(asdict(found)))
    return found


def _cosine(trail: Sequence[Snapshot], predictor: Predictor, horizon: int) -> float:
    """Mean cosine over windows that follow each other through the trail."""
    found = []
    for first in range(0, max(len(trail) - WINDOW, 1), WINDOW):
        recorder = Recorder(WINDOW + 1)
        for snapshot in trail[first : first + WINDOW + 1]:
            recorder.record(snapshot)
        known = {name: aligned(t) for name, t in recorder.trajectories(horizon).items()}
        count = len(recorder.snapshots) - 1
        at = folds(count, horizon, most=3, learnt=isinstance(predictor, NextMLP))
        if not at:
            continue
        proposals = walk_forward(predictor, known, at)
        found.append(judge(proposals, recorder.project(proposals, at, horizon)).cosine)
    return sum(found) / len(found) if found else float("nan")
