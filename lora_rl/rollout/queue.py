"""The prompts of a run, numbered as they are drawn, and what of them is still open when a run is saved."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from typing import Any

from lora_rl.data import PromptSource
from lora_rl.rollout.types import PromptGroup


class PromptQueue:
    """Draws prompts as groups. Every prompt of the source is drawn once per epoch; one given back comes again first."""

    def __init__(self, prompts: PromptSource) -> None:
        self.prompts = prompts
        self.drawn = 0
        self._again: deque[PromptGroup] = deque()

    def draw(self, count: int) -> list[PromptGroup]:
        """The next groups; those given back first."""
        groups = [self._again.popleft() for _ in range(min(count, len(self._again)))]
        if fresh := count - len(groups):
            prompts = self.prompts.next_batch(fresh)
            groups += [PromptGroup(self.drawn + n, prompt) for n, prompt in enumerate(prompts)]
            self.drawn += fresh
        return groups

    def give_back(self, group: PromptGroup) -> None:
        """The group's rollouts were given up: draw it once more, as another attempt."""
        self._again.append(dataclasses.replace(group, attempt=group.attempt + 1))

    def put_back(self, groups: Iterable[PromptGroup]) -> None:
        """Draw these groups again, before all others and as the same attempt: nothing is wrong with them."""
        self._again.extendleft(sorted(groups, key=lambda group: group.group_id, reverse=True))

    def state_dict(self, open_groups: Iterable[PromptGroup] = ()) -> dict[str, Any]:
        """What continues the order of prompts.

        Args:
            open_groups: drawn and not trained on; they will be drawn again, as the same attempt.
        """
        waiting = sorted([*open_groups, *self._again], key=lambda group: group.group_id)
        return {
            **self.prompts.state_dict(),
            "drawn": self.drawn,
            "open": [[group.group_id, group.prompt.id, group.attempt] for group in waiting],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            ValueError: the state is of other prompts.
        """
        state = dict(state)
        drawn, waiting = state.pop("drawn"), state.pop("open")
        self.prompts.load_state_dict(state)
        by_id = {prompt.id: prompt for prompt in self.prompts.prompts}
        self.drawn = drawn
        self._again = deque(PromptGroup(number, by_id[name], attempt) for number, name, attempt in waiting)
