"""What a run has cost, with everything that extrapolation added: only against this can it save anything."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Ledger:
    """Sums over the run.

    Attributes:
        optimizer_steps: taken in all, those undone by rollbacks included.
        wasted_steps: of those, the ones that rollbacks undid.
        generated_tokens, trained_tokens: by training steps.
        scored_tokens: tokens that training steps ran the trainer over for old and reference logprobs, and probes.
        gate_generated_tokens: completions of the gate's prompts, for every alpha and without a jump.
        gate_scored_tokens: tokens the trainer ran over to measure the KL of jumps.
        seconds: wall time of steps, the gate's included.
        gate_seconds: of those, what back-tests, gates and rollbacks took.
        proposed, accepted, rolled_back: jumps; rejected ones are those proposed and not accepted.
    """

    optimizer_steps: int = 0
    wasted_steps: int = 0
    generated_tokens: int = 0
    trained_tokens: int = 0
    scored_tokens: int = 0
    gate_generated_tokens: int = 0
    gate_scored_tokens: int = 0
    seconds: float = 0.0
    gate_seconds: float = 0.0
    proposed: int = 0
    accepted: int = 0
    rolled_back: int = 0

    def step(self, *, optimizer_steps: int, generated: int, trained: int, scored: int) -> None:
        """Book a training step."""
        self.optimizer_steps += optimizer_steps
        self.generated_tokens += generated
        self.trained_tokens += trained
        self.scored_tokens += scored

    def gate(self, *, generated: int, scored: int) -> None:
        """Book what one set of weights cost to measure."""
        self.gate_generated_tokens += generated
        self.gate_scored_tokens += scored

    def time(self, seconds: float, *, gate: float = 0.0) -> None:
        """Book wall time, and what of it was the gate's."""
        self.seconds += seconds
        self.gate_seconds += gate

    @property
    def tokens(self) -> int:
        """Everything that was generated or that the trainer ran over."""
        own = self.generated_tokens + self.trained_tokens + self.scored_tokens
        return own + self.gate_generated_tokens + self.gate_scored_tokens

    def metrics(self) -> dict[str, float]:
        """All sums, and `tokens`, as metrics of `next/`."""
        return {f"next/{name}": value for name, value in {**asdict(self), "tokens": self.tokens}.items()}

    def state_dict(self) -> dict[str, float]:
        """What continues it: the arguments of the class."""
        return asdict(self)
