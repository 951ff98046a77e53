"""After a jump was taken: is the training reward at least what it was?"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

# Standard errors by which the reward must have fallen for the watch to end early.
_EARLY = 2.0


class Outcome(Enum):
    """What the watch says after a step."""

    WATCHING = "watching"
    KEPT = "kept"
    FALLEN = "fallen"


@dataclass
class Watch:
    """Compares the steps after a jump with those before it.

    Attributes:
        before: mean training reward of each of the last steps before the jump.
        patience: steps that are watched.
        tolerance: by how much the mean reward may lie below that before.
        after: rewards of the steps since.
    """

    before: list[float]
    patience: int
    tolerance: float
    after: list[float] = field(default_factory=list)

    def note(self, reward: float) -> Outcome:
        """One more step after the jump.

        The jump has failed if the mean after `patience` steps lies below the mean before minus the tolerance, or
        earlier, once it does so by two standard errors of the difference.
        """
        self.after.append(reward)
        fall = statistics.fmean(self.before) - statistics.fmean(self.after) - self.tolerance
        if len(self.after) >= self.patience:
            return Outcome.FALLEN if fall > 0 else Outcome.KEPT
        spread = statistics.stdev(self.before) if len(self.before) > 1 else math.inf
        error = spread * math.sqrt(1 / len(self.before) + 1 / len(self.after))
        return Outcome.FALLEN if fall > _EARLY * error else Outcome.WATCHING

    def state_dict(self) -> dict[str, Any]:
        """What continues it: the arguments of the class."""
        return asdict(self)
