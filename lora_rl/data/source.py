"""Prompts, and the endless, resumable order in which a run sees them."""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One question with its reference answer.

    `id` is stable across runs and machines: it names the question, not its place in a list.
    `token_ids` is exactly what the engine receives; `text` is what those tokens say.
    `metadata` takes no part in equality or hashing.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict, compare=False)


class PromptSource:
    """Draws prompts without end, each exactly once per epoch, and can be stopped and resumed anywhere.

    With `shuffle`, epoch e visits the prompts in a permutation that depends on `seed` and e alone, so the
    cursor (epoch, position) is all there is to save. A batch that reaches the end of an epoch is filled up
    from the next one, and only then may hold the same prompt twice.

    Raises ValueError for an empty list of prompts or for duplicate ids.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0, shuffle: bool = True):
        self.prompts = tuple(prompts)
        self.seed = seed
        self.shuffle = shuffle
        ids = [prompt.id for prompt in self.prompts]
        if not ids:
            raise ValueError("PromptSource: the list of prompts is empty; at least one prompt is needed")
        if len(set(ids)) != len(ids):
            duplicate = next(name for name in ids if ids.count(name) > 1)
            raise ValueError(f"PromptSource: the prompt id {duplicate!r} occurs more than once")
        self._fingerprint = _fingerprint(self.prompts)
        self._start_epoch(0)

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self.prompts)

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the next prompt belongs to."""
        return self._epoch

    def next_batch(self, n: int) -> list[Prompt]:
        """The next `n` prompts. Raises ValueError unless n >= 1."""
        if n < 1:
            raise ValueError(f"next_batch: n is {n}; it must be at least 1")
        batch: list[Prompt] = []
        while len(batch) < n:
            indices = self._order[self._position : self._position + n - len(batch)]
            batch.extend(self.prompts[index] for index in indices)
            self._position += len(indices)
            if self._position == len(self.prompts):
                self._start_epoch(self._epoch + 1)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The cursor, and what it is only valid together with: seed, shuffling and the prompts themselves."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "prompts": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. The saved seed and shuffling replace this source's own.

        Raises ValueError when the state lacks a key, was taken over other prompts, or lies outside an epoch.
        """
        missing = sorted(self.state_dict().keys() - state.keys())
        if missing:
            raise ValueError(f"PromptSource state lacks {', '.join(missing)}")
        if state["prompts"] != self._fingerprint:
            raise ValueError(
                f"PromptSource state belongs to other prompts (fingerprint {state['prompts']!r}, "
                f"these have {self._fingerprint!r}): resume with the data set the run was started on"
            )
        if state["epoch"] < 0 or not 0 <= state["position"] < len(self.prompts):
            raise ValueError(
                f"PromptSource state has epoch {state['epoch']}, position {state['position']}; "
                f"valid are epoch >= 0 and position 0..{len(self.prompts) - 1}"
            )
        self.seed = state["seed"]
        self.shuffle = state["shuffle"]
        self._start_epoch(state["epoch"])
        self._position = state["position"]

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._position = 0
        self._order = list(range(len(self.prompts)))
        if self.shuffle:
            # A text seed is hashed with SHA-512, so neighbouring seeds and epochs are unrelated.
            random.Random(f"prompt order, seed {self.seed}, epoch {epoch}").shuffle(self._order)


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    """Differs when any prompt's id, tokens, answer or metadata do, or their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        # Columnar files have dates, bytes and decimals too; JSON has no word for them.
        described = [prompt.id, prompt.token_ids, prompt.answer, prompt.metadata]
        digest.update(json.dumps(described, default=str).encode() + b"\n")
    return digest.hexdigest()[:16]
